//! That the heuristic's config fits wherever the family serves.

use crate::config::Family;
use crate::device::{Arch, Device};
use crate::family::{check, heuristic_of};
use crate::problem::{BlockMask, Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};

/// Shared memory per block and per SM as the CUDA programming guide's table of technical
/// specifications has them.
fn device(arch: Arch, smem_per_block: u32, smem_per_sm: u32, threads_per_sm: u32) -> Device {
    Device {
        name: arch.to_string(),
        arch,
        sm_count: 100,
        smem_per_block: smem_per_block << 10,
        smem_per_sm: smem_per_sm << 10,
        registers_per_sm: 65536,
        threads_per_sm,
        l2_bytes: 50 << 20,
        memory_bytes: 16 << 30,
        memory_bytes_per_second: 0,
        driver_version: 13000,
    }
}

fn devices() -> [Device; 4] {
    [
        device(Arch::Sm(8, 0), 163, 164, 2048),
        device(Arch::Sm(8, 6), 99, 100, 1536),
        device(Arch::Sm(9, 0), 227, 228, 2048),
        device(Arch::Sm(12, 0), 99, 100, 1536),
    ]
}

fn problem(pass: Pass, head_dim: i64, head_dim_v: i64, causal: Causal) -> Problem {
    Problem {
        num_heads_kv: 2,
        head_dim_v,
        causal,
        layout: Layout::Vec1,
        ..Problem::dense(pass, Dtype::Bf16, 1, 8, 1000, head_dim)
    }
}

#[test]
fn the_heuristic_fits_every_head_dim_on_every_device() {
    for (device, dtype) in
        devices().into_iter().flat_map(|device| [(device.clone(), Dtype::Bf16), (device, Dtype::Fp32)])
    {
        for (head_dim, head_dim_v) in (1..=512).flat_map(|d| [(d, d), (d, 512), (d, 1), (d, 513 - d)]) {
            for (pass, causal) in
                [(Pass::Forward, Causal::None), (Pass::Forward, Causal::TopLeft), (Pass::Backward, Causal::None)]
            {
                let plain = Problem { dtype, ..problem(pass, head_dim, head_dim_v, causal) };
                let window = Window { left: Some(100), ..Window::default() };
                let sliding = Features { window, varlen: Some(Varlen::default()), ..Features::NONE };
                let biased = Features { bias: true, softcap: true, sinks: true, ..Features::NONE };
                let of_blocks =
                    |block_q, block_k| Features { block_mask: Some(BlockMask { block_q, block_k }), ..biased };
                for features in [Features::NONE, sliding, biased, of_blocks(128, 64), of_blocks(16, 48)] {
                    let problem = Problem { features, ..plain };
                    let config = heuristic_of(Family::Sm80, &problem, &device).unwrap();
                    assert_eq!(check(&problem, &config, &device), Ok(()), "{} {problem:?}", device.name);
                }
            }
        }
    }
}
