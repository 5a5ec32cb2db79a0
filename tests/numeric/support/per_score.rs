//! Tensors with an element for each score (bias, mask, dbias): their shape, and their buffers with
//! traps.
//!
//! Values are packed over the dimensions along which the tensor varies. Values that no score needs
//! are NaN.

use super::blocks::{BlockKind, BlockMap, block_kind};
use super::buffer::{CANARY, GUARD, download, upload};
use super::case::{Case, Data, Strides};
use super::extras::Spread;
use super::lengths::Side;
use flashtune::backend::{Backend, Memory};
use flashtune::call::ScoresRef;

/// Dimensions are batch, head, row and key.
#[derive(Clone, Copy, Debug)]
pub struct PerScore {
    /// The extent is 1 along dimensions where the tensor is the same.
    pub extents: [usize; 4],
    /// Strides in elements of the buffer; 0 along dimensions where the tensor is the same.
    strides: [usize; 4],
    lead: usize,
}

impl PerScore {
    pub fn new(case: &Case, spread: Spread) -> PerScore {
        PerScore::of_keys(case, spread, case.seqlen_k)
    }

    /// The bytes of a bit mask, which hold eight keys each, also if the mask is the same for all
    /// keys.
    pub fn of_bits(case: &Case, spread: Spread) -> PerScore {
        let contiguous = if case.strides == Strides::OddGaps { Strides::Gaps } else { case.strides };
        let case = Case { strides: contiguous, ..case.clone() };
        PerScore::of_keys(&case, Spread { key: true, ..spread }, (case.seqlen_k + 7) / 8)
    }

    fn of_keys(case: &Case, spread: Spread, keys: i64) -> PerScore {
        let sizes = [case.batch_size, case.num_heads_q, case.seqlen_q, keys];
        let own = [spread.batch, spread.head, spread.row, spread.key];
        let extents = std::array::from_fn(|at| if own[at] { sizes[at] as usize } else { 1 });
        let (gap, key_stride, lead) = match case.strides {
            Strides::Bshd | Strides::Bhsd | Strides::PackedQkv => (0, 1, 0),
            Strides::Gaps => (8, 1, 8),
            Strides::OddGaps => (3, 2, 1),
        };
        let mut strides = [0; 4];
        let mut next = key_stride;
        for at in (0..4).rev() {
            if own[at] {
                strides[at] = next;
                next = next * extents[at] + gap;
            }
        }
        PerScore { extents, strides, lead }
    }

    pub fn len(&self) -> usize {
        self.extents.iter().product()
    }

    /// Index of a score's value in the packed values.
    pub fn index(&self, place: [usize; 4]) -> usize {
        (0..4).fold(0, |index, at| index * self.extents[at] + if self.extents[at] == 1 { 0 } else { place[at] })
    }

    /// Packs a byte mask of this shape into the bytes that `of_bits` describes. Bits past the last
    /// key are 1.
    pub fn packed_bits(&self, case: &Case, mask: &[u8]) -> Vec<u8> {
        let ([batches, heads, rows, _], keys) = (self.extents, case.seqlen_k as usize);
        let mut bytes = Vec::new();
        for row in 0..batches * heads * rows {
            let place = |key| [row / rows / heads, row / rows % heads, row % rows, key];
            let shown = |key: usize| key >= keys || mask[self.index(place(key))] != 0;
            let byte = |first| (0..8).fold(0, |byte, bit| byte | u8::from(shown(first + bit)) << bit);
            bytes.extend((0..keys).step_by(8).map(byte));
        }
        bytes
    }

    /// Buffer index of each packed value in order.
    fn places(self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(move |index| {
            let digits = (0..4).rev().fold((index, self.lead), |(rest, place), at| {
                (rest / self.extents[at], place + rest % self.extents[at] * self.strides[at])
            });
            digits.1
        })
    }

    /// Whether each value is needed by a score: one of a used row and a used key that nothing
    /// hides.
    pub fn needed(&self, case: &Case, data: &Data) -> Vec<bool> {
        let mut needed = vec![false; self.len()];
        let (rows_q, rows_k) = (case.rows(Side::Q), case.rows(Side::K));
        let mask = case.extras.mask.map(|spread| PerScore::new(case, spread));
        let map = BlockMap::new(case);
        let is_shown = |place| match block_kind(&map, place) {
            BlockKind::Hidden => false,
            BlockKind::Partial => mask.is_none_or(|mask| data.mask[mask.index(place)] != 0),
            BlockKind::Full => true,
        };
        for (batch, (rows_q, rows_k)) in rows_q.iter().zip(&rows_k).enumerate() {
            for (row, key) in (0..rows_q.used).flat_map(|row| (0..rows_k.used).map(move |key| (row, key))) {
                if case.sees([rows_q.used, rows_k.used], row, key) {
                    let places = (0..case.num_heads_q as usize).map(|head| [batch, head, row, key]);
                    places.filter(|place| is_shown(*place)).for_each(|place| needed[self.index(place)] = true);
                }
            }
        }
        needed
    }
}

pub struct PerScoreBuffer {
    memory: Memory,
    shape: PerScore,
    /// Bytes of one element.
    bytes: usize,
}

impl PerScoreBuffer {
    /// `encode` gives the bytes of a value. `filler` stands in place of values that are None and in
    /// gaps.
    pub fn new<T>(
        backend: &Backend,
        shape: PerScore,
        filler: &[u8],
        values: impl Iterator<Item = Option<T>>,
        encode: impl Fn(T) -> Vec<u8>,
    ) -> PerScoreBuffer {
        let last = shape.places().max().map_or(shape.lead, |place| place + 1);
        let mut bytes = filler.repeat(last + GUARD);
        for (place, value) in shape.places().zip(values) {
            if let Some(value) = value {
                bytes[place * filler.len()..][..filler.len()].copy_from_slice(&encode(value));
            }
        }
        PerScoreBuffer { memory: upload(backend, &bytes), shape, bytes: filler.len() }
    }

    pub fn view(&self) -> ScoresRef {
        let [stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k] =
            self.shape.strides.map(|stride| stride as i64);
        let data = self.memory.address().wrapping_byte_add(self.shape.lead * self.bytes);
        ScoresRef { data, stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k }
    }

    /// The fp32 values. Panics if a byte between them changed.
    pub fn read_fp32(&self, backend: &Backend, name: &str) -> Vec<f32> {
        let mut bytes = download(backend, &self.memory);
        let values = self.shape.places().map(|place| {
            let element = &mut bytes[place * 4..][..4];
            let value = f32::from_le_bytes([element[0], element[1], element[2], element[3]]);
            element.fill(CANARY);
            value
        });
        let values = values.collect();
        let stray = bytes.iter().position(|byte| *byte != CANARY);
        assert!(stray.is_none(), "{name}: byte {} outside of the tensor was written", stray.unwrap_or(0));
        values
    }
}
