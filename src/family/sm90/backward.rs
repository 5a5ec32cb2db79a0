//! The backward pass of the sm90 family, in three kernels: up to head dim 128 each consumer warpgroup computes 64 keys, up to 192
//! fewer, transposed (`templates/sm90_backward_middle.cu.tera`), and beyond a half of the columns of 64 keys
//! (`templates/sm90_backward_wide.cu.tera`).

use super::super::limits::{GRID, MASK_BLOCKS, SHARED_MEMORY};
use super::super::{Constraint, Knob, check};
use super::padded;
use crate::config::{Config, Family};
use crate::device::Device;
use crate::family::geometry::{self, Sm90Backward};
use crate::problem::Problem;

pub const KNOBS: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a block", values: &[16, 32, 48, 64, 80, 96, 112, 128] },
    Knob { name: "block_n", meaning: "keys of a tile", values: &[64, 96, 128] },
    Knob {
        name: "num_stages",
        meaning: "blocks of Q and dO in flight; past head dim 128 of dO alone",
        values: &[1, 2, 3],
    },
    Knob { name: "kv_stages", meaning: "tiles of K and V in flight", values: &[1, 2] },
    Knob {
        name: "group_mb",
        meaning: "MB of Q, dO and fp32 dQ walked together, 0: all heads",
        values: &[0, 1, 4, 8, 16, 32],
    },
    Knob {
        name: "sink_softmax",
        meaning: "1: the compiler may sink the exponentials below the wait for dP",
        values: &[0, 1],
    },
    Knob { name: "v_regs", meaning: "dP's k16 steps that take V from registers", values: &[0, 2, 4] },
];

pub const CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "narrow_only",
        reason: "past head dim 128 there is no room for V in registers or a second tile of K and V, and no wait for dP follows the exponentials",
        holds: |p, c, _| {
            let narrow_only = [c.get("v_regs"), c.get("sink_softmax"), c.get("kv_stages") - 1];
            geometry::sm90_backward(p) == Sm90Backward::Narrow || narrow_only == [0; 3]
        },
    },
    Constraint {
        name: "num_stages",
        reason: "past head dim 128 two blocks of Q are in flight, behind which a third of dO waits",
        holds: |p, c, _| geometry::sm90_backward(p) == Sm90Backward::Narrow || c.get("num_stages") <= 2,
    },
    Constraint {
        name: "wgmma_m",
        reason: "wgmma's M is 64 queries from head dim 136 to 192, where a consumer holds fewer than 64 keys; else it is 64 keys, of each consumer or, past 192, of each of two blocks of threads",
        holds: |p, c, _| match geometry::sm90_backward(p) {
            Sm90Backward::Middle => c.get("block_m") == 64 && c.get("block_n") < 128,
            Sm90Backward::Narrow | Sm90Backward::Wide => c.get("block_n") == 128,
        },
    },
    Constraint {
        name: "v_regs",
        reason: "the first k16 step of dP overwrites it, from shared memory",
        holds: |p, c, _| i64::from(c.get("v_regs")) < (p.head_dim_v + 15) / 16,
    },
    MASK_BLOCKS,
    SHARED_MEMORY,
    Constraint {
        name: "registers",
        reason: "dK, dV, S, dP, P and what is kept of V of a consumer thread must fit the registers that setmaxnreg gives it",
        holds: |p, c, _| registers(p, c) <= geometry::sm90_backward_registers().consumer,
    },
    GRID,
];

/// Registers that a consumer thread needs at least: dK, dV, S and dP in fp32 (of wide ones a half of dK and dV, one of S and dP, and dQ;
/// of middle ones S and dP or dQ, and no P: at most 204, so that `wgmma_m` alone bounds their keys), P in 16 bits, V's k16 steps, and
/// 12 for addresses; what an H200's sweeps found serialised, and what not, bounds those 12.
fn registers(problem: &Problem, config: &Config) -> u32 {
    let [block_m, block_n] = ["block_m", "block_n"].map(|knob| config.get(knob));
    let [dim, dim_v] = [problem.head_dim, problem.head_dim_v];
    let (gradients, scores) = match geometry::sm90_backward(problem) {
        Sm90Backward::Narrow => {
            let columns = (dim as u32).next_multiple_of(8) + (dim_v as u32).next_multiple_of(8);
            (columns / 2, block_m + block_m / 4 + 4 * config.get("v_regs"))
        }
        Sm90Backward::Middle => {
            let dq_cols = geometry::boxes(dim) * 32;
            ((geometry::boxes(dim) + geometry::boxes(dim_v)) * block_n / 4, (block_n / 2).max(dq_cols / 2))
        }
        Sm90Backward::Wide => {
            ((geometry::sm90_half_cols(dim) + geometry::sm90_half_cols(dim_v)) / 2, block_m + block_m / 4)
        }
    };
    gradients + scores + 12
}

/// What bare kernels were fastest with on an H200, or the largest block whose consumers spill nothing (NVRTC 13.0;
/// `tests/kernels/matrix.rs` holds them to it), with fewer rows and less in flight where that does not fit. None where nothing
/// does, or the family does not do the problem.
pub fn heuristic(problem: &Problem, device: &Device) -> Option<Config> {
    let features = &problem.features;
    // What goes with each score takes an address and a bound of its own; that of a bias in both directions the most.
    let looks_up_twice = features.dbias || (features.bias && features.softcap);
    let (rows, [num_stages, kv_stages, v_regs]) = match (problem.head_dim.max(problem.head_dim_v), problem.dropout) {
        (..=64, _) if looks_up_twice => (64, [2, 2, 0]),
        (65..=128, _) if looks_up_twice => (32, [2, 1, 0]),
        (..=64, _) if features.modifies_scores() => (96, [2, 2, 0]),
        (65..=128, false) if features.modifies_scores() => (64, [2, 1, 0]),
        (129..=192, _) => (64, [2, 1, 0]),
        (193.., _) if features.modifies_scores() => (48, [1, 1, 0]),
        (..=64, false) => (128, [2, 2, 0]),
        (..=64, true) => (96, [2, 2, 0]),
        (65..=96, false) => (96, [2, 1, 0]),
        (97..=112, false) => (80, [2, 1, 0]),
        (65..=112, true) => (64, [2, 1, 0]),
        (113..=128, false) => (64, [2, 1, 2]),
        (113..=128, true) => (48, [2, 1, 0]),
        (_, false) if !problem.deterministic => (64, [1, 1, 0]),
        _ => (48, [1, 1, 0]),
    };
    // Tiles that take turns and wait lose least where few heads are walked together, however long they are.
    let group_mb = if problem.deterministic || wants_groups(problem) { 16 } else { 0 };
    let keys: &[u32] = match geometry::sm90_backward(problem) {
        // Where dK and dV are of three boxes each, what dropout or a bias takes is more than 48 keys leave.
        Sm90Backward::Middle
            if (problem.dropout || features.bias) && geometry::boxes(problem.head_dim.min(problem.head_dim_v)) == 3 =>
        {
            &[64]
        }
        Sm90Backward::Middle => &[96, 64],
        Sm90Backward::Narrow | Sm90Backward::Wide => &[128],
    };
    let config = |(block_n, block_m, [num_stages, kv_stages, v_regs]): (u32, u32, [u32; 3])| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("num_stages", num_stages), ("kv_stages", kv_stages)];
        let flow = [("group_mb", group_mb), ("sink_softmax", 0), ("v_regs", v_regs)];
        Config::new(Family::Sm90, tile.into_iter().chain(flow))
    };
    let in_flight = [[num_stages, kv_stages, v_regs], [num_stages, 1, 0], [1, 1, 0]];
    let blocks = || [128, 96, 80, 64, 48, 32, 16].into_iter().filter(|block_m| *block_m <= rows);
    let tiles = keys.iter().flat_map(|block_n| blocks().map(|block_m| (*block_n, block_m)));
    let flows = tiles.flat_map(|(block_n, block_m)| in_flight.map(|in_flight| (block_n, block_m, in_flight)));
    flows.map(config).find(|config| check(problem, config, device).is_ok())
}

/// Heads are walked in groups that fit L2, but for long ones all tiles of which are alike: those that run at a time read the same queries
/// (DESIGN.md, tuning log).
fn wants_groups(problem: &Problem) -> bool {
    problem.seqlen_q < LONG || geometry::tiles_differ(problem)
}

const LONG: i64 = 16384;

/// Expected time of a config over that of a perfect one, only to order candidates. The shares are what bare kernels showed
/// of each choice on an H200.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    let get = |knob| f64::from(config.get(knob));
    let heads = (problem.batch_size * problem.num_heads_kv) as f64;
    let tiles = heads * (problem.seqlen_k as f64 / get("block_n")).ceil();
    let waves = (tiles / f64::from(device.sm_count)).max(1e-3);
    // Tiles of every length, as causal ones are, fill the gaps of the last wave.
    let last_wave = if geometry::tiles_differ(problem) { 1.0 + 0.25 / waves } else { waves.ceil() / waves };
    // Barriers, statistics and the addition of dQ come once a block.
    let per_block = 45.0 / get("block_m");
    // Products of few keys read shared memory for longer than they multiply (DESIGN.md, three boxes of columns).
    let (per_tile, in_flight) = match geometry::sm90_backward(problem) {
        Sm90Backward::Narrow => (0.0, [0.15, 0.0, 0.02]),
        Sm90Backward::Middle => (120.0 / get("block_n"), [0.02, 0.0, 0.0]),
        Sm90Backward::Wide => (0.0, [0.0, 0.02, 0.04]),
    };
    let in_flight = in_flight[config.get("num_stages").clamp(1, 3) as usize - 1];
    // A tile's first loads and last stores stand still; it walks the queries of all heads of its group.
    let tile_end = 250.0 / get("kv_stages") / (problem.seqlen_q * problem.group_size()).max(1) as f64;
    let order = match (config.get("group_mb"), wants_groups(problem)) {
        (16, true) | (0, false) => 0.0,
        (0, true) => 0.2,
        _ => 0.03,
    };
    let fragments = match (problem.head_dim_v, config.get("v_regs")) {
        (..=64, 0) | (65.., 2) => 0.0,
        _ => 0.02,
    } + 0.005 * f64::from(config.get("sink_softmax"));
    let work = padded(problem.seqlen_q, get("block_m")) * padded(problem.seqlen_k, get("block_n"));
    work * last_wave * (1.0 + per_block + per_tile + in_flight + tile_end + order + fragments)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{broken, h200, problem as of_pass};
    use super::*;
    use crate::problem::Pass;

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        of_pass(Pass::Backward, head_dim, head_dim_v)
    }

    fn config(block_m: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", 128), ("num_stages", 1), ("kv_stages", 1)];
        Config::new(Family::Sm90, tile.into_iter().chain([("group_mb", 16), ("sink_softmax", 0), ("v_regs", 0)]))
    }

    #[test]
    fn tiles_that_ptxas_was_seen_to_serialise_are_out_and_those_beside_them_in() {
        // (head dim, clean, serialised), as a sweep on an H200 found.
        for (dim, clean, serialised) in [(64, vec![96, 128], None), (128, vec![64, 80], Some(96))] {
            for block_m in clean {
                assert_eq!(broken(&problem(dim, dim), &config(block_m)), None, "{dim} {block_m}");
            }
            if let Some(block_m) = serialised {
                let by = broken(&problem(dim, dim), &config(block_m));
                assert_eq!(by.as_deref(), Some("registers"), "{dim} {block_m}");
            }
        }
    }

    #[test]
    fn each_constraint_refuses_what_it_names() {
        let narrow = problem(128, 128);
        for (knob, most) in [("kv_stages", 1), ("num_stages", 2)] {
            let two_stages = config(80).with("num_stages", 2);
            assert_eq!(broken(&narrow, &two_stages.clone().with(knob, most)), None);
            assert_eq!(broken(&narrow, &two_stages.with(knob, most + 1)).unwrap(), "shared_memory");
        }
        assert_eq!(broken(&problem(256, 256), &config(64)), None);
        for (knob, value) in [("v_regs", 2), ("kv_stages", 2), ("sink_softmax", 1)] {
            assert_eq!(broken(&problem(256, 256), &config(64).with(knob, value)).unwrap(), "narrow_only");
        }
        assert_eq!(broken(&problem(256, 256), &config(64).with("num_stages", 2)).unwrap(), "shared_memory");
        for (stages, by) in [(2, None), (3, Some("num_stages"))] {
            let tile = config(64).with("block_n", 64).with("num_stages", stages);
            assert_eq!(broken(&problem(64, 160), &tile).as_deref(), by);
        }
        assert_eq!(broken(&problem(32, 32), &config(64).with("v_regs", 2)).unwrap(), "v_regs");
        let endless = Problem { batch_size: 1 << 16, num_heads_q: 1 << 14, num_heads_kv: 1 << 14, ..narrow };
        assert_eq!(broken(&endless, &config(80)).unwrap(), "grid");
    }

    #[test]
    fn three_boxes_of_columns_leave_room_for_48_keys_a_consumer() {
        let tile = |block_m, block_n| config(block_m).with("block_n", block_n);
        for dim in [136, 160, 192] {
            assert_eq!(broken(&problem(dim, dim), &tile(64, 96)), None, "{dim}");
            assert_eq!(broken(&problem(dim, dim), &tile(64, 128)).as_deref(), Some("wgmma_m"), "{dim}");
            assert_eq!(broken(&problem(dim, dim), &tile(48, 96)).as_deref(), Some("wgmma_m"), "{dim}");
            let two_of_dout = tile(64, 96).with("num_stages", 2);
            assert_eq!(broken(&problem(dim, dim), &two_of_dout).as_deref(), Some("shared_memory"), "{dim}");
        }
        assert_eq!(broken(&problem(192, 128), &tile(64, 96).with("num_stages", 2)), None);
        for dim in [128, 200] {
            assert_eq!(broken(&problem(dim, dim), &tile(64, 96)).as_deref(), Some("wgmma_m"), "{dim}");
        }
    }

    #[test]
    fn the_heuristic_is_what_was_fastest_on_an_h200() {
        let knobs = |problem: &Problem| {
            let config = heuristic(problem, &h200()).unwrap();
            ["block_m", "num_stages", "kv_stages", "group_mb", "v_regs"].map(|knob| config.get(knob))
        };
        assert_eq!(knobs(&problem(64, 64)), [128, 2, 2, 16, 0]);
        assert_eq!(knobs(&Problem { dropout: true, ..problem(64, 64) }), [96, 2, 2, 16, 0]);
        assert_eq!(knobs(&problem(128, 128)), [64, 2, 1, 16, 2]);
        assert_eq!(knobs(&problem(192, 192)), [64, 1, 1, 16, 0]);
        assert_eq!(knobs(&problem(192, 128)), [64, 2, 1, 16, 0]);
        assert_eq!(knobs(&problem(256, 256)), [64, 1, 1, 16, 0]);
        let keys = |problem: &Problem| heuristic(problem, &h200()).unwrap().get("block_n");
        let with_dropout = |dim, dim_v| Problem { dropout: true, ..problem(dim, dim_v) };
        assert_eq!(
            [keys(&problem(192, 192)), keys(&with_dropout(192, 192)), keys(&with_dropout(192, 128))],
            [96, 64, 96]
        );
        assert_eq!(knobs(&Problem { seqlen_q: 16384, ..problem(128, 128) })[3], 0);
        assert_eq!(knobs(&Problem { deterministic: true, ..problem(128, 128) })[3], 16);
    }
}
