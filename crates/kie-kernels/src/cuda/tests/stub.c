// A CUDA driver and a run-time compiler in one library, without a GPU, that do what a test sets.
// Memory is the host's; copies happen as late as they may (when somebody waits for them), so that a
// buffer which is used again too early gives wrong bytes. Every call that makes a real driver wait
// for a running kernel is counted as a violation while one runs.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Code;
typedef uintptr_t Handle;
enum { kOom = 2, kNoContext = 201, kNotFound = 500, kNotReady = 600, kInvalid = 1 };

static int lock_;
static void lock(void) {
    while (__atomic_exchange_n(&lock_, 1, __ATOMIC_ACQUIRE)) {
    }
}
static void unlock(void) { __atomic_store_n(&lock_, 0, __ATOMIC_RELEASE); }

// ---- What a test sets and asks, by name.
static struct {
    const char* name;
    long value;
} settings[] = {
    {"version", 13000},
    {"init", 0},
    {"count", 1},
    {"major", 9},
    {"minor", 0},
    {"mode", 0},
    {"cooperative", 1},
    {"retain", 0},
    {"memory", 1L << 40},
    {"host_memory", 1L << 40},
    {"fit", 1},
    {"shared", 232448},
    {"args_bytes", 8},
    {"parameters", 1},
    {"launch", 0},
    {"landed", 0},
    {"query", 0},
    {"copy", 0},
    {"nvrtc_code", 0},
    {"nvrtc_major", 13},
    {"nvrtc_minor", 0},
    // Counted by the stub.
    {"launched", 0},
    {"violations", 0},
    {"blocks", 0},
    {"pinned", 0},
    {"modules", 0},
    {"streams", 0},
    {"events", 0},
    {"contexts", 0},
    {"compiled", 0},
    {"memsets", 0},
    {"copies", 0},
    {"peers", 0},
    {"enabled", 0},
    {"opened", 0},
    {"stale", 0},
};
static long* find(const char* name) {
    for (size_t i = 0; i < sizeof settings / sizeof *settings; ++i)
        if (!strcmp(settings[i].name, name)) return &settings[i].value;
    fprintf(stderr, "stub: no setting %s\n", name);
    abort();
}
static long get(const char* name) { return __atomic_load_n(find(name), __ATOMIC_SEQ_CST); }
static void add(const char* name, long n) { __atomic_fetch_add(find(name), n, __ATOMIC_SEQ_CST); }
void stub_set(const char* name, long value) {
    __atomic_store_n(find(name), value, __ATOMIC_SEQ_CST);
}
long stub_get(const char* name) { return get(name); }

static void waits(void) {
    if (get("launched") > get("landed")) add("violations", 1);
}
static __thread int depth;
int stub_depth(void) { return depth; }
#define NEED_CONTEXT \
    if (depth <= 0) return kNoContext

// ---- Errors, devices, contexts.
Code cuGetErrorName(Code c, const char** out) {
    static __thread char name[32];
    snprintf(name, sizeof name, "STUB_ERROR_%d", c);
    return *out = name, 0;
}
Code cuGetErrorString(Code c, const char** out) { return (void)c, *out = "as the test set", 0; }
Code cuDriverGetVersion(int* v) { return *v = (int)get("version"), 0; }
Code cuInit(unsigned flags) { return (void)flags, (Code)get("init"); }
Code cuDeviceGetCount(int* n) { return *n = (int)get("count"), 0; }
Code cuDeviceGet(int* d, int n) { return *d = n, 0; }
Code cuDeviceGetName(char* s, int n, int d) { return (void)d, snprintf(s, n, "Stub GPU"), 0; }
Code cuDeviceTotalMem_v2(size_t* n, int d) { return (void)d, *n = 1L << 40, 0; }
Code cuDeviceGetAttribute(int* v, int which, int d) {
    (void)d;
    switch (which) {
        case 16:
            *v = 4;
            break;
        case 20:
            *v = (int)get("mode");
            break;
        case 41:
            *v = 1;
            break;
        case 75:
            *v = (int)get("major");
            break;
        case 76:
            *v = (int)get("minor");
            break;
        case 95:
            *v = (int)get("cooperative");
            break;
        case 97:
            *v = (int)get("shared");
            break;
        default:
            return kInvalid;
    }
    return 0;
}
Code cuDevicePrimaryCtxRetain(Handle* c, int d) {
    if (get("retain")) return (Code)get("retain");
    return *c = 77, add("contexts", 1), (void)d, 0;
}
Code cuDeviceGetPCIBusId(char* s, int n, int d) {
    return snprintf(s, n, "0000:%02x:00.0", 0x17 + d), 0;
}
Code cuDeviceCanAccessPeer(int* v, int d, int peer) { return *v = d != peer && get("peers"), 0; }
Code cuCtxEnablePeerAccess(Handle peer, unsigned flags) {
    NEED_CONTEXT;
    if (peer != 77 || flags) return kInvalid;
    add("enabled", 1);
    return get("enabled") > 1 ? 704 : 0;
}
Code cuDevicePrimaryCtxRelease_v2(int d) { return (void)d, waits(), add("contexts", -1), 0; }
Code cuCtxPushCurrent_v2(Handle c) { return c == 77 ? ++depth, 0 : kInvalid; }
Code cuCtxPopCurrent_v2(Handle* c) {
    NEED_CONTEXT;
    return *c = 77, --depth, 0;
}

// ---- Memory.
Code cuMemGetInfo_v2(size_t* rest, size_t* all) {
    NEED_CONTEXT;
    return *rest = (size_t)get("memory"), *all = 1L << 40, 0;
}
static Code take(const char* left, const char* count, size_t bytes, void** out) {
    NEED_CONTEXT;
    if ((long)bytes > get(left)) return kOom;
    if (bytes == 0 || posix_memalign(out, 256, bytes)) return kInvalid;
    memset(*out, 0xaa, bytes);
    return add(count, 1), 0;
}
static Code give(const char* count, void* p) {
    NEED_CONTEXT;
    return waits(), free(p), add(count, -1), 0;
}
Code cuMemAlloc_v2(uint64_t* a, size_t n) {
    void* p = NULL;
    Code c = take("memory", "blocks", n, &p);
    return *a = (uint64_t)(uintptr_t)p, c;
}
Code cuMemFree_v2(uint64_t a) { return give("blocks", (void*)(uintptr_t)a); }
// A handle holds the address, for the same process.
typedef struct {
    uint64_t address;
    char rest[56];
} IpcHandle;
Code cuIpcGetMemHandle(IpcHandle* h, uint64_t a) {
    NEED_CONTEXT;
    memset(h, 7, sizeof *h);
    return h->address = a, 0;
}
Code cuIpcOpenMemHandle_v2(uint64_t* a, IpcHandle h, unsigned flags) {
    NEED_CONTEXT;
    if (flags != 1 || h.rest[55] != 7) return kInvalid;
    if (get("stale")) return (Code)get("stale");
    return add("opened", 1), *a = h.address, 0;
}
Code cuIpcCloseMemHandle(uint64_t a) {
    NEED_CONTEXT;
    return (void)a, waits(), add("opened", -1), 0;
}
Code cuMemHostAlloc(void** p, size_t n, unsigned flags) {
    return (void)flags, take("host_memory", "pinned", n, p);
}
Code cuMemFreeHost(void* p) { return give("pinned", p); }
Code cuMemHostGetDevicePointer_v2(uint64_t* a, void* p, unsigned flags) {
    NEED_CONTEXT;
    return (void)flags, *a = (uint64_t)(uintptr_t)p, 0;
}

// ---- Streams and events. The first stream takes kernels, the second copies.
enum { kStreams = 100, kEvents = 1000, kQueue = 4096 };
static Handle next_stream = kStreams, next_event = kEvents;
static long event_launch[4096];  // launches before the event, if on the first stream
static struct {
    void* to;
    const void* from;
    size_t bytes;
    Handle event;
} queue[kQueue];
static int queued, ran;

Code cuStreamCreate(Handle* s, unsigned flags) {
    NEED_CONTEXT;
    if (flags != 1) return kInvalid;
    return *s = next_stream++, add("streams", 1), 0;
}
Code cuStreamDestroy_v2(Handle s) {
    NEED_CONTEXT;
    return (void)s, waits(), add("streams", -1), 0;
}
Code cuEventCreate(Handle* e, unsigned flags) {
    NEED_CONTEXT;
    (void)flags;
    lock();
    *e = next_event++;
    unlock();
    return add("events", 1), 0;
}
Code cuEventDestroy_v2(Handle e) {
    NEED_CONTEXT;
    return (void)e, add("events", -1), 0;
}
static Code push(void* to, const void* from, size_t bytes, Handle event) {
    lock();
    int full = queued == kQueue;
    if (!full) {
        queue[queued].to = to, queue[queued].from = from;
        queue[queued].bytes = bytes, queue[queued].event = event;
        ++queued;
    }
    unlock();
    return full ? kInvalid : 0;
}
static void run_until(Handle event) {
    lock();
    while (ran < queued) {
        if (queue[ran].bytes) memcpy(queue[ran].to, queue[ran].from, queue[ran].bytes);
        Handle here = queue[ran++].event;
        if (event && here == event) break;
    }
    if (ran == queued) ran = queued = 0;
    unlock();
}
Code cuEventRecord(Handle e, Handle s) {
    NEED_CONTEXT;
    if (s == kStreams) return event_launch[e - kEvents] = get("launched"), 0;
    return push(NULL, NULL, 0, e);
}
Code cuEventQuery(Handle e) {
    NEED_CONTEXT;
    if (get("query")) return (Code)get("query");
    return event_launch[e - kEvents] > get("landed") ? kNotReady : 0;
}
Code cuEventSynchronize(Handle e) {
    NEED_CONTEXT;
    if (event_launch[e - kEvents] > get("landed")) add("violations", 1);
    return run_until(e), 0;
}
Code cuStreamSynchronize(Handle s) {
    NEED_CONTEXT;
    if (s == kStreams) waits();
    return run_until(0), 0;
}
static Code copy(void* to, const void* from, size_t bytes, Handle s) {
    NEED_CONTEXT;
    if (get("copy")) return (Code)get("copy");
    if (s == kStreams) waits();
    add("copies", 1);
    return push(to, from, bytes, 0);
}
Code cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Handle s) {
    return copy((void*)(uintptr_t)to, from, bytes, s);
}
Code cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Handle s) {
    return copy(to, (const void*)(uintptr_t)from, bytes, s);
}
Code cuMemsetD8Async(uint64_t a, unsigned char v, size_t bytes, Handle s) {
    NEED_CONTEXT;
    (void)s;
    waits();  // it is a kernel of the driver's, for which there may be no room
    return memset((void*)(uintptr_t)a, v, bytes), add("memsets", 1), 0;
}

// ---- Code and launches.
static char launches[4096];
const char* stub_launches(void) { return launches; }
Code cuModuleLoadDataEx(Handle* m, const void* image, unsigned n, int* o, void** v) {
    NEED_CONTEXT;
    (void)n, (void)o, (void)v;
    if (memcmp(image, "\177ELF", 4)) return 200;
    return *m = 5, add("modules", 1), 0;
}
Code cuModuleUnload(Handle m) {
    NEED_CONTEXT;
    return (void)m, waits(), add("modules", -1), 0;
}
Code cuModuleGetFunction(Handle* f, Handle m, const char* name) {
    NEED_CONTEXT;
    (void)m;
    return strcmp(name, "absent") ? *f = 6, 0 : kNotFound;
}
Code cuFuncGetAttribute(int* v, int which, Handle f) {
    (void)f;
    return *v = which == 0 ? 1024 : which == 4 ? 40 : 16, 0;
}
Code cuFuncSetAttribute(Handle f, int which, int v) {
    NEED_CONTEXT;
    (void)f, (void)which;
    return v > get("shared") ? kInvalid : 0;
}
Code cuFuncGetParamInfo(Handle f, size_t index, size_t* at, size_t* bytes) {
    (void)f;
    if ((long)index >= get("parameters")) return kInvalid;
    return *at = 0, *bytes = (size_t)get("args_bytes"), 0;
}
Code cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Handle f, int threads, size_t shared) {
    NEED_CONTEXT;
    return (void)f, (void)threads, (void)shared, *n = (int)get("fit"), 0;
}
Code cuLaunchCooperativeKernel(Handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                               unsigned by, unsigned bz, unsigned shared, Handle s, void** args) {
    NEED_CONTEXT;
    (void)f;
    if (get("launch")) return (Code)get("launch");
    if (s != kStreams) return kInvalid;
    uint64_t word = 0;
    memcpy(&word, args[0], 8);
    char line[128];
    snprintf(line, sizeof line, "%ux%ux%u %ux%ux%u %u %llx;", gx, gy, gz, bx, by, bz, shared,
             (unsigned long long)word);
    strncat(launches, line, sizeof launches - strlen(launches) - 1);
    return add("launched", 1), 0;
}

// ---- The compiler: its result is the text, behind the first bytes of an ELF file.
static const char kLog[] = "stub log: line 7: as the test set";
int nvrtcVersion(int* major, int* minor) {
    return *major = (int)get("nvrtc_major"), *minor = (int)get("nvrtc_minor"), 0;
}
const char* nvrtcGetErrorString(int c) { return (void)c, "STUB_NVRTC_ERROR"; }
int nvrtcCreateProgram(Handle* p, const char* text, const char* name, int n, const char* const* h,
                       const char* const* names) {
    (void)name, (void)n, (void)h, (void)names;
    char* made = malloc(strlen(text) + 5);
    memcpy(made, "\177ELF", 4);
    strcpy(made + 4, text);
    return *p = (Handle)made, 0;
}
int nvrtcCompileProgram(Handle p, int n, const char* const* options) {
    (void)p, (void)n, (void)options;
    return add("compiled", 1), (int)get("nvrtc_code");
}
int nvrtcGetProgramLogSize(Handle p, size_t* n) { return (void)p, *n = sizeof kLog, 0; }
int nvrtcGetProgramLog(Handle p, char* out) { return (void)p, memcpy(out, kLog, sizeof kLog), 0; }
int nvrtcGetCUBINSize(Handle p, size_t* n) { return *n = strlen((char*)p), 0; }
int nvrtcGetCUBIN(Handle p, char* out) { return memcpy(out, (char*)p, strlen((char*)p)), 0; }
int nvrtcGetPTXSize(Handle p, size_t* n) { return nvrtcGetCUBINSize(p, n); }
int nvrtcGetPTX(Handle p, char* out) { return nvrtcGetCUBIN(p, out); }
int nvrtcDestroyProgram(Handle* p) { return free((void*)*p), 0; }
