//! The device buffers of a problem's features, with values that every backend represents exactly.
//!
//! Problems that differ only in the dtype get the same values, so that a candidate and its
//! reference do.

use super::lengths::Lengths;
use super::pages::Pages;
use super::values::{decode, encode, normals};
use crate::backend::{Backend, Memory};
use crate::call::{BlockLists, FeatureArgs, Scales, ScoresRef, TensorRef};
use crate::error::Result;
use crate::problem::{Dtype, Pass, Problem};
use std::ffi::c_void;

/// A cap low enough to bend the scores of normal Q and K.
const SOFTCAP: f32 = 4.0;
/// The most bytes of a bias or mask, since the problem's own tensors may be much smaller. A larger
/// one shrinks to one that all heads share, or all rows too.
const MAX_BYTES: i64 = 256 << 20;
/// The number of random values per tensor, a prime; they recur.
const POOL: usize = 65_537;

/// The density of a block mask's lists.
#[derive(Clone, Copy, Debug)]
pub enum ListDensity {
    /// A quarter of the blocks, every other one of them full. The share is smaller if the lists
    /// would take more than `MAX_BYTES`. For timing.
    Sparse,
    /// Three quarters of the blocks, a third of them full. Two blocks a side suffice for a row with
    /// one block of each kind and for a block that is not listed. For the check.
    Dense,
}

pub struct FeatureBuffers {
    args: FeatureArgs,
    dbias: Option<Memory>,
    dsinks: Option<Memory>,
    shape: ScoresShape,
    heads: usize,
    /// Keeps the memory of the args alive.
    _inputs: Vec<Memory>,
}

/// A gradient that the pass sums for a feature, in rows of `dim` fp32.
pub struct FeatureGradient {
    pub name: &'static str,
    pub dim: usize,
    pub values: Vec<f32>,
}

/// The shape of a tensor with one value for each score, shared by all batch entries.
#[derive(Clone, Copy)]
struct ScoresShape {
    heads: i64,
    rows: i64,
    keys: i64,
}

impl ScoresShape {
    /// Sized in fp32, so that bias, mask and dbias have the same shape.
    fn of(problem: &Problem) -> ScoresShape {
        let Problem { num_heads_q, seqlen_q, seqlen_k, .. } = *problem;
        let [heads, rows] = [[num_heads_q, seqlen_q], [1, seqlen_q], [1, 1]]
            .into_iter()
            .find(|[heads, rows]| 4 * heads * rows * seqlen_k <= MAX_BYTES)
            .unwrap_or([1, 1]);
        ScoresShape { heads, rows, keys: seqlen_k }
    }

    fn elements(&self) -> usize {
        (self.heads * self.rows * self.keys) as usize
    }

    /// The shape in bytes of the same tensor with one bit for each score.
    fn of_bits(self) -> ScoresShape {
        ScoresShape { keys: (self.keys + 7) / 8, ..self }
    }

    fn view(&self, data: *mut c_void) -> ScoresRef {
        ScoresRef {
            data,
            stride_batch: 0,
            stride_head: if self.heads == 1 { 0 } else { self.rows * self.keys },
            stride_seqlen_q: if self.rows == 1 { 0 } else { self.keys },
            stride_seqlen_k: 1,
        }
    }
}

impl FeatureBuffers {
    pub fn new(
        backend: &Backend,
        problem: &Problem,
        lengths: &Lengths,
        density: ListDensity,
    ) -> Result<FeatureBuffers> {
        let of = &problem.features;
        let shape = ScoresShape::of(problem);
        let heads = problem.num_heads_q as usize;
        let mut inputs = Vec::new();
        let mut upload = |is_on: bool, bytes: &dyn Fn() -> Vec<u8>| -> Result<*mut c_void> {
            if !is_on {
                return Ok(std::ptr::null_mut());
            }
            let bytes = bytes();
            let memory = backend.allocate(bytes.len().max(1))?;
            backend.upload(&memory, &bytes)?;
            inputs.push(memory);
            Ok(inputs[inputs.len() - 1].address())
        };
        let pool = |seed| normals(POOL, seed);
        let fp32 = |count: usize, seed| encode(&recurring(&pool(seed), count), Dtype::Fp32);
        // The slopes of the ALiBi paper for the heads in order, shared by the batch.
        let slopes = || {
            encode(&(1..=heads).map(|head| (-8.0 * head as f32 / heads as f32).exp2()).collect::<Vec<_>>(), Dtype::Fp32)
        };
        let alibi_slopes = upload(of.alibi, &slopes)?.cast();
        // Multiples of 1/8, which every dtype holds.
        let eighths =
            || recurring(&pool(31).iter().map(|x| (8.0 * x).round() / 8.0).collect::<Vec<_>>(), shape.elements());
        let bias = upload(of.bias, &|| encode(&eighths(), problem.dtype))?;
        // The mask hides one key of eight.
        let bytes = || recurring(&pool(32).iter().map(|x| u8::from(*x > -1.15)).collect::<Vec<_>>(), shape.elements());
        // Packs eight mask bytes into one byte of bits, the first key lowest.
        let of_byte = |shown: &[u8]| shown.iter().rev().fold(0, |bits, bit| bits << 1 | bit);
        let bits = || {
            let rows = bytes();
            rows.chunks(shape.keys as usize).flat_map(|row| row.chunks(8).map(of_byte)).collect()
        };
        let mask = upload(of.mask, if of.mask_bits { &bits } else { &bytes })?;
        let sinks = upload(of.sinks, &|| fp32(heads, 33))?.cast();
        let dlse = upload(of.dlse, &|| fp32(problem.lse_elements() as usize, 34))?.cast();
        let varlen = of.varlen.unwrap_or_default();
        let mut upload_lengths = |total: Option<i64>, lengths: &[i64]| -> Result<[*const i32; 2]> {
            let ends = || {
                lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                })
            };
            let cu_seqlens = || int32(std::iter::once(0).chain(ends()));
            let cu_seqlens = upload(total.is_some(), &cu_seqlens)?;
            let seqused = upload(of.varlen.is_some() && total.is_none(), &|| int32(lengths.iter().copied()))?;
            Ok([cu_seqlens, seqused].map(|array| array.cast_const().cast()))
        };
        let [cu_seqlens_q, seqused_q] = upload_lengths(varlen.total_q, &lengths.q)?;
        let [cu_seqlens_k, seqused_k] = upload_lengths(varlen.total_k, &lengths.k)?;
        // Each sequence in its own entry, from the first row on, as without the feature.
        let own_entries = || int32(0..problem.batch_size);
        let cache_batch_idx = upload(of.key_starts, &own_entries)?.cast_const().cast();
        let leftpad_k = upload(of.key_starts, &|| int32((0..problem.batch_size).map(|_| 0)))?.cast_const().cast();
        let pages = Pages::of(problem);
        let block_table = upload(pages.is_some(), &|| int32(pages.iter().flat_map(Pages::table)))?.cast_const().cast();
        let block_lists = match problem.list_extents() {
            None => BlockLists::NULL,
            Some(extents) => {
                let ([num_blocks, indices, full_num_blocks, full_indices], max_blocks) =
                    lists(problem.pass, extents, density);
                let mut upload = |list: Vec<i64>| {
                    upload(true, &|| int32(list.iter().copied())).map(|array| array.cast_const().cast())
                };
                BlockLists {
                    num_blocks: upload(num_blocks)?,
                    indices: upload(indices)?,
                    full_num_blocks: upload(full_num_blocks)?,
                    full_indices: upload(full_indices)?,
                    indices_stride_row: max_blocks,
                    max_blocks,
                    ..BlockLists::NULL
                }
            }
        };
        let rows_of_keys = match (&pages, of.varlen.and_then(|varlen| varlen.total_k)) {
            (Some(pages), _) => [pages.count, pages.size],
            (None, Some(total_k)) => [1, total_k],
            (None, None) => [problem.batch_size, problem.seqlen_k],
        };
        let mut upload_scales = |is_on: bool, is_v: bool, [entries, positions, heads]: [i64; 3]| -> Result<TensorRef> {
            let positions_of_all = (entries * positions) as usize;
            let of_position =
                |position: usize| (0..heads as usize).map(move |head| scale(problem, is_v, position, head));
            let values = || encode(&(0..positions_of_all).flat_map(of_position).collect::<Vec<_>>(), Dtype::Fp32);
            let data = upload(is_on, &values)?;
            Ok(if is_on { TensorRef::packed(data, positions, heads, 1) } else { TensorRef::NULL })
        };
        let of_keys = problem.scale_extents(rows_of_keys);
        let scales = Scales {
            q: upload_scales(of.has_fp8_queries(), false, [problem.batch_size, 1, problem.num_heads_kv])?,
            k: upload_scales(of.eight_bits.is_some(), false, of_keys)?,
            v: upload_scales(of.eight_bits.is_some(), true, of_keys)?,
        };
        let output = |is_on: bool, elements: usize| -> Result<Option<Memory>> {
            is_on.then(|| backend.allocate((4 * elements).max(1))).transpose()
        };
        let dbias = output(of.dbias, shape.elements())?;
        let dsinks = output(of.sinks && problem.pass == Pass::Backward, heads)?;
        let view_as = |shape: ScoresShape, data: *mut c_void| match data.is_null() {
            true => ScoresRef::NULL,
            false => shape.view(data),
        };
        let view = |data| view_as(shape, data);
        let args = FeatureArgs {
            softcap: if of.softcap { SOFTCAP } else { 0.0 },
            alibi_slopes,
            alibi_stride_batch: 0,
            bias: view(bias),
            dbias: dbias.as_ref().map_or(ScoresRef::NULL, |memory| shape.view(memory.address())),
            mask: view_as(if of.mask_bits { shape.of_bits() } else { shape }, mask),
            sinks,
            dsinks: dsinks.as_ref().map_or(std::ptr::null_mut(), |memory| memory.address().cast()),
            dlse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            block_table,
            block_table_stride: pages.as_ref().map_or(0, |pages| pages.blocks),
            num_pages: pages.as_ref().map_or(if of.key_starts { problem.batch_size } else { 0 }, |pages| pages.count),
            cache_batch_idx,
            leftpad_k,
            block_lists,
            scales,
        };
        Ok(FeatureBuffers { args, dbias, dsinks, shape, heads, _inputs: inputs })
    }

    pub fn args(&self) -> FeatureArgs {
        self.args
    }

    /// Fills the gradients that the pass adds to with zeros, and those that it writes with NaN.
    pub fn clear_gradients(&self, backend: &Backend) -> Result<()> {
        if let Some(dbias) = &self.dbias {
            backend.upload(dbias, &vec![0; 4 * self.shape.elements()])?;
        }
        match &self.dsinks {
            Some(dsinks) => backend.upload(dsinks, &encode(&vec![f32::NAN; self.heads], Dtype::Fp32)),
            None => Ok(()),
        }
    }

    pub fn read_gradients(&self, backend: &Backend) -> Result<Vec<FeatureGradient>> {
        let read = |name, memory: &Memory, elements: usize, dim| {
            let mut bytes = vec![0; 4 * elements];
            backend.download(memory, &mut bytes)?;
            Ok(FeatureGradient { name, dim, values: decode(&bytes, Dtype::Fp32) })
        };
        let dbias =
            self.dbias.iter().map(|dbias| read("dbias", dbias, self.shape.elements(), self.shape.keys as usize));
        let dsinks = self.dsinks.iter().map(|dsinks| read("dsinks", dsinks, self.heads, self.heads));
        dbias.chain(dsinks).collect()
    }
}

/// The scale of an 8-bit row of q, k or v: a power of two around an eighth, so that scaling rounds
/// nothing. Scales that several keys share follow from the head alone, since rows of the tensors do
/// not tell their sequence.
pub fn scale(problem: &Problem, is_v: bool, position: usize, head_kv: usize) -> f32 {
    let is_of_key = problem.features.eight_bits.is_some_and(|eight| eight.keys_per_scale == 1);
    let step = (if is_of_key { position } else { 0 } + head_kv + usize::from(is_v)) % 3;
    [0.0625, 0.125, 0.25][step]
}

/// Bytes of the problem's features. The lengths are left out, since they take almost none.
pub fn feature_bytes(problem: &Problem) -> usize {
    let (of, elements) = (&problem.features, ScoresShape::of(problem).elements());
    let bias = if of.bias { elements * problem.dtype.bytes() } else { 0 };
    let dbias = if of.dbias { 4 * elements } else { 0 };
    let mask = if of.mask { elements } else { 0 };
    let dlse = if of.dlse { 4 * problem.lse_elements() as usize } else { 0 };
    let lists = problem.list_extents().map_or(0, |(rows, cols)| {
        (2 * 4 * rows * (1 + max_blocks(cols, step(rows, cols, ListDensity::Sparse)))) as usize
    });
    bias + dbias + mask + dlse + lists
}

/// The lists of a block mask with so many rows and columns: num_blocks, indices, full_num_blocks
/// and full_indices, shared by all heads. The last value is the length of a row of indices.
pub fn lists(pass: Pass, (rows, cols): (i64, i64), density: ListDensity) -> ([Vec<i64>; 4], i64) {
    let step = step(rows, cols, density);
    let max_blocks = match density {
        ListDensity::Sparse => max_blocks(cols, step),
        ListDensity::Dense => cols,
    };
    let is_full = |row: i64, col: i64| {
        let (q, k) = if pass == Pass::Forward { (row, col) } else { (col, row) };
        match (density, (q + k) % step, (k - q).rem_euclid(step)) {
            (ListDensity::Sparse, 0, _) | (ListDensity::Dense, _, 0) => Some(true),
            (ListDensity::Sparse, sum, _) => (sum == step / 2).then_some(false),
            // The block after the diagonal is left out; a causal mask hides much of it already.
            (ListDensity::Dense, _, difference) => (difference != 1).then_some(false),
        }
    };
    let mut lists = [(); 4].map(|()| Vec::new());
    for (row, full) in (0..rows).flat_map(|row| [(row, false), (row, true)]) {
        // The pattern recurs after `step` columns.
        let first = (0..step.min(cols)).filter(|col| is_full(row, *col) == Some(full));
        let mut entries: Vec<i64> = first.flat_map(|col| (col..cols).step_by(step as usize)).collect();
        let at = 2 * usize::from(full);
        lists[at].push(entries.len() as i64);
        entries.resize(max_blocks as usize, 0);
        lists[at + 1].extend(entries);
    }
    (lists, max_blocks)
}

/// The period of the pattern in blocks, in both directions.
fn step(rows: i64, cols: i64, density: ListDensity) -> i64 {
    match density {
        ListDensity::Sparse => ((4 * rows * cols / MAX_BYTES) as u64 + 1).next_power_of_two().max(8) as i64,
        ListDensity::Dense => 4,
    }
}

/// The length of a row of indices in sparse lists, which have one entry per period for each kind.
fn max_blocks(cols: i64, step: i64) -> i64 {
    (cols + step - 1) / step
}

fn int32(values: impl Iterator<Item = i64>) -> Vec<u8> {
    values.flat_map(|value| (value as i32).to_le_bytes()).collect()
}

fn recurring<T: Copy>(pool: &[T], count: usize) -> Vec<T> {
    pool.iter().copied().cycle().take(count).collect()
}
