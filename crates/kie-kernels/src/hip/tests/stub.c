// A stand-in for the HIP runtime and hipRTC: host memory, one queue, and every call fails on demand.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALLS 64
static struct {
    const char* name;
    int fails_with, count;
} calls[CALLS];
static int version = 60342134, devices = 2, landed = 1, current, live;
static int cooperative = 1, major = 9, minor = 4, lanes = 64, fit = 1;
static unsigned char code[1 << 16];
static size_t code_bytes;
static const char* log_text = "";
static unsigned char args[256];
static size_t args_bytes;

static int call(const char* name) {
    for (int i = 0; i < CALLS; ++i) {
        if (!calls[i].name) calls[i].name = name;  // for ever
        if (strcmp(calls[i].name, name)) continue;
        ++calls[i].count;
        return calls[i].fails_with;
    }
    abort();
}
#define CALL(then)                    \
    do {                              \
        int failed = call(__func__);  \
        if (failed) return failed;    \
        then;                         \
        return 0;                     \
    } while (0)

// What a test says and asks.
void stub_fail(const char* name, int code_of_error) {
    call(strdup(name));
    for (int i = 0; i < CALLS; ++i)
        if (calls[i].name && !strcmp(calls[i].name, name))
            calls[i].fails_with = code_of_error, calls[i].count = 0;
}
int stub_calls(const char* name) {
    for (int i = 0; i < CALLS; ++i)
        if (calls[i].name && !strcmp(calls[i].name, name)) return calls[i].count;
    return 0;
}
void stub_set(const char* what, int value) {
    struct {
        const char* name;
        int* at;
    } all[] = {{"version", &version}, {"devices", &devices}, {"landed", &landed},
               {"cooperative", &cooperative}, {"major", &major}, {"minor", &minor},
               {"lanes", &lanes}, {"fit", &fit}, {"args_bytes", (int*)&args_bytes}};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
        if (!strcmp(all[i].name, what)) {
            *all[i].at = value;
            return;
        }
    abort();
}
void stub_code(const void* bytes, size_t size) { memcpy(code, bytes, code_bytes = size); }
int stub_live(void) { return live; }
int stub_device(void) { return current; }
const unsigned char* stub_args(void) { return args; }

// The runtime.
int hipRuntimeGetVersion(int* v) { CALL(*v = version); }
int hipInit(unsigned flags) { CALL((void)flags); }
const char* hipGetErrorName(int e) { return e == 700 ? "hipErrorIllegalAddress" : "hipErrorStub"; }
const char* hipGetErrorString(int e) { return e == 1 ? NULL : "a sentence"; }
int hipGetDeviceCount(int* n) { CALL(*n = devices); }
int hipGetDevice(int* n) { CALL(*n = current); }
int hipSetDevice(int n) { CALL(current = n); }
int hipDeviceGetName(char* to, int size, int device) {
    CALL((void)device; strncpy(to, "Stub GPU", (size_t)size));
}
int hipDeviceGetAttribute(int* to, int which, int device) {
    CALL((void)device; *to = which == 10   ? cooperative
                             : which == 23 ? major
                             : which == 61 ? minor
                             : which == 63 ? 4
                             : which == 74 ? 65536
                             : which == 87 ? lanes
                                           : -1);
}
int hipDeviceGetPCIBusId(char* to, int size, int device) {
    CALL(snprintf(to, (size_t)size, "0000:%02X:00.0", device ? 0x9f : 0x0c));
}
int hipDeviceCanAccessPeer(int* to, int device, int peer) {
    CALL(*to = device != peer && device < 2 && peer < 2);
}
int hipMemGetInfo(size_t* free_now, size_t* total) { CALL(*free_now = 1000; *total = 2000); }
int hipMalloc(void** to, size_t size) {
    CALL(*to = aligned_alloc(256, size); memset(*to, 0xa5, size); ++live);
}
int hipFree(void* p) { CALL(free(p); --live); }
int hipHostMalloc(void** to, size_t size, unsigned flags) {
    if (flags != 0x40000003) return 1;
    CALL(*to = aligned_alloc(64, size); memset(*to, 0xa5, size); ++live);
}
int hipHostFree(void* p) { CALL(free(p); --live); }
int hipHostGetDevicePointer(void** to, void* host, unsigned flags) { CALL((void)flags; *to = host); }
int hipMemcpyHtoDAsync(void* to, const void* from, size_t size, void* stream) {
    CALL((void)stream; memcpy(to, from, size));
}
int hipMemcpyDtoHAsync(void* to, const void* from, size_t size, void* stream) {
    CALL((void)stream; memcpy(to, from, size));
}
int hipMemsetD8Async(void* to, unsigned char v, size_t size, void* stream) {
    CALL((void)stream; memset(to, v, size));
}
int hipStreamCreateWithFlags(void** to, unsigned flags) { CALL(*to = malloc(flags); ++live); }
int hipStreamSynchronize(void* stream) { CALL((void)stream); }
int hipStreamDestroy(void* stream) { CALL(free(stream); --live); }
int hipEventCreateWithFlags(void** to, unsigned flags) { CALL(*to = malloc(flags); ++live); }
int hipEventRecord(void* event, void* stream) { CALL((void)event; (void)stream); }
int hipEventQuery(void* event) {
    (void)event;
    int failed = call(__func__);
    return failed ? failed : landed ? 0 : 600;
}
int hipEventSynchronize(void* event) { CALL((void)event); }
int hipEventDestroy(void* event) { CALL(free(event); --live); }
int hipModuleLoadData(void** to, const void* image) {
    if (memcmp(image, "\177ELF", 4)) return 209;
    CALL(*to = malloc(1); ++live);
}
int hipModuleUnload(void* module) { CALL(free(module); --live); }
int hipModuleGetFunction(void** to, void* module, const char* name) {
    (void)module;
    if (strcmp(name, "k")) return 500;
    CALL(*to = (void*)0x50);
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* to, void* f, int threads, size_t shared) {
    CALL((void)f; (void)threads; (void)shared; *to = fit);
}
int hipModuleLaunchCooperativeKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                     unsigned by, unsigned bz, unsigned shared, void* stream,
                                     void** params) {
    (void)gx, (void)shared, (void)stream, (void)bx;
    if (f != (void*)0x50 || gy * gz * by * bz != 1) return 1;
    CALL(memcpy(args, params[0], args_bytes));
}

// The compiler.
int hiprtcVersion(int* a, int* b) { CALL(*a = 6; *b = 3); }
const char* hiprtcGetErrorString(int e) { return e == 5 ? "HIPRTC_ERROR_INVALID_OPTION" : NULL; }
int hiprtcCreateProgram(void** to, const char* text, const char* name, int n, const char** headers,
                        const char** names) {
    (void)text, (void)name, (void)n, (void)headers, (void)names;
    CALL(*to = malloc(1); ++live; log_text = "");
}
int hiprtcCompileProgram(void* program, int count, const char** options) {
    (void)program;
    if (count != 3 || strcmp(options[2], "--offload-arch=gfx942")) return 5;
    int failed = call(__func__);
    if (failed == 6) log_text = "kie:2: error: no such thing";
    return failed;
}
int hiprtcGetProgramLogSize(void* program, size_t* to) {
    CALL((void)program; *to = strlen(log_text) + 1);
}
int hiprtcGetProgramLog(void* program, char* to) { CALL((void)program; strcpy(to, log_text)); }
int hiprtcGetCodeSize(void* program, size_t* to) { CALL((void)program; *to = code_bytes); }
int hiprtcGetCode(void* program, char* to) { CALL((void)program; memcpy(to, code, code_bytes)); }
int hiprtcDestroyProgram(void** program) { CALL(free(*program); --live); }
