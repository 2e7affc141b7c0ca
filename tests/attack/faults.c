// Reads that fail where they are told to and a budget for memory, put before libc's by LD_PRELOAD.
// Only calls out of one library's code count, so that the interpreter around it goes on as always.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static uintptr_t from, to;  // the library's code
static atomic_long reads;   // calls so far
static long at = -1;        // the one that fails
static int error_;          // with which errno; 0: a read of half of what was asked for
static char failed[64];

// Allocations of at least `kLarge` bytes, as far as they are alive, may take `budget` together.
enum { kLarge = 1 << 20, kMost = 4096 };
static size_t budget = SIZE_MAX, taken, peak, refused;
static struct {
    void* at;
    size_t bytes;
} large[kMost];
static atomic_int lock_;

void faults_watch(uintptr_t from_now, uintptr_t to_now) { from = from_now, to = to_now; }
void faults_arm(long at_now, int error_now, size_t budget_now) {
    atomic_store(&reads, 0);
    at = at_now, error_ = error_now, failed[0] = 0;
    budget = budget_now, refused = 0, peak = taken;
}
long faults_count(void) { return reads; }
size_t faults_peak(void) { return peak; }
size_t faults_refused(void) { return refused; }
const char* faults_failed(void) { return failed; }

static int ours(void* caller) { return (uintptr_t)caller >= from && (uintptr_t)caller < to; }
static int fails(const char* call, void* caller) {
    if (!ours(caller) || atomic_fetch_add(&reads, 1) != at) return 0;
    strncpy(failed, call, sizeof failed - 1);
    return 1;
}
#define CALLER __builtin_return_address(0)
#define REAL(result, name, ...)         \
    static result (*real)(__VA_ARGS__); \
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, #name)

// ---- Allocations. Under these names glibc has them for whoever replaces malloc.
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
static void lock(void) {
    while (atomic_exchange(&lock_, 1)) {
    }
}
static void unlock(void) { atomic_store(&lock_, 0); }
// Whether so many bytes more may be had; they are taken then.
static int room(size_t n) {
    lock();
    const int good = n <= budget && taken <= budget - n;
    if (good) taken += n;
    if (!good) refused = n;
    if (taken > peak) peak = taken;
    unlock();
    return good;
}
static void keep(void* p, size_t n) {
    lock();
    int i = 0;
    while (i < kMost && large[i].at) ++i;
    if (i < kMost && p) large[i].at = p, large[i].bytes = n;
    if (i == kMost || !p) taken -= n;
    unlock();
}
static void forget(void* p) {
    if (!p || !taken) return;
    lock();
    for (int i = 0; i < kMost; ++i)
        if (large[i].at == p) {
            taken -= large[i].bytes;
            large[i].at = NULL;
            break;
        }
    unlock();
}
static void* allocated(void* caller, size_t n, void* (*real)(size_t, size_t), size_t first) {
    if (n < kLarge || !ours(caller)) return real(first, n);
    if (!room(n)) return errno = ENOMEM, NULL;
    void* p = real(first, n);
    keep(p, n);
    return p;
}
static void* plain(size_t unused, size_t n) { return (void)unused, __libc_malloc(n); }
static void* zeroed(size_t unused, size_t n) { return (void)unused, __libc_calloc(1, n); }

void* malloc(size_t n) { return allocated(CALLER, n, plain, 0); }
void* calloc(size_t n, size_t each) { return allocated(CALLER, n * each, zeroed, 0); }
void* aligned_alloc(size_t align, size_t n) { return allocated(CALLER, n, __libc_memalign, align); }
int posix_memalign(void** p, size_t align, size_t n) {
    void* got = allocated(CALLER, n, __libc_memalign, align);
    return got ? (*p = got, 0) : ENOMEM;
}
void* realloc(void* p, size_t n) {
    const int counts = n >= kLarge && ours(CALLER);
    if (counts && !room(n)) return errno = ENOMEM, NULL;
    void* got = __libc_realloc(p, n);
    if (got) forget(p);
    if (counts) keep(got, n);
    return got;
}
void free(void* p) {
    forget(p);
    __libc_free(p);
}

// ---- Reads, and what comes before them.
#define READ(call, answer) \
    if (fails(call, CALLER) && error_) return errno = error_, answer

static mode_t mode_of(int flags, va_list more) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}
#define OPEN(name)                                \
    int name(const char* path, int flags, ...) {  \
        REAL(int, name, const char*, int, ...);   \
        READ(#name, -1);                          \
        va_list more;                             \
        va_start(more, flags);                    \
        const mode_t mode = mode_of(flags, more); \
        va_end(more);                             \
        return real(path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int file, void* out, size_t n) {
    REAL(ssize_t, read, int, void*, size_t);
    if (fails("read", CALLER)) {
        if (error_) return errno = error_, -1;
        n = n / 2 ? n / 2 : n;
    }
    return real(file, out, n);
}
ssize_t pread64(int file, void* out, size_t n, off64_t place) {
    REAL(ssize_t, pread64, int, void*, size_t, off64_t);
    if (fails("pread64", CALLER)) {
        if (error_) return errno = error_, -1;
        n = n / 2 ? n / 2 : n;
    }
    return real(file, out, n, place);
}
void* mmap64(void* where, size_t n, int protection, int flags, int file, off64_t place) {
    REAL(void*, mmap64, void*, size_t, int, int, int, off64_t);
    READ("mmap64", MAP_FAILED);
    return real(where, n, protection, flags, file, place);
}
void* mmap(void* where, size_t n, int protection, int flags, int file, off_t place) {
    REAL(void*, mmap, void*, size_t, int, int, int, off_t);
    READ("mmap", MAP_FAILED);
    return real(where, n, protection, flags, file, place);
}
int statx(int folder, const char* path, int flags, unsigned mask, struct statx* about) {
    REAL(int, statx, int, const char*, int, unsigned, struct statx*);
    READ("statx", -1);
    return real(folder, path, flags, mask, about);
}
int fstat64(int file, struct stat64* about) {
    REAL(int, fstat64, int, struct stat64*);
    READ("fstat64", -1);
    return real(file, about);
}
off64_t lseek64(int file, off64_t place, int whence) {
    REAL(off64_t, lseek64, int, off64_t, int);
    READ("lseek64", -1);
    return real(file, place, whence);
}
