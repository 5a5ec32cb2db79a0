/* Ranges: what a prepared range reports, which problems a sealed context then serves, and which
 * ranges are refused. */
#include "check.h"

static const int32_t invalid = FLASHTUNE_STATUS_INVALID_ARGUMENT;

static flashtune_forward_params forward(void) {
  flashtune_forward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16;
  p.causal = FLASHTUNE_CAUSAL_BOTTOM_RIGHT;
  p.batch_size = 16, p.seqlen_q = 500, p.seqlen_k = 3000;
  p.num_heads_q = 8, p.num_heads_kv = 2, p.head_dim = 64, p.head_dim_v = 64;
  p.features = FLASHTUNE_FEATURE_SINKS | FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;
  p.total_q = 4000, p.total_k = 40000;
  return p;
}

static flashtune_backward_params backward(void) {
  flashtune_backward_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.dtype = FLASHTUNE_DTYPE_BF16;
  p.batch_size = 16, p.seqlen_q = 500, p.seqlen_k = 3000;
  p.num_heads_q = 8, p.num_heads_kv = 2, p.head_dim = 64, p.head_dim_v = 64;
  return p;
}

static flashtune_range range_of(const flashtune_forward_params *f, const flashtune_backward_params *b) {
  flashtune_range range;
  memset(&range, 0, sizeof range);
  range.struct_size = sizeof range;
  range.forward = f, range.backward = b;
  return range;
}

static flashtune_context *cpu(void) {
  flashtune_context_options options;
  flashtune_context *context;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = FLASHTUNE_BACKEND_CPU;
  options.cache_dir = "";
  OK(flashtune_context_create(&options, &context));
  return context;
}

static void wrong_ranges(flashtune_context *context) {
  flashtune_forward_params f = forward();
  flashtune_backward_params b = backward();
  flashtune_range_info info;
  memset(&info, 0x55, sizeof info);
  info.struct_size = sizeof info;
#define REFUSED(status, word, mutation)                                     \
  do {                                                                      \
    flashtune_range range = range_of(&f, &b);                               \
    mutation;                                                               \
    FAILS(flashtune_prepare_range(context, &range, &info), status, word);   \
    CHECK(info.num_configs == 0x5555555555555555u, "a failed call wrote");  \
  } while (0)
  flashtune_range good = range_of(&f, &b);
  FAILS(flashtune_prepare_range(NULL, &good, &info), invalid, "context is NULL");
  FAILS(flashtune_prepare_range(context, NULL, &info), invalid, "range is NULL");
  REFUSED(invalid, "range.struct_size is 8", range.struct_size = 8);
  REFUSED(invalid, "range.forward and range.backward are both NULL", range.forward = NULL; range.backward = NULL);
  REFUSED(invalid, "least_batch_size is 17", range.least_batch_size = 17);
  REFUSED(invalid, "least_seqlen_q is -1", range.least_seqlen_q = -1);
  REFUSED(invalid, "least_seqlen_k is 3001", range.least_seqlen_k = 3001);
  REFUSED(invalid, "range.optional is 0x10", range.optional = 16);
  REFUSED(invalid, "range.optional_features is 0x400", range.optional_features = FLASHTUNE_FEATURE_PAGED);
  REFUSED(invalid, "head_dim is 0", f.head_dim = 0);
  f = forward();
  REFUSED(invalid, "total_q 0", f.total_q = 0);
  f = forward();
  REFUSED(invalid, "deterministic range has", b.deterministic = 1; range.forward = NULL);
  info.struct_size = 8;
  FAILS(flashtune_prepare_range(context, &good, &info), invalid, "info.struct_size is 8");
}

int main(void) {
  flashtune_context *context = cpu();
  flashtune_forward_params f = forward();
  flashtune_backward_params b = backward();
  flashtune_range range = range_of(&f, &b);
  flashtune_range_info info;
  flashtune_plan_info plan;
  wrong_ranges(context);

  range.optional_features = FLASHTUNE_FEATURE_SINKS;
  range.optional = FLASHTUNE_OPTIONAL_CAUSAL;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  OK(flashtune_prepare_range(context, &range, &info));
  CHECK(info.num_classes == 5 && info.num_configs >= 5, "%d classes", (int)info.num_classes);
  CHECK(info.num_kernels == 0 && info.num_compiled == 0 && info.num_cached == 0, "the CPU has kernels");
  CHECK(info.milliseconds > 0, "no time");
  uint64_t bytes;
  OK(flashtune_backward_workspace_size(context, &b, &bytes));
  CHECK(info.workspace_bytes == bytes, "%d bytes", (int)info.workspace_bytes);
  OK(flashtune_prepare_range(context, &range, NULL));

  OK(flashtune_context_seal(context));
  FAILS(flashtune_prepare_range(context, &range, &info), FLASHTUNE_STATUS_NOT_PREPARED, "sealed");
  memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  for (int i = 0; i < 200; i++) {
    f.batch_size = 1 + rand() % 16, f.seqlen_q = 1 + rand() % 500, f.seqlen_k = 1 + rand() % 3000;
    f.total_q = 1 + rand() % 5000, f.total_k = 1 + rand() % 5000;
    f.causal = rand() % 2 ? FLASHTUNE_CAUSAL_BOTTOM_RIGHT : FLASHTUNE_CAUSAL_NONE;
    f.features ^= rand() % 2 ? FLASHTUNE_FEATURE_SINKS : 0;
    b.batch_size = f.batch_size, b.seqlen_q = f.seqlen_q, b.seqlen_k = f.seqlen_k;
    OK(flashtune_forward_prepare(context, &f));
    OK(flashtune_forward_plan_info(context, &f, &plan));
    OK(flashtune_backward_plan_info(context, &b, &plan));
  }
  f.head_dim = 72;
  FAILS(flashtune_forward_prepare(context, &f), FLASHTUNE_STATUS_NOT_PREPARED, "sealed");
  OK(flashtune_context_destroy(context));
  return 0;
}
