//! The forward pass of the sm90 family: each consumer warpgroup computes 64 query rows.

use super::super::limits::{GRID, MASK_BLOCKS, SHARED_MEMORY};
use super::super::{Constraint, Knob, check};
use super::padded;
use crate::config::{Config, Family};
use crate::device::Device;
use crate::family::geometry;
use crate::problem::{Dtype, Problem};

pub const KNOBS: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a tile, 64 per consumer warpgroup", values: &[64, 128, 192, 256] },
    Knob {
        name: "block_n",
        meaning: "keys of a block",
        values: &[48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224],
    },
    Knob { name: "k_stages", meaning: "K blocks in flight", values: &[1, 2, 3, 4, 5, 6] },
    Knob { name: "v_stages", meaning: "V blocks in flight", values: &[1, 2, 3, 4, 5, 6] },
    Knob { name: "q_stages", meaning: "Q tiles in flight", values: &[1, 2] },
    Knob { name: "tma_store", meaning: "1: O leaves by TMA from Q's slot, 0: from registers", values: &[0, 1] },
    Knob { name: "stale_max", meaning: "1: full blocks are not searched for a maximum, 0: lazily", values: &[0, 1] },
    Knob { name: "group_mb", meaning: "MB of K and V walked together, 0: all heads", values: &[0, 1, 4, 8, 16, 32] },
];

pub const CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "stale_max",
        reason: "weights of a stale maximum leave fp16's range, bf16 has fp32's; and the path behind it draws no dropout mask and takes scores as they are",
        holds: |p, c, _| c.get("stale_max") == 0 || may_be_stale(p),
    },
    Constraint {
        name: "stages",
        reason: "a consumer takes K one block ahead of V: what is further ahead waits for the other's slot",
        holds: |_, c, _| matches!(c.get("k_stages").checked_sub(c.get("v_stages")), Some(0 | 1)),
    },
    Constraint {
        name: "group_mb",
        reason: "without a mask or lengths that make tiles differ, few heads at a time hit L2 best",
        holds: |p, c, _| c.get("group_mb") == 1 || geometry::tiles_differ(p),
    },
    Constraint {
        name: "tma_store",
        reason: "O waits in its tile's Q slot, which must be as wide, while the next tile's Q is in use: that needs two slots",
        holds: |p, c, _| c.get("tma_store") == 0 || (c.get("q_stages") == 2 && fits_q_slot(p)),
    },
    MASK_BLOCKS,
    SHARED_MEMORY,
    Constraint {
        name: "registers",
        reason: "O, S and P of a consumer thread must fit the registers that setmaxnreg gives it",
        holds: |p, c, _| registers(p, c) <= geometry::sm90_registers(c.get("block_m")).consumer,
    },
    GRID,
];

/// Registers that a consumer thread needs at least: O and S in fp32, P in 16 bits, and 28 for addresses and statistics.
fn registers(problem: &Problem, config: &Config) -> u32 {
    let dim_v = (problem.head_dim_v as u32).next_multiple_of(16);
    dim_v / 2 + config.get("block_n") / 2 + config.get("block_n") / 4 + 28
}

fn may_be_stale(problem: &Problem) -> bool {
    problem.dtype == Dtype::Bf16 && !problem.dropout && !problem.features.modifies_scores()
}

/// Whether a warpgroup's O takes no more room than its Q.
fn fits_q_slot(problem: &Problem) -> bool {
    geometry::boxed_tile_bytes(64, problem.head_dim_v) <= geometry::boxed_tile_bytes(64, problem.head_dim)
}

/// Rows, keys, and K, V and Q stages that won on an H200 where tiles abound (DESIGN.md, tuning log); with dropout, of those
/// and with what else takes registers, of those whose consumers spill nothing.
fn of_many(problem: &Problem) -> (u32, u32, [u32; 3]) {
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

/// The tile of many, or one with fewer rows where tiles are few; with fewer keys and blocks in flight where they do not fit.
/// None where nothing does, or the family does not do the problem.
pub fn heuristic(problem: &Problem, device: &Device) -> Option<Config> {
    let (rows, keys, stages) = of_many(problem);
    let modifies = problem.features.modifies_scores();
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = |block_m: u32| heads * ((problem.seqlen_q + i64::from(block_m) - 1) / i64::from(block_m));
    let fills = |block_m: &u32| tiles(*block_m) >= i64::from(device.sm_count);
    let block_mask = problem.features.block_mask;
    let fits =
        |block_m: &u32| *block_m <= rows && block_mask.is_none_or(|mask| mask.block_q % i64::from(*block_m) == 0);
    let block_m = [256, 192, 128].into_iter().filter(fits).find(fills).unwrap_or(64);
    let (keys, stages) = match problem.head_dim.max(problem.head_dim_v) {
        // Two warpgroups have registers for more keys, and fewer barriers.
        dim @ ..=128 if block_mask.is_some_and(|mask| block_m == 128 && mask.block_k % 128 == 0) && !modifies => {
            (128, if dim <= 64 { [4, 4, 2] } else { [2, 2, 2] })
        }
        _ if block_m == rows => (keys, stages),
        ..=128 => (64, [4, 4, 2]),
        _ => (64, [3, 2, 1]),
    };
    let tiles_differ = geometry::tiles_differ(problem);
    let config = |(block_n, [k_stages, v_stages, q_stages]): (u32, [u32; 3])| {
        let tile = [("block_m", block_m), ("block_n", block_n)];
        let stages = [("k_stages", k_stages), ("v_stages", v_stages), ("q_stages", q_stages)];
        // Under a block mask tiles are short, and the next one's Q waits for the store out of its slot: at a head dim of 64 that
        // costs more than the store saves.
        let may_wait = block_mask.is_none() || problem.head_dim.max(problem.head_dim_v) > 64;
        let tma_store = u32::from(q_stages == 2 && fits_q_slot(problem) && may_wait);
        let group_mb = if !tiles_differ { 1 } else { 32 * u32::from(wants_groups(problem)) };
        let stale_max = u32::from(may_be_stale(problem));
        let flow = [("group_mb", group_mb), ("stale_max", stale_max), ("tma_store", tma_store)];
        Config::new(Family::Sm90, tile.into_iter().chain(stages).chain(flow))
    };
    let smaller = |block_n| [[2, 2, 1], [2, 1, 1], [1, 1, 1]].map(|stages| (block_n, stages));
    let flows = [(keys, stages)].into_iter().chain(smaller(64)).chain(smaller(48));
    flows.map(config).find(|config| check(problem, config, device).is_ok())
}

/// Walked in groups, heads find their K and V in L2. At head dims up to 64 long ones lose more by the groups' ends than they win, since
/// tiles that run at a time read the same keys (DESIGN.md, tuning log), if no block mask sends each its own way.
fn wants_groups(problem: &Problem) -> bool {
    let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
    problem.seqlen_k < LONG || !is_narrow || problem.features.block_mask.is_some()
}

const LONG: i64 = 8192;

/// Expected time of a config over that of a perfect one, only to order candidates. The shares are what sweeps on an H200
/// showed of each choice.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    let get = |knob| f64::from(config.get(knob));
    let (tiles_differ, seqlen_k) = (geometry::tiles_differ(problem), (problem.seqlen_k as f64).max(1.0));
    let heads = (problem.batch_size * problem.num_heads_q) as f64;
    let tiles = heads * (problem.seqlen_q as f64 / get("block_m")).ceil();
    let waves = (tiles / f64::from(device.sm_count)).max(1e-3);
    // Tiles of every length, as causal ones are, fill the gaps of the last wave.
    let last_wave = if tiles_differ { 1.0 + 0.25 / waves } else { waves.ceil() / waves };
    // A search for the maximum, votes and barriers come once a block.
    let per_block = if config.get("stale_max") == 1 { 4.0 } else { 17.0 } / get("block_n");
    let few_consumers = [0.2, 0.08, 0.01, 0.0][(config.get("block_m") / 64).clamp(1, 4) as usize - 1];
    let in_flight = 5.0 / (get("k_stages") * get("block_n")) + 5.0 / (get("v_stages") * get("block_n"));
    let order = match (config.get("group_mb"), wants_groups(problem)) {
        (32, true) | (0, false) => 0.0,
        (0, true) => 0.1,
        _ => 0.02,
    };
    let prologue = 60.0 / get("q_stages") / seqlen_k;
    let epilogue = 60.0 * (1.0 - get("tma_store")) / seqlen_k;
    let work = padded(problem.seqlen_q, get("block_m")) * padded(problem.seqlen_k, get("block_n"));
    let order = if tiles_differ { order } else { 0.0 };
    work * last_wave * (1.0 + per_block + few_consumers + in_flight + order + prologue + epilogue)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{broken, h200, problem as of_pass};
    use super::*;
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
        // (head dim, rows, the most keys that a sweep on an H200 found free of it, more where shared memory would hold it).
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
        let tma_store = |head_dim, head_dim_v| {
            heuristic(&problem(head_dim, head_dim_v), &h200()).map(|config| config.get("tma_store"))
        };
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
