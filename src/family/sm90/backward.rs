//! The backward pass of the sm90 family, in three kernels.
//!
//! Up to head dim 128 each consumer warpgroup computes 64 keys, up to 192 fewer, transposed
//! (`templates/sm90_backward_middle.cu.tera`), and beyond a half of the columns of 64 keys
//! (`templates/sm90_backward_wide.cu.tera`).

use super::backward_geometry::{BackwardKernel, BackwardKnobs, CONSUMERS, SPLIT_WAVES, dq_transposed, half_cols};
use super::warpgroup::{WARPGROUP_ROWS, last_wave, padded, registers, tiles_differ};
use super::work;
use crate::device::Device;
use crate::family::backward;
use crate::family::knob::Constraint;
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, Boxes, KernelSpec, Schedule};
use crate::family::tile::boxes;
use crate::family::time::Work;
use crate::problem::{Features, Problem};

impl Space for BackwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "narrow_only",
            reason: "past head dim 128 there is no room for V in registers or a second tile of K and V, and no wait for dP follows the exponentials",
            holds: |p, k, _| is_narrow(p) || (k.v_regs, k.sink_softmax, k.kv_stages) == (0, 0, 1),
        },
        Constraint {
            name: "num_stages",
            reason: "past head dim 128 two blocks of Q are in flight, behind which a third of dO waits",
            holds: |p, k, _| is_narrow(p) || k.num_stages <= 2,
        },
        Constraint {
            name: "wgmma_m",
            reason: "wgmma's M is 64 queries from head dim 136 to 192, where a consumer holds fewer than 64 keys; else it is 64 keys, of each consumer or, past 192, of each of two CTAs",
            holds: |p, k, _| match BackwardKernel::of(p) {
                BackwardKernel::Middle => k.block_m == 64 && k.block_n < 128,
                BackwardKernel::Narrow | BackwardKernel::Wide => k.block_n == 128,
            },
        },
        Constraint {
            name: "v_regs",
            reason: "the first k16 step of dP overwrites it, from shared memory",
            holds: |p, k, _| i64::from(k.v_regs) < (p.head_dim_v + 15) / 16,
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        Constraint {
            name: "registers",
            reason: "dK, dV, S, dP, P and the part of V that a consumer thread keeps must fit the registers that setmaxnreg gives it",
            holds: |p, k, _| k.registers(p) <= registers(CONSUMERS).consumer,
        },
        grid(),
        Constraint {
            name: "split_waves",
            reason: "splits need queries enough for each, and not tiles for as many waves already; lists of a block mask are walked whole",
            holds: |p, k, d| k.split_waves == 0 || k.num_splits(p, d) > 1,
        },
    ];

    /// The tile that bare kernels were fastest with on an H200, or the largest block whose
    /// consumers spill nothing (NVRTC 13.0; `tests/kernels/matrix.rs` holds them to it), with fewer
    /// rows and less in flight where that does not fit.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    /// Expected time over that of a perfect config. The shares are what bare kernels showed of each
    /// choice on an H200.
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, kv_stages] = [self.block_m, self.block_n, self.kv_stages].map(f64::from);
        let heads = (problem.batch_size * problem.num_heads_kv) as f64;
        let tiles = heads * (problem.seqlen_k as f64 / block_n).ceil();
        let last_wave = last_wave(tiles, device.sm_count, tiles_differ(problem));
        // Barriers, statistics and the addition of dQ come once a block.
        let per_block = 45.0 / block_m;
        // Products of few keys read shared memory for longer than they multiply
        // (docs/tuning/sm90-backward.md).
        let (per_tile, in_flight) = match BackwardKernel::of(problem) {
            BackwardKernel::Narrow => (0.0, [0.15, 0.0, 0.02]),
            BackwardKernel::Middle => (120.0 / block_n, [0.02, 0.0, 0.0]),
            BackwardKernel::Wide => (0.0, [0.0, 0.02, 0.04]),
        };
        let in_flight = in_flight[self.num_stages as usize - 1];
        // Nothing is multiplied during a tile's first loads and last stores; it walks the queries
        // of all heads of its group.
        let tile_end = 250.0 / kv_stages / (problem.seqlen_q * problem.group_size()).max(1) as f64;
        let order = match (self.group_mb, wants_groups(problem, device)) {
            (16, true) | (0, false) => 0.0,
            (0, true) => 0.2,
            _ => 0.03,
        };
        let fragments = match (problem.head_dim_v, self.v_regs) {
            (..=64, 0) | (65.., 2) => 0.0,
            _ => 0.02,
        } + 0.005 * f64::from(self.sink_softmax);
        let work = padded(problem.seqlen_q, block_m) * padded(problem.seqlen_k, block_n);
        let split = match self.split_waves {
            0 => 1.0,
            _ => self.us(problem, device) / BackwardKnobs { split_waves: 0, ..*self }.us(problem, device),
        };
        work * split * last_wave * (1.0 + per_block + per_tile + in_flight + tile_end + order + fragments)
    }

    /// Another shape has other waves and groups.
    fn carried_over(self, _from: &Problem, to: &Problem, device: &Device) -> Self {
        let is_grouped_in_vain = tiles_differ(to) && !to.deterministic && !wants_groups(to, device);
        let group_mb = if is_grouped_in_vain { 0 } else { self.group_mb };
        BackwardKnobs { group_mb, ..self }.with_best_split(to, device)
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        backward::around(problem, self.main(problem), dq_transposed(problem))
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::backward(self, problem, device)
    }

    /// The heuristic's config with blocks of fewer rows, which need fewer registers, and from head
    /// dim 136 to 192 with tiles of fewer keys, where no feature takes more.
    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        let plain = Some(problem).filter(|problem| problem.features == Features::NONE);
        let Some(config) = plain.and_then(|problem| heuristic(problem, device)) else { return Vec::new() };
        let smaller = [112, 96, 80, 64, 48].into_iter().filter(|block_m| *block_m < config.block_m);
        let lower = smaller.map(|block_m| BackwardKnobs { block_m, ..config });
        let is_middle = BackwardKernel::of(problem) == BackwardKernel::Middle;
        let of_keys = |block_n| BackwardKnobs { block_n, num_stages: 2, ..config }.with_best_split(problem, device);
        let fewer_keys = [64].into_iter().filter(|block_n| is_middle && *block_n < config.block_n).map(of_keys);
        [config].into_iter().chain(lower).chain(fewer_keys).filter(|config| config.fits(problem, device)).collect()
    }
}

fn is_narrow(problem: &Problem) -> bool {
    BackwardKernel::of(problem) == BackwardKernel::Narrow
}

impl BackwardKnobs {
    fn main(&self, problem: &Problem) -> KernelSpec {
        let (template, schedule, key_rows) = match BackwardKernel::of(problem) {
            BackwardKernel::Narrow => ("sm90_backward", Schedule::Persistent, self.block_n),
            BackwardKernel::Middle => ("sm90_backward_middle", Schedule::Persistent, self.block_n),
            BackwardKernel::Wide => ("sm90_backward_wide", Schedule::PersistentPairs, WARPGROUP_ROWS),
        };
        KernelSpec {
            template,
            entry: "flashtune_sm90_backward",
            threads: 128 * (CONSUMERS + 1),
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_n,
            axis: Axis::Keys,
            schedule,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: self.block_m, key_rows },
                // Deterministic tiles are drawn from the workspace.
                is_dynamic: tiles_differ(problem) && !problem.deterministic,
            },
            registers: Some(registers(CONSUMERS)),
            split_waves: self.split_waves,
            ..KernelSpec::MAIN
        }
    }

    pub fn num_splits(&self, problem: &Problem, device: &Device) -> u32 {
        self.main(problem).num_splits(problem, device.sm_count)
    }

    /// The expected work. Every sequence counts as the longest, and a block mask counts as if it
    /// listed all blocks.
    fn largest_work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::backward(self, &work::of_longest(problem), device)
    }

    fn us(&self, problem: &Problem, device: &Device) -> f64 {
        self.largest_work(problem, device).map_or(f64::INFINITY, |work| work.us(device))
    }

    /// Splits where they are expected to pay. Those of a deterministic pass are the same on all
    /// GPUs of an architecture, as its bits are.
    fn with_best_split(self, problem: &Problem, device: &Device) -> Self {
        let unsplit = BackwardKnobs { split_waves: 0, ..self };
        // Lengths and modified scores leave no registers for the bounds of a part of the walk: its
        // loop would spill.
        if problem.features.varlen.is_some() && problem.features.modifies_scores() {
            return unsplit;
        }
        let typical = Device::typical(device.arch).filter(|_| problem.deterministic);
        let device = typical.as_ref().unwrap_or(device);
        let Some(work) = unsplit.largest_work(problem, device) else { return unsplit };
        let share = if work.idle() > 0.5 { WORTH_SPLITTING_IF_IDLE } else { WORTH_SPLITTING };
        let split = SPLIT_WAVES.iter().map(|waves| BackwardKnobs { split_waves: *waves, ..self });
        let split = split.filter(|knobs| knobs.num_splits(problem, device) > 1);
        let timed = split.map(|knobs| (knobs.us(problem, device), knobs));
        let best = timed.min_by(|(a, _), (b, _)| a.total_cmp(b));
        best.filter(|(us, _)| *us < share * work.us(device)).map_or(unsplit, |(_, knobs)| knobs)
    }

    /// Registers that a consumer thread needs at least: those of `gradients` and `scores`, and 12
    /// for addresses. The shapes that an H200's sweeps found serialised, and those found not, bound
    /// the 12.
    ///
    /// A narrow kernel holds dK, dV, S and dP in fp32, P in 16 bits, and V's k16 steps. A wide one
    /// holds a half of dK and dV, one of S and dP, and dQ. A middle one holds S and dP or dQ, and
    /// no P: at most 204, so that `wgmma_m` alone bounds its keys.
    fn registers(&self, problem: &Problem) -> u32 {
        let (block_m, block_n) = (self.block_m, self.block_n);
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let (gradients, scores) = match BackwardKernel::of(problem) {
            BackwardKernel::Narrow => {
                let columns = (dim as u32).next_multiple_of(8) + (dim_v as u32).next_multiple_of(8);
                (columns / 2, block_m + block_m / 4 + 4 * self.v_regs)
            }
            BackwardKernel::Middle => {
                let dq_cols = boxes(dim) * 32;
                ((boxes(dim) + boxes(dim_v)) * block_n / 4, (block_n / 2).max(dq_cols / 2))
            }
            BackwardKernel::Wide => ((half_cols(dim) + half_cols(dim_v)) / 2, block_m + block_m / 4),
        };
        gradients + scores + 12
    }
}

fn heuristic(problem: &Problem, device: &Device) -> Option<BackwardKnobs> {
    let features = &problem.features;
    // The tensors that go with each score take an address and a bound each, a bias in both
    // directions the most.
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
    // Deterministic tiles wait least for their turn at dQ where few heads are walked together,
    // however long the heads are.
    let group_mb = if problem.deterministic || wants_groups(problem, device) { 16 } else { 0 };
    let has_three_boxes_each = boxes(problem.head_dim.min(problem.head_dim_v)) == 3;
    let keys: &[u32] = match BackwardKernel::of(problem) {
        // Where dK and dV are of three boxes each, dropout or a bias takes more than 48 keys leave.
        BackwardKernel::Middle if (problem.dropout || features.bias) && has_three_boxes_each => &[64],
        BackwardKernel::Middle => &[96, 64],
        BackwardKernel::Narrow | BackwardKernel::Wide => &[128],
    };
    let config = |(block_n, block_m, [num_stages, kv_stages, v_regs]): (u32, u32, [u32; 3])| BackwardKnobs {
        block_m,
        block_n,
        num_stages,
        kv_stages,
        group_mb,
        sink_softmax: 0,
        v_regs,
        split_waves: 0,
    };
    let in_flight = [[num_stages, kv_stages, v_regs], [num_stages, 1, 0], [1, 1, 0]];
    let blocks = || [128, 96, 80, 64, 48, 32, 16].into_iter().filter(|block_m| *block_m <= rows);
    let tiles = keys.iter().flat_map(|block_n| blocks().map(|block_m| (*block_n, block_m)));
    let flows = tiles.flat_map(|(block_n, block_m)| in_flight.map(|in_flight| (block_n, block_m, in_flight)));
    let tile = flows.map(config).find(|config| config.fits(problem, device))?;
    Some(tile.with_best_split(problem, device))
}

/// Splits are expected to take less than this share of the time without.
const WORTH_SPLITTING: f64 = 0.95;
/// The same where more than half of the SMs would have no tile: there the model is least sure of
/// the time without.
const WORTH_SPLITTING_IF_IDLE: f64 = 1.05;

/// Heads are walked in groups that fit L2, except long ones all tiles of which are alike: tiles
/// that run at a time read the same queries (docs/tuning/sm90-backward.md). Where tiles differ and
/// are few, a group has hardly more of them than there are SMs, and the end of each group leaves
/// SMs idle: 3 heads of 13,821 causal queries took 1.25 times as long in groups (H200, head dim
/// 128).
fn wants_groups(problem: &Problem, device: &Device) -> bool {
    let tiles = problem.batch_size * problem.num_heads_kv * ((problem.seqlen_k + 127) / 128);
    let are_few = tiles <= FEW_WAVES * i64::from(device.sm_count);
    if tiles_differ(problem) { !are_few } else { problem.seqlen_q < LONG }
}

/// Tiles for each SM up to which the end of a group leaves SMs idle.
const FEW_WAVES: i64 = 4;

const LONG: i64 = 16384;

#[cfg(test)]
mod tests {
    use super::super::tests::{broken, h200, problem as of_pass};
    use super::*;
    use crate::config::{Config, Family};
    use crate::problem::{BlockMask, Causal, Features, Pass};

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        of_pass(Pass::Backward, head_dim, head_dim_v)
    }

    fn config(block_m: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", 128), ("num_stages", 1), ("kv_stages", 1)];
        Config::new(
            Family::Sm90,
            tile.into_iter().chain([("group_mb", 16), ("sink_softmax", 0), ("v_regs", 0), ("split_waves", 0)]),
        )
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

    /// (batch, query heads, kv heads, seqlen_q, seqlen_k, head dim)
    const FEW_TILES: [(i64, i64, i64, i64, i64, i64); 6] = [
        (2, 16, 1, 1140, 1140, 64),
        (1, 32, 2, 293, 293, 256),
        (2, 5, 5, 9216, 226, 64),
        (1, 4, 1, 4767, 4767, 128),
        (1, 8, 1, 2000, 2000, 192),
        (1, 4, 4, 2048, 2048, 128),
    ];

    fn of_shape(
        (batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, dim): (i64, i64, i64, i64, i64, i64),
    ) -> Problem {
        Problem { batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, ..problem(dim, dim) }
    }

    #[test]
    fn few_tiles_share_walks_until_most_sms_have_one() {
        for shape in FEW_TILES {
            // Most rows of cross attention see no key through a causal mask.
            let causals = if shape.3 > shape.4 { &[Causal::None][..] } else { &[Causal::None, Causal::BottomRight] };
            for causal in causals.iter().copied() {
                for deterministic in [false, true] {
                    let problem = Problem { causal, deterministic, ..of_shape(shape) };
                    let config = heuristic(&problem, &h200()).unwrap();
                    let splits = i64::from(config.num_splits(&problem, &h200()));
                    let main = config.main(&problem);
                    let busy = main.grid(&problem, h200().sm_count)[0];
                    assert!(splits > 1 && busy >= 100, "{problem:?}: {splits} splits on {busy} SMs");
                    assert!(splits <= problem.max_splits());
                }
            }
        }
        let many = Problem { batch_size: 16, ..problem(128, 128) };
        assert_eq!(heuristic(&many, &h200()).unwrap().split_waves, 0);
    }

    #[test]
    fn splits_need_queries_and_room() {
        let split = config(64).with("split_waves", 4);
        let few = of_shape(FEW_TILES[3]);
        assert_eq!(broken(&few, &split), None);
        let blocks = Features { block_mask: Some(BlockMask { block_q: 128, block_k: 128 }), ..Features::NONE };
        let cannot = [
            Problem { batch_size: 64, ..few },
            Problem { seqlen_q: 0, ..few },
            Problem { features: blocks, ..few },
            Problem { num_heads_q: 1, seqlen_q: 100, ..few },
        ];
        for problem in cannot {
            assert_eq!(broken(&problem, &split).as_deref(), Some("split_waves"), "{problem:?}");
        }
    }

    #[test]
    fn a_config_from_another_shape_gets_the_splits_of_this_one() {
        let (few, many) = (of_shape(FEW_TILES[0]), Problem { batch_size: 64, ..of_shape(FEW_TILES[0]) });
        let measured = BackwardKnobs { split_waves: 0, ..heuristic(&many, &h200()).unwrap() };
        let carried = measured.carried_over(&many, &few, &h200());
        assert!(carried.num_splits(&few, &h200()) > 1);
        assert_eq!(carried.carried_over(&few, &many, &h200()), measured);
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
            [config.block_m, config.num_stages, config.kv_stages, config.group_mb, config.v_regs]
        };
        assert_eq!(knobs(&problem(64, 64)), [128, 2, 2, 16, 0]);
        assert_eq!(knobs(&Problem { dropout: true, ..problem(64, 64) }), [96, 2, 2, 16, 0]);
        assert_eq!(knobs(&problem(128, 128)), [64, 2, 1, 16, 2]);
        assert_eq!(knobs(&problem(192, 192)), [64, 1, 1, 16, 0]);
        assert_eq!(knobs(&problem(192, 128)), [64, 2, 1, 16, 0]);
        assert_eq!(knobs(&problem(256, 256)), [64, 1, 1, 16, 0]);
        let keys = |problem: &Problem| heuristic(problem, &h200()).unwrap().block_n;
        let with_dropout = |dim, dim_v| Problem { dropout: true, ..problem(dim, dim_v) };
        assert_eq!(
            [keys(&problem(192, 192)), keys(&with_dropout(192, 192)), keys(&with_dropout(192, 128))],
            [96, 64, 96]
        );
        assert_eq!(knobs(&Problem { seqlen_q: 16384, ..problem(128, 128) })[3], 0);
        assert_eq!(knobs(&Problem { deterministic: true, ..problem(128, 128) })[3], 16);
    }
}
