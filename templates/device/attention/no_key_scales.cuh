// No scales of keys, under the names that key_scales.cuh has: for keys of q's type, and what int4
// has in common with them.

#include "device/attention/sequence.cuh"

struct NoKeyScales {
    __device__ __forceinline__ NoKeyScales(const KernelParams&, const Sequence&, int, int, int, int) {}
    __device__ __forceinline__ void acquire(int, int) {}
    __device__ __forceinline__ float of_softmax() const { return 1.f; }
    template <class Scores>
    __device__ __forceinline__ void scale_scores(Scores&) const {}
    template <class Weights, class Output>
    __device__ __forceinline__ void scale_weights(Weights&, Output&) {}
    template <class Output>
    __device__ __forceinline__ void scale_output(Output&) const {}
};
