// Decoding over pages in bf16, on a GPU with the CUDA runtime. One step (append the new keys and
// values, attend) is captured into a graph and replayed. The lengths live on the device and grow
// there, so the graph needs no update.
//
//   nvcc -std=c++17 decode_pages.cu $(pkg-config --cflags --libs flashtune) -o decode_pages
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <flashtune.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

constexpr int batch = 8, heads_q = 32, heads_kv = 8, dim = 128, page_size = 64, room = 1024, steps = 300;
constexpr int pages_each = room / page_size, num_pages = batch * pages_each;

static void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
static T *allocate(std::size_t elements) {
  void *memory;
  check(cudaMalloc(&memory, elements * sizeof(T)));
  check(cudaMemset(memory, 0, elements * sizeof(T)));
  return static_cast<T *>(memory);
}

// Stands for the model: every value of a step's q, k and v depends on the sequence's length alone.
__global__ void model(__nv_bfloat16 *q, __nv_bfloat16 *k, __nv_bfloat16 *v, const int *seqlens) {
  const int b = blockIdx.x, length = seqlens[b];
  for (int i = threadIdx.x; i < heads_q * dim; i += blockDim.x) q[b * heads_q * dim + i] = __float2bfloat16(0.0f);
  for (int i = threadIdx.x; i < heads_kv * dim; i += blockDim.x) {
    k[b * heads_kv * dim + i] = __float2bfloat16(float(i % 7));
    v[b * heads_kv * dim + i] = __float2bfloat16(float(length % 2));
  }
}

int main() try {
  auto *q = allocate<__nv_bfloat16>(batch * heads_q * dim), *out = allocate<__nv_bfloat16>(batch * heads_q * dim);
  auto *k_new = allocate<__nv_bfloat16>(batch * heads_kv * dim), *v_new = allocate<__nv_bfloat16>(batch * heads_kv * dim);
  auto *k_cache = allocate<__nv_bfloat16>(std::size_t(num_pages) * page_size * heads_kv * dim);
  auto *v_cache = allocate<__nv_bfloat16>(std::size_t(num_pages) * page_size * heads_kv * dim);
  int *before = allocate<int>(batch), *after = allocate<int>(batch), *block_table = allocate<int>(num_pages);
  std::vector<int> pages(num_pages);
  std::iota(pages.rbegin(), pages.rend(), 0);  // any order
  check(cudaMemcpy(block_table, pages.data(), num_pages * sizeof(int), cudaMemcpyHostToDevice));

  flashtune::context context(flashtune::backend::cuda);
  flashtune::kv_append_params append;
  append.dtype = FLASHTUNE_DTYPE_BF16;
  append.batch_size = batch, append.num_heads_kv = heads_kv, append.seqlen_new = 1, append.seqlen_cache = room;
  append.head_dim = dim, append.head_dim_v = dim;
  append.k_new = flashtune::dense(k_new, 1, heads_kv, dim), append.v_new = flashtune::dense(v_new, 1, heads_kv, dim);
  append.k_cache = flashtune::dense(k_cache, page_size, heads_kv, dim);
  append.v_cache = flashtune::dense(v_cache, page_size, heads_kv, dim);
  append.seqlens = before, append.seqused = after;
  append.block_table = block_table, append.block_table_stride = pages_each;
  append.page_size = page_size, append.num_pages = num_pages;
  auto attend = flashtune::forward_params()
                    .with_dtype(flashtune::dtype::bf16)
                    .with_batch_size(batch)
                    .with_seqlens(1, room)
                    .with_heads(heads_q, heads_kv)
                    .with_head_dim(dim)
                    .with_tensors(flashtune::dense(q, 1, heads_q, dim), append.k_cache, append.v_cache,
                                  flashtune::dense(out, 1, heads_q, dim))
                    .with_pages(block_table, pages_each, page_size, num_pages)
                    .with_seqused_k(after);
  // Prepared calls only enqueue, so a graph can capture them.
  context.prepare(append);
  context.prepare(attend);
  auto workspace = flashtune::workspace::cuda();
  workspace.reserve(context.workspace_size(attend));

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t step;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  model<<<batch, 256, 0, stream>>>(q, k_new, v_new, before);
  context.launch(append, stream);
  context.launch(attend, workspace, stream);
  check(cudaMemcpyAsync(before, after, batch * sizeof(int), cudaMemcpyDeviceToDevice, stream));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&step, graph, 0));
  for (int i = 0; i < steps; i++) check(cudaGraphLaunch(step, stream));
  check(cudaStreamSynchronize(stream));

  // With q = 0 all keys weigh the same: out is the share of odd positions.
  int length;
  __nv_bfloat16 first;
  check(cudaMemcpy(&length, after, sizeof length, cudaMemcpyDeviceToHost));
  check(cudaMemcpy(&first, out, sizeof first, cudaMemcpyDeviceToHost));
  const float error = std::fabs(__bfloat162float(first) - float(steps / 2) / steps);
  std::printf("%d sequences of %d keys in pages of %d; error %.1e\n", batch, length, page_size, error);
  return length == steps && error < 4e-3f ? 0 : 1;
} catch (const flashtune::error &why) {
  std::fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(why.status()), why.what());
  return 1;
}
