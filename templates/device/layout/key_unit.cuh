// Numbers of a column of K's and V's tiles. Tensors of 8 bits and of int4 rows are tensors of
// 16-bit elements to all that copies them, so a column has 16 bits (or 32 in fp32).

#include "device/key_formats.cuh"
#include "device/layout/round_up.cuh"

constexpr int kKeyUnit = kKeyFormat == 0 ? 1 : kKeyFormat == kInt4 ? 4 : 2;

// Columns of a row of `dim` numbers. A row of int4 ends with its scales and zeros and with padding
// to 16 bytes (src/four.rs).
constexpr int key_cols(int dim) {
    return kKeyFormat == kInt4 ? round_up(dim / 2 + dim / (kKeyGroup + (kKeyGroup == 0)) * 4, 16) / 2 : dim / kKeyUnit;
}
