// In place of key_scales.cuh for keys of q's type, which have no scales.

#include "device/attention/sequence.cuh"

struct KeyScales {
    __device__ __forceinline__ KeyScales(const KernelParams&, const Sequence&, int, int, int, int) {}
    __device__ __forceinline__ void acquire(int, int) {}
    __device__ __forceinline__ float of_softmax() const { return 1.f; }
    template <class Scores>
    __device__ __forceinline__ void scale_scores(Scores&) const {}
    template <class Weights, class Output>
    __device__ __forceinline__ void scale_weights(Weights&, Output&) {}
    template <class Output>
    __device__ __forceinline__ void scale_output(Output&) const {}
};
