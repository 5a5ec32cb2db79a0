// The numbers of kKeyFormat (src/problem/features.rs); 0 are keys of q's type.

constexpr int kE4m3 = 1, kE5m2 = 2, kInt8 = 3, kInt4 = 4;
