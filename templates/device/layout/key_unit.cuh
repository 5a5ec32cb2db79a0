// Numbers of a column of K's and V's tiles. Tensors of 8 bits are tensors of pairs to all that
// copies them, so a column has 16 bits (or 32 in fp32).

constexpr int kKeyUnit = kKeyFormat == 0 ? 1 : 2;
