//! Arena: the device buffers of one problem and the `Call` that uses them, filled with random or
//! with given values.
//!
//! The tuner's own tensors are packed (batch, seqlen, heads, dim), with the row pitch of the
//! problem's layout class. Tensors that hold sequences end to end are (total, heads, dim), and
//! pages are (pages, page size, heads, dim). The timing runs and the check both use an arena, on
//! any backend.

use super::features::{FeatureBuffers, ListDensity, feature_bytes, scale};
use super::lengths::Lengths;
use super::pages::Pages;
use super::values::{decode, decode_row, encode, encode_row, normals};
use crate::backend::{Backend, Memory};
use crate::call::{Call, TensorRef};
use crate::dropout::Dropout;
use crate::error::Result;
use crate::problem::{Dtype, ElementType, Features, Layout, Pass, Problem};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    Q,
    K,
    V,
    Out,
    Dout,
    Dq,
    Dk,
    Dv,
}

/// The tensors of a pass, inputs first.
pub const fn tensors(pass: Pass) -> &'static [Tensor] {
    use Tensor::*;
    match pass {
        Pass::Forward => &[Q, K, V, Out],
        Pass::Backward => &[Q, K, V, Out, Dout, Dq, Dk, Dv],
    }
}

/// The outputs among them.
pub const fn outputs(pass: Pass) -> &'static [Tensor] {
    use Tensor::*;
    match pass {
        Pass::Forward => &[Out],
        Pass::Backward => &[Dq, Dk, Dv],
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub rows: usize,
    pub dim: usize,
    /// Elements from one row to the next.
    pub pitch: usize,
}

impl Shape {
    pub fn of(problem: &Problem, tensor: Tensor) -> Shape {
        let (entries, seqlen, heads, dim) = extents(problem, tensor);
        let positions = total(problem, tensor).unwrap_or(entries * seqlen);
        Shape {
            rows: (positions * heads) as usize,
            dim: dim as usize,
            pitch: pitch(element(problem, tensor), dim, problem) as usize,
        }
    }

    const fn elements(&self) -> usize {
        self.rows * self.pitch
    }
}

/// The type of a tensor's elements.
pub fn element(problem: &Problem, tensor: Tensor) -> ElementType {
    match tensor {
        Tensor::Q => problem.query_type(),
        Tensor::K | Tensor::V => problem.key_type(),
        _ => problem.dtype.into(),
    }
}

/// (batch entries or pages, positions in each, heads, dim) of a tensor.
fn extents(p: &Problem, tensor: Tensor) -> (i64, i64, i64, i64) {
    let (entries, seqlen_k) = Pages::of(p).map_or((p.batch_size, p.seqlen_k), |pages| (pages.count, pages.size));
    match tensor {
        Tensor::Q | Tensor::Dq => (p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim),
        Tensor::K | Tensor::Dk => (entries, seqlen_k, p.num_heads_kv, p.head_dim),
        Tensor::V | Tensor::Dv => (entries, seqlen_k, p.num_heads_kv, p.head_dim_v),
        Tensor::Out | Tensor::Dout => (p.batch_size, p.seqlen_q, p.num_heads_q, p.head_dim_v),
    }
}

/// Whether the tensor has a row for each query; otherwise it has one for each key.
const fn is_of_queries(tensor: Tensor) -> bool {
    matches!(tensor, Tensor::Q | Tensor::Out | Tensor::Dout | Tensor::Dq)
}

/// The number of positions of a tensor that holds sequences end to end; None for any other tensor.
fn total(problem: &Problem, tensor: Tensor) -> Option<i64> {
    let varlen = problem.features.varlen?;
    if is_of_queries(tensor) { varlen.total_q } else { varlen.total_k }
}

/// The shortest row pitch of exactly this layout class. A kernel for 4-element accesses is thus
/// timed on rows where 8-element accesses would be misaligned.
fn pitch(element: ElementType, dim: i64, problem: &Problem) -> i64 {
    let dim = element.elements(dim);
    // Elements of one byte count by the pair.
    let unit = if element.bytes() == 1 { 2 } else { 1 };
    let step = unit * problem.layout.elements();
    let pitch = (dim + step - 1) / step * step;
    if Layout::widest(problem.dtype, [pitch / unit]) < problem.layout { pitch + step } else { pitch }
}

pub struct Arena {
    call: Call,
    /// In the order of `tensors(pass)`.
    tensors: Vec<Memory>,
    lse: Memory,
    lengths: Lengths,
    features: FeatureBuffers,
    /// Keeps the memory of `call.workspace` alive.
    _workspace: Memory,
}

impl Arena {
    /// Allocates the buffers and leaves their contents undefined.
    pub fn new(
        backend: &Backend,
        problem: &Problem,
        dropout: Dropout,
        lengths: Lengths,
        density: ListDensity,
    ) -> Result<Arena> {
        let allocate = |bytes: usize| backend.allocate(bytes.max(SMALLEST));
        let tensors: Vec<Memory> =
            tensors(problem.pass).iter().map(|tensor| allocate(bytes_of(problem, *tensor))).collect::<Result<_>>()?;
        let lse = allocate(problem.lse_elements() as usize * 4)?;
        let workspace = allocate(problem.workspace_bytes())?;
        let features = FeatureBuffers::new(backend, problem, &lengths, density)?;
        let view = |tensor: Tensor| match self::tensors(problem.pass).iter().position(|t| *t == tensor) {
            Some(at) => {
                let (_, seqlen, heads, dim) = extents(problem, tensor);
                let pitch = pitch(element(problem, tensor), dim, problem);
                TensorRef::packed(tensors[at].address(), seqlen, heads, pitch)
            }
            None => TensorRef::NULL,
        };
        let call = Call {
            problem: *problem,
            softmax_scale: (1.0 / (problem.head_dim as f64).sqrt()) as f32,
            dropout,
            q: view(Tensor::Q),
            k: view(Tensor::K),
            v: view(Tensor::V),
            out: view(Tensor::Out),
            lse: lse.address().cast(),
            dout: view(Tensor::Dout),
            dq: view(Tensor::Dq),
            dk: view(Tensor::Dk),
            dv: view(Tensor::Dv),
            features: features.args(),
            most_splits: 0,
            workspace: if problem.workspace_bytes() == 0 { std::ptr::null_mut() } else { workspace.address() },
        };
        Ok(Arena { call, tensors, lse, lengths, features, _workspace: workspace })
    }

    /// Buffers for timing: normally distributed inputs, an LSE near that of these inputs, and
    /// outputs of any content.
    pub fn random(backend: &Backend, problem: &Problem, dropout: Dropout, seed: u32) -> Result<Arena> {
        let arena = Arena::new(backend, problem, dropout, Lengths::even(problem), ListDensity::Sparse)?;
        let normals = normals(POOL, seed);
        for (at, tensor) in tensors(problem.pass).iter().enumerate() {
            if outputs(problem.pass).contains(tensor) {
                continue;
            }
            let (bytes, element) = (bytes_of(problem, *tensor), element(problem, *tensor));
            let Shape { dim, pitch, .. } = Shape::of(problem, *tensor);
            let pool = match element {
                ElementType::Plain(_) => encode_row(&normals, element),
                // With scales of about an eighth.
                ElementType::Eight(_) => encode_row(&normals.iter().map(|x| 8.0 * x).collect::<Vec<_>>(), element),
                // Whole rows, so that scales are where they belong. The offset is one of rows too.
                ElementType::Four(_) => normals
                    .chunks_exact(dim)
                    .flat_map(|row| {
                        let mut row = encode_row(row, element);
                        row.resize(pitch, 0);
                        row
                    })
                    .collect(),
            };
            let step = if matches!(element, ElementType::Four(_)) { pitch } else { 4099 * element.bytes() };
            // Each tensor starts at another offset of the pool. Rows recur only after the pool's
            // prime length.
            let (ahead, behind) = pool.split_at(at * step);
            let mut values = Vec::with_capacity(bytes);
            for part in [behind, ahead].into_iter().cycle() {
                values.extend_from_slice(&part[..part.len().min(bytes - values.len())]);
                if values.len() == bytes {
                    break;
                }
            }
            backend.upload(&arena.tensors[at], &values)?;
        }
        if problem.pass == Pass::Backward {
            arena.write_lse(backend, &expected_lse(problem))?;
        }
        Ok(arena)
    }

    pub fn call(&self) -> &Call {
        &self.call
    }

    pub fn features(&self) -> &FeatureBuffers {
        &self.features
    }

    /// For each position of the tensor, whether a sequence uses it.
    fn used(&self, tensor: Tensor) -> Vec<bool> {
        let problem = &self.call.problem;
        match (is_of_queries(tensor), Pages::of(problem)) {
            (true, _) => Lengths::used(&self.lengths.q, problem.seqlen_q, total(problem, tensor)),
            (false, None) => Lengths::used(&self.lengths.k, problem.seqlen_k, total(problem, tensor)),
            (false, Some(pages)) => pages.used(&self.lengths.k),
        }
    }

    /// For each row of the LSE, whether a sequence uses it.
    fn used_lse(&self) -> Vec<bool> {
        let (used, problem) = (self.used(Tensor::Q), &self.call.problem);
        // Every head repeats the positions: all of them end to end, or those of one batch entry.
        let entry = if total(problem, Tensor::Q).is_some() { used.len() } else { problem.seqlen_q as usize };
        let heads = problem.num_heads_q as usize;
        used.chunks(entry.max(1)).flat_map(|positions| positions.repeat(heads)).collect()
    }

    /// Fills a tensor with NaN, gaps between rows included, so that a read of an unwritten element
    /// shows.
    pub fn poison(&self, backend: &Backend, tensor: Tensor) -> Result<()> {
        backend.upload(self.memory(tensor), &vec![NAN_BYTE; bytes_of(&self.call.problem, tensor)])
    }

    /// Writes rows of `dim` values each, with NaN in the gaps between them and in the rows that no
    /// sequence uses. Rows of 8 bits are divided by their scales.
    pub fn write(&self, backend: &Backend, tensor: Tensor, values: &[f32]) -> Result<()> {
        let problem = &self.call.problem;
        let shape = Shape::of(problem, tensor);
        let element = element(problem, tensor);
        let mut bytes = vec![NAN_BYTE; bytes_of(problem, tensor)];
        let rows =
            bytes.chunks_exact_mut(shape.pitch * element.bytes()).zip(values.chunks_exact(shape.dim)).enumerate();
        for ((row, (to, from)), _) in rows.zip(self.used_rows(tensor)).filter(|(_, is_used)| *is_used) {
            let scale = scale_of_row(problem, tensor, row);
            let encoded = encode_row(&from.iter().map(|x| x / scale).collect::<Vec<_>>(), element);
            to[..encoded.len()].copy_from_slice(&encoded);
        }
        backend.upload(self.memory(tensor), &bytes)
    }

    /// Reads the rows. A row that no sequence uses reads as 0 while it still holds the NaN of
    /// `poison`.
    pub fn read(&self, backend: &Backend, tensor: Tensor) -> Result<Vec<f32>> {
        let shape = Shape::of(&self.call.problem, tensor);
        let mut bytes = vec![0; shape.elements() * self.call.problem.dtype.bytes()];
        backend.download(self.memory(tensor), &mut bytes)?;
        let spaced = decode(&bytes, self.call.problem.dtype);
        let mut values: Vec<f32> =
            spaced.chunks_exact(shape.pitch).flat_map(|row| &row[..shape.dim]).copied().collect();
        for (row, is_used) in values.chunks_exact_mut(shape.dim).zip(self.used_rows(tensor)) {
            if !is_used && row.iter().all(|x| x.is_nan()) {
                row.fill(0.0);
            }
        }
        Ok(values)
    }

    /// For each row (position, head) of the tensor, whether a sequence uses it.
    fn used_rows(&self, tensor: Tensor) -> impl Iterator<Item = bool> + use<> {
        let heads = extents(&self.call.problem, tensor).2 as usize;
        self.used(tensor).into_iter().flat_map(move |is_used| std::iter::repeat_n(is_used, heads))
    }

    /// Writes the LSE, with NaN in the rows that no sequence uses.
    pub fn write_lse(&self, backend: &Backend, values: &[f32]) -> Result<()> {
        let used = values.iter().zip(self.used_lse()).map(|(lse, is_used)| if is_used { *lse } else { f32::NAN });
        backend.upload(&self.lse, &encode(&used.collect::<Vec<_>>(), Dtype::Fp32))
    }

    /// Reads the LSE. A row that no sequence uses reads as -inf while it still holds NaN.
    pub fn read_lse(&self, backend: &Backend) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.call.problem.lse_elements() as usize * 4];
        backend.download(&self.lse, &mut bytes)?;
        let unless_unused =
            |(lse, is_used): (f32, bool)| if !is_used && lse.is_nan() { f32::NEG_INFINITY } else { lse };
        Ok(decode(&bytes, Dtype::Fp32).into_iter().zip(self.used_lse()).map(unless_unused).collect())
    }

    fn memory(&self, tensor: Tensor) -> &Memory {
        let at = tensors(self.call.problem.pass).iter().position(|t| *t == tensor);
        &self.tensors[at.expect("a tensor of this pass")]
    }
}

/// The values as a tensor of the problem holds them: rounded, and with 8 bits times their scales.
pub fn rounded(problem: &Problem, tensor: Tensor, values: &[f32]) -> Vec<f32> {
    let (shape, element) = (Shape::of(problem, tensor), element(problem, tensor));
    let of_row = |(row, values): (usize, &[f32])| {
        let scale = scale_of_row(problem, tensor, row);
        let scaled: Vec<f32> = values.iter().map(|x| x / scale).collect();
        decode_row(&encode_row(&scaled, element), element, shape.dim).into_iter().map(move |x| x * scale)
    };
    values.chunks_exact(shape.dim).enumerate().flat_map(of_row).collect()
}

/// The scale of a row (position, head) of 8 bits; 1 for other tensors.
fn scale_of_row(problem: &Problem, tensor: Tensor, row: usize) -> f32 {
    if !matches!(element(problem, tensor), ElementType::Eight(_)) {
        return 1.0;
    }
    let heads = extents(problem, tensor).2 as usize;
    let head_kv = row % heads * problem.num_heads_kv as usize / heads;
    scale(problem, tensor == Tensor::V, row / heads, head_kv)
}

fn bytes_of(problem: &Problem, tensor: Tensor) -> usize {
    Shape::of(problem, tensor).elements() * element(problem, tensor).bytes()
}

/// Bytes of one arena, the workspace included.
pub fn arena_bytes(problem: &Problem) -> u128 {
    let rest = [problem.lse_elements() as usize * 4, feature_bytes(problem), problem.workspace_bytes()];
    tensor_bytes(problem).chain(rest.map(|bytes| bytes as u128)).sum()
}

pub fn largest_tensor_bytes(problem: &Problem) -> u128 {
    tensor_bytes(problem).max().unwrap_or(0)
}

fn tensor_bytes(problem: &Problem) -> impl Iterator<Item = u128> {
    let bytes = |tensor: &Tensor| {
        let Shape { rows, pitch, .. } = Shape::of(problem, *tensor);
        rows as u128 * pitch as u128 * element(problem, *tensor).bytes() as u128
    };
    tensors(problem.pass).iter().map(bytes)
}

/// The least size of an allocation: a tensor without elements still has an address.
const SMALLEST: usize = 256;
/// Every pattern of this byte is a NaN in fp16, bf16 and fp32.
const NAN_BYTE: u8 = 0xff;
/// The number of random values per problem, a prime.
const POOL: usize = 1_048_573;

/// An estimate of the LSE for normal Q and K: log(visible keys) + 1/2, since E[exp(s)] = exp(1/2)
/// for a normal s. It takes every sequence as the longest and leaves out features that change the
/// scores.
fn expected_lse(problem: &Problem) -> Vec<f32> {
    let longest = Problem { features: Features { varlen: None, ..problem.features }, ..*problem };
    let row = |i: i64| {
        let end = longest.right_shift().map_or(problem.seqlen_k, |shift| (i + shift + 1).min(problem.seqlen_k));
        let begin = longest.left_shift().map_or(0, |shift| (i + shift).max(0));
        if end <= begin { f32::NEG_INFINITY } else { ((end - begin) as f32).ln() + 0.5 }
    };
    let rows: Vec<f32> = (0..problem.seqlen_q).map(row).collect();
    rows.iter().cycle().take(problem.lse_elements() as usize).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Causal, Varlen, Window};

    #[test]
    fn the_pitch_has_exactly_the_layout_class() {
        let of_16_bits = [Layout::Vec8, Layout::Vec4, Layout::Vec2, Layout::Vec1].map(|layout| (Dtype::Bf16, layout));
        for (dtype, layout) in of_16_bits.into_iter().chain([(Dtype::Fp32, Layout::Vec4), (Dtype::Fp32, Layout::Vec1)])
        {
            for dim in (1..=130).filter(|dim| dim % layout.elements() == 0) {
                let problem = Problem { layout, ..Problem::dense(Pass::Forward, dtype, 1, 1, 1, dim) };
                let pitch = pitch(dtype.into(), dim, &problem);
                assert!(pitch >= dim && pitch <= dim + layout.elements(), "{dim} {layout:?}: {pitch}");
                assert_eq!(Layout::widest(dtype, [pitch]), layout, "{dim} {layout:?}: {pitch}");
            }
        }
    }

    #[test]
    fn varlen_rows_see_as_many_keys_as_rows_of_equal_lengths() {
        let equal = Problem {
            seqlen_k: 100,
            causal: Causal::BottomRight,
            features: Features { window: Window { left: Some(40), ..Window::default() }, ..Features::NONE },
            ..Problem::dense(Pass::Backward, Dtype::Bf16, 1, 1, 10, 64)
        };
        let varlen = Features { varlen: Some(Varlen::default()), ..equal.features };
        assert_eq!(expected_lse(&Problem { features: varlen, ..equal }), expected_lse(&equal));
        assert!(expected_lse(&equal).iter().all(|lse| *lse == 41f32.ln() + 0.5));
    }
}
