// A stand-in for libcuda whose GPUs have host memory. It checks what the real driver checks (a
// current context, the context of a handle, the capture mode, the process) and records every
// launch. tests/fake_cuda compiles it. mod.rs and tests/c read the fake_* part.
//
// Like drivers before 12.4, it has cuEventElapsedTime only under the old name and no cuFuncLoad.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, UNSUPPORTED = 900, IMPLICIT = 906 };
// PARAMS_BYTES, the size of KernelParams, comes from the command line.
enum { MAX_LAUNCHES = 16, RELAXED = 2, MAPS = 4, SM90 = 1, KEY_MAPS = 2 };
// The primary context of device N is OUR_CONTEXT + N * CONTEXT_STEP. Others are of device 0.
enum { OUR_CONTEXT = 0x1000, CONTEXT_STEP = 0x10, MAX_DEVICES = 8, FIRST_HANDLE = 0x5000, DEVICE_SHIFT = 40 };

struct fake_launch {
    uint64_t function, stream, context;
    uint32_t grid[3], block[3], smem_bytes, overlaps; // overlaps: may start while the previous launch ends
    uint8_t params[PARAMS_BYTES];
    uint64_t maps[MAPS][16], counter; // sm90: all; decode with TMA (FAKE_KEY_MAPS): two maps
};

struct fake_state {
    int64_t retains, memory, modules, streams, events, memsets, pushes;
    int64_t capturing;   // another stream of the process is captured in global mode
    int64_t sync_result; // what cuStreamSynchronize returns
    int64_t is_full;     // allocations fail
    int64_t launches;
    struct fake_launch launch[MAX_LAUNCHES];
} fake_state;

static _Thread_local void *stack[16];
static _Thread_local int depth;
static _Thread_local int capture_mode;
static uintptr_t next_handle = FIRST_HANDLE;
static void *captured; // the stream that cuStreamBeginCapture has begun
static int process;    // the one that called cuInit

// Each call has a number. One of them fails, as a test asks; see fake_fail.
static int64_t calls, fails_at;
static int fails_with;
static const char *failed;

static void *current(void) { return depth ? stack[depth - 1] : NULL; }
static uintptr_t device_of(void *context) { uintptr_t number = ((uintptr_t)context - OUR_CONTEXT) / CONTEXT_STEP; return number < MAX_DEVICES ? number : 0; }
// A handle names the device whose context made it. Handles that a test made up belong to all.
static void *handle(void) { return (void *)(__atomic_add_fetch(&next_handle, 16, __ATOMIC_SEQ_CST) | device_of(current()) << DEVICE_SHIFT); }
static int is_foreign(const void *made) { uintptr_t device = (uintptr_t)made >> DEVICE_SHIFT; return (uintptr_t)made >= FIRST_HANDLE && device != device_of(current()); }
static void count(int64_t *counter, int by) { __atomic_add_fetch(counter, by, __ATOMIC_SEQ_CST); }
static int called(const char *name) {
    if (process && process != getpid()) return NOT_INITIALIZED;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != fails_at) return SUCCESS;
    failed = name;
    return fails_with;
}
#define CALL do { int fault = called(__func__); if (fault) return fault; } while (0)
// A release that fails has released: it reports what went wrong before.
#define RELEASE(work) do { int fault = called(__func__); if (fault == NOT_INITIALIZED) return fault; work; return fault; } while (0)
#define NEED_CONTEXT CALL; if (!current()) return INVALID_CONTEXT
#define NEED(made) NEED_CONTEXT; if (is_foreign(made)) return INVALID_HANDLE
// Calls that a capture in global mode refuses.
#define REFUSE_CAPTURE if (!current()) return INVALID_CONTEXT; if (fake_state.capturing && capture_mode != RELAXED) return UNSUPPORTED
#define NEED_NO_CAPTURE CALL; REFUSE_CAPTURE

// From now on the call of this number fails with `code`. Returns the calls before, and forgets
// them.
int64_t fake_fail(int64_t at, int code) {
    fails_at = at, fails_with = code, failed = NULL;
    return __atomic_exchange_n(&calls, 0, __ATOMIC_SEQ_CST);
}
// The function that failed so, or NULL.
const char *fake_failed(void) { return failed; }
// Everything that was made and not given back.
int64_t fake_left(void) { return fake_state.retains + fake_state.memory + fake_state.modules + fake_state.streams + fake_state.events; }
int64_t fake_launches(void) { return fake_state.launches; }
int fake_capture_mode(void) { return capture_mode; }

// A number from the environment, so that a test can choose another driver.
static int setting(const char *name, int otherwise) { const char *value = getenv(name); return value ? atoi(value) : otherwise; }
int cuInit(unsigned flags) { CALL; process = getpid(); return flags ? INVALID_VALUE : setting("FAKE_INIT_RESULT", SUCCESS); }
int cuDriverGetVersion(int *version) { CALL; *version = setting("FAKE_DRIVER_VERSION", 13000); return SUCCESS; }
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) { *text = code == OUT_OF_MEMORY ? "out of memory" : NULL; return *text ? SUCCESS : INVALID_VALUE; }

int cuDeviceGetCount(int *count) { CALL; *count = setting("FAKE_DEVICES", 1); return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { CALL; *device = ordinal; return ordinal < 0 || ordinal >= setting("FAKE_DEVICES", 1) ? INVALID_DEVICE : SUCCESS; }
int cuDeviceGetName(char *name, int bytes, int device) { CALL; (void)device; strncpy(name, "Fake GPU", bytes); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { CALL; (void)device; *bytes = 1 << 30; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL;
    (void)device;
    switch (attribute) {
    case 75: *value = setting("FAKE_ARCH", 90) / 10; break; // compute capability, major
    case 76: *value = setting("FAKE_ARCH", 90) % 10; break; // and minor
    case 16: *value = 132; break;      // multiprocessors
    case 97: *value = 232448; break;   // shared memory of a block, opt-in
    case 81: *value = 233472; break;   // shared memory of a multiprocessor
    case 82: *value = 65536; break;    // registers of a multiprocessor
    case 39: *value = 2048; break;     // threads of a multiprocessor
    case 38: *value = 1 << 20; break;  // L2 cache
    case 36: *value = 3201000; break;  // memory clock in kHz, of an H200
    case 37: *value = 6144; break;     // and bits of its bus
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { CALL; count(&fake_state.retains, 1); *context = (void *)(uintptr_t)(OUR_CONTEXT + device * CONTEXT_STEP); return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; RELEASE(count(&fake_state.retains, -1)); }
int cuCtxGetCurrent(void **context) { CALL; *context = current(); return SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { CALL; if (depth == 16) return INVALID_VALUE; count(&fake_state.pushes, 1); stack[depth++] = context; return SUCCESS; }
int cuCtxPopCurrent_v2(void **context) { NEED_CONTEXT; *context = stack[--depth]; return SUCCESS; }
int cuCtxGetDevice(int *device) { NEED_CONTEXT; *device = (int)device_of(current()); return SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int *mode) { CALL; int old = capture_mode; capture_mode = *mode; *mode = old; return SUCCESS; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    NEED_NO_CAPTURE;
    if (!bytes) return INVALID_VALUE;
    if (bytes > (1 << 30) || fake_state.is_full) return OUT_OF_MEMORY;
    void *memory = NULL;
    if (posix_memalign(&memory, 256, bytes)) return OUT_OF_MEMORY;
    *address = (uint64_t)(uintptr_t)memory;
    count(&fake_state.memory, 1);
    return SUCCESS;
}
int cuMemFree_v2(uint64_t address) { REFUSE_CAPTURE; RELEASE(free((void *)(uintptr_t)address); count(&fake_state.memory, -1)); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) { NEED(stream); memcpy((void *)(uintptr_t)to, from, bytes); return SUCCESS; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) { NEED(stream); memcpy(to, (void *)(uintptr_t)from, bytes); return SUCCESS; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) { NEED(stream); memset((void *)(uintptr_t)address, value, bytes); count(&fake_state.memsets, 1); return SUCCESS; }

int cuStreamCreate(void **stream, unsigned flags) { NEED_NO_CAPTURE; (void)flags; *stream = handle(); count(&fake_state.streams, 1); return SUCCESS; }
int cuStreamDestroy_v2(void *stream) { REFUSE_CAPTURE; if (is_foreign(stream)) return INVALID_HANDLE; RELEASE(count(&fake_state.streams, -1)); }
int cuStreamSynchronize(void *stream) { NEED_NO_CAPTURE; if (is_foreign(stream)) return INVALID_HANDLE; return (int)fake_state.sync_result; }
int cuStreamIsCapturing(void *stream, int *status) {
    NEED(stream);
    if (!stream && fake_state.capturing) return IMPLICIT;
    *status = stream == (void *)0xca7 || (captured && stream == captured) ? 1 : 0;
    return SUCCESS;
}
int cuStreamGetId(void *stream, unsigned long long *id) { NEED(stream); *id = (uintptr_t)stream; return SUCCESS; }
int cuTensorMapEncodeTiled(void *map, int element, unsigned rank, void *address, const uint64_t *extents, const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    CALL;
    if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || rank < 4 || rank > 5 || interleave || swizzle != 3 || (promotion != 2 && promotion != 3) || fill) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; ++i) {
        if (!extents[i] || extents[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return INVALID_VALUE;
    }
    uint64_t words[16] = {(uintptr_t)address, (uint64_t)element, extents[0], extents[1], extents[2], extents[3], strides[0], strides[1], strides[2], box[0], box[1], (uint64_t)promotion, rank, rank > 4 ? extents[4] : 0, rank > 4 ? strides[3] : 0};
    memcpy(map, words, sizeof words);
    return SUCCESS;
}
int cuEventCreate(void **event, unsigned flags) { NEED_NO_CAPTURE; (void)flags; *event = handle(); count(&fake_state.events, 1); return SUCCESS; }
int cuEventDestroy_v2(void *event) { REFUSE_CAPTURE; if (is_foreign(event)) return INVALID_HANDLE; RELEASE(count(&fake_state.events, -1)); }
int cuEventRecord(void *event, void *stream) { NEED(event); if (is_foreign(stream)) return INVALID_HANDLE; return SUCCESS; }
int cuEventSynchronize(void *event) { NEED(event); return SUCCESS; }
int cuEventElapsedTime(float *milliseconds, void *start, void *stop) { NEED(start); if (is_foreign(stop)) return INVALID_HANDLE; *milliseconds = 1.5f; return SUCCESS; }

int cuModuleLoadData(void **module, const void *image) { NEED_NO_CAPTURE; if (memcmp(image, "\x7f" "ELF", 4)) return INVALID_VALUE; *module = handle(); count(&fake_state.modules, 1); return SUCCESS; }
int cuModuleUnload(void *module) { REFUSE_CAPTURE; if (is_foreign(module)) return INVALID_HANDLE; RELEASE(count(&fake_state.modules, -1)); }
int cuModuleGetFunction(void **function, void *module, const char *name) { NEED(module); *function = (char *)module + (strstr(name, "sm90") && !strstr(name, "widen") ? SM90 : strstr(name, "decode") && setting("FAKE_KEY_MAPS", 0) ? KEY_MAPS : 0); return SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { NEED(function); *value = attribute == 4 ? setting("FAKE_REGISTERS", 96) : attribute == 8 ? 49152 : 0; return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) { NEED(function); return attribute == 8 && value <= 232448 ? SUCCESS : INVALID_VALUE; }

static int record(unsigned overlaps, void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, void *stream, void **params, void **extra) {
    if (!current()) return INVALID_CONTEXT;
    if (is_foreign(function) || is_foreign(stream)) return INVALID_HANDLE;
    if (extra || !gx || !gy || !gz) return INVALID_VALUE;
    int64_t index = __atomic_fetch_add(&fake_state.launches, 1, __ATOMIC_SEQ_CST);
    struct fake_launch *launch = &fake_state.launch[index % MAX_LAUNCHES];
    launch->function = (uintptr_t)function;
    launch->stream = (uintptr_t)stream;
    launch->context = (uintptr_t)current();
    uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    memcpy(launch->grid, grid, sizeof grid);
    memcpy(launch->block, block, sizeof block);
    launch->smem_bytes = smem;
    launch->overlaps = overlaps;
    memcpy(launch->params, params[0], PARAMS_BYTES);
    if ((uintptr_t)function & SM90) {
        for (int i = 0; i < MAPS; ++i) memcpy(launch->maps[i], params[1 + i], sizeof launch->maps[i]);
        memcpy(&launch->counter, params[1 + MAPS], sizeof launch->counter);
    }
    if ((uintptr_t)function & KEY_MAPS) {
        for (int i = 0; i < 2; ++i) memcpy(launch->maps[i], params[1 + i], sizeof launch->maps[i]);
    }
    return SUCCESS;
}
// Laid out as in cuda.h.
struct launch_attribute { int id; char pad[4]; union { int value; char all[64]; } value; };
struct launch_config { unsigned gx, gy, gz, bx, by, bz, smem; void *stream; struct launch_attribute *attributes; unsigned count; };
int cuLaunchKernelEx(const struct launch_config *config, void *function, void **params, void **extra) {
    CALL;
    const int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
    const struct launch_attribute *attribute = config->attributes;
    if (config->count > 1) return INVALID_VALUE;
    if (config->count && (attribute->id != PROGRAMMATIC_STREAM_SERIALIZATION || attribute->value.value != 1)) return INVALID_VALUE;
    return record(config->count, function, config->gx, config->gy, config->gz, config->bx, config->by, config->bz, config->smem, config->stream, params, extra);
}

// What the C programs of tests/c call beside.
int cuStreamBeginCapture_v2(void *stream, int mode) { NEED(stream); (void)mode; if (!stream || captured) return UNSUPPORTED; captured = stream; fake_state.capturing = 1; return SUCCESS; }
int cuStreamEndCapture(void *stream, void **graph) { NEED(stream); if (stream != captured) return INVALID_VALUE; captured = NULL; fake_state.capturing = 0; *graph = handle(); return SUCCESS; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) { NEED(graph); (void)flags; *executable = handle(); return SUCCESS; }
int cuGraphLaunch(void *executable, void *stream) { NEED(executable); return is_foreign(stream) ? INVALID_HANDLE : SUCCESS; }
int cuGraphExecDestroy(void *executable) { NEED(executable); return SUCCESS; }
int cuGraphDestroy(void *graph) { NEED(graph); return SUCCESS; }
