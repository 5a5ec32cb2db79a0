/* A libcuda.so.1 in front of the real one, which SHIM_DRIVER names. It fails calls:
 *
 * - every call that is illegal while a stream captures a graph, from any thread. Legal are what a
 *   captured launch needs: questions about contexts and captures, switching contexts, encoding
 *   tensor maps, which is arithmetic, and launches on the capturing stream. The others fail with
 *   CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and are counted, also those that the real driver would
 *   allow in a relaxed capture: a launch promises to do without them.
 * - the call that fake_fail chooses, as the stand-in of tests/driver does. It counts what is made
 *   and given back, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { UNSUPPORTED = 900 };
/* Whether a call is legal in a capture, and what it does: it makes something or gives it back. */
enum { LEGAL = 1, MAKES = 2, RELEASES = 4 };

#define FUNCTIONS(F)                                                                                      \
  F(cuInit, 0) F(cuDriverGetVersion, 0) F(cuGetErrorName, LEGAL) F(cuGetErrorString, LEGAL)               \
  F(cuDeviceGetCount, 0) F(cuDeviceGet, 0) F(cuDeviceGetName, 0) F(cuDeviceTotalMem_v2, 0)                \
  F(cuDeviceGetAttribute, 0) F(cuDevicePrimaryCtxRetain, MAKES) F(cuDevicePrimaryCtxRelease_v2, RELEASES) \
  F(cuCtxGetCurrent, LEGAL) F(cuCtxPushCurrent_v2, LEGAL) F(cuCtxPopCurrent_v2, LEGAL)                    \
  F(cuCtxGetDevice, 0) F(cuThreadExchangeStreamCaptureMode, 0) F(cuMemAlloc_v2, MAKES)                    \
  F(cuMemFree_v2, RELEASES) F(cuMemcpyHtoDAsync_v2, 0) F(cuMemcpyDtoHAsync_v2, 0)                         \
  F(cuMemcpyDtoDAsync_v2, 0) F(cuMemsetD8Async, 0) F(cuStreamCreate, MAKES)                               \
  F(cuStreamDestroy_v2, RELEASES) F(cuStreamSynchronize, 0) F(cuStreamIsCapturing, LEGAL)                 \
  F(cuStreamGetId, LEGAL) F(cuTensorMapEncodeTiled, LEGAL) F(cuEventCreate, MAKES)                        \
  F(cuEventDestroy_v2, RELEASES) F(cuEventRecord, 0) F(cuEventSynchronize, 0) F(cuEventElapsedTime, 0)    \
  F(cuModuleLoadData, MAKES) F(cuModuleUnload, RELEASES) F(cuModuleGetFunction, 0)                        \
  F(cuFuncGetAttribute, 0) F(cuFuncSetAttribute, 0) F(cuGraphInstantiateWithFlags, 0)                     \
  F(cuGraphLaunch, 0) F(cuGraphExecDestroy, 0) F(cuGraphDestroy, 0)

static _Atomic(void *) captured;
static atomic_int refused;
static const char *_Atomic last_refused;
static atomic_long calls, fails_at, left;
static atomic_int fails_with;
static const char *_Atomic failed;

static void *driver(void) {
  static _Atomic(void *) library;
  if (!library) {
    const char *path = getenv("SHIM_DRIVER");
    library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) fprintf(stderr, "SHIM_DRIVER names no driver: %s\n", path ? dlerror() : "it is not set"), abort();
  }
  return library;
}

/* A symbol of the driver behind the shim, or NULL. */
void *shim_real(const char *name) { return dlsym(driver(), name); }

static void *real(const char *name) {
  void *function = shim_real(name);
  if (!function) fprintf(stderr, "the driver has no %s\n", name), abort();
  return function;
}

static int refuse(const char *name) {
  refused++;
  last_refused = name;
  return UNSUPPORTED;
}

/* The illegal calls so far, and the last one's name. */
int shim_refused(const char **name) {
  *name = last_refused;
  return refused;
}

/* From now on the call of this number fails with `code`. Returns the calls before, and forgets
 * them. */
int64_t fake_fail(int64_t at, int code) {
  fails_at = at;
  fails_with = code;
  failed = NULL;
  return atomic_exchange(&calls, 0);
}

const char *fake_failed(void) { return failed; }
int64_t fake_left(void) { return left; }

int fake_capture_mode(void) {
  int (*exchange)(int *), mode = 2, again;
  *(void **)(&exchange) = real("cuThreadExchangeStreamCaptureMode");
  exchange(&mode);
  again = mode;
  exchange(&again);
  return mode;
}

/* The code of the failure that was asked for, or 0. */
static int fault(const char *name) {
  if (atomic_fetch_add(&calls, 1) + 1 != fails_at) return 0;
  failed = name;
  return fails_with;
}

/* Every argument is an integer or a pointer, and there are at most twelve. A function takes as many
 * as it has and leaves the others, in the calling conventions of x86-64 and aarch64. */
typedef intptr_t A;
#define PARAMETERS A a, A b, A c, A d, A e, A f, A g, A h, A i, A j, A k, A l
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l
#define FORWARD(name, what)                                        \
  int name(PARAMETERS) {                                           \
    static int (*function)(PARAMETERS);                            \
    if (!((what) & LEGAL) && captured) return refuse(#name);       \
    if (!function) *(void **)(&function) = real(#name);            \
    const int broken = fault(#name);                               \
    /* A release that fails has released: it reports what went wrong before. */ \
    if (broken && !((what) & RELEASES)) return broken;             \
    const int code = function(ARGUMENTS);                          \
    if (!code) left += ((what) & MAKES ? 1 : (what) & RELEASES ? -1 : 0); \
    return broken ? broken : code;                                 \
  }
FUNCTIONS(FORWARD)

int cuStreamBeginCapture_v2(void *stream, int mode) {
  int (*begin)(void *, int);
  *(void **)(&begin) = real("cuStreamBeginCapture_v2");
  const int code = begin(stream, mode);
  if (!code) captured = stream;
  return code;
}

int cuStreamEndCapture(void *stream, void **graph) {
  int (*end)(void *, void **);
  *(void **)(&end) = real("cuStreamEndCapture");
  captured = NULL;
  return end(stream, graph);
}

struct launch_config {
  unsigned grid[3], block[3], smem;
  void *stream;
};

int cuLaunchKernelEx(const struct launch_config *config, void *function, void **params, void **extra) {
  int (*launch)(const void *, void *, void **, void **);
  void *const capturing = captured;
  if (capturing && config->stream != capturing) return refuse("cuLaunchKernelEx");
  const int broken = fault("cuLaunchKernelEx");
  *(void **)(&launch) = real("cuLaunchKernelEx");
  return broken ? broken : launch(config, function, params, extra);
}

/* In drivers from 12.4 on. */
int cuFuncLoad(void *function) {
  int (*load)(void *) = NULL;
  if (captured) return refuse("cuFuncLoad");
  const int broken = fault("cuFuncLoad");
  *(void **)(&load) = shim_real("cuFuncLoad");
  return broken ? broken : load ? load(function) : 0;
}
