//! Scores: softcap, ALiBi, bias and mask (bytes or bits), applied between Q K^T and the softmax by
//! both passes.
//!
//! The forward pass works on columns of a tile and the backward pass on rows; both are lines here.
//! A caller passes only the part of a line that causal and window leave, so no hidden element is
//! read. Scores leave this file in base 2.

use super::element::Element;
use super::read_only::ReadOnly;
use super::sequence::Sequence;
use super::simd::Level;
use super::tile::{Axis, BlockKind, Line};
use super::vector::{add_distances, add_scaled, cap, cap_with_slopes};
use crate::call::{Call, ScoresRef};
use std::f32::consts::LOG2_E;

#[derive(Clone, Copy)]
pub struct ScoreModifier<E> {
    level: Level,
    /// The caller multiplies Q K^T with it before `modify`.
    pub factor: f32,
    /// softcap * log2(e)
    softcap_log2: Option<f32>,
    /// ALiBi's slopes, and the stride between batch entries in elements.
    slopes: Option<(ReadOnly<f32>, usize)>,
    bias: Option<Scores<E>>,
    mask: Option<Mask>,
}

#[derive(Clone, Copy)]
enum Mask {
    Bytes(Scores<u8>),
    /// A byte holds the bits of eight keys; the lowest bit is the first key's.
    Bits(Scores<u8>),
}

impl<E: Element> ScoreModifier<E> {
    pub fn new(call: &Call, level: Level) -> Self {
        let (of, args) = (&call.problem.features, &call.features);
        ScoreModifier {
            level,
            factor: if of.softcap { call.softmax_scale / args.softcap } else { call.softmax_scale * LOG2_E },
            softcap_log2: of.softcap.then_some(args.softcap * LOG2_E),
            slopes: of.alibi.then_some((ReadOnly::new(args.alibi_slopes), args.alibi_stride_batch as usize)),
            bias: of.bias.then(|| Scores::new(&args.bias)),
            mask: of.mask.then(|| match of.mask_bits {
                true => Mask::Bits(Scores::new(&args.mask)),
                false => Mask::Bytes(Scores::new(&args.mask)),
            }),
        }
    }

    pub fn is_needed(&self) -> bool {
        self.has_softcap() || self.slopes.is_some() || self.bias.is_some() || self.mask.is_some()
    }

    pub fn has_softcap(&self) -> bool {
        self.softcap_log2.is_some()
    }

    /// Turns the line's products, already multiplied with `factor`, into scores. With a softcap,
    /// `slopes` receives 1 - tanh^2, the factor of a score's gradient on its way back. The line
    /// lies in one block, which is not empty.
    pub fn modify(
        &self,
        sequence: &Sequence,
        line: Line,
        kind: BlockKind,
        scores: &mut [f32],
        slopes: Option<&mut [f32]>,
    ) {
        match (self.softcap_log2, slopes) {
            (None, _) => {}
            (Some(softcap), None) => cap(self.level, scores, softcap),
            (Some(softcap), Some(slopes)) => cap_with_slopes(self.level, scores, softcap, slopes),
        }
        if let Some((slopes, stride)) = self.slopes {
            // SAFETY: a slope of this batch entry and query head.
            let slope = unsafe { slopes.at(sequence.batch * stride + line.head) };
            let distance = (line.row + sequence.seqlen_k) as i64 - (sequence.seqlen_q + line.key) as i64;
            let step = if line.axis == Axis::Rows { 1 } else { -1 };
            add_distances(self.level, scores, -slope * LOG2_E, distance as i32, step);
        }
        if let Some(bias) = &self.bias {
            self.add_bias(bias, sequence.batch, line, scores);
        }
        if let Some(mask) = self.mask.as_ref().filter(|_| kind == BlockKind::Partial) {
            mask.hide(sequence.batch, line, scores);
        }
    }

    fn add_bias(&self, bias: &Scores<E>, batch: usize, line: Line, scores: &mut [f32]) {
        const PIECE: usize = 64;
        let mut gathered = [E::ZERO; PIECE];
        let mut wide = [0.0; PIECE];
        let (first, stride) = bias.line(batch, line);
        for (piece, scores) in scores.chunks_mut(PIECE).enumerate() {
            let first = first.wrapping_offset((piece * PIECE) as isize * stride);
            for (at, element) in gathered[..scores.len()].iter_mut().enumerate() {
                // SAFETY: an element of a row and key of this sequence.
                *element = unsafe { first.wrapping_offset(at as isize * stride).read() };
            }
            let wide = &mut wide[..scores.len()];
            E::widen(self.level, &gathered[..scores.len()], wide);
            add_scaled(self.level, scores, LOG2_E, wide);
        }
    }
}

impl Mask {
    /// Puts -inf in place of the line's scores whose keys it hides.
    fn hide(&self, batch: usize, line: Line, scores: &mut [f32]) {
        match self {
            Mask::Bytes(bytes) => {
                let (first, stride) = bytes.line(batch, line);
                for (at, score) in scores.iter_mut().enumerate() {
                    // SAFETY: a byte of a row and key of this sequence.
                    if unsafe { first.wrapping_offset(at as isize * stride).read() } == 0 {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
            Mask::Bits(bits) => {
                let (first, stride) = bits.line(batch, Line { key: line.key / 8, ..line });
                let first_bit = line.key % 8;
                for (at, score) in scores.iter_mut().enumerate() {
                    let (byte, bit) = match line.axis {
                        Axis::Rows => (at as isize * stride, first_bit),
                        Axis::Keys => (((first_bit + at) / 8) as isize, (first_bit + at) % 8),
                    };
                    // SAFETY: the byte of a row and key of this sequence.
                    if unsafe { first.wrapping_offset(byte).read() } >> bit & 1 == 0 {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// A (batch, heads_q, seqlen_q, seqlen_k) tensor of the caller.
#[derive(Clone, Copy)]
pub struct Scores<T> {
    data: *mut T,
    stride_batch: isize,
    stride_head: isize,
    stride_row: isize,
    stride_key: isize,
}

// SAFETY: addresses and strides; each access is an unsafe block whose author answers for it.
unsafe impl<T> Send for Scores<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Scores<T> {}

impl<T> Scores<T> {
    pub fn new(scores: &ScoresRef) -> Self {
        Scores {
            data: scores.data.cast(),
            stride_batch: scores.stride_batch as isize,
            stride_head: scores.stride_head as isize,
            stride_row: scores.stride_seqlen_q as isize,
            stride_key: scores.stride_seqlen_k as isize,
        }
    }

    /// The line's first element, and the stride along the line in elements.
    pub fn line(&self, batch: usize, line: Line) -> (*mut T, isize) {
        let offset = batch as isize * self.stride_batch
            + line.head as isize * self.stride_head
            + line.row as isize * self.stride_row
            + line.key as isize * self.stride_key;
        let stride = if line.axis == Axis::Rows { self.stride_row } else { self.stride_key };
        (self.data.wrapping_offset(offset), stride)
    }
}
