//! That the heuristic's config fits any host, and follows none where it must not.

use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::family::{check, heuristic_of};
use crate::problem::{Causal, Dtype, Layout, Pass, Problem};

fn heuristic(problem: &Problem, device: &Device) -> Config {
    heuristic_of(Family::Cpu, problem, device).unwrap()
}

fn device(sm_count: u32, l2_bytes: u64) -> Device {
    Device {
        name: "test".to_owned(),
        arch: Arch::Cpu,
        sm_count,
        smem_per_block: 0,
        smem_per_sm: 0,
        registers_per_sm: 0,
        threads_per_sm: 0,
        l2_bytes,
        memory_bytes: 0,
        memory_bytes_per_second: 0,
        driver_version: 0,
    }
}

fn problem(pass: Pass, seqlen_q: i64, seqlen_k: i64, head_dim: i64, causal: Causal) -> Problem {
    Problem {
        num_heads_kv: 1,
        seqlen_k,
        causal,
        dropout: true,
        layout: Layout::Vec1,
        ..Problem::dense(pass, Dtype::Fp32, 1, 2, seqlen_q, head_dim)
    }
}

#[test]
fn the_heuristic_passes_every_check_on_any_host() {
    for device in [device(1, 1 << 25), device(64, 1 << 25), device(4096, 1 << 20), device(2, 0)] {
        for pass in [Pass::Forward, Pass::Backward] {
            for (seqlen_q, seqlen_k) in [(0, 0), (1, 1), (1, 5000), (17, 100), (4096, 33), (100_000, 100_000)] {
                for (head_dim, causal) in [(1, Causal::None), (64, Causal::BottomRight), (512, Causal::TopLeft)] {
                    let problem = problem(pass, seqlen_q, seqlen_k, head_dim, causal);
                    let config = heuristic(&problem, &device);
                    assert_eq!(check(&problem, &config, &device), Ok(()), "{problem:?} on {device:?}");
                }
            }
        }
    }
}

#[test]
fn the_blocks_of_a_deterministic_problem_follow_no_host() {
    for (seqlen, head_dim) in [(17, 64), (1000, 128), (5000, 512)] {
        let plain = problem(Pass::Backward, seqlen, seqlen, head_dim, Causal::None);
        let deterministic = Problem { deterministic: true, ..plain };
        let (roomy, crowded) = (device(1, 1 << 28), device(256, 1 << 25));
        assert_eq!(heuristic(&deterministic, &roomy), heuristic(&deterministic, &crowded));
        assert_eq!(check(&deterministic, &heuristic(&deterministic, &crowded), &crowded), Ok(()));
        if seqlen > 100 {
            assert_ne!(heuristic(&plain, &roomy), heuristic(&plain, &crowded), "else this shows nothing");
        }
    }
}
