/* Trains on packed QKV: one buffer (batch, seqlen, 3, heads, dim), as a projection of width
 * 3 * heads * dim leaves it, and its gradient in a buffer of the same layout. A few steps of
 * gradient descent pull the output towards a target. Runs on the CPU, in fp32. */
#define _POSIX_C_SOURCE 200809L
#include <flashtune.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, SEQLEN = 128, HEADS = 4, DIM = 32, ROW = HEADS * DIM, COUNT = BATCH * SEQLEN * ROW, STEPS = 20 };

static float qkv[3 * COUNT], dqkv[3 * COUNT], out[COUNT], dout[COUNT], target[COUNT], lse[BATCH * HEADS * SEQLEN];

static void check(int32_t status) {
  if (status == FLASHTUNE_STATUS_OK) return;
  fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(status), flashtune_last_error());
  exit(1);
}

/* Slice 0 (q), 1 (k) or 2 (v) of a packed buffer: only the strides know of the packing. */
static flashtune_tensor slice(float *packed, int index) {
  return (flashtune_tensor){packed + index * ROW, SEQLEN * 3 * ROW, 3 * ROW, DIM};
}

static flashtune_const_tensor input(const float *packed, int index) {
  return (flashtune_const_tensor){packed + index * ROW, SEQLEN * 3 * ROW, 3 * ROW, DIM};
}

static flashtune_tensor dense(float *data) { return (flashtune_tensor){data, SEQLEN * ROW, ROW, DIM}; }

static void fill(float *data, int count) {
  for (int i = 0; i < count; i++) data[i] = (float)(rand() % 2001 - 1000) / 1000;
}

int main(void) {
  flashtune_context *context;
  flashtune_context_options options = {.struct_size = sizeof options, .backend = FLASHTUNE_BACKEND_CPU};
  check(flashtune_context_create(&options, &context));
  fill(qkv, 3 * COUNT);
  fill(target, COUNT);

  flashtune_forward_params forward = {
      .struct_size = sizeof forward, .dtype = FLASHTUNE_DTYPE_FP32, .causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT,
      .batch_size = BATCH, .num_heads_q = HEADS, .num_heads_kv = HEADS, .seqlen_q = SEQLEN, .seqlen_k = SEQLEN,
      .head_dim = DIM, .head_dim_v = DIM,
      .q = input(qkv, 0), .k = input(qkv, 1), .v = input(qkv, 2), .out = dense(out), .lse = lse};
  flashtune_backward_params backward = {.struct_size = sizeof backward};
  check(flashtune_backward_params_from_forward(&forward, &backward));
  backward.dout = (flashtune_const_tensor){dout, SEQLEN * ROW, ROW, DIM};
  backward.dq = slice(dqkv, 0), backward.dk = slice(dqkv, 1), backward.dv = slice(dqkv, 2);

  /* One workspace of the larger size serves both passes, since they run one after the other. */
  uint64_t bytes[2];
  check(flashtune_forward_workspace_size(context, &forward, &bytes[0]));
  check(flashtune_backward_workspace_size(context, &backward, &bytes[1]));
  uint64_t largest = bytes[0] > bytes[1] ? bytes[0] : bytes[1];
  void *workspace = NULL;
  if (largest && posix_memalign(&workspace, 256, largest)) return puts("out of memory"), 1;

  double first = 0, loss = 0;
  for (int step = 0; step < STEPS; step++) {
    check(flashtune_forward(context, &forward, workspace, largest, NULL));
    loss = 0;
    for (int i = 0; i < COUNT; i++) {
      dout[i] = out[i] - target[i];
      loss += 0.5 * dout[i] * dout[i] / COUNT;
    }
    if (step == 0) first = loss;
    check(flashtune_backward(context, &backward, workspace, largest, NULL));
    for (int i = 0; i < 3 * COUNT; i++) qkv[i] -= 0.5f * dqkv[i];
  }
  printf("loss %.4f, after %d steps %.4f\n", first, STEPS, loss);
  free(workspace);
  check(flashtune_context_destroy(context));
  return loss < 0.8 * first ? 0 : 1;
}
