#include "parallel.h"

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#if (defined(__unix__) || defined(__APPLE__)) && !defined(REWIRE_OWN_THREADS)  // tools/sanitize.sh
#define REWIRE_FINDS_OPENMP
#include <dlfcn.h>
#endif

namespace rewire {
namespace {

// The entry point that GCC's `#pragma omp parallel` compiles to; LLVM's runtime has it too.
struct OpenMP {
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*thread)() = nullptr;

    OpenMP() {
#ifdef REWIRE_FINDS_OPENMP
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
#ifdef REWIRE_FINDS_OPENMP
    template <class Function>
    static void find(const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    }
#endif
};

}  // namespace

bool shares_torch_threads() { return OpenMP::runtime().found(); }

void run_on_threads(int threads, Body body, void* data) {
    // An exception that leaves another thread would end the process.
    struct Call {
        Body body;
        void* data;
        std::atomic_flag failed = ATOMIC_FLAG_INIT;
        std::exception_ptr first{};

        void run(int thread) noexcept {
            try {
                body(data, thread);
            } catch (...) {
                if (!failed.test_and_set()) first = std::current_exception();
            }
        }
    } call{body, data};
    if (shares_torch_threads()) {
        OpenMP::runtime().parallel([](void* it) { static_cast<Call*>(it)->run(OpenMP::runtime().thread()); }, &call,
                                   static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> others;
        others.reserve(size_t(threads));
        try {
            for (int t = 1; t < threads; t++) others.emplace_back(&Call::run, &call, t);
        } catch (const std::system_error&) {  // there are no more threads to have: those that are there do it all
        }
        call.run(0);
        for (auto& thread : others) thread.join();
    }
    if (call.first) std::rethrow_exception(call.first);
}

}  // namespace rewire
