// A warp's row of 16-bit elements in fp32, which kv_append_eight rotates and quantises.
//
// A lane has kVec neighbouring columns, then as many 32 * kVec columns further on.

#include "device/quantise.cuh"

constexpr int kSteps = kMostCols / (32 * kVec);

// As many elements as an access has.
struct __align__(kVec * 2) Elements16 { uint16 values[kVec]; };
struct __align__(kVec) Bytes8 { uint8 values[kVec]; };

// A row of at most kMostCols columns. Columns past its end are 0.
struct WarpRow {
    float x[kSteps][kVec];

    static __device__ __forceinline__ int col(int step, int lane) { return (step * 32 + lane) * kVec; }

    __device__ __forceinline__ void load(const uint16* row, int cols, int lane) {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Elements16 loaded = {};
            if (col(step, lane) < cols) loaded = *reinterpret_cast<const Elements16*>(row + col(step, lane));
            #pragma unroll
            for (int i = 0; i < kVec; ++i) x[step][i] = unpack(loaded.values[i]);
        }
    }

    // The lane's largest magnitude. NaN does not count.
    __device__ __forceinline__ float largest() const {
        float top = 0.f;
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            #pragma unroll
            for (int i = 0; i < kVec; ++i) top = fmaxf(top, fabsf(x[step][i]));
        }
        return top;
    }

    __device__ __forceinline__ void store(uint16* row, int cols, int lane) const {
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (col(step, lane) >= cols) continue;
            Elements16 narrow;
            #pragma unroll
            for (int i = 0; i < kVec; ++i) narrow.values[i] = uint16(pack2(x[step][i], 0.f));
            *reinterpret_cast<Elements16*>(row + col(step, lane)) = narrow;
        }
    }

    // The numbers nearest to x / scale.
    __device__ __forceinline__ void store_eight(uint8* row, int cols, float scale, int lane) const {
        const float factor = 1.f / scale;
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (col(step, lane) >= cols) continue;
            Bytes8 narrow;
            #pragma unroll
            for (int i = 0; i < kVec; i += 2) {
                const uint32 two = narrow_two(x[step][i] * factor, i + 1 < kVec ? x[step][i + 1 < kVec ? i + 1 : i] * factor : 0.f);
                narrow.values[i] = uint8(two);
                if (i + 1 < kVec) narrow.values[i + 1 < kVec ? i + 1 : i] = uint8(two >> 8);
            }
            *reinterpret_cast<Bytes8*>(row + col(step, lane)) = narrow;
        }
    }
};
