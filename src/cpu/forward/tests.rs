//! Tests of the forward pass with a tile unit, beside the same pass without. The emulated unit runs
//! on every machine.

use crate::call::{Call, FeatureArgs, TensorRef};
use crate::config::{Config, Family};
use crate::cpu::amx::TileUnit;
use crate::cpu::{Cpu, Executable};
use crate::dropout::Dropout;
use crate::problem::{Causal, Dtype, Features, Layout, Pass, Problem};
use half::bf16;

/// (seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v) of problems that end within the
/// chunks of a tile unit.
const SHAPES: [[i64; 6]; 4] =
    [[1, 1, 1, 1, 8, 8], [45, 77, 2, 1, 40, 24], [130, 70, 1, 1, 72, 80], [33, 200, 3, 3, 16, 64]];

/// How a test runs a problem.
struct Run {
    block_m: u32,
    num_threads: usize,
    tile_unit: Option<TileUnit>,
    /// V has NaN in so many keys of each sequence, from the first on.
    keys_of_nan: i64,
}

const EMULATED: Run = Run { block_m: 48, num_threads: 1, tile_unit: Some(TileUnit::Emulated), keys_of_nan: 0 };
const FP32: Run = Run { tile_unit: None, ..EMULATED };

/// O and LSE of a problem whose q, k and v have varied values in ±1.
fn forward(problem: &Problem, run: Run) -> [Vec<f32>; 2] {
    let p = problem;
    let cpu = Cpu::new(run.num_threads).unwrap();
    let tensor = |seqlen: i64, heads: i64, dim: i64, seed: u64| {
        let is_nan = |i: u64| seed == 3 && (i as i64 / (heads * dim)) % seqlen < run.keys_of_nan;
        let varied = |i: u64| ((i * 2_654_435_761 + seed * 40_503) % 65_521) as f32 / 32_760.5 - 1.0;
        let number = |i: u64| if is_nan(i) { f32::NAN } else { varied(i) };
        let count = (p.batch_size * seqlen * heads * dim) as u64;
        let bytes: Vec<u8> = (0..count).flat_map(|i| bf16::from_f32(number(i)).to_le_bytes()).collect();
        let memory = cpu.allocate(bytes.len()).unwrap();
        cpu.upload(&memory, &bytes).unwrap();
        (TensorRef::packed(memory.address(), seqlen, heads, dim), memory)
    };
    let (q, _q) = tensor(p.seqlen_q, p.num_heads_q, p.head_dim, 1);
    let (k, _k) = tensor(p.seqlen_k, p.num_heads_kv, p.head_dim, 2);
    let (v, _v) = tensor(p.seqlen_k, p.num_heads_kv, p.head_dim_v, 3);
    let (out, of_out) = tensor(p.seqlen_q, p.num_heads_q, p.head_dim_v, 4);
    let lse = cpu.allocate((p.batch_size * p.num_heads_q * p.seqlen_q * 4) as usize).unwrap();
    let call = Call {
        problem: *p,
        softmax_scale: 1.0,
        dropout: if p.dropout { Dropout { p: 0.25, seed: 7, ..Dropout::NONE } } else { Dropout::NONE },
        q,
        k,
        v,
        out,
        lse: lse.address().cast(),
        dout: TensorRef::NULL,
        dq: TensorRef::NULL,
        dk: TensorRef::NULL,
        dv: TensorRef::NULL,
        features: FeatureArgs::NONE,
        most_splits: 0,
        workspace: std::ptr::null_mut(),
    };
    let config = Config::new(Family::Cpu, [("block_m", run.block_m), ("block_n", 64)]);
    Executable { tile_unit: run.tile_unit, ..cpu.build(p, &config).unwrap() }.launch(&call).unwrap();
    let mut bytes = [vec![0; of_out.bytes()], vec![0; lse.bytes()]];
    cpu.download(&of_out, &mut bytes[0]).unwrap();
    cpu.download(&lse, &mut bytes[1]).unwrap();
    let out = bytes[0].as_chunks::<2>().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32());
    [out.collect(), bytes[1].as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()]
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

#[test]
fn a_tile_unit_gives_the_results_of_fp32_products() {
    for shape in SHAPES {
        for (causal, dropout) in [(Causal::None, false), (Causal::BottomRight, false), (Causal::None, true)] {
            let problem = problem(shape, causal, dropout);
            let [got, expected] = [EMULATED, FP32].map(|run| forward(&problem, run));
            // O may be rounded to the other neighbour in bf16.
            for ((got, expected), [relative, absolute]) in
                got.iter().zip(&expected).zip([[2f32.powi(-7), 1e-6], [1e-6, 1e-6]])
            {
                for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
                    let close = got == expected || (got - expected).abs() <= relative * expected.abs() + absolute;
                    assert!(close, "{shape:?} {causal:?} dropout {dropout}: {got} at {at}, not {expected}");
                }
            }
        }
    }
}

#[test]
fn a_tile_unit_gives_the_same_bits_with_any_number_of_threads() {
    for shape in SHAPES {
        let problem = problem(shape, Causal::BottomRight, true);
        let [one, three] = [1, 3].map(|num_threads| forward(&problem, Run { num_threads, ..EMULATED }));
        assert!(one == three, "{shape:?}");
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
        let run = |block_m| forward(&problem, Run { block_m, ..EMULATED });
        let [whole, fp32] = [run(128), forward(&problem, Run { block_m: 128, ..FP32 })];
        assert!(run(16) == whole && run(48) == whole, "{seqlens:?} {causal:?} {left:?}");
        for (got, expected) in whole[1].iter().zip(&fp32[1]) {
            assert!((got - expected).abs() <= 1e-5, "{got}, not {expected}");
        }
        for (got, expected) in whole[0].iter().zip(&fp32[0]) {
            assert!((got - expected).abs() <= 2f32.powi(-7) * expected.abs() + 1e-5, "{got}, not {expected}");
        }
    }
}

/// As in pages of 16 keys that a window has left and the cache has given away.
#[test]
fn nan_in_patches_of_keys_that_a_window_hides_does_not_spread() {
    let mut problem = problem([1, 203, 2, 1, 40, 24], Causal::BottomRight, false);
    // The one query sees the keys from 178 on, in the patch that begins at 176.
    problem.features.window.left = Some(24);
    for run in [EMULATED, FP32] {
        let [out, lse] = forward(&problem, Run { keys_of_nan: 176, ..run });
        assert!(out.iter().chain(&lse).all(|x| x.is_finite()), "{out:?}");
        let [out, _] = forward(&problem, Run { keys_of_nan: 179, tile_unit: Some(TileUnit::Emulated), ..FP32 });
        assert!(out.iter().any(|x| x.is_nan()), "a NaN in a key that is seen");
    }
}
