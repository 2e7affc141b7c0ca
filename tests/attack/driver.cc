// A CUDA driver with NVRTC and a HIP runtime with hipRTC, without a GPU: memory is the host's, a
// kernel is a few lines that make tokens out of nothing, and any call fails where it is told to.
// What is taken and given back is kept in books. Linked under the name of the library it stands
// for, so that whoever looks for that finds this one, loaded already.
//
// Calls that give something back do so and then fail: real ones answer with faults of earlier work.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;
#include "wire.h"  // what a launch is given: see drivers.py

namespace {

constexpr int kNotFound = 500, kNotReady = 600, kInvalid = 1, kOutOfMemory = 2;
constexpr int kProcessors = 16, kRing = 8192, kMostCalls = 1 << 16;
constexpr size_t kDeviceBytes = size_t{8} << 30;

enum Kind { kBlock, kPinned, kModule, kStream, kEvent, kContext, kProgram, kOpened, kKinds };
const char* const kNames[kKinds] = {"blocks", "pinned",   "modules",  "streams",
                                    "events", "contexts", "programs", "opened"};

std::mutex lock_;
std::map<u64, Kind> live;
std::map<u64, int> asked;  // how often an event was since it was recorded
std::atomic<long> pushed, faults;
std::string fault, code_object;
u64 next = 1000;

// The script: which call fails, and how.
const char* calls[kMostCalls];
long count, at = -1;
int code;
bool lasting;
std::string report_;

int gate(const char* name) {
    const std::lock_guard<std::mutex> held(lock_);
    const long now = count++;
    if (now < kMostCalls) calls[now] = name;
    return at >= 0 && (now == at || (lasting && now > at)) ? code : 0;
}
void wrong(const std::string& what) {
    ++faults;
    fault = what;
}
u64 take(Kind kind, u64 handle) {
    const std::lock_guard<std::mutex> held(lock_);
    if (!handle) handle = next++;
    live[handle] = kind;
    if (kind == kEvent) asked[handle] = 0;
    return handle;
}
bool give(Kind kind, u64 handle) {
    const std::lock_guard<std::mutex> held(lock_);
    const auto found = live.find(handle);
    if (found == live.end() || found->second != kind) {
        wrong(std::string(kNames[kind]) + ": one was given back that nobody has");
        return false;
    }
    live.erase(found);
    return true;
}
int give_memory(const char* name, Kind kind, u64 address) {
    const int failed = gate(name);
    if (give(kind, address)) free(reinterpret_cast<void*>(address));
    return failed;
}
int give_other(const char* name, Kind kind, u64 handle) {
    const int failed = gate(name);
    give(kind, handle);
    return failed;
}
int take_memory(const char* name, Kind kind, u64* to, size_t bytes) {
    if (const int failed = gate(name)) return failed;
    if (bytes > kDeviceBytes) return kOutOfMemory;
    void* memory = nullptr;
    if (!bytes || posix_memalign(&memory, 256, bytes)) return kInvalid;
    *to = take(kind, reinterpret_cast<u64>(memory));
    return 0;
}
int take_other(const char* name, Kind kind, u64* to) {
    if (const int failed = gate(name)) return failed;
    *to = take(kind, 0);
    return 0;
}

// ---- Kernels.
struct Entry {
    const char* name;
    size_t args_bytes;
};
const Entry kEntries[] = {
    {"kie_decode", sizeof(DecodeArgs)},
    {"kie_pack", 32},
    {"kie_prefill", sizeof(PrefillArgs)},
};
constexpr u64 kFunctions = 1 << 20;

const Entry* entry_of(u64 function) {
    const u64 index = function - kFunctions;
    return index < sizeof kEntries / sizeof *kEntries ? kEntries + index : nullptr;
}
int find_function(const char* call, u64* to, const char* name) {
    if (const int failed = gate(call)) return failed;
    for (const Entry& entry : kEntries)
        if (!strcmp(entry.name, name)) return *to = kFunctions + (&entry - kEntries), 0;
    return kNotFound;
}
void store(u64* to, u64 word) { __atomic_store_n(to, word, __ATOMIC_RELEASE); }
// As the kernel does (emit.h): a tag in each of three words. The token follows from its position.
void emit(u64* to, u32 n, u32 token) {
    const float logprob = -1.0f;
    u32 bits;
    memcpy(&bits, &logprob, sizeof bits);
    const u64 tag = n + 1;
    store(to, tag << 32 | token), store(to + 1, tag << 32 | bits);
    store(to + 2, (tag & 0xffffff) << 40 | 1);
}
void decode(const DecodeArgs& args) {
    u32 made = args.live ? 0 : args.steps;
    for (u32 c = 0; c < args.live; ++c) {
        const Sequence& s = args.column[c];
        u32 n = 0;
        for (; n < args.steps && s.position + n < s.last; ++n) {
            const u32 emitted = s.emitted + n;
            emit(args.out + (u64{s.row} * kRing + emitted % kRing) * 3, emitted,
                 5 + (s.position + n) % 40);
        }
        if (n > made) made = n;
    }
    __atomic_store_n(args.control + 3, made, __ATOMIC_RELEASE);
}
int launch(const char* call, u64 function, u64 stream, void** args) {
    if (const int failed = gate(call)) return failed;
    const Entry* entry = entry_of(function);
    if (!entry || !live.count(stream)) return wrong("a launch of nothing, or nowhere"), kInvalid;
    if (!strcmp(entry->name, "kie_decode")) decode(*static_cast<const DecodeArgs*>(args[0]));
    return 0;
}
// A kernel takes a while: the first answer is that it has not ended.
int query(const char* call, u64 event) {
    if (const int failed = gate(call)) return failed;
    const std::lock_guard<std::mutex> held(lock_);
    return asked[event]++ ? 0 : kNotReady;
}
int record(const char* call, u64 event) {
    if (const int failed = gate(call)) return failed;
    const std::lock_guard<std::mutex> held(lock_);
    return asked[event] = 0;
}
int copy(const char* call, void* to, const void* from, size_t bytes) {
    if (const int failed = gate(call)) return failed;
    return memcpy(to, from, bytes), 0;
}
int fill(const char* call, u64 to, u8 value, size_t bytes) {
    if (const int failed = gate(call)) return failed;
    return memset(reinterpret_cast<void*>(to), value, bytes), 0;
}
template <class T>
int answer(const char* call, T* to, T value) {
    if (const int failed = gate(call)) return failed;
    return *to = value, 0;
}
int answer_text(const char* call, char* to, int room, const char* text) {
    if (const int failed = gate(call)) return failed;
    return snprintf(to, room, "%s", text), 0;
}
int answer_bus(const char* call, char* to, int room, int device) {
    if (const int failed = gate(call)) return failed;
    return snprintf(to, room, "0000:%02x:00.0", 0x17 + device), 0;
}

thread_local int current;
thread_local char name_[32];
const char* name_of(int error) { return snprintf(name_, sizeof name_, "FAULT_%d", error), name_; }
const char kLog[] = "log of a compiler";
const char kImage[] = "\177ELF";

}  // namespace

// ---- What a test says and asks.
extern "C" {

// From now on the call of this number fails with `code_now`, and with `lasting_now` all after it.
void script_arm(long at_now, int code_now, int lasting_now) {
    const std::lock_guard<std::mutex> held(lock_);
    count = 0, at = at_now, code = code_now, lasting = lasting_now;
}
long script_count() { return count; }
const char* script_call(long n) { return n < count && n < kMostCalls ? calls[n] : ""; }
// What is not given back, in words; empty: all is.
const char* script_left() {
    const std::lock_guard<std::mutex> held(lock_);
    int kinds[kKinds] = {};
    for (const auto& one : live) ++kinds[one.second];
    report_.clear();
    for (int kind = 0; kind < kKinds; ++kind)
        if (kinds[kind]) report_ += std::to_string(kinds[kind]) + " " + kNames[kind] + ", ";
    if (pushed) report_ += std::to_string(pushed) + " contexts pushed, ";
    if (faults) report_ += fault;
    return report_.c_str();
}
// Nothing was ever taken.
void script_heal() {
    const std::lock_guard<std::mutex> held(lock_);
    for (const auto& one : live)
        if (one.second == kBlock || one.second == kPinned) free(reinterpret_cast<void*>(one.first));
    live.clear(), asked.clear();
    pushed = faults = 0, at = -1;
}
int script_args_bytes(const char* name) {
    for (const Entry& entry : kEntries)
        if (!strcmp(entry.name, name)) return static_cast<int>(entry.args_bytes);
    return -1;
}
// What hipRTC makes of every source.
void script_code(const char* bytes, size_t size) { code_object.assign(bytes, size); }

// ---- The CUDA driver.
struct IpcHandle {
    u64 address;
    char rest[56];
};
int cuDriverGetVersion(int* v) { return answer(__func__, v, 13000); }
int cuInit(unsigned) { return gate(__func__); }
int cuGetErrorName(int e, const char** to) { return answer(__func__, to, name_of(e)); }
int cuGetErrorString(int, const char** to) { return answer(__func__, to, "as the script has it"); }
int cuDeviceGetCount(int* n) { return answer(__func__, n, 2); }
int cuDeviceGet(int* d, int n) { return answer(__func__, d, n); }
int cuDeviceGetName(char* s, int n, int) { return answer_text(__func__, s, n, "no GPU at all"); }
int cuDeviceGetAttribute(int* v, int which, int) {
    const std::map<int, int> values = {{16, kProcessors}, {20, 0}, {41, 1},     {75, 9},
                                       {76, 0},           {95, 1}, {97, 232448}};
    return answer(__func__, v, values.at(which));
}
int cuDeviceTotalMem_v2(size_t* n, int) { return answer(__func__, n, kDeviceBytes); }
int cuDeviceGetPCIBusId(char* s, int n, int d) { return answer_bus(__func__, s, n, d); }
int cuDeviceCanAccessPeer(int* v, int, int) { return answer(__func__, v, 1); }
int cuCtxEnablePeerAccess(u64, unsigned) { return gate(__func__); }
int cuDevicePrimaryCtxRetain(u64* c, int) { return take_other(__func__, kContext, c); }
int cuDevicePrimaryCtxRelease_v2(int) {
    const int failed = gate(__func__);
    const std::lock_guard<std::mutex> held(lock_);
    for (auto one = live.begin(); one != live.end(); ++one)
        if (one->second == kContext) return live.erase(one), failed;
    return wrong("a context was released that nobody has"), failed;
}
int cuCtxPushCurrent_v2(u64) {
    const int failed = gate(__func__);
    if (!failed) ++pushed;
    return failed;
}
int cuCtxPopCurrent_v2(u64* c) { return --pushed, *c = 0, gate(__func__); }
int cuMemGetInfo_v2(size_t* rest, size_t* all) {
    return *all = kDeviceBytes, answer(__func__, rest, kDeviceBytes);
}
int cuMemAlloc_v2(u64* a, size_t n) { return take_memory(__func__, kBlock, a, n); }
int cuMemFree_v2(u64 a) { return give_memory(__func__, kBlock, a); }
int cuIpcGetMemHandle(IpcHandle* h, u64 a) { return h->address = a, gate(__func__); }
int cuIpcOpenMemHandle_v2(u64* a, IpcHandle, unsigned) { return take_other(__func__, kOpened, a); }
int cuIpcCloseMemHandle(u64 a) { return give_other(__func__, kOpened, a); }
int cuMemHostAlloc(u64* p, size_t n, unsigned) { return take_memory(__func__, kPinned, p, n); }
int cuMemFreeHost(u64 p) { return give_memory(__func__, kPinned, p); }
int cuMemHostGetDevicePointer_v2(u64* a, u64 p, unsigned) { return answer(__func__, a, p); }
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t n, u64) {
    return copy(__func__, to, from, n);
}
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t n, u64) {
    return copy(__func__, to, from, n);
}
int cuMemsetD8Async(u64 a, u8 v, size_t n, u64) { return fill(__func__, a, v, n); }
int cuStreamCreate(u64* s, unsigned) { return take_other(__func__, kStream, s); }
int cuStreamSynchronize(u64) { return gate(__func__); }
int cuStreamDestroy_v2(u64 s) { return give_other(__func__, kStream, s); }
int cuEventCreate(u64* e, unsigned) { return take_other(__func__, kEvent, e); }
int cuEventRecord(u64 e, u64) { return record(__func__, e); }
int cuEventQuery(u64 e) { return query(__func__, e); }
int cuEventSynchronize(u64) { return gate(__func__); }
int cuEventDestroy_v2(u64 e) { return give_other(__func__, kEvent, e); }
int cuModuleLoadDataEx(u64* m, const void*, unsigned, int*, void**) {
    return take_other(__func__, kModule, m);
}
int cuModuleUnload(u64 m) { return give_other(__func__, kModule, m); }
int cuModuleGetFunction(u64* f, u64, const char* name) { return find_function(__func__, f, name); }
int cuFuncGetAttribute(int* v, int which, u64) { return answer(__func__, v, which ? 40 : 1024); }
int cuFuncSetAttribute(u64, int, int) { return gate(__func__); }
int cuFuncGetParamInfo(u64 f, size_t index, size_t* begin, size_t* bytes) {
    const Entry* entry = entry_of(f);
    *begin = 0, *bytes = entry ? entry->args_bytes : 0;
    const int failed = gate(__func__);
    return index || !entry ? kInvalid : failed;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, u64, int, size_t) {
    return answer(__func__, n, 1);
}
int cuLaunchCooperativeKernel(u64 f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, u64 s, void** args) {
    return launch(__func__, f, s, args);
}

// ---- NVRTC.
int nvrtcVersion(int* major, int* minor) { return *minor = 0, answer(__func__, major, 13); }
const char* nvrtcGetErrorString(int e) { return name_of(e); }
int nvrtcCreateProgram(u64* p, const char*, const char*, int, const char* const*,
                       const char* const*) {
    return take_other(__func__, kProgram, p);
}
int nvrtcCompileProgram(u64, int, const char* const*) { return gate(__func__); }
int nvrtcGetProgramLogSize(u64, size_t* n) { return answer(__func__, n, sizeof kLog); }
int nvrtcGetProgramLog(u64, char* to) { return copy(__func__, to, kLog, sizeof kLog); }
int nvrtcGetCUBINSize(u64, size_t* n) { return answer(__func__, n, sizeof kImage); }
int nvrtcGetCUBIN(u64, char* to) { return copy(__func__, to, kImage, sizeof kImage); }
int nvrtcGetPTXSize(u64, size_t* n) { return answer(__func__, n, sizeof kImage); }
int nvrtcGetPTX(u64, char* to) { return copy(__func__, to, kImage, sizeof kImage); }
int nvrtcDestroyProgram(u64* p) { return give_other(__func__, kProgram, *p); }

// ---- The HIP runtime.
int hipRuntimeGetVersion(int* v) { return answer(__func__, v, 60342134); }
int hipInit(unsigned) { return gate(__func__); }
const char* hipGetErrorName(int e) { return name_of(e); }
const char* hipGetErrorString(int) { return "as the script has it"; }
int hipGetDeviceCount(int* n) { return answer(__func__, n, 2); }
int hipGetDevice(int* n) { return answer(__func__, n, current); }
int hipSetDevice(int n) { return answer(__func__, &current, n); }
int hipDeviceGetName(char* s, int n, int) { return answer_text(__func__, s, n, "no GPU at all"); }
int hipDeviceGetAttribute(int* v, int which, int) {
    const std::map<int, int> values = {{10, 1},           {23, 9},     {61, 4},
                                       {63, kProcessors}, {74, 65536}, {87, 64}};
    return answer(__func__, v, values.at(which));
}
int hipDeviceGetPCIBusId(char* s, int n, int d) { return answer_bus(__func__, s, n, d); }
int hipDeviceCanAccessPeer(int* v, int, int) { return answer(__func__, v, 1); }
int hipMemGetInfo(size_t* rest, size_t* all) {
    return *all = kDeviceBytes, answer(__func__, rest, kDeviceBytes);
}
int hipMalloc(u64* a, size_t n) { return take_memory(__func__, kBlock, a, n); }
int hipFree(u64 a) { return give_memory(__func__, kBlock, a); }
int hipHostMalloc(u64* p, size_t n, unsigned) { return take_memory(__func__, kPinned, p, n); }
int hipHostFree(u64 p) { return give_memory(__func__, kPinned, p); }
int hipHostGetDevicePointer(u64* a, u64 p, unsigned) { return answer(__func__, a, p); }
int hipMemcpyHtoDAsync(void* to, const void* from, size_t n, u64) {
    return copy(__func__, to, from, n);
}
int hipMemcpyDtoHAsync(void* to, const void* from, size_t n, u64) {
    return copy(__func__, to, from, n);
}
int hipMemsetD8Async(u64 a, u8 v, size_t n, u64) { return fill(__func__, a, v, n); }
int hipStreamCreateWithFlags(u64* s, unsigned) { return take_other(__func__, kStream, s); }
int hipStreamSynchronize(u64) { return gate(__func__); }
int hipStreamDestroy(u64 s) { return give_other(__func__, kStream, s); }
int hipEventCreateWithFlags(u64* e, unsigned) { return take_other(__func__, kEvent, e); }
int hipEventRecord(u64 e, u64) { return record(__func__, e); }
int hipEventQuery(u64 e) { return query(__func__, e); }
int hipEventSynchronize(u64) { return gate(__func__); }
int hipEventDestroy(u64 e) { return give_other(__func__, kEvent, e); }
int hipModuleLoadData(u64* m, const void*) { return take_other(__func__, kModule, m); }
int hipModuleUnload(u64 m) { return give_other(__func__, kModule, m); }
int hipModuleGetFunction(u64* f, u64, const char* name) { return find_function(__func__, f, name); }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* n, u64, int, size_t) {
    return answer(__func__, n, 1);
}
int hipModuleLaunchCooperativeKernel(u64 f, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, u64 s, void** args) {
    return launch(__func__, f, s, args);
}

// ---- hipRTC.
int hiprtcVersion(int* major, int* minor) { return *minor = 3, answer(__func__, major, 6); }
const char* hiprtcGetErrorString(int e) { return name_of(e); }
int hiprtcCreateProgram(u64* p, const char*, const char*, int, const char**, const char**) {
    return take_other(__func__, kProgram, p);
}
int hiprtcCompileProgram(u64, int, const char**) { return gate(__func__); }
int hiprtcGetProgramLogSize(u64, size_t* n) { return answer(__func__, n, sizeof kLog); }
int hiprtcGetProgramLog(u64, char* to) { return copy(__func__, to, kLog, sizeof kLog); }
int hiprtcGetCodeSize(u64, size_t* n) { return answer(__func__, n, code_object.size()); }
int hiprtcGetCode(u64, char* to) {
    return copy(__func__, to, code_object.data(), code_object.size());
}
int hiprtcDestroyProgram(u64* p) { return give_other(__func__, kProgram, *p); }

}  // extern "C"
