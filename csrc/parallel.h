// Runs tasks on torch's own thread pool when its OpenMP runtime is in the process (two pools that
// spin on the same cores cost more than they give), and on plain threads otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

namespace rewire {

using Body = void (*)(void* data, int thread);

// Calls body(data, t) once on each of `threads` threads, t from 0 (this one) on, and waits for all; then throws the first
// exception that one of them threw. Where the system has no more threads there are fewer.
void run_on_threads(int threads, Body body, void* data);

// True when torch's OpenMP runtime was found.
bool shares_torch_threads();

// The tasks in [0, tasks), one run of them for each thread: where the layers of a model are cut alike, a thread
// reads what it has written itself, and need not fetch it from another core's cache. Whoever is done helps others.
class Deal {
   public:
    Deal(int64_t tasks, int threads) : tasks_(tasks), runs_(std::min(threads, kMost)) {
        for (int r = 0; r < runs_; r++) next_[r].task.store(first(r), std::memory_order_relaxed);
    }
    template <class Task>
    void work(int thread, Task&& task) {
        for (int k = 0; k < runs_; k++) {
            const int run = (thread + k) % runs_;
            const int64_t end = first(run + 1);
            for (int64_t i; (i = next_[run].task.fetch_add(1, std::memory_order_relaxed)) < end;) task(i);
        }
    }

   private:
    static constexpr int kMost = 64;
    struct alignas(64) Next {
        std::atomic<int64_t> task;
    };
    int64_t first(int run) const { return tasks_ * run / runs_; }

    int64_t tasks_;
    int runs_;
    Next next_[kMost];
};

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
        Deal deal;
        Task* task;
    } shared{{tasks, threads}, &task};
    run_on_threads(
        threads,
        [](void* data, int thread) {
            auto* s = static_cast<Shared*>(data);
            s->deal.work(thread, *s->task);
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
