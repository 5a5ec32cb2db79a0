//! 8-bit tensors of a case: the scale of each row, and where the scales lie.
//!
//! `Data` holds numbers times scales, so the reference knows nothing of 8 bits.

use super::buffer::Array;
use super::case::{Case, Kind, Random};
use super::lengths::{Rows, Side};
use flashtune::backend::Backend;
use flashtune::call::{Scales, TensorRef};
use flashtune::problem::{Eight, ElementType};

/// Mean of the scales: normal values use most of each format's range.
const TYPICAL: f32 = 1.0 / 24.0;

impl Case {
    /// The type of a tensor's elements.
    pub fn element(&self, kind: Kind) -> ElementType {
        if let (Kind::K | Kind::V, Some(four)) = (kind, self.extras.four) {
            return four.into();
        }
        match (kind, self.extras.eight) {
            (Kind::K | Kind::V, Some(eight)) => eight.keys.into(),
            (Kind::Q, Some(eight)) if eight.queries => Eight::E4m3.into(),
            _ => self.dtype.into(),
        }
    }

    /// The scale of a key, or of all queries of a sequence.
    fn scale(&self, kind: Kind, batch: usize, key: usize, head_kv: usize) -> f32 {
        let keys_per_scale = self.extras.eight.map_or(0, |eight| eight.keys_per_scale) as usize;
        let share = if keys_per_scale == 0 || kind == Kind::Q { 0 } else { key / keys_per_scale };
        let place = ((batch * 31 + share) * 17 + head_kv) as u64 * 4 + kind as u64;
        let mut random = Random::new(self.seed ^ 0x5ca1e ^ place << 20);
        TYPICAL * (1.0 + random.between(-500, 1000) as f32 / 1000.0)
    }

    /// The scale of each row (batch, position, head) of a tensor in order; 1 without 8 bits and for
    /// rows of no sequence.
    pub fn row_scales(&self, kind: Kind) -> Vec<f32> {
        let shape = self.shape(kind);
        let mut scales = vec![1.0; (shape.batch * shape.seqlen * shape.heads) as usize];
        if !matches!(self.element(kind), ElementType::Eight(_)) {
            return scales;
        }
        let (heads, group) = (shape.heads as usize, (shape.heads / self.num_heads_kv) as usize);
        for (batch, Rows { entry, begin, length, .. }) in self.rows(Side::of(kind)).into_iter().enumerate() {
            for (position, head) in (0..length).flat_map(|position| (0..heads).map(move |head| (position, head))) {
                let row = entry * shape.seqlen as usize + begin + position;
                scales[row * heads + head] = self.scale(kind, batch, position, head / group);
            }
        }
        scales
    }

    /// The scales as they lie in memory, with NaN where no sequence has a key, and their strides.
    fn scales_in_memory(&self, kind: Kind) -> (Vec<f32>, TensorRef) {
        let heads = self.num_heads_kv as usize;
        let keys_per_scale = self.extras.eight.map_or(0, |eight| eight.keys_per_scale) as usize;
        let shape = self.shape_in_memory(kind);
        let [entries, positions] = match keys_per_scale {
            _ if kind == Kind::Q => [self.batch_size as usize, 1],
            0 => [self.batch_size as usize, 1],
            1 => [shape.batch as usize, shape.seqlen as usize],
            keys => [self.batch_size as usize, (self.seqlen_k as usize).div_ceil(keys)],
        };
        // One element more than packed arrays have.
        let stride_batch = positions * heads + 1;
        let mut values = vec![f32::NAN; entries * stride_batch];
        let (leftpads, rows) = (self.leftpads(), self.rows(Side::K));
        let table = if self.extras.page_size.is_some() { self.block_table() } else { Vec::new() };
        let cache_entries = if self.extras.key_starts { self.cache_batch_idx() } else { Vec::new() };
        for (batch, Rows { entry, begin, used, .. }) in rows.into_iter().enumerate() {
            for key in 0..if keys_per_scale == 0 || kind == Kind::Q { 1 } else { used } {
                let (entry, position) = match (keys_per_scale, self.extras.page_size) {
                    _ if kind == Kind::Q => (batch, 0),
                    (0, _) => (batch, 0),
                    (1, Some(page_size)) => {
                        let page_size = page_size as usize;
                        let at = batch * self.block_table_stride() as usize + key / page_size;
                        (table[at] as usize, key % page_size)
                    }
                    (1, None) if self.extras.key_starts => {
                        (cache_entries[batch] as usize, leftpads[batch] as usize + key)
                    }
                    (1, None) => (entry, begin + key),
                    (keys, _) => (batch, key / keys),
                };
                for head in 0..heads {
                    values[entry * stride_batch + position * heads + head] = self.scale(kind, batch, key, head);
                }
            }
        }
        let (stride_batch, stride_seqlen) = (stride_batch as i64, heads as i64);
        (values, TensorRef { stride_batch, stride_seqlen, stride_head: 1, ..TensorRef::NULL })
    }
}

/// The scales of a case on a device: of q, k and v.
pub struct ScaleBuffers([Option<(Array, TensorRef)>; 3]);

impl ScaleBuffers {
    pub fn new(backend: &Backend, case: &Case) -> ScaleBuffers {
        ScaleBuffers([Kind::Q, Kind::K, Kind::V].map(|kind| {
            matches!(case.element(kind), ElementType::Eight(_)).then(|| {
                let (values, view) = case.scales_in_memory(kind);
                (Array::input(backend, &values), view)
            })
        }))
    }

    pub fn args(&self) -> Scales {
        let view = |buffer: &Option<(Array, TensorRef)>| {
            buffer.as_ref().map_or(TensorRef::NULL, |(array, view)| TensorRef { data: array.address(), ..*view })
        };
        let [q, k, v] = &self.0;
        Scales { q: view(q), k: view(k), v: view(v) }
    }
}

/// The values that a tensor of 8 bits can hold, nearest to the given ones.
pub fn quantised(element: ElementType, values: &mut [f32], scales: &[f32], dim: usize) {
    let ElementType::Eight(eight) = element else { return };
    for (row, scale) in values.chunks_mut(dim).zip(scales) {
        row.iter_mut().for_each(|x| *x = eight.decode(eight.encode(*x / scale)) * scale);
    }
}

/// A weight of at most 1 as kernels with fp8 queries round it: to e4m3, times 2^8.
pub fn rounded_weight(case: &Case, weight: f32) -> f32 {
    match case.extras.eight {
        Some(eight) if eight.queries => Eight::E4m3.decode(Eight::E4m3.encode(weight * 256.0)) / 256.0,
        _ => weight,
    }
}
