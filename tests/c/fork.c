/* Fork: a context of the parent is refused in a child, which may make one of its own. */
#define _DEFAULT_SOURCE /* fork */
#include "attention.h"

#include <sys/wait.h>
#include <unistd.h>

static float data[4 * 64 * 8];

static int32_t launch(flashtune_context *context) {
  flashtune_forward_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.dtype = FLASHTUNE_DTYPE_FP32;
  params.batch_size = 1, params.num_heads_q = 1, params.num_heads_kv = 1;
  params.seqlen_q = 64, params.seqlen_k = 64, params.head_dim = 8, params.head_dim_v = 8;
  flashtune_const_tensor *inputs[] = {&params.q, &params.k, &params.v};
  for (int i = 0; i < 3; i++) *inputs[i] = packed_input(data + i * 64 * 8, 64, 1, 8);
  params.out = packed(data + 3 * 64 * 8, 64, 1, 8);
  return flashtune_forward(context, &params, NULL, 0, NULL);
}

int main(void) {
  flashtune_context *context = cpu_context("");
  OK(launch(context));
  pid_t child = fork();
  CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(60);
    FAILS(launch(context), FLASHTUNE_STATUS_INVALID_ARGUMENT, "before this process was forked");
    FAILS(flashtune_context_seal(context), FLASHTUNE_STATUS_INVALID_ARGUMENT, "context was made before");
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
  return 0;
}
