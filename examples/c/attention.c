/* Runs GPT-2's attention forward and backward, on the GPU if there is one, else on the CPU. The
 * first run tunes; later runs start from the record that it leaves on this machine.
 * usage: attention [SECONDS TO TUNE EACH PASS] */
#include "device.h"

#include <flashtune.h>
#include <math.h>

#define REAL double
#define UNFUSED unfused_double
#include "unfused.h"
#define REAL float
#define UNFUSED unfused_float
#include "unfused.h"

enum { HEADS = 12, SEQLEN = 1024, DIM = 64, ROW = HEADS * DIM, COUNT = SEQLEN * ROW, ONE_HEAD = SEQLEN * DIM };

static void check(int32_t status) {
  if (status == FLASHTUNE_STATUS_OK) return;
  fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(status), flashtune_last_error());
  exit(1);
}

/* The same tensor, to be read. */
static flashtune_const_tensor read_of(flashtune_tensor t) {
  return (flashtune_const_tensor){t.data, t.stride_batch, t.stride_seqlen, t.stride_head};
}

int main(int argc, char **argv) {
  flashtune_context *context;
  flashtune_device_info info = {.struct_size = sizeof info};
  check(flashtune_context_create(NULL, &context));
  check(flashtune_context_device(context, &info));
  device_open(info.backend == FLASHTUNE_BACKEND_CUDA);
  printf("device    %s (%s), %s\n", info.name, info.arch, device.on_gpu ? "bf16" : "fp32");
  printf("problem   GPT-2: batch 1, %d heads, seqlen %d, head_dim %d, causal\n", HEADS, SEQLEN, DIM);

  float *input[4];            /* q, k, v, dout on the host: (batch, seqlen, heads, dim), exact in bf16 */
  flashtune_tensor tensor[8]; /* q, k, v, dout, out, dq, dk, dv on the device */
  for (int t = 0; t < 8; t++) {
    float *values = t < 4 ? input[t] = malloc(COUNT * sizeof(float)) : NULL;
    for (int i = 0; values && i < COUNT; i++) values[i] = (float)(rand() % 257 - 128) / 128;
    tensor[t] = (flashtune_tensor){device_array(values, COUNT), COUNT, ROW, DIM};
  }
  float *lse = device_bytes(HEADS * SEQLEN * sizeof(float));
  flashtune_forward_params forward = {
      .struct_size = sizeof forward, .dtype = device.on_gpu ? FLASHTUNE_DTYPE_BF16 : FLASHTUNE_DTYPE_FP32,
      .causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT, .batch_size = 1, .num_heads_q = HEADS, .num_heads_kv = HEADS,
      .seqlen_q = SEQLEN, .seqlen_k = SEQLEN, .head_dim = DIM, .head_dim_v = DIM,
      .q = read_of(tensor[0]), .k = read_of(tensor[1]), .v = read_of(tensor[2]), .out = tensor[4], .lse = lse};
  flashtune_backward_params backward = {.struct_size = sizeof backward};
  check(flashtune_backward_params_from_forward(&forward, &backward));
  backward.dout = read_of(tensor[3]), backward.dq = tensor[5], backward.dk = tensor[6], backward.dv = tensor[7];
  flashtune_plan_info plan[2] = {{.struct_size = sizeof *plan}, {.struct_size = sizeof *plan}};
  flashtune_autotune_params tune[2] = {{.struct_size = sizeof *tune, .forward = &forward},
                                       {.struct_size = sizeof *tune, .backward = &backward}};
  double start = device_milliseconds(), best[2] = {1e30, 1e30}, total;
  int tuned = 0;
  for (int pass = 0; pass < 2; pass++) {
    check(pass ? flashtune_backward_plan_info(context, &backward, &plan[pass])
               : flashtune_forward_plan_info(context, &forward, &plan[pass]));
    if (plan[pass].source == FLASHTUNE_SOURCE_MACHINE) continue;
    tune[pass].time_limit_seconds = argc > 1 ? atof(argv[1]) : 20;
    check(flashtune_autotune(context, &tune[pass]));
    check(pass ? flashtune_backward_plan_info(context, &backward, &plan[pass])
               : flashtune_forward_plan_info(context, &forward, &plan[pass]));
    tuned = 1;
  }
  if (tuned) printf("tuning    took %.1f s; the next run has its record\n", (device_milliseconds() - start) / 1e3);
  else printf("tuning    none: starts from this machine's record\n");
  /* A backward pass needs a workspace, and so does a forward pass of few queries over many keys. */
  uint64_t bytes[2];
  check(flashtune_forward_workspace_size(context, &forward, &bytes[0]));
  check(flashtune_backward_workspace_size(context, &backward, &bytes[1]));
  void *workspace[2] = {bytes[0] ? device_bytes(bytes[0]) : NULL, device_bytes(bytes[1])};
  for (int run = 0, pass = 0; run < 40; run++, pass = run % 2) {
    start = device_milliseconds();
    check(pass ? flashtune_backward(context, &backward, workspace[1], bytes[1], NULL)
               : flashtune_forward(context, &forward, workspace[0], bytes[0], NULL));
    best[pass] = fmin(best[pass], device_milliseconds() - start);
  }
  for (int pass = 0; pass < 2; pass++)
    printf("%-9s %.3f ms with %s: %s\n          %s\n", pass ? "backward" : "forward", best[pass], plan[pass].kernel,
           plan[pass].config, plan[pass].reason);
  static double reference[4 * ONE_HEAD], worst; /* fp64 results of the last head; the largest relative error */
  static float unfused[4 * ONE_HEAD];
  const int last = ROW - DIM;
  unfused_double(SEQLEN, DIM, ROW, input[0] + last, input[1] + last, input[2] + last, input[3] + last, reference);
  for (int t = 0; t < 4; t++) {
    float *got = device_read(tensor[4 + t].data, COUNT);
    double error = 0, largest = 0, *want = reference + t * ONE_HEAD;
    for (int i = 0; i < ONE_HEAD; i++) {
      error = fmax(error, fabs(got[i / DIM * ROW + last + i % DIM] - want[i]));
      largest = fmax(largest, fabs(want[i]));
    }
    printf("%s %s %.1e", t ? "," : "error    ", (const char *[]){"out", "dq", "dk", "dv"}[t], error / largest);
    worst = fmax(worst, error / largest);
    free(got);
  }
  start = device_milliseconds();
  for (int h = 0; h < ROW; h += DIM)
    unfused_float(SEQLEN, DIM, ROW, input[0] + h, input[1] + h, input[2] + h, input[3] + h, unfused);
  total = device_milliseconds() - start;
  printf(" of the largest value, against fp64\nspeed     %.0f x unfused attention (%.0f ms: plain C loops, one core)\n",
         total / (best[0] + best[1]), total);
  check(flashtune_context_destroy(context));
  return worst < (device.on_gpu ? 2e-2 : 1e-4) ? 0 : 1;
}
