// A training step on packed QKV, on the CPU in fp32: examples/c/packed_qkv.c in C++17.
#include <flashtune.hpp>

#include <cstdio>
#include <random>
#include <vector>

int main() try {
  constexpr int batch = 2, seqlen = 128, heads = 4, dim = 32, steps = 20;
  constexpr int row = heads * dim, count = batch * seqlen * row;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> qkv(3 * count), dqkv(3 * count), out(count), dout(count), target(count), lse(batch * heads * seqlen);
  for (auto *values : {&qkv, &target})
    for (float &x : *values) x = normal(random);

  // Slice 0 is q, 1 is k and 2 is v, in the projection and in its gradient.
  auto slice = [&](std::vector<float> &packed, int index) {
    return flashtune::packed(packed.data() + index * row, 3, seqlen, heads, dim);
  };
  auto dense = [&](std::vector<float> &data) { return flashtune::dense(data.data(), seqlen, heads, dim); };

  flashtune::context context(flashtune::backend::cpu);
  auto workspace = flashtune::workspace::host();
  auto forward = flashtune::forward_params()
                     .with_dtype(flashtune::dtype::fp32)
                     .with_causal(flashtune::causal::bottom_right)
                     .with_batch_size(batch)
                     .with_seqlens(seqlen, seqlen)
                     .with_heads(heads, heads)
                     .with_head_dim(dim)
                     .with_tensors(slice(qkv, 0), slice(qkv, 1), slice(qkv, 2), dense(out), lse.data());
  auto backward = flashtune::backward_params::from(forward).with_gradients(
      dense(dout), slice(dqkv, 0), slice(dqkv, 1), slice(dqkv, 2));

  double first = 0, loss = 0;
  for (int step = 0; step < steps; step++) {
    context.launch(forward, workspace);
    loss = 0;
    for (int i = 0; i < count; i++) {
      dout[i] = out[i] - target[i];
      loss += 0.5 * dout[i] * dout[i] / count;
    }
    if (step == 0) first = loss;
    context.launch(backward, workspace);
    for (int i = 0; i < 3 * count; i++) qkv[i] -= 0.5f * dqkv[i];
  }
  std::printf("loss %.4f, after %d steps %.4f\n", first, steps, loss);
  return loss < 0.9 * first ? 0 : 1;
} catch (const flashtune::error &why) {
  std::fprintf(stderr, "flashtune: %s: %s\n", flashtune_status_string(why.status()), why.what());
  return 1;
}
