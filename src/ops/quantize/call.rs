//! The sizes and tensors of one quantisation, as a backend gets them.

use super::rotation::Rotation;
use crate::call::TensorRef;
use crate::ops::class::QuantizeClass;

#[derive(Clone, Copy, Debug)]
pub struct Quantize {
    pub class: QuantizeClass,
    pub batch_size: i64,
    pub seqlen: i64,
    pub num_heads: i64,
    pub head_dim: i64,
    /// Positions that share a scale, 1 to `seqlen`.
    pub rows_per_scale: i64,
    /// Neighbouring heads that share a scale; divides `num_heads`.
    pub heads_per_scale: i64,
    /// Scales are written, else read.
    pub computes: bool,
    /// The seed of the signs, where the class rotates.
    pub rotation_seed: u64,
    /// (batch, seqlen, heads, dim)
    pub x: TensorRef,
    pub out: TensorRef,
    /// fp32 (batch, blocks of positions, groups of heads). Not used where out has the dtype of x.
    pub scales: TensorRef,
}

impl Quantize {
    /// What rows are rotated by; None: by nothing.
    pub fn rotation(&self) -> Option<Rotation> {
        self.class.rotates.then(|| Rotation::new(self.rotation_seed, self.head_dim))
    }

    /// Blocks of positions and groups of heads of a batch entry.
    pub fn blocks(&self) -> [i64; 2] {
        let positions = (self.seqlen + self.rows_per_scale - 1) / self.rows_per_scale.max(1);
        [positions, self.num_heads / self.heads_per_scale]
    }

    /// Scales of the tensor.
    pub fn units(&self) -> i64 {
        let [positions, groups] = self.blocks();
        if self.seqlen == 0 { 0 } else { self.batch_size * positions * groups }
    }
}

// SAFETY: a Quantize only carries addresses; the backend that dereferences them in a launch answers
// for the access.
unsafe impl Send for Quantize {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for Quantize {}
