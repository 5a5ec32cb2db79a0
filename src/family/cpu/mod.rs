//! The CPU family: block sizes of the tiles, what bounds them, and the choice without measurement.

pub mod scratch;
#[cfg(test)]
mod tests;

use super::knob::{Constraint, Knobs, knobs};
use super::space::Space;
use super::spec::KernelSpec;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::problem::{Pass, Problem};
use scratch::TileSize;

/// Multiples of 16: tiles are cut along registers of 16 floats and along the 16 x 16 patches of the
/// dropout mask.
const BLOCK_M: [u32; 10] = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512];
const BLOCK_N: [u32; 8] = [32, 64, 96, 128, 192, 256, 384, 512];

knobs! {
    pub struct CpuKnobs of Cpu {
        block_m: "query rows of a tile" in BLOCK_M,
        block_n: "keys of a tile" in BLOCK_N,
    }
}

impl Space for CpuKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "tiles_fit_the_cache",
            reason: "a thread's tiles must fit its share of the last-level cache, or each product reads memory",
            holds: |problem, knobs, device| {
                let share = match problem.deterministic || problem.batch_invariant {
                    true => DETERMINISTIC_SHARE,
                    false => device.l2_bytes / u64::from(device.sm_count.max(1)),
                };
                // The smallest tiles are always allowed, so that there is a config on a host with
                // many threads.
                let smallest = knobs.block_m <= 32 && knobs.block_n <= 32;
                smallest || scratch::bytes(problem, knobs.tile_size()) as u64 <= share
            },
        },
        Constraint {
            name: "block_m_within_sequence",
            reason: "a block of more than twice seqlen_q computes the same as the next smaller one, in more memory",
            holds: |problem, knobs, _| within(knobs.block_m, problem.seqlen_q),
        },
        Constraint {
            name: "block_n_within_sequence",
            reason: "a block of more than twice seqlen_k computes the same as the next smaller one, in more memory",
            holds: |problem, knobs, _| within(knobs.block_n, problem.seqlen_k),
        },
    ];

    /// The blocks that measured well (Zen 4, 1 MB of L2, seqlens 1024 and 4096, head dims 64 and
    /// 128), cut to the sequence, the cache and the number of threads.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        Some(heuristic(problem, device))
    }

    /// Distance from the heuristic's choice on a logarithmic scale: configs near it are tried
    /// first.
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let choice = heuristic(problem, device);
        let distance = |own: u32, chosen: u32| (f64::from(own) / f64::from(chosen)).ln().abs();
        distance(self.block_m, choice.block_m) + distance(self.block_n, choice.block_n)
    }

    /// The CPU backend launches none.
    fn kernels(&self, _problem: &Problem) -> Vec<KernelSpec> {
        Vec::new()
    }
}

impl CpuKnobs {
    fn tile_size(&self) -> TileSize {
        TileSize { m: self.block_m as usize, n: self.block_n as usize }
    }
}

/// The tile of a config in text form. An error names a knob that is missing or unknown.
pub fn tile_size(config: &Config) -> Result<TileSize> {
    CpuKnobs::of(config).map(|knobs| knobs.tile_size()).map_err(Error::unsupported)
}

/// Bytes of cache that a thread is taken to have where the blocks, and with them the order of sums,
/// may not follow the host: room for the heuristic's at head dim 128.
const DETERMINISTIC_SHARE: u64 = 2 << 20;

fn within(block: u32, seqlen: i64) -> bool {
    i64::from(block) < 2 * seqlen || block <= 32
}

fn heuristic(problem: &Problem, device: &Device) -> CpuKnobs {
    // A forward task loads the keys once for all its queries. A strip of them skips the keys that
    // it does not see, so causal problems need no smaller blocks.
    let (block_m, block_n) = match problem.pass {
        Pass::Forward => (512, 256),
        Pass::Backward => (256, 256),
    };
    let mut knobs = CpuKnobs { block_m, block_n };
    while knobs.broken(problem, device).is_some() {
        let keys_too_long = !within(knobs.block_n, problem.seqlen_k);
        let wants_fewer_keys = knobs.block_n >= knobs.block_m && within(knobs.block_m, problem.seqlen_q);
        // The keys of a tile decide the order of a sum, so a batch-invariant one keeps them.
        if keys_too_long || wants_fewer_keys && !problem.batch_invariant {
            knobs.block_n = smaller(&BLOCK_N, knobs.block_n);
        } else {
            knobs.block_m = smaller(&BLOCK_M, knobs.block_m);
        }
    }
    // Forward, a block of queries is a task: four for each thread even out their ends, and two
    // where a task is a strip or less.
    let heads = problem.batch_size * problem.num_heads_q;
    let tasks = |m| heads * ((problem.seqlen_q + i64::from(m) - 1) / i64::from(m));
    let of_thread = |m| if m as usize > scratch::STRIP { 4 } else { 2 };
    let wants_more_tasks =
        |m| problem.pass == Pass::Forward && m > 32 && tasks(m) < of_thread(m) * i64::from(device.sm_count);
    while wants_more_tasks(knobs.block_m) {
        knobs.block_m = smaller(&BLOCK_M, knobs.block_m);
    }
    knobs
}

/// The next smaller value, or the smallest.
fn smaller(values: &[u32], value: u32) -> u32 {
    values.iter().rev().copied().find(|other| *other < value).unwrap_or(values[0])
}
