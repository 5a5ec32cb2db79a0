//! Cost: the least operations and bytes that a problem needs. The bench and the tuner's utilisation
//! compare measured times with them. They depend on the problem alone, not on a device or a clock.

use super::{Pass, Problem};

impl Problem {
    /// Operations of the matrix products that this pass needs: two products forward, five backward,
    /// and each multiply-add counts as two. A causal mask counts as half of the scores, by the
    /// field's convention; a window counts the scores inside it. Varlen counts every sequence as
    /// the longest, and a block mask counts as if it listed all blocks.
    pub fn flops(&self) -> f64 {
        let pairs = self.batch_size as f64 * self.num_heads_q as f64 * self.seqlen_q as f64 * self.keys_of_a_row();
        let (qk, v) = (self.head_dim as f64, self.head_dim_v as f64);
        let products = match self.pass {
            Pass::Forward => qk + v,
            Pass::Backward => 3.0 * qk + 2.0 * v,
        };
        2.0 * pairs * products
    }

    /// Bytes of K and V, each read once. A window counts only the keys that some row sees. Varlen
    /// counts every sequence as the longest.
    pub fn key_value_bytes(&self) -> f64 {
        let side = |keys: Option<i64>| keys.unwrap_or(self.seqlen_k);
        let keys =
            (side(self.features.window.left) + side(self.keys_after_diagonal()) + self.seqlen_q).min(self.seqlen_k);
        let elements = self.batch_size as f64 * self.num_heads_kv as f64 * keys as f64;
        elements * (self.head_dim + self.head_dim_v) as f64 * self.dtype.bytes() as f64
    }

    /// The mean number of keys that a row sees. Each side of the diagonal counts half of the keys,
    /// or the window's keys if those are fewer; causality leaves none after the diagonal.
    fn keys_of_a_row(&self) -> f64 {
        let half = self.seqlen_k as f64 / 2.0;
        let side = |keys: Option<i64>| keys.map_or(half, |keys| (keys as f64).min(half));
        side(self.features.window.left) + side(self.keys_after_diagonal())
    }
}
