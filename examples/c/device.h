/* The example's device functions: arrays in device memory (bf16 on a GPU, fp32 on the host),
 * copies, a wait and a clock. The CUDA driver is opened at run time, so that building needs no
 * CUDA header. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct {
  int on_gpu;
  int (*init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*set_current)(void *), (*wait)(void);
  int (*allocate)(uint64_t *, size_t), (*upload)(uint64_t, const void *, size_t), (*download)(void *, uint64_t, size_t);
} device;

static void must(int ok, const char *what) {
  if (ok) return;
  fprintf(stderr, "%s failed\n", what);
  exit(1);
}

static void symbol(void *library, void *function, const char *name) {
  void *found = dlsym(library, name);
  must(found != NULL, name);
  memcpy(function, &found, sizeof found);
}

/* Makes the GPU's primary context current on this thread. flashtune uses the same context. */
static void device_open(int on_gpu) {
  int ordinal;
  void *context, *cuda;
  device.on_gpu = on_gpu;
  if (!on_gpu) return;
  must((cuda = dlopen("libcuda.so.1", RTLD_NOW)) != NULL, "dlopen libcuda.so.1");
  symbol(cuda, &device.init, "cuInit");
  symbol(cuda, &device.get, "cuDeviceGet");
  symbol(cuda, &device.retain, "cuDevicePrimaryCtxRetain");
  symbol(cuda, &device.set_current, "cuCtxSetCurrent");
  symbol(cuda, &device.wait, "cuCtxSynchronize");
  symbol(cuda, &device.allocate, "cuMemAlloc_v2");
  symbol(cuda, &device.upload, "cuMemcpyHtoD_v2");
  symbol(cuda, &device.download, "cuMemcpyDtoH_v2");
  must(!device.init(0) && !device.get(&ordinal, 0), "cuInit");
  must(!device.retain(&context, ordinal) && !device.set_current(context), "cuCtxSetCurrent");
}

static void *device_bytes(size_t bytes) {
  uint64_t address = 0;
  void *memory = NULL;
  if (!device.on_gpu) return posix_memalign(&memory, 256, bytes + 1) ? NULL : memory;
  must(!device.allocate(&address, bytes + 1), "cuMemAlloc");
  return (void *)(uintptr_t)address;
}

/* Allocates an array of count elements and copies values into it unless values is NULL. The values
 * must be exact in bf16, since this function does not round. */
static void *device_array(const float *values, size_t count) {
  size_t element = device.on_gpu ? sizeof(uint16_t) : sizeof(float);
  void *array = device_bytes(count * element);
  must(array != NULL, "allocation");
  if (values == NULL) return array;
  if (!device.on_gpu) return memcpy(array, values, count * element);
  uint16_t *halves = malloc(count * element);
  for (size_t i = 0; i < count; i++) memcpy(&halves[i], (const char *)&values[i] + 2, 2); /* little endian */
  must(!device.upload((uint64_t)(uintptr_t)array, halves, count * element), "cuMemcpyHtoD");
  free(halves);
  return array;
}

static float *device_read(const void *array, size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!device.on_gpu) return memcpy(values, array, count * sizeof *values);
  uint16_t *halves = malloc(count * sizeof *halves);
  must(!device.download(halves, (uint64_t)(uintptr_t)array, count * sizeof *halves), "cuMemcpyDtoH");
  for (size_t i = 0; i < count; i++) memcpy((char *)&values[i] + 2, &halves[i], 2);
  free(halves);
  return values;
}

/* Milliseconds of a monotonic clock, read after all enqueued work is done. */
static double device_milliseconds(void) {
  struct timespec t;
  if (device.on_gpu) must(!device.wait(), "cuCtxSynchronize");
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}
