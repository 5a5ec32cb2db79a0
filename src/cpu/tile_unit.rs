//! Tests of both passes with a tile unit, beside the same passes without. The emulated unit runs on
//! every machine, and AMX where there is one.

use super::amx::TileUnit;
use super::{Cpu, Executable, HostMemory};
use crate::call::{Call, FeatureArgs, TensorRef};
use crate::config::{Config, Family};
use crate::dropout::Dropout;
use crate::problem::{Causal, Dtype, Features, Layout, Pass, Problem};
use half::bf16;

/// (seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v) of problems that end within the
/// chunks of a tile unit.
const SHAPES: [[i64; 6]; 4] =
    [[1, 1, 1, 1, 8, 8], [45, 77, 2, 1, 40, 24], [130, 70, 1, 1, 72, 80], [33, 200, 3, 3, 16, 64]];

/// How a test runs a pass.
#[derive(Clone, Copy)]
struct Run {
    block_m: u32,
    num_threads: usize,
    tile_unit: Option<TileUnit>,
}

const FP32: Run = Run { block_m: 48, num_threads: 1, tile_unit: None };

/// The emulation, and AMX if it is there.
fn tile_units() -> impl Iterator<Item = Run> {
    [Some(TileUnit::Emulated), TileUnit::detect()]
        .into_iter()
        .flatten()
        .map(|unit| Run { tile_unit: Some(unit), ..FP32 })
}

/// q, k, v or dO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    Q,
    K,
    V,
    Dout,
}

/// Varied values in ±1.
fn varied(input: Input, at: u64) -> f32 {
    let seed = [1, 2, 3, 5][input as usize];
    ((at * 2_654_435_761 + seed * 40_503) % 65_521) as f32 / 32_760.5 - 1.0
}

struct Tensors {
    problem: Problem,
    /// q, k, v and dO, then O, dQ, dK and dV, then LSE and the workspace.
    memories: Vec<HostMemory>,
}

impl Tensors {
    /// Element (batch, position, head, column) of an input is `number` of its index.
    fn new(problem: &Problem, number: impl Fn(Input, u64) -> f32) -> Tensors {
        let p = &Problem { pass: Pass::Backward, ..*problem };
        let of_q = |dim| p.batch_size * p.seqlen_q * p.num_heads_q * dim;
        let of_k = |dim| p.batch_size * p.seqlen_k * p.num_heads_kv * dim;
        let sizes = [of_q(p.head_dim), of_k(p.head_dim), of_k(p.head_dim_v), of_q(p.head_dim_v)];
        let memory = |bytes: &[u8]| {
            let memory = HostMemory::new(bytes.len()).unwrap();
            memory.upload(bytes).unwrap();
            memory
        };
        let mut memories = Vec::new();
        for (input, size) in [Input::Q, Input::K, Input::V, Input::Dout].into_iter().zip(sizes) {
            let numbers = (0..size as u64).map(|at| bf16::from_f32(number(input, at)));
            memories.push(memory(&numbers.flat_map(bf16::to_le_bytes).collect::<Vec<u8>>()));
        }
        memories.extend([sizes[3], sizes[0], sizes[1], sizes[2]].map(|size| memory(&vec![0xff; 2 * size as usize])));
        memories.push(memory(&vec![0xff; 4 * of_q(1) as usize]));
        memories.push(HostMemory::new(p.workspace_bytes()).unwrap());
        Tensors { problem: *problem, memories }
    }

    fn call(&self, pass: Pass) -> Call {
        let p = &self.problem;
        let view = |at: usize, seqlen, heads, dim| TensorRef::packed(self.memories[at].address(), seqlen, heads, dim);
        let of_q = |at, dim| view(at, p.seqlen_q, p.num_heads_q, dim);
        let of_k = |at, dim| view(at, p.seqlen_k, p.num_heads_kv, dim);
        Call {
            problem: Problem { pass, ..*p },
            softmax_scale: 1.0,
            dropout: if p.dropout { Dropout { p: 0.25, seed: 7, ..Dropout::NONE } } else { Dropout::NONE },
            q: of_q(0, p.head_dim),
            k: of_k(1, p.head_dim),
            v: of_k(2, p.head_dim_v),
            dout: of_q(3, p.head_dim_v),
            out: of_q(4, p.head_dim_v),
            dq: of_q(5, p.head_dim),
            dk: of_k(6, p.head_dim),
            dv: of_k(7, p.head_dim_v),
            lse: self.memories[8].address().cast(),
            features: FeatureArgs::NONE,
            most_splits: 0,
            workspace: self.memories[9].address(),
        }
    }

    fn launch(&self, pass: Pass, run: Run) {
        let cpu = Cpu::new(run.num_threads).unwrap();
        let config = Config::new(Family::Cpu, [("block_m", run.block_m), ("block_n", 64)]);
        let call = self.call(pass);
        Executable { tile_unit: run.tile_unit, ..cpu.build(&call.problem, &config).unwrap() }.launch(&call).unwrap();
    }

    /// O and LSE.
    fn forward(&self, run: Run) -> [Vec<f32>; 2] {
        self.launch(Pass::Forward, run);
        let lse = self.bytes(8).as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        [self.numbers(4), lse]
    }

    /// dQ, dK and dV, of the O and the LSE that lie there.
    fn backward(&self, run: Run) -> [Vec<f32>; 3] {
        self.launch(Pass::Backward, run);
        [5, 6, 7].map(|at| self.numbers(at))
    }

    fn bytes(&self, at: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.memories[at].bytes()];
        self.memories[at].download(&mut bytes).unwrap();
        bytes
    }

    fn numbers(&self, at: usize) -> Vec<f32> {
        self.bytes(at).as_chunks::<2>().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
    }
}

fn problem([seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v]: [i64; 6], causal: Causal, dropout: bool) -> Problem {
    Problem {
        num_heads_kv: heads_kv,
        seqlen_k,
        head_dim_v: dim_v,
        causal,
        dropout,
        layout: Layout::Vec8,
        features: Features::NONE,
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 2, heads, seqlen_q, dim)
    }
}

/// Results in bf16 may be rounded to the other neighbour. Terms of a gradient may cancel.
fn assert_close(got: &[f32], expected: &[f32], [relative, absolute]: [f32; 2], what: impl std::fmt::Display) {
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0f32, |top, x| top.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        let is_close =
            got.to_bits() == expected.to_bits() || error <= relative * expected.abs() + absolute * largest.max(0.01);
        assert!(is_close || got.is_nan() && expected.is_nan(), "{what}: {got} at {at}, not {expected}");
    }
}

const IN_BF16: [f32; 2] = [1.0 / 128.0, 1e-4];

#[test]
fn a_tile_unit_gives_the_results_of_fp32_products() {
    for shape in SHAPES {
        for (causal, dropout) in [(Causal::None, false), (Causal::BottomRight, false), (Causal::None, true)] {
            let tensors = Tensors::new(&problem(shape, causal, dropout), varied);
            for run in tile_units() {
                let what = format!("{:?} {shape:?} {causal:?} dropout {dropout}", run.tile_unit);
                let [out, lse] = tensors.forward(run);
                let [expected_out, expected_lse] = tensors.forward(FP32);
                assert_close(&out, &expected_out, [1.0 / 128.0, 1e-6], format!("{what}, O"));
                assert_close(&lse, &expected_lse, [1e-6, 1e-6], format!("{what}, LSE"));
                // Both are of the same O, of which delta is made.
                let [got, expected] = [run, FP32].map(|run| tensors.backward(run));
                for ((name, got), expected) in ["dQ", "dK", "dV"].iter().zip(&got).zip(&expected) {
                    assert_close(got, expected, IN_BF16, format!("{what}, {name}"));
                }
            }
        }
    }
}

/// Three threads split the heads of the backward pass, and one does not.
#[test]
fn a_tile_unit_gives_the_same_bits_with_any_number_of_threads() {
    for shape in SHAPES {
        let tensors = Tensors::new(&problem(shape, Causal::BottomRight, true), varied);
        for run in tile_units() {
            let with = |num_threads| {
                let run = Run { num_threads, ..run };
                (tensors.forward(run), tensors.backward(run))
            };
            assert!(with(1) == with(3), "{:?} {shape:?}", run.tile_unit);
        }
    }
}

/// Blocks of one strip and of several, whose first keys lie apart.
#[test]
fn a_tile_unit_gives_the_same_bits_in_blocks_of_any_size() {
    for (seqlens, causal, left) in [
        ([130, 203], Causal::BottomRight, None),
        ([130, 203], Causal::BottomRight, Some(37)),
        ([203, 203], Causal::None, Some(50)),
    ] {
        let mut problem = problem([seqlens[0], seqlens[1], 2, 1, 40, 24], causal, false);
        problem.features.window.left = left;
        let tensors = Tensors::new(&problem, varied);
        for run in tile_units() {
            let what = format!("{:?} {seqlens:?} {causal:?} {left:?}", run.tile_unit);
            let [whole, fp32] = [run, FP32].map(|run| tensors.forward(Run { block_m: 128, ..run }));
            for block_m in [16, 48] {
                assert!(tensors.forward(Run { block_m, ..run }) == whole, "{what}, blocks of {block_m}");
            }
            assert_close(&whole[0], &fp32[0], [1.0 / 128.0, 1e-4], format!("{what}, O"));
            assert_close(&whole[1], &fp32[1], [0.0, 1e-6], format!("{what}, LSE"));
            // The rows of a block decide the order of dK's and dV's sums.
            for block_m in [16, 48, 128] {
                let [got, expected] = [run, FP32].map(|run| tensors.backward(Run { block_m, ..run }));
                for ((name, got), expected) in ["dQ", "dK", "dV"].iter().zip(&got).zip(&expected) {
                    assert_close(got, expected, IN_BF16, format!("{what}, {name} in blocks of {block_m}"));
                }
            }
        }
    }
}

/// As in pages of 16 keys that a window has left and the cache has given away.
#[test]
fn nan_in_patches_of_keys_that_a_window_hides_does_not_spread() {
    let mut problem = problem([1, 203, 2, 1, 40, 24], Causal::BottomRight, false);
    // The one query sees the keys from 178 on, in the patch that begins at 176.
    problem.features.window.left = Some(24);
    let with_nan = |keys: u64| {
        let is_nan = move |input, at| input == Input::V && at / 24 % 203 < keys;
        Tensors::new(&problem, move |input, at| if is_nan(input, at) { f32::NAN } else { varied(input, at) })
    };
    for run in tile_units().chain([FP32]) {
        let [out, lse] = with_nan(176).forward(run);
        assert!(out.iter().chain(&lse).all(|x| x.is_finite()), "{:?}: {out:?}", run.tile_unit);
        let [out, _] = with_nan(179).forward(run);
        assert!(out.iter().any(|x| x.is_nan()), "{:?}: a NaN in a key that is seen", run.tile_unit);
    }
}

/// One such number in each input in turn. The same elements are finite, the same are NaN if the
/// number is, and else a tile unit may give NaN for an infinity. Subnormal numbers are 0 to it.
#[test]
fn a_tile_unit_spreads_nan_and_infinities_as_fp32_products_do() {
    const AT: u64 = 11;
    for (seqlens, dims) in [([45, 77], [40, 24]), ([33, 70], [64, 64])] {
        let problem = problem([seqlens[0], seqlens[1], 1, 1, dims[0], dims[1]], Causal::None, false);
        for (input, special) in [Input::Q, Input::K, Input::V, Input::Dout].into_iter().flat_map(|input| {
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e37, 1e-39].map(move |special| (input, special))
        }) {
            let number = |of, at| if of == input && at == AT { special } else { varied(of, at) };
            let tensors = Tensors::new(&problem, number);
            for run in tile_units() {
                let what = format!("{:?} {seqlens:?} {special:e} in {input:?}", run.tile_unit);
                let [got, lse] = tensors.forward(run);
                let [expected, expected_lse] = tensors.forward(FP32);
                let [dq, dk, dv] = tensors.backward(run);
                let [expected_dq, expected_dk, expected_dv] = tensors.backward(FP32);
                for (name, got, expected, tolerance) in [
                    ("O", got, expected, IN_BF16),
                    ("LSE", lse, expected_lse, [1e-6, 1e-6]),
                    ("dQ", dq, expected_dq, IN_BF16),
                    ("dK", dk, expected_dk, IN_BF16),
                    ("dV", dv, expected_dv, IN_BF16),
                ] {
                    let or_expected = |(got, expected): (&f32, &f32)| {
                        let are_both = !got.is_finite() && !expected.is_finite() && !special.is_nan();
                        if are_both { *expected } else { *got }
                    };
                    let got: Vec<f32> = got.iter().zip(&expected).map(or_expected).collect();
                    assert_close(&got, &expected, tolerance, format!("{what}, {name}"));
                }
            }
        }
    }
}
