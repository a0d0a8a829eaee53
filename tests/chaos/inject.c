/* A disk that fails and a clock that jumps, for one process tree (LD_PRELOAD). shim.py compiles it.

   CHAOS_FAIL=CALL:N:ERRNO:TIMES   the N-th CALL (write, fsync, rename or open for writing) under CHAOS_UNDER
                                   fails with ERRNO, and so do the next ones: TIMES in all, 0 for ever
   CHAOS_UNDER=PATH                the absolute path of a folder
   CHAOS_LOG=FILE                  a line per failure, which tells the campaign that it happened
   CHAOS_CLOCK=AFTER:JUMP          AFTER seconds from now on, the wall clock is JUMP seconds off */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static char call[16], under[PATH_MAX], book[PATH_MAX];
static int nth, number, times;
static atomic_int seen;
static time_t after, jump;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void read_settings(void) {
    const char *fail = getenv("CHAOS_FAIL"), *clock = getenv("CHAOS_CLOCK"), *path;
    if ((path = getenv("CHAOS_UNDER"))) strncpy(under, path, sizeof under - 1);
    if ((path = getenv("CHAOS_LOG"))) strncpy(book, path, sizeof book - 1);
    if (fail && *under) sscanf(fail, "%15[a-z]:%d:%d:%d", call, &nth, &number, &times);
    if (clock && sscanf(clock, "%ld:%ld", &after, &jump) == 2) {
        struct timespec now;
        REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
        after += now.tv_sec;
    }
}

/* Whether this call is to fail; sets errno. */
static int fails(const char *which, const char *path) {
    char line[PATH_MAX + 32];
    int place, out, keep = errno;
    if (!*call || strcmp(which, call) || !path || strncmp(path, under, strlen(under))) return 0;
    place = atomic_fetch_add(&seen, 1) + 1;
    if (place < nth || (times && place >= nth + times)) return 0;
    out = (int)syscall(SYS_openat, AT_FDCWD, book, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out >= 0) {
        int size = snprintf(line, sizeof line, "%s %d %s\n", which, place, path);
        syscall(SYS_write, out, line, (size_t)size);
        syscall(SYS_close, out);
    }
    errno = number ? number : keep;
    return 1;
}

static int descriptor_fails(const char *which, int descriptor) {
    char link[32], path[PATH_MAX];
    if (!*call || strcmp(which, call)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(which, path);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    return descriptor_fails("write", descriptor) ? -1 : REAL(write)(descriptor, data, size);
}

int fsync(int descriptor) { return descriptor_fails("fsync", descriptor) ? -1 : REAL(fsync)(descriptor); }

int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }

static int opens(const char *name, const char *path, int flags, va_list rest) {
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails("open", path)) return -1;
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name)                                   \
    int name(const char *path, int flags, ...) {     \
        va_list rest;                                \
        va_start(rest, flags);                       \
        int got = opens(#name, path, flags, rest);   \
        va_end(rest);                                \
        return got;                                  \
    }
OPEN(open)
OPEN(open64)

static time_t off(void) {
    struct timespec now;
    if (!jump) return 0;
    REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
    return now.tv_sec >= after ? jump : 0;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = REAL(clock_gettime)(which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += off();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = REAL(gettimeofday)(now, zone);
    if (!failed) now->tv_sec += off();
    return failed;
}

time_t time(time_t *where) {
    time_t now = REAL(time)(NULL) + off();
    if (where) *where = now;
    return now;
}
