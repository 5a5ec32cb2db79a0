// Training steps on packed QKV in bf16, on a GPU with the CUDA runtime: one stream, two kernels of
// our own beside flashtune's passes, and a workspace from cudaMalloc.
//
//   nvcc -std=c++17 training_step.cu $(pkg-config --cflags --libs flashtune) -o training_step
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <flashtune.hpp>

#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int batch = 2, seqlen = 1024, heads = 16, dim = 64, steps = 50;
constexpr int row = heads * dim, count = batch * seqlen * row;

static void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
static T *allocate(std::size_t elements) {
  void *memory;
  check(cudaMalloc(&memory, elements * sizeof(T)));
  return static_cast<T *>(memory);
}

// dout = out - target, and the sum of its squares.
__global__ void loss_gradient(const __nv_bfloat16 *out, const __nv_bfloat16 *target, __nv_bfloat16 *dout, float *loss) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float difference = __bfloat162float(out[i]) - __bfloat162float(target[i]);
  dout[i] = __float2bfloat16(difference);
  atomicAdd(loss, difference * difference / (2 * count));
}

// Master weights in fp32, as a training program keeps them.
__global__ void descend(float *master, __nv_bfloat16 *qkv, const __nv_bfloat16 *dqkv, float rate) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= 3 * count) return;
  master[i] -= rate * __bfloat162float(dqkv[i]);
  qkv[i] = __float2bfloat16(master[i]);
}

int main() try {
  std::vector<float> values(3 * count);
  std::vector<__nv_bfloat16> halves(3 * count);
  auto upload = [&](__nv_bfloat16 *to, int elements) {
    for (int i = 0; i < elements; i++) halves[i] = __float2bfloat16(values[i] = float(std::rand() % 2001 - 1000) / 1000);
    check(cudaMemcpy(to, halves.data(), elements * sizeof *to, cudaMemcpyHostToDevice));
  };
  auto *target = allocate<__nv_bfloat16>(count), *out = allocate<__nv_bfloat16>(count), *dout = allocate<__nv_bfloat16>(count);
  auto *qkv = allocate<__nv_bfloat16>(3 * count), *dqkv = allocate<__nv_bfloat16>(3 * count);
  auto *master = allocate<float>(3 * count), *lse = allocate<float>(batch * heads * seqlen), *loss = allocate<float>(steps);
  upload(target, count);
  upload(qkv, 3 * count);
  check(cudaMemcpy(master, values.data(), 3 * count * sizeof(float), cudaMemcpyHostToDevice));
  check(cudaMemset(loss, 0, steps * sizeof(float)));

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  // CUDA, not automatic: without a usable GPU this throws, and the message names the reason.
  flashtune::context context(flashtune::backend::cuda);
  auto workspace = flashtune::workspace::cuda();
  auto slice = [](__nv_bfloat16 *packed, int index) { return flashtune::packed(packed + index * row, 3, seqlen, heads, dim); };
  auto dense = [](__nv_bfloat16 *data) { return flashtune::dense(data, seqlen, heads, dim); };
  auto forward = flashtune::forward_params()
                     .with_dtype(flashtune::dtype::bf16)
                     .with_causal(flashtune::causal::bottom_right)
                     .with_batch_size(batch)
                     .with_seqlens(seqlen, seqlen)
                     .with_heads(heads, heads)
                     .with_head_dim(dim)
                     .with_tensors(slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), dense(out), lse);
  auto backward =
      flashtune::backward_params::from(forward).with_gradients(dense(dout), slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 2));
  // Compiles now, so that the first step does not wait.
  context.prepare(forward);
  context.prepare(backward);
  std::printf("forward  %s\nbackward %s\n", context.plan_info(forward).config, context.plan_info(backward).config);

  for (int step = 0; step < steps; step++) {
    context.launch(forward, workspace, stream);
    loss_gradient<<<(count + 255) / 256, 256, 0, stream>>>(out, target, dout, loss + step);
    context.launch(backward, workspace, stream);
    descend<<<(3 * count + 255) / 256, 256, 0, stream>>>(master, qkv, dqkv, 0.2f);
  }
  check(cudaStreamSynchronize(stream));
  std::vector<float> losses(steps);
  check(cudaMemcpy(losses.data(), loss, steps * sizeof(float), cudaMemcpyDeviceToHost));
  std::printf("loss %.4f, after %d steps %.4f\n", losses.front(), steps, losses.back());
  return losses.back() < losses.front() ? 0 : 1;
} catch (const flashtune::error &why) {
  std::fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(why.status()), why.what());
  return 1;
}
