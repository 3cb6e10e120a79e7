/* Lets the n-th call of a kind fail: loaded before libc, so that it sees what Python, NumPy and other libraries do.
   Linux with glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NONE, OPEN, WRITE, SYNC, RENAME, MMAP, ALLOCATE };
static volatile int kind = NONE, left = 0, number = 0, happened = 0;
static __thread int armed = 0; /* only calls of this thread fail: Python waits for ever for a thread that cannot begin */
static const size_t LARGE = 1 << 12; /* smaller allocations do not fail: on Linux they hardly ever do */

void fault_arm(int which, int nth, int error) { happened = 0, left = nth, number = error, kind = which, armed = 1; }
int fault_disarm(void) { kind = NONE, armed = 0; return happened; }

static int fails(int which) {
    if (kind != which || !armed || --left != 0) return 0;
    kind = NONE, happened = 1, errno = number;
    return 1;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define MODE va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest)

int open(const char *path, int flags, ...) { MODE; NEXT(open); return fails(OPEN) ? -1 : next(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; NEXT(open64); return fails(OPEN) ? -1 : next(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE; NEXT(openat); return fails(OPEN) ? -1 : next(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE; NEXT(openat64); return fails(OPEN) ? -1 : next(at, path, flags, mode); }
ssize_t write(int f, const void *data, size_t size) {
    NEXT(write);
    if (fails(WRITE)) return -1;
    /* A full disk takes a part first. */
    return next(f, data, kind == WRITE && left == 1 && size > 1 ? size / 2 : size);
}
int fsync(int f) { NEXT(fsync); return fails(SYNC) ? -1 : next(f); }
int fdatasync(int f) { NEXT(fdatasync); return fails(SYNC) ? -1 : next(f); }
int rename(const char *a, const char *b) { NEXT(rename); return fails(RENAME) ? -1 : next(a, b); }
int renameat(int x, const char *a, int y, const char *b) { NEXT(renameat); return fails(RENAME) ? -1 : next(x, a, y, b); }
void *mmap(void *at, size_t size, int p, int flags, int f, off_t from) {
    NEXT(mmap);
    return fails(MMAP) ? MAP_FAILED : next(at, size, p, flags, f, from);
}
void *mmap64(void *at, size_t size, int p, int flags, int f, off64_t from) {
    NEXT(mmap64);
    return fails(MMAP) ? MAP_FAILED : next(at, size, p, flags, f, from);
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t size) { return size >= LARGE && fails(ALLOCATE) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return n * size >= LARGE && fails(ALLOCATE) ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return size >= LARGE && fails(ALLOCATE) ? NULL : __libc_realloc(old, size); }
