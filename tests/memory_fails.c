/* Preloaded into a process: threads other than the first get no aligned memory of 16 KB or more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

int posix_memalign(void **to, size_t alignment, size_t size) {
    static int (*real)(void **, size_t, size_t);
    if (!real) real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    if (size >= 1 << 14 && syscall(SYS_gettid) != getpid()) return ENOMEM;
    return real(to, alignment, size);
}
