// Factors of the scores of single keys beside a widened K and V in the workspace, where keys or
// blocks of keys have scales: those of K times the softmax's scale, or alone where scores are
// modified before the softmax. sm90_widen_kv.cu.tera writes them, and the sm90 forward kernel reads
// them.

// The place of a key's factor in its sequence's row. Each 16 keys are in the order in which the
// lanes of a quad hold their scores, four for each lane.
__device__ __forceinline__ int place_of_factor(int key) { return key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2; }
