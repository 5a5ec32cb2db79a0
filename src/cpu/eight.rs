//! 8-bit elements of q, k and v, and their scales; and int4 rows of k and v.
//!
//! A row becomes fp32 by a table and is multiplied by its scale as it is loaded, so the passes see
//! fp32 tiles as ever. A row of int4 becomes the fp16 numbers that it stands for.

use super::element::{Element, Head, Tensor};
use super::product::Matrix;
use super::read_only::ReadOnly;
use super::sequence::{Pages, Place, Sequence, Sequences};
use super::simd::Level;
use crate::call::{Call, TensorRef};
use crate::eight::Eight;
use crate::error::{Error, Result};
use crate::four::Four;
use crate::problem::{ElementType, Problem};
use std::sync::LazyLock;

macro_rules! eight {
    ($name:ident, $table:ident) => {
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub struct $name(u8);

        static $table: LazyLock<[f32; 256]> = LazyLock::new(|| Eight::$name.table());

        impl Element for $name {
            const ZERO: Self = $name(0);
            fn widen(_level: Level, row: &[Self], wide: &mut [f32]) {
                let table = &*$table;
                wide.iter_mut().zip(row).for_each(|(wide, x)| *wide = table[usize::from(x.0)]);
            }
            fn narrow(_level: Level, wide: &[f32], row: &mut [Self]) {
                row.iter_mut().zip(wide).for_each(|(x, wide)| *x = $name(Eight::$name.encode(*wide)));
            }
        }
    };
}
eight!(E4m3, E4M3_TABLE);
eight!(E5m2, E5M2_TABLE);
eight!(Int8, INT8_TABLE);

/// A caller's q, k or v.
#[derive(Clone, Copy)]
pub struct Input<E> {
    elements: Elements<E>,
    scales: Option<Scales>,
}

#[derive(Clone, Copy)]
enum Elements<E> {
    Plain(Tensor<E>),
    E4m3(Tensor<E4m3>),
    E5m2(Tensor<E5m2>),
    Int8(Tensor<Int8>),
    /// Rows of bytes, of so many columns.
    Four(Four, Tensor<u8>, usize),
}

/// One (seqlen, dim) matrix of an input.
#[derive(Clone, Copy)]
pub struct InputHead<E> {
    elements: HeadElements<E>,
    scales: Option<(Scales, Sequence, usize)>,
}

#[derive(Clone, Copy)]
enum HeadElements<E> {
    Plain(Head<E>),
    E4m3(Head<E4m3>),
    E5m2(Head<E5m2>),
    Int8(Head<Int8>),
    Four(Four, Head<u8>, usize),
}

/// The scales of an 8-bit input.
#[derive(Clone, Copy)]
struct Scales {
    data: ReadOnly<f32>,
    strides: [usize; 3],
    /// Keys that share a scale: 0 (all of a sequence), 1 or a block's.
    keys: usize,
}

impl Scales {
    fn new(view: &TensorRef, keys: i64) -> Scales {
        let strides = [view.stride_batch, view.stride_seqlen, view.stride_head].map(|stride| stride as usize);
        Scales { data: ReadOnly::new(view.data.cast_const().cast()), strides, keys: keys as usize }
    }

    fn at(&self, sequence: &Sequence, head: usize, key: usize) -> f32 {
        let (entry, position) = match (self.keys, sequence.pages, sequence.place_k) {
            (0, ..) => (sequence.batch, 0),
            (1, Some(Pages { table, first, size }), _) => {
                // SAFETY: the table has an entry for each page of a used key (the caller checked
                // its size).
                (unsafe { table.at(first + key / size) } as usize, key % size)
            }
            (1, None, Place::Entry(entry)) => (entry, key),
            (1, None, Place::Row(row)) => (0, row + key),
            (1, None, Place::RowOfEntry(entry, row)) => (entry, row + key),
            (keys, ..) => (sequence.batch, key / keys),
        };
        let [batch, seqlen, of_head] = self.strides;
        // SAFETY: the scales have these extents (the caller checked them).
        unsafe { self.data.at(entry * batch + position * seqlen + head * of_head) }
    }
}

impl<E: Element> Input<E> {
    pub fn q(call: &Call) -> Input<E> {
        let p = &call.problem;
        let scales = p.features.has_fp8_queries().then(|| Scales::new(&call.features.scales.q, 0));
        Input { elements: Elements::new(p.query_type(), &call.q, p.head_dim), scales }
    }

    pub fn k(call: &Call) -> Input<E> {
        Input::of_keys(&call.problem, &call.k, call.problem.head_dim, &call.features.scales.k)
    }

    pub fn v(call: &Call) -> Input<E> {
        Input::of_keys(&call.problem, &call.v, call.problem.head_dim_v, &call.features.scales.v)
    }

    fn of_keys(p: &Problem, view: &TensorRef, dim: i64, scales: &TensorRef) -> Input<E> {
        let scales = p.features.eight_bits.map(|eight| Scales::new(scales, eight.keys_per_scale));
        Input { elements: Elements::new(p.key_type(), view, dim), scales }
    }

    /// The rows of a head's queries; `head_kv` has their scale.
    pub fn queries(&self, sequence: &Sequence, head: usize, head_kv: usize) -> InputHead<E> {
        let place = sequence.place_q;
        let elements = match &self.elements {
            Elements::Plain(tensor) => HeadElements::Plain(tensor.head(place, head)),
            Elements::E4m3(tensor) => HeadElements::E4m3(tensor.head(place, head)),
            Elements::E5m2(tensor) => HeadElements::E5m2(tensor.head(place, head)),
            Elements::Int8(tensor) => HeadElements::Int8(tensor.head(place, head)),
            Elements::Four(..) => unreachable!("q is not int4"),
        };
        InputHead { elements, scales: self.scales.map(|scales| (scales, *sequence, head_kv)) }
    }

    /// The rows of a head of a sequence's keys, in k or v.
    pub fn keys(&self, sequence: &Sequence, head: usize) -> InputHead<E> {
        let elements = match &self.elements {
            Elements::Plain(tensor) => HeadElements::Plain(tensor.keys(sequence, head)),
            Elements::E4m3(tensor) => HeadElements::E4m3(tensor.keys(sequence, head)),
            Elements::E5m2(tensor) => HeadElements::E5m2(tensor.keys(sequence, head)),
            Elements::Int8(tensor) => HeadElements::Int8(tensor.keys(sequence, head)),
            Elements::Four(four, tensor, dim) => HeadElements::Four(*four, tensor.keys(sequence, head), *dim),
        };
        InputHead { elements, scales: self.scales.map(|scales| (scales, *sequence, head)) }
    }
}

impl<E: Element> Elements<E> {
    fn new(element: ElementType, view: &TensorRef, dim: i64) -> Elements<E> {
        let dim = dim as usize;
        match element {
            ElementType::Plain(_) => Elements::Plain(Tensor::new(view, dim)),
            ElementType::Eight(Eight::E4m3) => Elements::E4m3(Tensor::new(view, dim)),
            ElementType::Eight(Eight::E5m2) => Elements::E5m2(Tensor::new(view, dim)),
            ElementType::Eight(Eight::Int8) => Elements::Int8(Tensor::new(view, dim)),
            ElementType::Four(four) => {
                Elements::Four(four, Tensor::new(view, four.row_bytes(dim as i64) as usize), dim)
            }
        }
    }
}

impl<E: Element> InputHead<E> {
    /// The rows, which are not of 8 bits.
    pub fn plain(&self) -> &Head<E> {
        match &self.elements {
            HeadElements::Plain(head) => head,
            _ => unreachable!("8 bits are not multiplied as they are"),
        }
    }

    /// As `Head::load`, times the scales.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    unsafe fn load(&self, first: usize, rows: usize, tile: &mut [f32], pitch: usize) {
        // SAFETY: the caller's promise, in each of the arms.
        unsafe {
            match &self.elements {
                HeadElements::Plain(head) => head.load(first, rows, tile, pitch),
                HeadElements::E4m3(head) => head.load(first, rows, tile, pitch),
                HeadElements::E5m2(head) => head.load(first, rows, tile, pitch),
                HeadElements::Int8(head) => head.load(first, rows, tile, pitch),
                HeadElements::Four(four, head, dim) => {
                    for (position, wide) in (first..first + rows).zip(tile.chunks_exact_mut(pitch)) {
                        four.decode_row(head.row(position), &mut wide[..*dim]);
                        wide[*dim..].fill(0.0);
                    }
                }
            }
        }
        if let Some((scales, sequence, head)) = &self.scales {
            for (key, row) in (first..first + rows).zip(tile.chunks_exact_mut(pitch)) {
                let scale = scales.at(sequence, *head, key);
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }

    /// As `Head::rows`, times the scales.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes during `'a`.
    pub unsafe fn rows<'a>(&self, first: usize, rows: usize, tile: &'a mut [f32], pitch: usize) -> Matrix<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.elements {
                HeadElements::Plain(head) if self.scales.is_none() => head.rows(first, rows, tile, pitch),
                _ => {
                    self.load(first, rows, tile, pitch);
                    Matrix::rows(tile, pitch)
                }
            }
        }
    }

    /// As `Head::load_transposed`, times the scale, which is one for all rows.
    ///
    /// # Safety
    /// The rows must lie in a live tensor that nobody writes meanwhile.
    pub unsafe fn load_transposed(
        &self,
        first: usize,
        rows: usize,
        padded_rows: usize,
        tile: &mut [f32],
        pitch: usize,
    ) {
        // SAFETY: the caller's promise, in each of the arms.
        unsafe {
            match &self.elements {
                HeadElements::Plain(head) => head.load_transposed(first, rows, padded_rows, tile, pitch),
                HeadElements::E4m3(head) => head.load_transposed(first, rows, padded_rows, tile, pitch),
                HeadElements::E5m2(head) => head.load_transposed(first, rows, padded_rows, tile, pitch),
                HeadElements::Int8(head) => head.load_transposed(first, rows, padded_rows, tile, pitch),
                HeadElements::Four(..) => unreachable!("q is not int4"),
            }
        }
        if let Some((scales, sequence, head)) = &self.scales {
            let scale = scales.at(sequence, *head, 0);
            tile.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// Refuses scales that are not finite or not above 0, of the sequences' keys alone: other elements
/// of the arrays may hold anything.
pub fn check_scales(call: &Call) -> Result<()> {
    if let Some(four) = call.problem.features.four_bits {
        return check_rows_of_four(call, four);
    }
    let Some(eight) = call.problem.features.eight_bits else { return Ok(()) };
    let sequences = Sequences::new(call);
    let of = &call.features.scales;
    let q = eight.queries.then(|| ("q_descale", Scales::new(&of.q, 0)));
    let keys = [("k_descale", &of.k), ("v_descale", &of.v)];
    let keys = keys.map(|(name, view)| (name, Scales::new(view, eight.keys_per_scale)));
    for (name, scales) in q.into_iter().chain(keys) {
        for batch in 0..call.problem.batch_size as usize {
            let sequence = sequences.of(batch);
            let step = if scales.keys == 0 { sequence.seqlen_k.max(1) } else { scales.keys };
            for (key, head) in (0..sequence.seqlen_k)
                .step_by(step)
                .flat_map(|key| (0..call.problem.num_heads_kv as usize).map(move |head| (key, head)))
            {
                let scale = scales.at(&sequence, head, key);
                if !(scale.is_finite() && scale > 0.0) {
                    return Err(Error::invalid(format!(
                        "{name} of sequence {batch}, key {key} and head {head} is {scale}; a scale must be finite and above 0"
                    )));
                }
            }
        }
    }
    Ok(())
}

/// Refuses int4 rows of the sequences' keys with a scale that is not finite or not above 0, or with
/// a zero that is not finite.
fn check_rows_of_four(call: &Call, four: Four) -> Result<()> {
    let sequences = Sequences::new(call);
    let p = &call.problem;
    for (name, view, dim) in [("k", &call.k, p.head_dim), ("v", &call.v, p.head_dim_v)] {
        let tensor = Tensor::<u8>::new(view, four.row_bytes(dim) as usize);
        for batch in 0..p.batch_size as usize {
            let sequence = sequences.of(batch);
            let heads = (0..p.num_heads_kv as usize).map(|head| (head, tensor.keys(&sequence, head)));
            for (head, keys, key) in
                heads.flat_map(|(head, keys)| (0..sequence.seqlen_k).map(move |key| (head, keys, key)))
            {
                // SAFETY: a row of a sequence's keys, which the caller checked and nobody writes.
                let row = unsafe { keys.row(key) };
                for group in 0..(dim / four.group()) as usize {
                    let [scale, zero] = four.scale_and_zero(row, dim as usize, group);
                    let at = || format!("of {name}, sequence {batch}, key {key}, head {head} and group {group}");
                    if !(scale.is_finite() && scale.to_f32() > 0.0) {
                        let at = at();
                        return Err(Error::invalid(format!(
                            "the scale {at} is {scale}; a scale must be finite and above 0"
                        )));
                    }
                    if !zero.is_finite() {
                        return Err(Error::invalid(format!("the zero {} is {zero}; a zero must be finite", at())));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Rounds weights from 0 to 1 as kernels with fp8 queries do: to e4m3, times 2^8, so that the range
/// of the format is used.
pub fn round_weights(weights: &mut [f32]) {
    const FACTOR: f32 = 256.0;
    for weight in weights {
        *weight = Eight::E4m3.decode(Eight::E4m3.encode(*weight * FACTOR)) / FACTOR;
    }
}
