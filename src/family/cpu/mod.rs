//! The CPU family's space: block sizes of the tiles, what bounds them, and the choice without measurement.

pub mod scratch;

use super::{Constraint, Knob};
use crate::config::{Config, Family};
use crate::device::Device;
use crate::problem::{Causal, Pass, Problem};
use scratch::TileSize;

/// Multiples of 16: tiles are cut along registers of 16 floats and along the 16 x 16 patches of the dropout mask.
/// Multiples of 48 too, the rows of the GEMM's best kernel.
const KNOBS: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a tile", values: &[16, 32, 48, 64, 96, 128, 192, 256, 384] },
    Knob { name: "block_n", meaning: "keys of a tile", values: &[32, 64, 96, 128, 192, 256, 384, 512] },
];

const CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "tiles_fit_the_cache",
        reason: "a thread's tiles must fit its share of the last-level cache, or each product reads memory",
        holds: |problem, config, device| {
            let share = match problem.deterministic {
                true => DETERMINISTIC_SHARE,
                false => device.l2_bytes / u64::from(device.sm_count.max(1)),
            };
            // The smallest tiles are always allowed, so that there is a config on a host with many threads.
            let smallest = config.get("block_m") <= 32 && config.get("block_n") <= 32;
            smallest || scratch::bytes(problem, TileSize::of(config)) as u64 <= share
        },
    },
    Constraint {
        name: "block_m_within_sequence",
        reason: "a block of more than twice seqlen_q computes the same as the next smaller one, in more memory",
        holds: |problem, config, _| within(config.get("block_m"), problem.seqlen_q),
    },
    Constraint {
        name: "block_n_within_sequence",
        reason: "a block of more than twice seqlen_k computes the same as the next smaller one, in more memory",
        holds: |problem, config, _| within(config.get("block_n"), problem.seqlen_k),
    },
];

/// Bytes of cache that a thread is taken to have where the blocks, and with them the order of sums, may not follow the host:
/// room for the heuristic's at head dim 128.
const DETERMINISTIC_SHARE: u64 = 2 << 20;

fn within(block: u32, seqlen: i64) -> bool {
    i64::from(block) < 2 * seqlen || block <= 32
}

pub fn knobs(_pass: Pass) -> &'static [Knob] {
    KNOBS
}

pub fn constraints(_pass: Pass) -> &'static [Constraint] {
    CONSTRAINTS
}

/// The blocks that measured well (Zen 5, 1 MB of L2, seqlen 1024, head dims 64 and 128: within 5 % of the best of the
/// space), cut to the sequence, the cache and the number of threads.
pub fn heuristic(problem: &Problem, device: &Device) -> Config {
    // Half of a tile on the diagonal is computed in vain: in a short causal problem tiles are smaller.
    let short_causal = problem.causal != Causal::None && problem.seqlen_k < 2048;
    let (mut block_m, mut block_n) = match (short_causal, problem.pass) {
        (false, _) => (256, 256),
        (true, Pass::Forward) => (64, 256),
        (true, Pass::Backward) => (96, 96),
    };
    let config = |m, n| Config::new(Family::Cpu, [("block_m", m), ("block_n", n)]);
    let holds = |m, n| CONSTRAINTS.iter().all(|constraint| (constraint.holds)(problem, &config(m, n), device));
    while !holds(block_m, block_n) {
        let keys_too_long = !within(block_n, problem.seqlen_k);
        if keys_too_long || (block_n >= block_m && within(block_m, problem.seqlen_q)) {
            block_n = smaller(KNOBS[1].values, block_n);
        } else {
            block_m = smaller(KNOBS[0].values, block_m);
        }
    }
    // Forward, a block of queries is a task: two for each thread even out their ends.
    let heads = problem.batch_size * problem.num_heads_q;
    let tasks = |m| heads * ((problem.seqlen_q + i64::from(m) - 1) / i64::from(m));
    while problem.pass == Pass::Forward && block_m > 32 && tasks(block_m) < 2 * i64::from(device.sm_count) {
        block_m = smaller(KNOBS[0].values, block_m);
    }
    config(block_m, block_n)
}

/// The next smaller value, or the smallest.
fn smaller(values: &[u32], value: u32) -> u32 {
    values.iter().rev().copied().find(|other| *other < value).unwrap_or(values[0])
}

/// Distance from the heuristic's choice on a logarithmic scale: what is near it is tried first.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    let choice = heuristic(problem, device);
    let distance = |knob| (f64::from(config.get(knob)) / f64::from(choice.get(knob))).ln().abs();
    distance("block_m") + distance("block_n")
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::*;
    use crate::device::Arch;
    use crate::problem::{Dtype, Layout};

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
            nvrtc_version: (0, 0),
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
}
