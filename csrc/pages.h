// Memory on huge pages where the system has them: kernels gather from all over a buffer, and with 4 KB
// pages they wait for address translation more than for data.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rewire {

constexpr std::size_t kHugePage = std::size_t(2) << 20;

// `bytes` from the system, on huge pages if `huge`. To be freed with std::free.
inline void* allocate_pages(std::size_t bytes, bool huge) {
    void* data = nullptr;
    if (posix_memalign(&data, huge ? kHugePage : 64, bytes ? bytes : 64)) throw std::bad_alloc();
#if defined(__linux__)
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // only a wish
#endif
    return data;
}

}  // namespace rewire
