// libcuda's face: the functions of the driver that flashtune calls, over the engine. Streams are
// synchronous. A launch that fails returns CUDA_ERROR_LAUNCH_FAILED, whose text is the engine's
// report; the report also goes to stderr.
//
// FLASHTUNE_EMULATOR_ARCH names the GPU (sm_80, sm_86, sm_90, sm_100, sm_120), sm_90 if unset.
// FLASHTUNE_EMULATOR_SMS sets the number of its SMs. FLASHTUNE_EMULATOR_OVERLAPS=1 hides a kernel's
// writes from a kernel that may overlap it (memory.cpp).

#include "engine.h"
#include "fault.h"
#include "tensor_map.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <unistd.h>

using namespace emulator;

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
void* const kContext = reinterpret_cast<void*>(0x1000);

struct Gpu {
    int arch;
    const char* name;
    int sms, shared_of_block, shared_of_sm, threads_of_sm, l2_bytes;
};
// Shared memory and threads: CUDA programming guide, "compute capabilities".
constexpr Gpu kGpus[] = {
    {80, "Emulated sm_80", 108, 166912, 167936, 2048, 40 << 20}, {86, "Emulated sm_86", 84, 101376, 102400, 1536, 6 << 20},
    {89, "Emulated sm_89", 128, 101376, 102400, 1536, 72 << 20}, {90, "Emulated sm_90", 132, 232448, 233472, 2048, 50 << 20},
    {100, "Emulated sm_100", 148, 232448, 233472, 2048, 126 << 20}, {120, "Emulated sm_120", 170, 101376, 102400, 1536, 96 << 20}};

const Gpu& gpu() {
    const char* given = getenv("FLASHTUNE_EMULATOR_ARCH");
    const int arch = given && !strncmp(given, "sm_", 3) ? atoi(given + 3) : 90;
    for (const Gpu& one : kGpus) if (one.arch == arch) return one;
    fprintf(stderr, "flashtune's emulator: FLASHTUNE_EMULATOR_ARCH is %s, which it does not know\n", given);
    abort();
}

int sm_count() {
    const char* given = getenv("FLASHTUNE_EMULATOR_SMS");
    return given && atoi(given) > 0 ? atoi(given) : gpu().sms;
}

thread_local std::vector<void*> contexts;
thread_local int capture_mode;
thread_local std::string last_report;

struct Module {
    void* library;
};
struct Function {
    const Kernel* kernel;
    std::string name;
    int max_shared = 49152;
};

std::mutex streams_mutex;
std::map<void*, std::unique_ptr<std::mutex>> streams;
uintptr_t next_handle = 0x5000;

void* new_handle() { return reinterpret_cast<void*>(__atomic_add_fetch(&next_handle, 16, __ATOMIC_SEQ_CST)); }

std::mutex& lock_of(void* stream) {
    std::lock_guard lock(streams_mutex);
    auto& found = streams[stream];
    if (!found) found = std::make_unique<std::mutex>();
    return *found;
}

int registers_of(const Kernel& kernel) {
    const int ctas = kernel.ctas_per_sm > 0 ? kernel.ctas_per_sm : 1;
    const int registers = 65536 / (kernel.max_threads * ctas) / 8 * 8;
    return registers > 255 ? 255 : registers;
}

bool shows_overlaps() { return getenv("FLASHTUNE_EMULATOR_OVERLAPS") != nullptr; }

// Held by launches and by the host's accesses to device memory if overlaps are shown.
std::unique_lock<std::mutex> device_memory() {
    static std::mutex one;
    return shows_overlaps() ? std::unique_lock(one) : std::unique_lock<std::mutex>();
}

// A launch that may overlap the one before it on its stream, as far as the emulator shows it.
class Overlap {
  public:
    Overlap(void* stream, bool may_overlap) : has_to_wait(may_overlap) {
        if (!shows_overlaps()) return;
        keep_memory();
        if (may_overlap && stream == last_stream) hide_writes();
        last_stream = stream;
    }
    // The kernel's end has to follow that of the kernel before it, as the next kernel waits for
    // this one alone.
    std::string end() const {
        if (!shows_overlaps() || find_writes() || !has_to_wait) return "";
        return "no thread has waited for the kernel before";
    }

  private:
    static inline void* last_stream;
    const bool has_to_wait;
};

// The bytes of an ELF file, whose section table comes last.
size_t elf_bytes(const unsigned char* image) {
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, image + 0x28, 8), memcpy(&size, image + 0x3a, 2), memcpy(&count, image + 0x3c, 2);
    return sections + size_t(size) * count;
}

}  // namespace

#define NEED_CONTEXT if (contexts.empty()) return INVALID_CONTEXT

extern "C" {

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuGetErrorName(int code, const char** name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
    return *name ? SUCCESS : INVALID_VALUE;
}
int cuGetErrorString(int code, const char** text) {
    // The caller keeps the text.
    static std::mutex mutex;
    static std::set<std::string> kept;
    *text = nullptr;
    if (code != LAUNCH_FAILED && code != INVALID_VALUE) return INVALID_VALUE;
    std::lock_guard lock(mutex);
    *text = kept.insert(last_report).first->c_str();
    return SUCCESS;
}

int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal ? INVALID_DEVICE : SUCCESS; }
int cuDeviceGetName(char* name, int bytes, int) { return strncpy(name, gpu().name, bytes), SUCCESS; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t(8) << 30, SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 75: *value = gpu().arch / 10; break;
    case 76: *value = gpu().arch % 10; break;
    case 16: *value = sm_count(); break;
    case 97: *value = gpu().shared_of_block; break;
    case 81: *value = gpu().shared_of_sm; break;
    case 82: *value = 65536; break;
    case 39: *value = gpu().threads_of_sm; break;
    case 38: *value = gpu().l2_bytes; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int) { return *context = kContext, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxGetCurrent(void** context) { return *context = contexts.empty() ? nullptr : contexts.back(), SUCCESS; }
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), SUCCESS; }
int cuCtxPopCurrent_v2(void** context) {
    NEED_CONTEXT;
    *context = contexts.back();
    return contexts.pop_back(), SUCCESS;
}
int cuCtxGetDevice(int* device) {
    NEED_CONTEXT;
    return *device = 0, SUCCESS;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), SUCCESS; }

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    NEED_CONTEXT;
    const auto alone = device_memory();
    if (!bytes) return INVALID_VALUE;
    if (bytes > size_t(4) << 30) return OUT_OF_MEMORY;
    *address = reinterpret_cast<uint64_t>(allocate(bytes));
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemFree_v2(uint64_t address) {
    NEED_CONTEXT;
    const auto alone = device_memory();
    return release(reinterpret_cast<void*>(address)) ? SUCCESS : INVALID_VALUE;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    NEED_CONTEXT;
    const auto alone = device_memory();
    return memcpy(reinterpret_cast<void*>(to), from, bytes), SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    NEED_CONTEXT;
    const auto alone = device_memory();
    return memcpy(to, reinterpret_cast<void*>(from), bytes), SUCCESS;
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void*) {
    NEED_CONTEXT;
    const auto alone = device_memory();
    return memset(reinterpret_cast<void*>(address), value, bytes), SUCCESS;
}

int cuStreamCreate(void** stream, unsigned) { return *stream = new_handle(), SUCCESS; }
int cuStreamDestroy_v2(void*) { return SUCCESS; }
int cuStreamSynchronize(void*) { return SUCCESS; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0, SUCCESS; }
int cuStreamGetId(void* stream, unsigned long long* id) { return *id = reinterpret_cast<uintptr_t>(stream), SUCCESS; }
int cuEventCreate(void** event, unsigned) { return *event = new_handle(), SUCCESS; }
int cuEventDestroy_v2(void*) { return SUCCESS; }
int cuEventRecord(void*, void*) { return SUCCESS; }
int cuEventSynchronize(void*) { return SUCCESS; }
// Time means nothing here.
int cuEventElapsedTime(float* ms, void*, void*) { return *ms = 1.f, SUCCESS; }

int cuTensorMapEncodeTiled(void* map, int element, unsigned rank, void* address, const uint64_t* extents, const uint64_t* strides,
                           const unsigned* box, const unsigned* steps, int interleave, int swizzle, int, int fill) {
    last_report = "cuTensorMapEncodeTiled";
    const bool is_16_bit = element == 6 || element == 9;  // FLOAT16 and BFLOAT16
    if (!is_16_bit || uintptr_t(map) % 64 || uintptr_t(address) % 16 || rank < 1 || rank > 5 || interleave || swizzle != 3 || fill) return INVALID_VALUE;
    TensorMapFields fields = {};
    fields.magic = kTensorMapMagic, fields.rank = rank, fields.address = reinterpret_cast<uint64_t>(address);
    for (unsigned d = 0; d < rank; ++d) {
        if (!extents[d] || extents[d] > 1ull << 32 || !box[d] || box[d] > 256 || steps[d] != 1) return INVALID_VALUE;
        if (d + 1 < rank && (strides[d] % 16 || strides[d] >= 1ull << 40)) return INVALID_VALUE;
        fields.extents[d] = extents[d], fields.box[d] = uint16_t(box[d]);
        if (d + 1 < rank) fields.strides[d] = strides[d];
    }
    if (box[0] * 2 > 128) return INVALID_VALUE;
    memset(map, 0, 128), memcpy(map, &fields, sizeof fields);
    return SUCCESS;
}

// An image is a shared library that the stand-in for NVRTC has made.
int cuModuleLoadData(void** module, const void* image) {
    NEED_CONTEXT;
    const auto* bytes = static_cast<const unsigned char*>(image);
    last_report = "the image is no library of the emulator's NVRTC";
    if (memcmp(bytes, "\x7f" "ELF", 4)) return INVALID_VALUE;
    // Each library needs a path of its own: the loader knows libraries by their paths.
    char path[] = "/tmp/flashtune-kernel-XXXXXX";
    const int file = mkstemp(path);
    const size_t size = elf_bytes(bytes);
    void* library = file >= 0 && write(file, bytes, size) == ssize_t(size) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) {
        const char* reason = dlerror();
        last_report = reason ? reason : "writing a temporary file";
    }
    if (file >= 0) close(file), unlink(path);
    if (!library) return INVALID_VALUE;
    *module = new Module{library};
    return SUCCESS;
}
int cuModuleUnload(void* module) {
    dlclose(static_cast<Module*>(module)->library);
    delete static_cast<Module*>(module);
    return SUCCESS;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    NEED_CONTEXT;
    const std::string symbol = std::string("emulator_") + name;
    const void* kernel = dlsym(static_cast<Module*>(module)->library, symbol.c_str());
    if (!kernel) return NOT_FOUND;
    // A function lives as long as the process, as few are made.
    *function = new Function{static_cast<const Kernel*>(kernel), name};
    return SUCCESS;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
    const auto* f = static_cast<Function*>(function);
    switch (attribute) {
    case 0: *value = f->kernel->max_threads; break;
    case 1: *value = 0; break;  // static shared memory: not known, and small
    case 4: *value = registers_of(*f->kernel); break;
    case 8: *value = f->max_shared; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    last_report = "more dynamic shared memory than the GPU has";
    if (attribute != 8 || value > gpu().shared_of_block) return INVALID_VALUE;
    return static_cast<Function*>(function)->max_shared = value, SUCCESS;
}

// Laid out as in cuda.h.
constexpr unsigned kProgrammaticStreamSerialization = 6;
struct launch_attribute {
    unsigned id, padding;
    int value, others[15];
};
struct launch_config {
    unsigned gx, gy, gz, bx, by, bz, shared_bytes;
    void* stream;
    const launch_attribute* attributes;
    unsigned count;
};
int cuLaunchKernelEx(const launch_config* config, void* function, void** params, void** extra) {
    NEED_CONTEXT;
    auto* f = static_cast<Function*>(function);
    const uint64_t ctas = uint64_t(config->gx) * config->gy * config->gz;
    last_report = "the launch of " + f->name;
    if (extra || !ctas || !config->bx || config->by != 1 || config->bz != 1 || config->bx > unsigned(f->kernel->max_threads) ||
        config->shared_bytes > unsigned(f->max_shared) || config->gx % f->kernel->cluster) {
        return INVALID_VALUE;
    }
    Launch work = {};
    work.kernel = f->kernel, work.name = f->name.c_str(), work.arguments = params;
    work.grid = {config->gx, config->gy, config->gz}, work.block = {config->bx, 1, 1};
    work.shared_bytes = config->shared_bytes;
    std::string report;
    {
        std::lock_guard in_order(lock_of(config->stream));
        const auto alone = device_memory();
        const launch_attribute* const first = config->attributes;
        const Overlap overlap(config->stream, config->count == 1 && first->id == kProgrammaticStreamSerialization && first->value);
        FaultsAreReported faults;
        unsigned long long begin, end, ns;
        read_clocks(begin, ns);
        report = run(work);
        const std::string overlapped = overlap.end();
        if (report.empty()) report = overlapped;
        read_clocks(end, ns);
        if (getenv("FLASHTUNE_EMULATOR_LOG")) {
            fprintf(stderr, "flashtune's emulator: %s, grid %u x %u x %u, %u threads, %u bytes, %.1f ms\n", f->name.c_str(), config->gx,
                    config->gy, config->gz, config->bx, config->shared_bytes, double(end - begin) / 1e6);
        }
    }
    if (const void* memory = overwritten(); report.empty() && memory) {
        char text[100];
        snprintf(text, sizeof text, "bytes beside the allocation at %p were written", memory);
        report = text;
    }
    if (report.empty()) return SUCCESS;
    last_report = f->name + ": " + report;
    fprintf(stderr, "flashtune's emulator: %s\n", last_report.c_str());
    return LAUNCH_FAILED;
}

}  // extern "C"
