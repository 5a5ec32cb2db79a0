//! The forward pass of the sm90 family: each consumer warpgroup computes 64 query rows.

use super::warpgroup::{BARRIER_BYTES, WARPGROUP_ROWS, last_wave, padded, registers, tiles_differ};
use super::work;
use crate::device::Device;
use crate::family::knob::{Constraint, knobs};
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Boxes, KernelSpec, Schedule};
use crate::family::tile::{TMA_ALIGNMENT_BYTES, boxed_tile_bytes};
use crate::family::time::Work;
use crate::problem::{Dtype, Features, Problem};

knobs! {
    pub struct ForwardKnobs of Sm90 {
        block_m: "query rows of a tile, 64 for each consumer warpgroup" in [64, 128, 192, 256],
        block_n: "keys of a K or V block" in [48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224],
        k_stages: "K blocks in flight" in [1, 2, 3, 4, 5, 6],
        v_stages: "V blocks in flight" in [1, 2, 3, 4, 5, 6],
        q_stages: "Q tiles in flight" in [1, 2],
        tma_store: "1: O is stored by TMA from Q's slot, 0: from registers" in [0, 1],
        stale_max: "1: blocks without a mask are not searched for a row maximum, 0: all blocks are" in [0, 1],
        group_mb: "MB of K and V in a group of heads that tiles walk together, 0: one group" in [0, 1, 4, 8, 16, 32],
    }
}

impl Space for ForwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "stale_max",
            reason: "with a stale maximum, weights need the range of bf16, which is that of fp32; and the code that recomputes failed rows handles neither dropout nor modified scores",
            holds: |p, k, _| k.stale_max == 0 || may_be_stale(p),
        },
        Constraint {
            name: "stages",
            reason: "consumers use K one block ahead of V, so K needs as many stages as V or one more; more stages than that would not be used",
            holds: |_, k, _| matches!(k.k_stages.checked_sub(k.v_stages), Some(0 | 1)),
        },
        Constraint {
            name: "group_mb",
            reason: "if all tiles have the same length, groups of heads with 1 MB of K and V use L2 best",
            holds: |p, k, _| k.group_mb == 1 || tiles_differ(p),
        },
        Constraint {
            name: "tma_store",
            reason: "O is stored from its tile's Q slot while the next tile uses another, so Q needs two slots, and O must fit into one",
            holds: |p, k, _| k.tma_store == 0 || (k.q_stages == 2 && fits_q_slot(p)),
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        Constraint {
            name: "registers",
            reason: "O, S and P of a consumer thread must fit the registers that setmaxnreg gives it",
            holds: |p, k, _| k.registers(p) <= registers(k.consumers()).consumer,
        },
        grid(),
    ];

    /// The tile of `tile_of_full_device`. A tile has fewer rows if there would be too few tiles for
    /// all SMs, and fewer keys and stages if it would not fit.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    /// The expected time over that of a perfect config. Sweeps on an H200 gave the share of each
    /// term.
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, q_stages] = [self.block_m, self.block_n, self.q_stages].map(f64::from);
        let [k_stages, v_stages, tma_store] = [self.k_stages, self.v_stages, self.tma_store].map(f64::from);
        let (tiles_differ, seqlen_k) = (tiles_differ(problem), (problem.seqlen_k as f64).max(1.0));
        let heads = (problem.batch_size * problem.num_heads_q) as f64;
        let tiles = heads * (problem.seqlen_q as f64 / block_m).ceil();
        // Each block costs one search for the maximum, one vote and one pass of the barriers.
        let per_block = if self.stale_max == 1 { 4.0 } else { 17.0 } / block_n;
        let few_consumers = [0.2, 0.08, 0.01, 0.0][self.consumers() as usize - 1];
        let in_flight = 5.0 / (k_stages * block_n) + 5.0 / (v_stages * block_n);
        let order = match (self.group_mb, wants_groups(problem)) {
            (32, true) | (0, false) => 0.0,
            (0, true) => 0.1,
            _ => 0.02,
        };
        let prologue = 60.0 / q_stages / seqlen_k;
        let epilogue = 60.0 * (1.0 - tma_store) / seqlen_k;
        let work = padded(problem.seqlen_q, block_m) * padded(problem.seqlen_k, block_n);
        let order = if tiles_differ { order } else { 0.0 };
        let last_wave = last_wave(tiles, device.sm_count, tiles_differ);
        work * last_wave * (1.0 + per_block + few_consumers + in_flight + order + prologue + epilogue)
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        vec![KernelSpec {
            template: "sm90_forward",
            entry: "flashtune_sm90_forward",
            threads: 128 * (self.consumers() + 1),
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_m,
            schedule: Schedule::Persistent,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: WARPGROUP_ROWS, key_rows: self.block_n },
                is_dynamic: tiles_differ(problem),
            },
            registers: Some(registers(self.consumers())),
            ..KernelSpec::MAIN
        }]
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::forward([self.block_m, self.block_n], problem, device)
    }

    /// The heuristic's config with every number of rows, and blocks of more keys. Features take
    /// registers, so problems with any keep to the tiles of the heuristic and of records.
    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        if problem.features != Features::NONE {
            return Vec::new();
        }
        let (rows, ..) = tile_of_full_device(problem);
        let heights = [64, 128, 192, 256].into_iter().filter(|block_m| *block_m <= rows);
        let mut configs: Vec<_> = heights.filter_map(|block_m| of_rows(problem, device, block_m)).collect();
        let wider: Vec<_> = configs.iter().flat_map(|config| wider_blocks(config, problem, device)).collect();
        configs.extend(wider);
        configs
    }
}

/// The config with blocks of more keys, where two consumer warpgroups or one have registers to
/// spare: fewer keys are padded where there are few.
fn wider_blocks(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    if problem.dropout || config.block_m > 128 || problem.head_dim.max(problem.head_dim_v) > 128 {
        return Vec::new();
    }
    let of_keys = |block_n: u32| {
        let stages = [[4, 4, 2], [3, 3, 2], [2, 2, 2], [2, 2, 1]].into_iter();
        let of_stages = |[k_stages, v_stages, q_stages]: [u32; 3]| ForwardKnobs {
            block_n,
            k_stages,
            v_stages,
            q_stages,
            tma_store: u32::from(q_stages == 2 && fits_q_slot(problem)),
            ..*config
        };
        stages.map(of_stages).find(|config| config.fits(problem, device))
    };
    [80, 112, 128].into_iter().filter_map(of_keys).collect()
}

impl ForwardKnobs {
    fn consumers(&self) -> u32 {
        self.block_m / WARPGROUP_ROWS
    }

    fn smem_bytes(&self, problem: &Problem) -> u32 {
        let q = self.q_stages * boxed_tile_bytes(self.block_m, problem.head_dim);
        let k = self.k_stages * boxed_tile_bytes(self.block_n, problem.head_dim);
        let v = self.v_stages * boxed_tile_bytes(self.block_n, problem.head_dim_v);
        TMA_ALIGNMENT_BYTES + q + k + v + BARRIER_BYTES
    }

    /// The least number of registers that a consumer thread needs: O and S in fp32, P in 16 bits,
    /// and 28 registers for addresses and row statistics.
    fn registers(&self, problem: &Problem) -> u32 {
        let dim_v = (problem.head_dim_v as u32).next_multiple_of(16);
        dim_v / 2 + self.block_n / 2 + self.block_n / 4 + 28
    }
}

fn may_be_stale(problem: &Problem) -> bool {
    problem.dtype == Dtype::Bf16 && !problem.dropout && !problem.features.modifies_scores()
}

/// Whether a warpgroup's O fits into the slot of its Q.
fn fits_q_slot(problem: &Problem) -> bool {
    boxed_tile_bytes(64, problem.head_dim_v) <= boxed_tile_bytes(64, problem.head_dim)
}

/// The fastest (block_m, block_n, [k_stages, v_stages, q_stages]) on an H200 for problems of many
/// tiles (docs/tuning/sm90-forward.md). With dropout, and with features that take registers, it is
/// the fastest whose consumers spill nothing.
fn tile_of_full_device(problem: &Problem) -> (u32, u32, [u32; 3]) {
    let is_causal = problem.right_shift().is_some();
    let drops_full = problem.dropout && !is_causal;
    let features = &problem.features;
    let modifies = features.modifies_scores();
    let takes_more = modifies || features.varlen.is_some() || problem.left_shift().is_some();
    match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if takes_more => (192, if modifies || problem.dropout { 64 } else { 96 }, [4, 4, 2]),
        65..=128 if features.bias || features.mask => (128, 64, [4, 4, 2]),
        129..=160 if takes_more => (128, 64, [3, 3, 1]),
        161..=224 if modifies => (128, 64, [3, 3, 1]),
        225.. if modifies => (128, 64, [3, 2, 1]),
        ..=56 if drops_full => (256, 48, [4, 4, 2]),
        ..=64 => (256, 64, [4, 4, 2]),
        // With 128 keys the consumers spill 24 bytes at head dim 112 (NVRTC 13.0).
        97..=112 if drops_full => (128, 112, [2, 2, 1]),
        65..=128 if drops_full => (128, 128, [2, 2, 1]),
        65..=96 if !problem.dropout => (192, 80, [3, 3, 2]),
        65..=128 => (192, 64, [4, 4, 2]),
        129..=160 => (192, 64, [3, 3, 1]),
        161..=192 if is_causal => (128, 96, [2, 2, 1]),
        161..=192 => (128, 64, [3, 3, 1]),
        225.. if is_causal || problem.dropout => (128, 64, [3, 2, 1]),
        _ => (128, 80, [2, 2, 1]),
    }
}

fn heuristic(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    let (rows, ..) = tile_of_full_device(problem);
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = |block_m: u32| heads * ((problem.seqlen_q + i64::from(block_m) - 1) / i64::from(block_m));
    let fills = |block_m: &u32| tiles(*block_m) >= i64::from(device.sm_count);
    let block_mask = problem.features.block_mask;
    let fits =
        |block_m: &u32| *block_m <= rows && block_mask.is_none_or(|mask| mask.block_q % i64::from(*block_m) == 0);
    let block_m = [256, 192, 128].into_iter().filter(fits).find(fills).unwrap_or(64);
    of_rows(problem, device, block_m)
}

/// The heuristic's config with so many rows.
fn of_rows(problem: &Problem, device: &Device, block_m: u32) -> Option<ForwardKnobs> {
    let (rows, keys, stages) = tile_of_full_device(problem);
    let (block_mask, modifies) = (problem.features.block_mask, problem.features.modifies_scores());
    let (keys, stages) = match problem.head_dim.max(problem.head_dim_v) {
        // Two consumer warpgroups have the registers for blocks of 128 keys, which need fewer
        // barriers.
        dim @ ..=128 if block_mask.is_some_and(|mask| block_m == 128 && mask.block_k % 128 == 0) && !modifies => {
            (128, if dim <= 64 { [4, 4, 2] } else { [2, 2, 2] })
        }
        _ if block_m == rows => (keys, stages),
        ..=128 => (64, [4, 4, 2]),
        _ => (64, [3, 2, 1]),
    };
    let tiles_differ = tiles_differ(problem);
    let config = |(block_n, [k_stages, v_stages, q_stages]): (u32, [u32; 3])| {
        // Under a block mask tiles are short, so a tile's Q often waits until an earlier O has left
        // its slot. At head dims up to 64 this wait costs more than the TMA store saves.
        let may_wait = block_mask.is_none() || problem.head_dim.max(problem.head_dim_v) > 64;
        ForwardKnobs {
            block_m,
            block_n,
            k_stages,
            v_stages,
            q_stages,
            tma_store: u32::from(q_stages == 2 && fits_q_slot(problem) && may_wait),
            stale_max: u32::from(may_be_stale(problem)),
            group_mb: if !tiles_differ { 1 } else { 32 * u32::from(wants_groups(problem)) },
        }
    };
    let smaller = |block_n| [[2, 2, 1], [2, 1, 1], [1, 1, 1]].map(|stages| (block_n, stages));
    let flows = [(keys, stages)].into_iter().chain(smaller(64)).chain(smaller(48));
    flows.map(config).find(|config| config.fits(problem, device))
}

/// Whether heads are walked in groups whose K and V fit into L2. At head dims up to 64 and long
/// sequences, groups lose more at their ends than they gain, because concurrent tiles read the same
/// keys anyway (docs/tuning/sm90-forward.md). Under a block mask they do not, so groups still help.
fn wants_groups(problem: &Problem) -> bool {
    let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
    problem.seqlen_k < LONG || !is_narrow || problem.features.block_mask.is_some()
}

const LONG: i64 = 8192;

#[cfg(test)]
mod tests {
    use super::super::tests::{broken, h200, problem as of_pass};
    use super::*;
    use crate::config::{Config, Family};
    use crate::problem::{Features, Pass, Window};

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        of_pass(Pass::Forward, head_dim, head_dim_v)
    }

    fn config(block_m: u32, block_n: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", block_n), ("q_stages", 1), ("stale_max", 0)];
        let order = [("k_stages", 2), ("v_stages", 2), ("group_mb", 1), ("tma_store", 0)];
        Config::new(Family::Sm90, tile.into_iter().chain(order))
    }

    #[test]
    fn tiles_that_ptxas_was_seen_to_serialise_are_out_and_those_beside_them_in() {
        // (head dim, block_m, the largest block_n that ptxas did not serialise in a sweep on an
        // H200, the next larger block_n if shared memory has room for it).
        for (dim, block_m, most, more) in
            [(64, 128, 224, None), (64, 192, 128, Some(144)), (64, 256, 64, Some(80)), (128, 192, 80, Some(96))]
        {
            assert_eq!(broken(&problem(dim, dim), &config(block_m, most)), None, "{dim} {block_m} x {most}");
            let refused = more.map(|more| broken(&problem(dim, dim), &config(block_m, more)));
            assert!(refused.is_none_or(|by| by.as_deref() == Some("registers")), "{dim} {block_m} x {more:?}");
        }
    }

    #[test]
    fn the_heuristic_stores_by_tma_where_o_fits_one_of_two_q_slots() {
        let tma_store =
            |head_dim, head_dim_v| heuristic(&problem(head_dim, head_dim_v), &h200()).map(|config| config.tma_store);
        assert_eq!([(64, 64), (96, 96), (128, 128), (128, 64)].map(|(d, v)| tma_store(d, v)), [Some(1); 4]);
        assert_eq!([(64, 128), (160, 160), (256, 256)].map(|(d, v)| tma_store(d, v)), [Some(0); 3]);
    }

    #[test]
    fn each_constraint_refuses_what_it_names() {
        let (problem, good) = (problem(128, 128), config(128, 128));
        assert_eq!(broken(&problem, &good), None);
        let breaks = |problem: &Problem, knob, value| broken(problem, &good.clone().with(knob, value)).unwrap();
        assert_eq!(breaks(&Problem { dtype: Dtype::Fp16, ..problem }, "stale_max", 1), "stale_max");
        assert_eq!(breaks(&Problem { dropout: true, ..problem }, "stale_max", 1), "stale_max");
        let capped = Problem { features: Features { softcap: true, ..Features::NONE }, ..problem };
        assert_eq!(breaks(&capped, "stale_max", 1), "stale_max");
        let window = Features { window: Window { left: Some(9), ..Window::default() }, ..Features::NONE };
        assert_eq!(broken(&Problem { features: window, ..problem }, &good.clone().with("group_mb", 16)), None);
        assert_eq!(breaks(&problem, "group_mb", 16), "group_mb");
        assert_eq!(breaks(&problem, "k_stages", 1), "stages");
        assert_eq!(breaks(&problem, "k_stages", 4), "stages");
        assert_eq!(broken(&problem, &good.clone().with("k_stages", 3)), None);
        assert_eq!(broken(&problem, &good.clone().with("k_stages", 4).with("v_stages", 4)).unwrap(), "shared_memory");
        assert_eq!(breaks(&problem, "block_m", 256), "registers");
        assert_eq!(breaks(&problem, "tma_store", 1), "tma_store");
        let stored = good.clone().with("block_n", 64).with("q_stages", 2).with("tma_store", 1);
        assert_eq!(broken(&problem, &stored), None);
        assert_eq!(broken(&Problem { head_dim: 64, ..problem }, &stored).unwrap(), "tma_store");
        assert_eq!(broken(&Problem { head_dim: 72, ..problem }, &stored), None, "both take two boxes");
        let endless = Problem { batch_size: 1 << 16, num_heads_q: 1 << 14, num_heads_kv: 1 << 14, ..problem };
        assert_eq!(broken(&endless, &good).unwrap(), "grid");
    }
}
