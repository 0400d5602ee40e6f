/* Preloaded into a process: counts what it does to the files below a folder, and at one of these operations ends the
 * process, before it or in the middle, or lets it fail. Armed by `faults_arm`; until then nothing happens. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, BEFORE, MIDDLE, FAIL };

static char root[PATH_MAX];
static long at, count;
static int action, error, list = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Every operation below `folder` is numbered from 1 on. Their names are written to `names`, unless it is -1. */
void faults_arm(const char *folder, long operation, int what, int number, int names) {
    at = operation, action = what, error = number, list = names, count = 0;
    snprintf(root, sizeof root, "%s", folder);
}

static void end(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void path_of(int fd, char *to) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, to, PATH_MAX - 1);
    to[length > 0 ? length : 0] = 0;
}

/* Whether an operation must fail (1), or be ended in its middle (2). */
static int meet(const char *name, int folder, const char *path) {
    char full[2 * PATH_MAX + 2] = "";
    if (!root[0]) return 0;
    if (path && path[0] == '/') {
        snprintf(full, sizeof full, "%s", path);
    } else if (folder == AT_FDCWD) {
        if (!getcwd(full, PATH_MAX)) return 0;
    } else {
        path_of(folder, full);
    }
    if (path && path[0] != '/') {
        strncat(full, "/", 2);
        strncat(full, path, PATH_MAX);
    }
    const size_t length = strlen(root);
    if (strncmp(full, root, length) || (full[length] && full[length] != '/')) return 0;
    count++;
    if (list >= 0) dprintf(list, "%s %s\n", name, full[length] ? full + length + 1 : ".");
    if (count != at) return 0;
    if (action == BEFORE) end();
    if (action == FAIL) errno = error;
    return action == FAIL ? 1 : action == MIDDLE ? 2 : 0;
}

/* An operation that is done at once: its middle is the moment after it. */
#define WHOLE(name, folder, path, call)          \
    const int met = meet(name, folder, path);    \
    if (met == 1) return -1;                     \
    const int result = call;                     \
    if (met == 2) end();                         \
    return result

ssize_t write(int fd, const void *data, size_t size) {
    const int met = meet("write", fd, 0);
    if (met == 1) return -1;
    const ssize_t result = REAL(write)(fd, data, met == 2 ? size / 2 : size);
    if (met == 2) end();
    return result;
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    const int met = meet("write", fd, 0);
    if (met == 1) return -1;
    const ssize_t result = REAL(writev)(fd, parts, met == 2 ? number / 2 : number);
    if (met == 2) end();
    return result;
}

int fsync(int fd) { WHOLE("fsync", fd, 0, REAL(fsync)(fd)); }
int fdatasync(int fd) { WHOLE("fsync", fd, 0, REAL(fdatasync)(fd)); }
int ftruncate64(int fd, off64_t size) { WHOLE("truncate", fd, 0, REAL(ftruncate64)(fd, size)); }
int rename(const char *from, const char *to) { WHOLE("rename", AT_FDCWD, to, REAL(rename)(from, to)); }
int unlink(const char *path) { WHOLE("unlink", AT_FDCWD, path, REAL(unlink)(path)); }
int rmdir(const char *path) { WHOLE("rmdir", AT_FDCWD, path, REAL(rmdir)(path)); }
int mkdir(const char *path, mode_t mode) { WHOLE("mkdir", AT_FDCWD, path, REAL(mkdir)(path, mode)); }
int chmod(const char *path, mode_t mode) { WHOLE("chmod", AT_FDCWD, path, REAL(chmod)(path, mode)); }
int unlinkat(int folder, const char *path, int flags) {
    WHOLE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, REAL(unlinkat)(folder, path, flags));
}

/* Files that are made or emptied. */
#define OPEN(folder, path, call)                       \
    va_list rest;                                      \
    va_start(rest, flags);                             \
    const mode_t mode = va_arg(rest, mode_t);          \
    va_end(rest);                                      \
    if (!(flags & (O_CREAT | O_TRUNC))) return call;   \
    WHOLE("create", folder, path, call)

int open(const char *path, int flags, ...) { OPEN(AT_FDCWD, path, REAL(open)(path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPEN(AT_FDCWD, path, REAL(open64)(path, flags, mode)); }
int openat(int folder, const char *path, int flags, ...) { OPEN(folder, path, REAL(openat)(folder, path, flags, mode)); }
int openat64(int folder, const char *path, int flags, ...) {
    OPEN(folder, path, REAL(openat64)(folder, path, flags, mode));
}
