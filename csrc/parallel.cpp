#include "parallel.h"

#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace rewire {
namespace {

// The entry point that GCC's `#pragma omp parallel` compiles to; LLVM's runtime has it too.
struct OpenMP {
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*thread)() = nullptr;

    OpenMP() {
#if defined(__unix__) || defined(__APPLE__)
        find("GOMP_parallel", parallel);
        find("omp_get_thread_num", thread);
#endif
    }
    bool found() const { return parallel && thread; }
    static const OpenMP& runtime() {
        static const OpenMP it;
        return it;
    }

   private:
#if defined(__unix__) || defined(__APPLE__)
    template <class Function>
    static void find(const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    }
#endif
};

}  // namespace

bool shares_torch_threads() { return OpenMP::runtime().found(); }

void run_on_threads(int threads, Body body, void* data) {
    if (shares_torch_threads()) {
        struct Call {
            Body body;
            void* data;
        } call{body, data};
        OpenMP::runtime().parallel(
            [](void* it) {
                const auto* c = static_cast<const Call*>(it);
                c->body(c->data, OpenMP::runtime().thread());
            },
            &call, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(body, data, t);
    body(data, 0);
    for (auto& thread : others) thread.join();
}

}  // namespace rewire
