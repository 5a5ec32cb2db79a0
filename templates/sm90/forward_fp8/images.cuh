// Images of V^T in the workspace, for the sm90 forward kernel for e4m3 and for the kernel that
// writes them (sm90_transpose_v.cu.tera).
//
// An image is a block of V^T as wgmma reads it from shared memory: a copy of contiguous bytes fills
// a slot. It is boxes of 128 keys, and for the rest one of 64, one of 32 or both. A box has a row
// for each column of V, in the swizzle of the row's bytes. So an image has no padding. The keys of
// each 16 have the order of transpose.cuh.
//
// All sequences have equally many images. The host gives each head room for them
// (src/problem/workspace.rs).

#include "device/attention/sequence.cuh"
#include "device/layout/swizzle.cuh"

constexpr int kImageBytes = kHeadDimV * kBlockN;

// The box of an image that holds a key, by its first key and its keys.
struct ImageBox {
    int first, keys;

    static __device__ __forceinline__ constexpr ImageBox of(int key) {
        constexpr int kWhole = kBlockN / 128 * 128, kHas64 = kBlockN % 128 / 64;
        if (key < kWhole) return {key / 128 * 128, 128};
        if (key < kWhole + kHas64 * 64) return {kWhole, 64};
        return {kWhole + kHas64 * 64, 32};
    }
    __device__ __forceinline__ constexpr int begin() const { return first * kHeadDimV; }
};

// The place in an image of the chunk of 16 keys from `key` on of V's column `column`. A row has 2,
// 4 or 8 chunks, which are xored with the row over 4, 2 or 1.
__device__ __forceinline__ int place_in_image(int key, int column) {
    const ImageBox box = ImageBox::of(key);
    const int chunks = box.keys / 16, chunk = (key - box.first) / 16 ^ column * chunks / 8 % chunks;
    return box.begin() + column * box.keys + chunk * 16;
}

// The descriptor of the k32 step `step` of an image in shared memory, whose address gives `low`.
__device__ __forceinline__ uint64 image_descriptor(uint32 low, int step) {
    const ImageBox box = ImageBox::of(step * 32);
    // The swizzle of 128, 64 or 32 bytes, and the bytes of 8 rows.
    const uint32 swizzle = box.keys == 128 ? 1 : box.keys == 64 ? 2 : 3, group = box.keys * 8;
    return uint64(swizzle << 30 | group / 16) << 32 | (low + (box.begin() + step * 32 - box.first) / 16);
}

// Only the backward pass has dO, so the view of the images takes its place in KernelParams. Its
// stride counts bytes.
__device__ __forceinline__ const TensorView& images_of_v(const KernelParams& params) { return params.dout; }

// The first image of a sequence and head.
__device__ __forceinline__ uint8* images_of(const KernelParams& params, const Sequence& sequence, int head_kv) {
    const int blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
    const TensorView& images = images_of_v(params);
    return static_cast<uint8*>(images.data) + head_kv * images.stride_head + int64(sequence.batch) * blocks * kImageBytes;
}
