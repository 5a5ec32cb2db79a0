/* Every wrong argument gets its status, a sentence that names it, and touches no output. */
#include "attention.h"

#include <limits.h>
#include <stddef.h>

static flashtune_context *context;
static Attention a;
static void *workspace;
static uint64_t workspace_bytes;

static const Shape shape = {2, 4, 2, 5, 7, 8, 4, FLASHTUNE_CAUSAL_BOTTOM_RIGHT};
static const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT;

static void nothing_written(const flashtune_plan_info *info, uint64_t bytes) {
  static const int outputs[] = {OUT, LSE, DQ, DK, DV};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
    for (int64_t j = 0; j < a.count[outputs[i]]; j++)
      CHECK(a.data[outputs[i]][j] == CANARY, "a failed call wrote buffer %d", outputs[i]);
  check_guards(&a);
  CHECK(bytes == 77, "a failed call wrote bytes");
  CHECK(info->source == -5 && info->kernel[0] == 'x' && info->measured_us == 3.0, "a failed call wrote info");
}

static flashtune_plan_info canary_info(void) {
  flashtune_plan_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  info.source = -5;
  info.kernel[0] = 'x';
  info.measured_us = 3.0;
  return info;
}

/* What is wrong whoever asks: all five functions and autotune refuse it. */
static void forward_refused(const flashtune_forward_params *p, int32_t status, const char *word) {
  flashtune_plan_info info = canary_info();
  flashtune_autotune_params tune;
  uint64_t bytes = 77;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.forward = p;
  FAILS(flashtune_forward_supported(context, p), status, word);
  FAILS(flashtune_forward_workspace_size(context, p, &bytes), status, word);
  FAILS(flashtune_forward_prepare(context, p), status, word);
  FAILS(flashtune_forward_plan_info(context, p, &info), status, word);
  FAILS(flashtune_forward(context, p, workspace, workspace_bytes, NULL), status, word);
  if (p != NULL) FAILS(flashtune_autotune(context, &tune), status, word);
  nothing_written(&info, bytes);
}

static void backward_refused(const flashtune_backward_params *p, int32_t status, const char *word) {
  flashtune_plan_info info = canary_info();
  flashtune_autotune_params tune;
  uint64_t bytes = 77;
  memset(&tune, 0, sizeof tune);
  tune.struct_size = sizeof tune;
  tune.backward = p;
  FAILS(flashtune_backward_supported(context, p), status, word);
  FAILS(flashtune_backward_workspace_size(context, p, &bytes), status, word);
  FAILS(flashtune_backward_prepare(context, p), status, word);
  FAILS(flashtune_backward_plan_info(context, p, &info), status, word);
  FAILS(flashtune_backward(context, p, workspace, workspace_bytes, NULL), status, word);
  if (p != NULL) FAILS(flashtune_autotune(context, &tune), status, word);
  nothing_written(&info, bytes);
}

#define FORWARD_REFUSED(word, mutation)      \
  do {                                       \
    flashtune_forward_params p = a.forward;  \
    mutation;                                \
    forward_refused(&p, invalid, word);      \
  } while (0)

#define BACKWARD_REFUSED(word, mutation)      \
  do {                                        \
    flashtune_backward_params p = a.backward; \
    mutation;                                 \
    backward_refused(&p, invalid, word);      \
  } while (0)

#define BOTH_REFUSED(word, mutation) \
  FORWARD_REFUSED(word, mutation);   \
  BACKWARD_REFUSED(word, mutation)

/* What only a launch needs: the others accept it. */
#define FORWARD_NEEDS(word, mutation)                                           \
  do {                                                                          \
    flashtune_forward_params p = a.forward;                                     \
    flashtune_plan_info info = canary_info();                                   \
    mutation;                                                                   \
    OK(flashtune_forward_supported(context, &p));                               \
    FAILS(flashtune_forward(context, &p, NULL, 0, NULL), invalid, word);        \
    nothing_written(&info, 77);                                                 \
  } while (0)

#define BACKWARD_NEEDS(word, mutation)                                                         \
  do {                                                                                         \
    flashtune_backward_params p = a.backward;                                                  \
    flashtune_plan_info info = canary_info();                                                  \
    mutation;                                                                                  \
    OK(flashtune_backward_supported(context, &p));                                             \
    FAILS(flashtune_backward(context, &p, workspace, workspace_bytes, NULL), invalid, word);   \
    nothing_written(&info, 77);                                                                \
  } while (0)

static void nulls(void) {
  uint64_t bytes = 77;
  flashtune_plan_info info = canary_info();
  forward_refused(NULL, invalid, "params is NULL");
  backward_refused(NULL, invalid, "params is NULL");
  FAILS(flashtune_forward_supported(NULL, &a.forward), invalid, "context is NULL");
  FAILS(flashtune_forward_workspace_size(NULL, &a.forward, &bytes), invalid, "context is NULL");
  FAILS(flashtune_forward_prepare(NULL, &a.forward), invalid, "context is NULL");
  FAILS(flashtune_forward_plan_info(NULL, &a.forward, &info), invalid, "context is NULL");
  FAILS(flashtune_forward(NULL, &a.forward, NULL, 0, NULL), invalid, "context is NULL");
  FAILS(flashtune_backward_supported(NULL, &a.backward), invalid, "context is NULL");
  FAILS(flashtune_backward_workspace_size(NULL, &a.backward, &bytes), invalid, "context is NULL");
  FAILS(flashtune_backward_prepare(NULL, &a.backward), invalid, "context is NULL");
  FAILS(flashtune_backward_plan_info(NULL, &a.backward, &info), invalid, "context is NULL");
  FAILS(flashtune_backward(NULL, &a.backward, workspace, workspace_bytes, NULL), invalid, "context is NULL");
  FAILS(flashtune_forward_workspace_size(context, &a.forward, NULL), invalid, "bytes is NULL");
  FAILS(flashtune_backward_workspace_size(context, &a.backward, NULL), invalid, "bytes is NULL");
  FAILS(flashtune_forward_plan_info(context, &a.forward, NULL), invalid, "info is NULL");
  FAILS(flashtune_backward_plan_info(context, &a.backward, NULL), invalid, "info is NULL");
  nothing_written(&info, bytes);

  FORWARD_NEEDS("q.data is NULL", p.q.data = NULL);
  FORWARD_NEEDS("k.data is NULL", p.k.data = NULL);
  FORWARD_NEEDS("v.data is NULL", p.v.data = NULL);
  FORWARD_NEEDS("out.data is NULL", p.out.data = NULL);
  BACKWARD_NEEDS("q.data is NULL", p.q.data = NULL);
  BACKWARD_NEEDS("k.data is NULL", p.k.data = NULL);
  BACKWARD_NEEDS("v.data is NULL", p.v.data = NULL);
  BACKWARD_NEEDS("out.data is NULL", p.out.data = NULL);
  BACKWARD_NEEDS("dout.data is NULL", p.dout.data = NULL);
  BACKWARD_NEEDS("dq.data is NULL", p.dq.data = NULL);
  BACKWARD_NEEDS("dk.data is NULL", p.dk.data = NULL);
  BACKWARD_NEEDS("dv.data is NULL", p.dv.data = NULL);
  BACKWARD_NEEDS("lse is NULL", p.lse = NULL);
}

static void struct_sizes(void) {
  struct {
    flashtune_forward_params known;
    uint64_t later[2];
  } newer;
  FORWARD_REFUSED("struct_size is 0", p.struct_size = 0);
  FORWARD_REFUSED("struct_size is 8", p.struct_size = 8);
  FORWARD_REFUSED("struct_size", p.struct_size = sizeof p - 1);
  FORWARD_REFUSED("struct_size is 16385", p.struct_size = 16385);
  FORWARD_REFUSED("struct_size is 18446744073709551615", p.struct_size = UINT64_MAX);
  BACKWARD_REFUSED("struct_size is 0", p.struct_size = 0);
  BACKWARD_REFUSED("struct_size", p.struct_size = sizeof(flashtune_forward_params));
  BACKWARD_REFUSED("struct_size is 18446744073709551615", p.struct_size = UINT64_MAX);

  memset(&newer, 0, sizeof newer);
  newer.known = a.forward;
  newer.known.struct_size = sizeof newer;
  OK(flashtune_forward_supported(context, &newer.known));
  newer.later[1] = 1;
  forward_refused(&newer.known, invalid, "must be zero");

  /* A caller of the first release, whose params end before deterministic. */
  flashtune_backward_params older = a.backward;
  older.struct_size = offsetof(flashtune_backward_params, deterministic);
  older.deterministic = 2;
  OK(flashtune_backward_supported(context, &older));

  flashtune_plan_info info = canary_info();
  info.struct_size = 16;
  FAILS(flashtune_forward_plan_info(context, &a.forward, &info), invalid, "info.struct_size is 16");
  nothing_written(&info, 77);
  char odd[sizeof(flashtune_forward_params) + 8];
  const void *misaligned = odd + ((uintptr_t)odd % 8 == 1 ? 2 : 1 + (8 - (uintptr_t)odd % 8) % 8);
  forward_refused((const flashtune_forward_params *)misaligned, invalid, "aligned");
}

static void enums_and_scalars(void) {
  BOTH_REFUSED("dtype is 0", p.dtype = 0);
  BOTH_REFUSED("dtype is 4", p.dtype = 4);
  BOTH_REFUSED("dtype is -2147483648", p.dtype = INT32_MIN);
  BOTH_REFUSED("causal is 3", p.causal = 3);
  BOTH_REFUSED("causal is -1", p.causal = -1);
  BOTH_REFUSED("softmax_scale is NaN", p.softmax_scale = NAN);
  BOTH_REFUSED("softmax_scale is inf", p.softmax_scale = INFINITY);
  BOTH_REFUSED("dropout_p is NaN", p.dropout_p = NAN);
  BOTH_REFUSED("dropout_p is 1", p.dropout_p = 1.0f);
  BOTH_REFUSED("dropout_p is -0.1", p.dropout_p = -0.1f);
  BOTH_REFUSED("dropout_p is inf", p.dropout_p = INFINITY);
  BACKWARD_REFUSED("deterministic is 2", p.deterministic = 2);
  BACKWARD_REFUSED("deterministic is -1", p.deterministic = -1);
  BACKWARD_REFUSED("reserved is 1", p.reserved = 1);
  BOTH_REFUSED("dropout_seed_ptr is 0x1001",
               p.dropout_p = 0.1f; p.dropout_seed_ptr = (const uint64_t *)(intptr_t)0x1001);
  BOTH_REFUSED("dropout_offset_ptr is 0x1004",
               p.dropout_p = 0.1f; p.dropout_offset_ptr = (const uint64_t *)(intptr_t)0x1004);
}

static void sizes(void) {
  BOTH_REFUSED("batch_size is -1", p.batch_size = -1);
  BOTH_REFUSED("batch_size is 9223372036854775807", p.batch_size = INT64_MAX);
  BOTH_REFUSED("num_heads_q is 0", p.num_heads_q = 0);
  BOTH_REFUSED("num_heads_q is -4", p.num_heads_q = -4);
  BOTH_REFUSED("num_heads_q is 5; it must be a multiple of num_heads_kv", p.num_heads_q = 5);
  BOTH_REFUSED("num_heads_kv is 0", p.num_heads_kv = 0);
  BOTH_REFUSED("num_heads_kv is -2", p.num_heads_kv = -2);
  BOTH_REFUSED("seqlen_q is -1", p.seqlen_q = -1);
  BOTH_REFUSED("seqlen_q is 9223372036854775807", p.seqlen_q = INT64_MAX);
  BOTH_REFUSED("seqlen_k is -9223372036854775808", p.seqlen_k = INT64_MIN);
  BOTH_REFUSED("head_dim is 0", p.head_dim = 0);
  BOTH_REFUSED("head_dim is 513; it must be from 1 to 512", p.head_dim = 513);
  BOTH_REFUSED("head_dim_v is -1", p.head_dim_v = -1);
  BOTH_REFUSED("head_dim_v is 513", p.head_dim_v = 513);
  /* Each in range, the product not. */
  BOTH_REFUSED("overflows", p.batch_size = 1 << 30; p.num_heads_q = p.num_heads_kv = 1 << 30);
  BOTH_REFUSED("overflows", p.batch_size = 1 << 30; p.num_heads_q = p.num_heads_kv = 1; p.seqlen_q = 1 << 30);
}

static void strides(void) {
  BOTH_REFUSED("q.stride_batch is -1", p.q.stride_batch = -1);
  BOTH_REFUSED("k.stride_seqlen is -16", p.k.stride_seqlen = -16);
  BOTH_REFUSED("v.stride_head is -9223372036854775808", p.v.stride_head = INT64_MIN);
  BOTH_REFUSED("out.stride_seqlen is -1", p.out.stride_seqlen = -1);
  BOTH_REFUSED("q at", p.q.stride_batch = INT64_MAX);
  BOTH_REFUSED("overflows", p.k.stride_seqlen = INT64_MAX / 2);
  BOTH_REFUSED("overflows", p.v.stride_head = (int64_t)1 << 60);
  BACKWARD_REFUSED("dout.stride_head is -4", p.dout.stride_head = -4);
  BACKWARD_REFUSED("dq.stride_batch is -1", p.dq.stride_batch = -1);
  BACKWARD_REFUSED("dk at", p.dk.stride_batch = INT64_MAX);
  /* Outputs that hold two elements in one place; the same strides are fine for inputs. */
  FORWARD_REFUSED("out is written", p.out.stride_batch = 0);
  FORWARD_REFUSED("out is written", p.out.stride_head = 0);
  FORWARD_REFUSED("out is written", p.out.stride_seqlen = p.out.stride_head);
  FORWARD_REFUSED("out is written", p.out.stride_head = 3);
  BACKWARD_REFUSED("dq is written", p.dq.stride_seqlen = 0);
  BACKWARD_REFUSED("dk is written", p.dk.stride_head = 7);
  BACKWARD_REFUSED("dv is written", p.dv.stride_batch = 4);
}

static void *shifted(void *data, int bytes) { return (char *)data + bytes; }

static void misaligned(void) {
  BOTH_REFUSED("q.data is", p.q.data = shifted(p.q.data, 1));
  BOTH_REFUSED("k.data is", p.k.data = shifted(p.k.data, 2));
  BOTH_REFUSED("v.data is", p.v.data = shifted(p.v.data, 3));
  BOTH_REFUSED("aligned to the 4 bytes of one fp32 element", p.out.data = shifted(p.out.data, 2));
  BOTH_REFUSED("aligned to the 2 bytes of one bf16 element", p.dtype = FLASHTUNE_DTYPE_BF16;
               p.q.data = shifted(p.q.data, 1));
  BACKWARD_REFUSED("dout.data is", p.dout.data = shifted(p.dout.data, 1));
  BACKWARD_REFUSED("dq.data is", p.dq.data = shifted(p.dq.data, 1));
  BACKWARD_REFUSED("dk.data is", p.dk.data = shifted(p.dk.data, 1));
  BACKWARD_REFUSED("dv.data is", p.dv.data = shifted(p.dv.data, 1));
  BOTH_REFUSED("lse is", p.lse = shifted((void *)(uintptr_t)p.lse, 2));
}

static void overlapping(void) {
  FORWARD_REFUSED("out overlaps q", p.out.data = p.q.data);
  FORWARD_REFUSED("out overlaps k", p.k.data = p.out.data);
  FORWARD_REFUSED("out overlaps v", p.out.data = (float *)p.v.data + a.count[V] - 1);
  FORWARD_REFUSED("out overlaps lse", p.lse = (float *)p.out.data + 3);
  FORWARD_REFUSED("lse overlaps q", p.lse = p.q.data);
  FORWARD_REFUSED("out overlaps dropout_seed_ptr", p.dropout_p = 0.5f; p.dropout_seed_ptr = p.out.data);
  BACKWARD_REFUSED("dq overlaps q", p.dq.data = p.q.data);
  BACKWARD_REFUSED("dq overlaps out", p.dq.data = p.out.data);
  BACKWARD_REFUSED("dq overlaps lse", p.lse = (const float *)p.dq.data + 1);
  BACKWARD_REFUSED("dk overlaps k", p.dk.data = p.k.data);
  BACKWARD_REFUSED("dv overlaps v", p.dv.data = p.v.data);
  BACKWARD_REFUSED("dv overlaps dout", p.dout.data = p.dv.data);
  BACKWARD_REFUSED("dk overlaps dv", p.dv.data = p.dk.data);
  BACKWARD_REFUSED("dq overlaps dk", p.dk.data = (float *)p.dq.data + 8);
  /* Inputs may share what they like. */
  flashtune_forward_params p = a.forward;
  p.k.data = p.q.data;
  p.v.data = p.q.data;
  OK(flashtune_forward_supported(context, &p));
  p.v.stride_head = p.v.stride_batch = 0;
  OK(flashtune_forward_supported(context, &p));
}

static void workspaces(void) {
  const flashtune_backward_params *p = &a.backward;
  const int32_t small = FLASHTUNE_STATUS_WORKSPACE_TOO_SMALL;
  flashtune_backward_params q = *p;
  flashtune_plan_info info = canary_info();
  CHECK(workspace_bytes > 256, "%llu bytes", (unsigned long long)workspace_bytes);
  FAILS(flashtune_backward(context, p, NULL, workspace_bytes, NULL), invalid, "workspace is NULL");
  FAILS(flashtune_backward(context, p, shifted(workspace, 128), workspace_bytes, NULL), invalid, "aligned to 256");
  FAILS(flashtune_backward(context, p, workspace, workspace_bytes - 1, NULL), small, "workspace_bytes is");
  FAILS(flashtune_backward(context, p, workspace, 0, NULL), small, "workspace_bytes is 0");
  q.q.data = workspace;
  FAILS(flashtune_backward(context, &q, workspace, workspace_bytes, NULL), invalid, "workspace overlaps q");
  q = *p;
  q.dv.data = shifted(workspace, 512);
  FAILS(flashtune_backward(context, &q, workspace, workspace_bytes, NULL), invalid, "workspace overlaps dv");
  nothing_written(&info, 77);
}

static void autotune_params(void) {
  flashtune_autotune_params good, p;
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
  good.forward = &a.forward;
  FAILS(flashtune_autotune(context, NULL), invalid, "params is NULL");
  FAILS(flashtune_autotune(NULL, &good), invalid, "context is NULL");
  FAILS((p = good, p.struct_size = 0, flashtune_autotune(context, &p)), invalid, "params.struct_size is 0");
  FAILS((p = good, p.forward = NULL, flashtune_autotune(context, &p)), invalid, "both NULL");
  FAILS((p = good, p.backward = &a.backward, flashtune_autotune(context, &p)), invalid, "both set");
  flashtune_backward_params fixed = a.backward;
  fixed.deterministic = 1;
  FAILS((p = good, p.forward = NULL, p.backward = &fixed, flashtune_autotune(context, &p)), invalid, "deterministic");
  FAILS((p = good, p.retune = 2, flashtune_autotune(context, &p)), invalid, "params.retune is 2");
  FAILS((p = good, p.reserved = 1, flashtune_autotune(context, &p)), invalid, "params.reserved is 1");
  FAILS((p = good, p.time_limit_seconds = -1, flashtune_autotune(context, &p)), invalid, "time_limit_seconds is -1");
  FAILS((p = good, p.time_limit_seconds = NAN, flashtune_autotune(context, &p)), invalid, "time_limit_seconds is NaN");
}

static void record_files(void) {
  uint64_t count = 77;
  FAILS(flashtune_records_export(NULL, "x", &count), invalid, "context is NULL");
  FAILS(flashtune_records_import(NULL, "x", &count), invalid, "context is NULL");
  FAILS(flashtune_records_export(context, NULL, &count), invalid, "path is NULL");
  FAILS(flashtune_records_import(context, NULL, &count), invalid, "path is NULL");
  FAILS(flashtune_records_export(context, "", &count), invalid, "path is \"\"");
  FAILS(flashtune_records_import(context, "/no/such/file", &count), FLASHTUNE_STATUS_IO, "/no/such/file");
  FAILS(flashtune_records_export(context, "/no/such/folder/x", &count), FLASHTUNE_STATUS_IO, "/no/such/folder");
  CHECK(count == 77, "a failed call wrote count");
}

int main(void) {
  context = cpu_context("");
  a = make_attention(shape, 1);
  reset_outputs(&a);
  OK(flashtune_backward_workspace_size(context, &a.backward, &workspace_bytes));
  workspace = make_workspace(workspace_bytes + 256);
  nulls();
  struct_sizes();
  enums_and_scalars();
  sizes();
  strides();
  misaligned();
  overlapping();
  workspaces();
  autotune_params();
  record_files();
  /* After all that the context still works. */
  run_and_check(context, &a);
  free(workspace);
  free_attention(&a);
  OK(flashtune_context_destroy(context));
  return 0;
}
