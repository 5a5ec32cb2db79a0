//! The check: compares a candidate's output with the CPU backend's in fp32, before it may be timed.
//!
//! It runs two small problems of the candidate's class that contain the usual traps of kernels:
//! several tiles with ragged ends, shared and separate heads, rows that see no key, and NaN in
//! every byte that must not be read or must be written. The reference gets the same rounded inputs,
//! so only the candidate's own arithmetic differs.

use super::arena::{self, Arena, Tensor};
use super::features::{FeatureGradient, ListDensity};
use super::lengths::{Lengths, RAGGED};
use super::values;
use crate::backend::{Backend, Executable};
use crate::config::Config;
use crate::cpu::Cpu;
use crate::dropout::Dropout;
use crate::error::Result;
use crate::family;
use crate::problem::{BlockMask, Dtype, Features, Pass, Problem, Varlen, Window};

/// One reduced problem with its inputs and expected outputs.
struct Case {
    arena: Arena,
    expected: Vec<(Tensor, Vec<f32>)>,
    expected_gradients: Vec<FeatureGradient>,
    /// Forward only.
    expected_lse: Option<Vec<f32>>,
}

pub struct Check {
    cases: Vec<Case>,
    bound: f64,
}

impl Check {
    /// Computes the reference for the class of `problem`.
    pub fn new(backend: &Backend, problem: &Problem) -> Result<Check> {
        let oracle = Backend::Cpu(match backend {
            // Threads of its own would take memory that a limited process lacks.
            Backend::Cpu(cpu) => cpu.beside(),
            Backend::Cuda(_) => Cpu::new(0)?,
        });
        let cases = reduced(problem).iter().map(|small| Case::new(backend, &oracle, small)).collect::<Result<_>>()?;
        Ok(Check { cases, bound: bound_of(problem) })
    }

    /// The largest relative error of any row; or, in one sentence, what is wrong.
    pub fn run(&self, backend: &Backend, config: &Config, executable: &Executable) -> Result<Result<f64, String>> {
        let mut worst = 0.0;
        for case in &self.cases {
            let problem = &case.arena.call().problem;
            poison_outputs(&case.arena, backend)?;
            executable.launch(case.arena.call(), backend.stream())?;
            backend.synchronize()?;
            let features = case.arena.features().read_gradients(backend)?;
            let of_features = features.iter().zip(&case.expected_gradients);
            let mut errors: Vec<(String, f64)> = of_features
                .map(|(actual, expected)| {
                    (expected.name.to_owned(), row_error(&actual.values, &expected.values, expected.dim))
                })
                .collect();
            for (tensor, expected) in &case.expected {
                let dim = arena::Shape::of(problem, *tensor).dim;
                errors.push((format!("{tensor:?}"), row_error(&case.arena.read(backend, *tensor)?, expected, dim)));
            }
            for (name, error) in errors {
                if error.is_nan() || error > self.bound {
                    return Ok(Err(format!(
                        "{name} is off by {error:.1e} at seqlen_q {} and seqlen_k {}; {:.1e} is allowed",
                        problem.seqlen_q, problem.seqlen_k, self.bound
                    )));
                }
                worst = f64::max(worst, error);
            }
            if let Some(expected) = &case.expected_lse {
                let error = lse_error(&case.arena.read_lse(backend)?, expected);
                let allowed = lse_bound_of(problem, config);
                if error.is_nan() || error > allowed {
                    return Ok(Err(format!("lse is off by {error:.1e}; {allowed:.1e} is allowed")));
                }
            }
        }
        Ok(Ok(worst))
    }
}

/// Two shapes of the class. The first ends in ragged tiles of queries and keys for every tile up to
/// 256, and has two blocks a side of a block mask of any size. In the second the queries outnumber
/// the keys, so that with bottom-right causality the first rows see none. Where the problem's
/// workspace has room for V transposed, a candidate may use it, so the second keeps enough keys.
///
/// A problem that may decode keeps its few queries and its GQA group, whose rows are packed, and
/// gets enough keys for several splits. Over 8 bits and int4, where a CTA may have up to 8 K/V
/// heads, it keeps up to 16 of them.
fn reduced(problem: &Problem) -> [Problem; 2] {
    let is_decoding = problem.may_decode() && problem.has_few_rows();
    // A group of one head stays; three heads of a larger group show every way of sharing.
    let group_size = if is_decoding { problem.group_size() } else { problem.group_size().min(3) };
    let shares_heads = is_decoding && problem.key_format() != 0;
    let num_heads_kv = if shares_heads { problem.num_heads_kv.clamp(2, 16) } else { 2 };
    let queries = |seqlen_q| if is_decoding { problem.seqlen_q } else { seqlen_q };
    let of = &problem.features;
    let batch_size = if of.varlen.is_some() { RAGGED as i64 } else { 2 };
    let window = Window {
        left: of.window.left.map(|keys| keys.min(130)),
        right: of.window.right.map(|keys| keys.min(70)),
        ..of.window
    };
    let more_than_a_block = |block: fn(BlockMask) -> i64| of.block_mask.map_or(0, |mask| block(mask) + 37);
    let first_q = queries(293).max(more_than_a_block(|mask| mask.block_q));
    let first_k = 549.max(more_than_a_block(|mask| mask.block_k)).max(first_q + 256);
    let second_k = if problem.keeps_transposed_v() { 299 } else { 171 };
    [(first_q, first_k), (queries(421), second_k)].map(|(seqlen_q, seqlen_k)| {
        let padded = Problem {
            batch_size,
            num_heads_kv,
            num_heads_q: num_heads_kv * group_size,
            seqlen_q,
            seqlen_k,
            features: Features { window, ..*of },
            ..*problem
        };
        let Lengths { q, k } = Lengths::ragged(&padded);
        // Some rows lie behind the last sequence.
        let total = |of: Option<i64>, lengths: &[i64]| of.map(|_| lengths.iter().sum::<i64>() + 3);
        let varlen =
            of.varlen.map(|of| Varlen { total_q: total(of.total_q, &q), total_k: total(of.total_k, &k), ..of });
        Problem { features: Features { varlen, ..padded.features }, ..padded }
    })
}

/// Memory of the host that a check takes, from above: its tensors, their fp32 values, and those of
/// the reference.
pub fn host_bytes(problem: &Problem) -> u128 {
    8 * reduced(problem).iter().map(arena::arena_bytes).sum::<u128>()
}

/// Fills the outputs with NaN: an element that is not written then shows in the comparison.
fn poison_outputs(arena: &Arena, backend: &Backend) -> Result<()> {
    let problem = &arena.call().problem;
    for tensor in arena::outputs(problem.pass) {
        arena.poison(backend, *tensor)?;
    }
    if problem.pass == Pass::Forward {
        arena.write_lse(backend, &vec![f32::NAN; problem.lse_elements() as usize])?;
    }
    arena.features().clear_gradients(backend)
}

impl Case {
    fn new(backend: &Backend, oracle: &Backend, problem: &Problem) -> Result<Case> {
        let dropout = match problem.dropout {
            true => Dropout { p: 0.15, seed: 0x5eed_0000_0001, offset: 3, ..Dropout::NONE },
            false => Dropout::NONE,
        };
        let random = |tensor: Tensor| {
            let shape = arena::Shape::of(problem, tensor);
            arena::rounded(problem, tensor, &values::normals(shape.rows * shape.dim, tensor as u32))
        };
        let arena = Arena::new(backend, problem, dropout, Lengths::ragged(problem), ListDensity::Dense)?;
        let mut inputs: Vec<(Tensor, Vec<f32>)> = [Tensor::Q, Tensor::K, Tensor::V].map(|t| (t, random(t))).into();
        // Only the backward pass has the features of gradients.
        let features = Features { dbias: false, dlse: false, ..problem.features };
        let forward = Problem { pass: Pass::Forward, dtype: Dtype::Fp32, features, ..*problem };
        let mut expected = reference(oracle, &forward, dropout, &inputs, None)?;
        if problem.pass == Pass::Backward {
            // Both backends get the output rounded to the dtype: the caller rounds it, not the
            // candidate.
            let (_, out) = expected.outputs.swap_remove(0);
            inputs.push((Tensor::Out, values::rounded(&out, problem.dtype)));
            inputs.push((Tensor::Dout, random(Tensor::Dout)));
            let backward = Problem { dtype: Dtype::Fp32, ..*problem };
            let lse = expected.lse;
            expected = reference(oracle, &backward, dropout, &inputs, Some(&lse))?;
            arena.write_lse(backend, &lse)?;
        }
        for (tensor, values) in &inputs {
            arena.write(backend, *tensor, values)?;
        }
        let Reference { outputs, gradients, lse } = expected;
        let expected_lse = (problem.pass == Pass::Forward).then_some(lse);
        Ok(Case { arena, expected: outputs, expected_gradients: gradients, expected_lse })
    }
}

/// The outputs and the LSE of the CPU backend's default config.
struct Reference {
    outputs: Vec<(Tensor, Vec<f32>)>,
    gradients: Vec<FeatureGradient>,
    lse: Vec<f32>,
}

fn reference(
    oracle: &Backend,
    problem: &Problem,
    dropout: Dropout,
    inputs: &[(Tensor, Vec<f32>)],
    lse: Option<&[f32]>,
) -> Result<Reference> {
    let arena = Arena::new(oracle, problem, dropout, Lengths::ragged(problem), ListDensity::Dense)?;
    for (tensor, values) in inputs {
        arena.write(oracle, *tensor, values)?;
    }
    poison_outputs(&arena, oracle)?;
    if let Some(lse) = lse {
        arena.write_lse(oracle, lse)?;
    }
    let executable = oracle.build(problem, &family::heuristic(problem, oracle.device()))?;
    executable.launch(arena.call(), oracle.stream())?;
    let outputs = arena::outputs(problem.pass);
    let outputs = outputs.iter().map(|t| Ok((*t, arena.read(oracle, *t)?))).collect::<Result<_>>()?;
    let gradients = arena.features().read_gradients(oracle)?;
    Ok(Reference { outputs, gradients, lse: arena.read_lse(oracle)? })
}

/// Four roundings of the dtype. P (or dS) and the output are rounded once each, by at most u
/// relative, and a row of independent roundings stays near u in the norm. The other half is slack
/// for the order of sums. A single wrong key among a few hundred moves its row by 1 / sqrt(keys) =
/// 0.04 or more, 2.5 times the bound of bf16. In fp32 nothing is rounded to a shorter type; sums of
/// some hundred terms and exp lose a few hundred u at worst.
pub fn bound(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 4.0 / 256.0,
        Dtype::Fp16 => 4.0 / 2048.0,
        Dtype::Fp32 => 512.0 / 16_777_216.0,
    }
}

/// The bound of a problem's candidates. With fp8 queries, kernels round P to e4m3, by at most 2^-4
/// relative and 2^-5.2 in the root mean square.
fn bound_of(problem: &Problem) -> f64 {
    bound(problem.dtype) + if problem.features.has_fp8_queries() { 1.0 / 16.0 } else { 0.0 }
}

/// The LSE is summed in fp32 before P is rounded, in base 2 with approximate exp2 and log2 (2 ulp
/// each).
const LSE_BOUND: f64 = 1e-3;

/// The bound of a candidate. One that widens int4 rounds k to bf16, so each product in a score is
/// off by up to 2^-8 of itself. In a row that sees one key, the LSE is as far off as the score.
fn lse_bound_of(problem: &Problem, config: &Config) -> f64 {
    let rounds = problem.features.four_bits.is_some() && config.get("widens") == Some(1);
    LSE_BOUND + if rounds { 1.0 / 64.0 } else { 0.0 }
}

/// The largest ‖row - expected row‖ / (‖expected row‖ + the tensor's mean row norm); NaN if an
/// element is NaN.
fn row_error(actual: &[f32], expected: &[f32], dim: usize) -> f64 {
    let norm = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let rows = (expected.len() / dim.max(1)).max(1);
    // Rows of zeros (no key seen) and rows of one key (no gradient) have no norm of their own to
    // compare with.
    let typical = (norm(expected).powi(2) / rows as f64).sqrt().max(f64::MIN_POSITIVE);
    let errors = actual.chunks_exact(dim).zip(expected.chunks_exact(dim)).map(|(actual, expected)| {
        let difference = actual.iter().zip(expected).map(|(a, e)| (f64::from(*a) - f64::from(*e)).powi(2)).sum::<f64>();
        difference.sqrt() / (norm(expected) + typical)
    });
    largest(errors)
}

/// The largest absolute difference; equal infinities agree.
fn lse_error(actual: &[f32], expected: &[f32]) -> f64 {
    let errors = actual.iter().zip(expected).map(|(a, e)| if a == e { 0.0 } else { f64::from((a - e).abs()) });
    largest(errors)
}

/// The largest error; NaN if one is NaN.
fn largest(errors: impl Iterator<Item = f64>) -> f64 {
    errors.fold(0.0, |worst: f64, error| if worst.is_nan() || worst >= error { worst } else { error })
}

#[cfg(test)]
mod tests {
    use super::super::features;
    use super::*;
    use crate::problem::{Eight, EightBits, Four, Layout};

    const PROBLEM: Problem =
        Problem { num_heads_kv: 2, layout: Layout::Vec4, ..Problem::dense(Pass::Forward, Dtype::Bf16, 3, 4, 4096, 64) };

    #[test]
    fn a_block_mask_of_any_block_is_checked_with_rows_of_both_kinds_and_a_hidden_block() {
        let sizes = [16, 48, 128, 192, 256, 512, 1040, 2048];
        for (block_q, block_k) in sizes.iter().flat_map(|q| sizes.map(|k| (*q, k))) {
            for pass in [Pass::Forward, Pass::Backward] {
                let mask = BlockMask { block_q, block_k };
                let of_mask = Features { block_mask: Some(mask), ..Features::NONE };
                let small = reduced(&Problem { pass, features: of_mask, ..PROBLEM })[0];
                let ([partial, _, full, _], cols) =
                    features::lists(small.pass, small.list_extents().unwrap(), ListDensity::Dense);
                let both = partial.iter().zip(&full).any(|(partial, full)| *partial > 0 && *full > 0);
                assert!(both, "{pass:?} {mask:?}: no row has a block of either kind");
                let listed = partial.iter().chain(&full).sum::<i64>();
                assert!(listed < cols * full.len() as i64, "{pass:?} {mask:?}: no block is hidden");
                assert!(small.seqlen_q < small.seqlen_k, "{mask:?}: the other shape has more queries than keys");
            }
        }
    }

    /// A kernel that transposes V writes to the workspace.
    #[test]
    fn both_shapes_have_room_for_v_transposed_where_the_problem_has() {
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
        let features = Features { eight_bits, ..Features::NONE };
        for (seqlen_k, has_room) in [(255, false), (256, true), (4096, true)] {
            let problem = Problem { seqlen_k, head_dim: 128, head_dim_v: 128, features, ..PROBLEM };
            assert_eq!(problem.keeps_transposed_v(), has_room, "{seqlen_k}");
            let small = reduced(&problem);
            assert!(!has_room || small.iter().all(Problem::keeps_transposed_v), "{seqlen_k}");
            assert!(small[1].seqlen_q > small[1].seqlen_k);
        }
    }

    /// Their heads lie one after the other, as those that are timed.
    #[test]
    fn ctas_of_several_heads_are_checked_with_as_many() {
        let of = |num_heads_kv, features, seqlen_q| {
            let problem = Problem { num_heads_kv, num_heads_q: 4 * num_heads_kv, seqlen_q, features, ..PROBLEM };
            reduced(&problem).map(|small| (small.num_heads_kv, small.num_heads_q))
        };
        let int4 = Features { four_bits: Some(Four::Int4g32), ..Features::NONE };
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 });
        for features in [int4, Features { eight_bits, ..Features::NONE }] {
            let heads = [1, 4, 9, 32].map(|heads| of(heads, features, 1));
            assert_eq!(heads, [(2, 8), (4, 16), (9, 36), (16, 64)].map(|both| [both; 2]));
        }
        assert_eq!([of(32, Features::NONE, 1), of(32, int4, 4096)], [[(2, 8); 2], [(2, 6); 2]]);
    }

    #[test]
    fn a_nan_anywhere_is_an_error() {
        let expected = values::normals(640, 1);
        for at in [0, 13, 639] {
            let mut actual = expected.clone();
            actual[at] = f32::NAN;
            assert!(row_error(&actual, &expected, 64).is_nan());
            assert!(lse_error(&actual, &expected).is_nan());
        }
    }

    #[test]
    fn the_cpu_in_bf16_passes_with_every_feature() {
        let features = Features {
            window: Window { left: Some(4096), right: Some(100), top_left: false },
            softcap: true,
            alibi: true,
            bias: true,
            mask: true,
            sinks: true,
            varlen: Some(Varlen { total_q: Some(8192), ..Varlen::default() }),
            ..Features::NONE
        };
        let of_gradients = |features| Features { dbias: true, dlse: true, ..features };
        let cpu = Backend::Cpu(Cpu::new(2).unwrap());
        let of_pages = Features { paged: Some(16), ..features };
        let of_bits = Features { mask_bits: true, ..features };
        let of_blocks =
            |block_q, block_k| Features { varlen: None, block_mask: Some(BlockMask { block_q, block_k }), ..features };
        for (pass, features) in [
            (Pass::Forward, features),
            (Pass::Forward, of_pages),
            (Pass::Forward, of_bits),
            (Pass::Forward, of_blocks(128, 256)),
            (Pass::Backward, of_gradients(features)),
            (Pass::Backward, of_gradients(of_bits)),
            (Pass::Backward, of_gradients(of_blocks(256, 48))),
        ] {
            let problem = Problem { pass, features, ..PROBLEM };
            problem.validate().unwrap();
            let check = Check::new(&cpu, &problem).unwrap();
            let config = family::heuristic(&problem, cpu.device());
            let executable = cpu.build(&problem, &config).unwrap();
            let error = check.run(&cpu, &config, &executable).unwrap().unwrap();
            assert!(error > 0.0 && error < bound(Dtype::Bf16), "{pass:?}: {error}");
        }
    }

    #[test]
    fn rounding_passes_and_a_lost_key_does_not() {
        // A row of attention over 500 keys with equal weights, and the same without the last key.
        let (keys, dim) = (500, 64);
        let v = values::normals(keys * dim, 2);
        let mean = |count: usize| -> Vec<f32> {
            (0..dim).map(|d| (0..count).map(|j| v[j * dim + d]).sum::<f32>() / keys as f32).collect()
        };
        let expected = mean(keys);
        let rounded = values::rounded(&expected, Dtype::Bf16);
        assert!(row_error(&rounded, &expected, dim) < bound(Dtype::Bf16) / 4.0);
        assert!(row_error(&mean(keys - 1), &expected, dim) > bound(Dtype::Bf16));
    }

    #[test]
    fn an_empty_row_must_be_zero() {
        let mut expected = values::normals(640, 3);
        expected[..64].fill(0.0);
        let mut actual = expected.clone();
        assert_eq!(row_error(&actual, &expected, 64), 0.0);
        actual[..64].fill(0.1);
        assert!(row_error(&actual, &expected, 64) > bound(Dtype::Bf16));
    }

    #[test]
    fn the_lse_of_an_empty_row_must_be_minus_infinity() {
        let expected = [f32::NEG_INFINITY, 1.0];
        assert_eq!(lse_error(&[f32::NEG_INFINITY, 1.0], &expected), 0.0);
        assert!(lse_error(&[0.0, 1.0], &expected) > LSE_BOUND);
    }
}
