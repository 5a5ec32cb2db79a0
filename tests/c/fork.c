/* Fork: a context of the parent is refused in a child, which may make one of its own on the CPU.
 * CUDA does not survive: with FORK_GPU=1 the parent has a context on GPU 0 too. */
#define _DEFAULT_SOURCE /* fork */
#include "attention.h"
#include "device.h"

#include <sys/wait.h>
#include <unistd.h>

static float data[4 * 64 * 8];

static flashtune_forward_params problem(int32_t dtype, char *at) {
  flashtune_forward_params params;
  const int64_t bytes = 64 * 8 * (dtype == FLASHTUNE_DTYPE_FP32 ? 4 : 2);
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.dtype = dtype;
  params.batch_size = 1, params.num_heads_q = 1, params.num_heads_kv = 1;
  params.seqlen_q = 64, params.seqlen_k = 64, params.head_dim = 8, params.head_dim_v = 8;
  flashtune_const_tensor *inputs[] = {&params.q, &params.k, &params.v};
  for (int i = 0; i < 3; i++) *inputs[i] = packed_input(at + i * bytes, 64, 1, 8);
  params.out = packed(at + 3 * bytes, 64, 1, 8);
  return params;
}

static int32_t launch(flashtune_context *context) {
  const flashtune_forward_params params = problem(FLASHTUNE_DTYPE_FP32, (char *)data);
  return flashtune_forward(context, &params, NULL, 0, NULL);
}

static flashtune_context *gpu;
static char *gpu_data;

static int32_t launch_on_gpu(flashtune_context *context) {
  const flashtune_forward_params params = problem(FLASHTUNE_DTYPE_BF16, gpu_data);
  return flashtune_forward(context, &params, NULL, 0, NULL);
}

static int32_t create(int32_t backend, flashtune_context **context) {
  flashtune_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = backend, options.cache_dir = "", options.num_threads = 1;
  return flashtune_context_create(&options, context);
}

/* What a child may do of a parent that has used CUDA. */
static void child_of_cuda(void) {
  flashtune_context *own = NULL;
  FAILS(launch_on_gpu(gpu), FLASHTUNE_STATUS_INVALID_ARGUMENT, "before this process was forked");
  FAILS(create(FLASHTUNE_BACKEND_CUDA, &own), FLASHTUNE_STATUS_NO_DEVICE, "CUDA does not survive a fork");
  OK(create(FLASHTUNE_BACKEND_AUTO, &own));
  OK(launch(own));
  OK(flashtune_context_destroy(own));
  OK(flashtune_context_destroy(gpu));
}

int main(void) {
  flashtune_context *context = cpu_context("");
  if (getenv("FORK_GPU")) {
    CHECK(open_driver() > 0, "no GPU");
    enter_device(0);
    gpu_data = device_memory(4 * 64 * 8 * 2);
    fill_device(gpu_data, 0, 4 * 64 * 8 * 2);
    gpu = cuda_context(0, "");
    OK(launch_on_gpu(gpu));
    CUDA(cuStreamSynchronize(NULL));
  }
  OK(launch(context));
  pid_t child = fork();
  CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(60);
    FAILS(launch(context), FLASHTUNE_STATUS_INVALID_ARGUMENT, "before this process was forked");
    FAILS(flashtune_context_seal(context), FLASHTUNE_STATUS_INVALID_ARGUMENT, "context was made before");
    if (gpu) child_of_cuda();
    OK(flashtune_context_destroy(context));
    flashtune_context *own = cpu_context("");
    OK(launch(own));
    OK(flashtune_context_destroy(own));
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
  OK(launch(context));
  OK(flashtune_context_destroy(context));
  if (gpu) {
    OK(launch_on_gpu(gpu));
    CUDA(cuStreamSynchronize(NULL));
    OK(flashtune_context_destroy(gpu));
  }
  return 0;
}
