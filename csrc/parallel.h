// Runs tasks on torch's own thread pool when its OpenMP runtime is in the process (two pools that
// spin on the same cores cost more than they give), and on plain threads otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace rewire {

using Body = void (*)(void*);

// Calls body(data) once on each of `threads` threads, this one included, and waits for all.
void run_on_threads(int threads, Body body, void* data);

// True when torch's OpenMP runtime was found.
bool shares_torch_threads();

// Calls task(i) for every i in [0, tasks), in any order, on up to `threads` threads. How the work is
// cut into tasks is the caller's and must not depend on the number of threads.
template <class Task>
void parallel_for(int64_t tasks, int threads, Task&& task) {
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1) {
        for (int64_t i = 0; i < tasks; i++) task(i);
        return;
    }
    struct Shared {
        std::atomic<int64_t> next;
        int64_t tasks;
        Task* task;
    } shared{{0}, tasks, &task};
    run_on_threads(
        threads,
        [](void* data) {
            auto* s = static_cast<Shared*>(data);
            for (int64_t i; (i = s->next.fetch_add(1, std::memory_order_relaxed)) < s->tasks;)
                (*s->task)(i);
        },
        &shared);
}

// How many threads are worth waking for so many elements.
inline int worth_sharing(int64_t elements, int threads) { return elements < (1 << 15) ? 1 : threads; }

// Calls task(begin, end) for pieces of [0, n).
template <class Task>
void pieces(int64_t n, int64_t piece, int threads, Task&& task) {
    parallel_for((n + piece - 1) / piece, threads,
                 [&](int64_t i) { task(i * piece, std::min(n, (i + 1) * piece)); });
}

}  // namespace rewire
