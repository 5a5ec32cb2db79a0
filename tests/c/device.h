/* The CUDA driver as the C test programs use it: opened at run time, so that a stand-in may be it.
 * Include it after check.h. */
#ifndef DEVICE_H
#define DEVICE_H

#include <dlfcn.h>
#include <stdint.h>

#define DRIVER_FUNCTIONS(F)                                         \
  F(cuInit, (unsigned))                                             \
  F(cuDeviceGetCount, (int *))                                      \
  F(cuDeviceGet, (int *, int))                                      \
  F(cuDevicePrimaryCtxRetain, (void **, int))                       \
  F(cuDevicePrimaryCtxRelease_v2, (int))                            \
  F(cuCtxPushCurrent_v2, (void *))                                  \
  F(cuCtxPopCurrent_v2, (void **))                                  \
  F(cuCtxGetCurrent, (void **))                                     \
  F(cuMemAlloc_v2, (uint64_t *, size_t))                            \
  F(cuMemFree_v2, (uint64_t))                                       \
  F(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *)) \
  F(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))       \
  F(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *))     \
  F(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void *))     \
  F(cuStreamCreate, (void **, unsigned))                            \
  F(cuStreamDestroy_v2, (void *))                                   \
  F(cuStreamSynchronize, (void *))                                  \
  F(cuStreamBeginCapture_v2, (void *, int))                         \
  F(cuStreamEndCapture, (void *, void **))                          \
  F(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long)) \
  F(cuGraphLaunch, (void *, void *))                                \
  F(cuGraphExecDestroy, (void *))                                   \
  F(cuGraphDestroy, (void *))

#define DECLARE(name, parameters) __attribute__((unused)) static int(*name) parameters;
DRIVER_FUNCTIONS(DECLARE)

static void *driver_library;

/* A driver call that must succeed. */
#define CUDA(call)                          \
  do {                                      \
    int code_ = (call);                     \
    CHECK(code_ == 0, "code %d", code_);    \
  } while (0)

/* A function of the driver, or of a stand-in alone: NULL where the driver has none. */
static inline void *driver_symbol(const char *name) { return dlsym(driver_library, name); }

/* The number of GPUs, after cuInit. */
static inline int open_driver(void) {
  int count = 0;
  driver_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(driver_library, "%s", dlerror());
#define LOOK_UP(name, parameters) *(void **)(&name) = driver_symbol(#name);
  DRIVER_FUNCTIONS(LOOK_UP)
  CUDA(cuInit(0));
  CUDA(cuDeviceGetCount(&count));
  return count;
}

/* Makes a GPU's primary context current on this thread. */
static inline void *enter_device(int ordinal) {
  int device = 0;
  void *context = NULL;
  CUDA(cuDeviceGet(&device, ordinal));
  CUDA(cuDevicePrimaryCtxRetain(&context, device));
  CUDA(cuCtxPushCurrent_v2(context));
  return context;
}

static inline void *device_memory(size_t bytes) {
  uint64_t address = 0;
  CUDA(cuMemAlloc_v2(&address, bytes ? bytes : 1));
  return (void *)(uintptr_t)address;
}

static inline void free_device(const void *memory) { CUDA(cuMemFree_v2((uint64_t)(uintptr_t)memory)); }

static inline void to_device(void *to, const void *from, size_t bytes) {
  CUDA(cuMemcpyHtoDAsync_v2((uint64_t)(uintptr_t)to, from, bytes, NULL));
}

static inline void from_device(void *to, const void *from, size_t bytes) {
  CUDA(cuMemcpyDtoHAsync_v2(to, (uint64_t)(uintptr_t)from, bytes, NULL));
  CUDA(cuStreamSynchronize(NULL));
}

static inline void fill_device(void *to, unsigned char value, size_t bytes) {
  CUDA(cuMemsetD8Async((uint64_t)(uintptr_t)to, value, bytes, NULL));
}

/* Whether the driver is the stand-in of tests/driver, which runs no kernel. */
static inline int is_stand_in(void) { return driver_symbol("fake_launches") != NULL; }

/* A context on a GPU that keeps its records and kernels in `folder`, or in memory for "". */
static inline flashtune_context *cuda_context(int ordinal, const char *folder) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CUDA;
  options.device_ordinal = ordinal;
  options.cache_dir = folder;
  flashtune_context *context = NULL;
  OK(flashtune_context_create(&options, &context));
  return context;
}

#endif
