#include "parallel.h"

#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace rewire {
namespace {

// The entry point that GCC's `#pragma omp parallel` compiles to; LLVM's runtime has it too.
using GompParallel = void (*)(Body, void*, unsigned threads, unsigned flags);

GompParallel find_gomp() {
#if defined(__unix__) || defined(__APPLE__)
    return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
    return nullptr;
#endif
}

GompParallel gomp() {
    static const GompParallel found = find_gomp();
    return found;
}

}  // namespace

bool shares_torch_threads() { return gomp() != nullptr; }

void run_on_threads(int threads, Body body, void* data) {
    if (gomp()) {
        gomp()(body, data, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(body, data);
    body(data);
    for (auto& thread : others) thread.join();
}

}  // namespace rewire
