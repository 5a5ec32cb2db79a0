//! Cost: the operations and the bytes that a problem needs at least. Bench figures and the tuner's
//! utilisation are measured against them; nothing is decided by the clock or the device here.

use super::{Causal, Pass, Problem, Window};

impl Problem {
    /// The multiply-adds of the products that this pass needs, counted as two operations each: two
    /// products forward, five backward; half of them when causal, as the field counts it, and of a
    /// window those that it lets be seen. Of sequences of their own lengths as if all were the
    /// longest, under a block mask as if it named all blocks.
    pub fn flops(&self) -> f64 {
        let pairs = self.batch_size as f64 * self.num_heads_q as f64 * self.seqlen_q as f64 * self.keys_of_a_row();
        let (qk, v) = (self.head_dim as f64, self.head_dim_v as f64);
        let products = match self.pass {
            Pass::Forward => qk + v,
            Pass::Backward => 3.0 * qk + 2.0 * v,
        };
        2.0 * pairs * products
    }

    /// Bytes of K and V, each once; of a window those of the keys that some row sees. Of sequences
    /// of their own lengths as `flops`.
    pub fn key_value_bytes(&self) -> f64 {
        let Window { left, right, .. } = self.features.window;
        let right = if self.causal == Causal::None { right } else { Some(0) };
        let side = |keys: Option<i64>| keys.unwrap_or(self.seqlen_k);
        let keys = (side(left) + side(right) + self.seqlen_q).min(self.seqlen_k);
        let elements = self.batch_size as f64 * self.num_heads_kv as f64 * keys as f64;
        elements * (self.head_dim + self.head_dim_v) as f64 * self.dtype.bytes() as f64
    }

    /// Keys that a row sees, in the mean: half of all on either side of its diagonal, or as many as
    /// a window has there; after a causal one none.
    fn keys_of_a_row(&self) -> f64 {
        let Window { left, right, .. } = self.features.window;
        let right = if self.causal == Causal::None { right } else { Some(0) };
        let half = self.seqlen_k as f64 / 2.0;
        let side = |keys: Option<i64>| keys.map_or(half, |keys| (keys as f64).min(half));
        side(left) + side(right)
    }
}
