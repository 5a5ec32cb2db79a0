//! The forward pass of the sm90 family: each consumer warpgroup computes 64 query rows.

use super::forward_geometry::{ForwardKnobs, SPLITS};
use super::warpgroup::{WARPGROUP_ROWS, last_wave, padded, tiles_differ};
use super::work;
use crate::device::{Arch, Device};
use crate::family::knob::{Constraint, Knob};
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Boxes, KernelSpec, Schedule};
use crate::family::tile::boxed_tile_bytes;
use crate::family::time::Work;
use crate::family::{combine, decode};
use crate::problem::{Dtype, Features, Problem};

impl Space for ForwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "num_splits",
            reason: "a launch makes no more splits than the workspace has room for; the keys under a block mask are no range, and a batch-invariant sum is in one order",
            holds: |p, k, _| k.num_splits == 1 || may_split(p) && i64::from(k.num_splits) <= p.max_splits(),
        },
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
            reason: "O is stored from its tile's Q slot while the next tile uses another, so Q needs two slots, and O must fit into one, which the fp32 O of a split does not",
            holds: |p, k, _| k.tma_store == 0 || (k.q_stages == 2 && fits_q_slot(p) && k.num_splits == 1),
        },
        Constraint {
            name: "decode_rows",
            reason: "a decode kernel takes short sequences out of varlen batches over pages, up to the rows of its tile; it has no block mask, and sums in another order than batch_invariant asks",
            holds: |p, k, _| k.decode_rows == 0 || mixes_lengths(p) && short_sequences(p, k.decode_rows).is_some(),
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        Constraint {
            name: "registers",
            reason: "O, S and P of a consumer thread must fit the registers that setmaxnreg gives it",
            holds: |p, k, _| k.registers(p) <= k.warpgroup_registers(p).consumer,
        },
        grid(),
    ];

    /// The tile of `tile_of_full_device`. A tile has fewer rows if there would be too few tiles for
    /// all SMs, and fewer keys and stages if it would not fit. No keys are split: `alternatives`
    /// has split configs, for the model to choose.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    fn usable(knob: &Knob, problem: &Problem) -> &'static [u32] {
        match knob.name {
            "num_splits" => {
                let most = problem.max_splits();
                &SPLITS[..SPLITS.partition_point(|splits| i64::from(*splits) <= most)]
            }
            "decode_rows" => {
                let rows = decode_rows(problem);
                let at = knob.values.iter().position(|value| *value == rows).unwrap_or(0);
                &knob.values[at..=at]
            }
            _ => knob.values,
        }
    }

    /// Splits are for the shape alone that they were measured on; `decode_rows` follows from the
    /// problem.
    fn carried_over(self, _from: &Problem, to: &Problem, _device: &Device) -> Self {
        let unsplit = if self.num_splits == 1 { self } else { self.unsplit(to) };
        ForwardKnobs { decode_rows: decode_rows(to), ..unsplit }
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
        let split = match self.num_splits {
            1 => 1.0,
            _ => self.us(problem, device) / self.unsplit(problem).us(problem, device),
        };
        work * split * last_wave * (1.0 + per_block + few_consumers + in_flight + order + prologue + epilogue)
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        let main = KernelSpec {
            template: "sm90_forward",
            entry: "flashtune_sm90_forward",
            threads: 128 * (self.consumers() + 1),
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_m,
            schedule: Schedule::Persistent,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: WARPGROUP_ROWS, key_rows: self.box_rows(problem) },
                is_dynamic: tiles_differ(problem),
            },
            registers: Some(self.warpgroup_registers(problem)),
            most_splits: self.num_splits,
            ..KernelSpec::MAIN
        };
        let combine = (self.num_splits > 1).then(|| combine::many_rows(problem, self.num_splits));
        let decode = (self.decode_rows > 0).then(|| short_sequences(problem, self.decode_rows));
        // A config whose rows no such kernel has breaks a constraint.
        let decode = decode.flatten();
        [main].into_iter().chain(combine).chain(decode).collect()
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::forward(self, problem, device)
    }

    /// The heuristic's config with every number of rows and, without pages, blocks of other numbers
    /// of keys, and each of these with its keys split.
    /// Other features than pages take registers, so problems with any keep to the tiles of the
    /// heuristic and of records.
    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        let Features { varlen, paged, .. } = problem.features;
        let is_plain = Features { varlen: None, paged: None, ..problem.features } == Features::NONE;
        if !is_plain || varlen.is_some() && paged.is_none() {
            return Vec::new();
        }
        let (rows, ..) = tile_of_full_device(problem);
        // A server prepares few kernels, so over pages there are fewer to choose from, and only a
        // tuning run splits.
        let lowest = if paged.is_some() { 128 } else { 64 };
        let heights = [64, 128, 192, 256].into_iter().filter(|block_m| (lowest..=rows).contains(block_m));
        let mut configs: Vec<_> = heights.filter_map(|block_m| of_rows(problem, device, block_m)).collect();
        let others: Vec<_> = configs.iter().flat_map(|config| other_blocks(config, problem, device)).collect();
        configs.extend(others);
        if paged.is_none() {
            let split: Vec<_> = configs.iter().flat_map(|config| split_keys(config, problem, device)).collect();
            configs.extend(split);
        }
        configs
    }
}

/// The config with its keys split, while the tiles of all splits fill the SMs at most `MOST_WAVES`
/// times.
fn split_keys(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = heads * ((problem.seqlen_q + i64::from(config.block_m) - 1) / i64::from(config.block_m));
    let most = MOST_WAVES * i64::from(device.sm_count) / tiles.max(1);
    let of = |num_splits: u32| ForwardKnobs { num_splits, tma_store: 0, ..*config };
    let splits = SPLITS.into_iter().filter(|splits| *splits > 1 && i64::from(*splits) <= most);
    splits.map(of).filter(|config| config.fits(problem, device)).collect()
}

const MOST_WAVES: i64 = 3;

/// The config with blocks of other numbers of keys, where two consumer warpgroups or one have
/// registers to spare: fewer keys are padded where there are few.
fn other_blocks(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    if problem.dropout || problem.features.paged.is_some() || config.block_m > 128 {
        return Vec::new();
    }
    let (blocks, in_flight): (&[u32], &[[u32; 3]]) = match problem.head_dim.max(problem.head_dim_v) {
        ..=128 => (&[80, 112, 128], &[[4, 4, 2], [3, 3, 2], [2, 2, 2], [2, 2, 1]]),
        129..=192 => (&[64, 80, 96], &[[3, 3, 1], [3, 2, 1], [2, 2, 1]]),
        _ => (&[64, 80], &[[3, 2, 1], [2, 2, 1]]),
    };
    let of_keys = |block_n: u32| {
        let of_stages = |&[k_stages, v_stages, q_stages]: &[u32; 3]| ForwardKnobs {
            block_n,
            k_stages,
            v_stages,
            q_stages,
            tma_store: stores_by_tma(q_stages, problem),
            ..*config
        };
        in_flight.iter().map(of_stages).find(|config| config.fits(problem, device))
    };
    blocks.iter().copied().filter_map(of_keys).collect()
}

impl ForwardKnobs {
    /// The config without splits. It stores O by TMA where it may, which a split does not.
    fn unsplit(self, problem: &Problem) -> Self {
        ForwardKnobs { tma_store: stores_by_tma(self.q_stages, problem), num_splits: 1, ..self }
    }

    /// The expected time, where every sequence counts as the longest.
    fn us(&self, problem: &Problem, device: &Device) -> f64 {
        self.work(&work::of_longest(problem), device).map_or(f64::INFINITY, |work| work.us(device))
    }
}

/// Whether an unsplit tile is to store O by TMA. Under a block mask tiles are short, so a tile's Q
/// often waits until an earlier O has left its slot. At head dims up to 64 this wait costs more
/// than the TMA store saves.
fn stores_by_tma(q_stages: u32, problem: &Problem) -> u32 {
    let may_wait = problem.features.block_mask.is_none() || problem.head_dim.max(problem.head_dim_v) > 64;
    u32::from(q_stages == 2 && fits_q_slot(problem) && may_wait)
}

/// The packed rows up to which a sequence goes to a decode kernel, in batches that may mix chunks
/// of prompts and single tokens: those of one token, and 16 at least, which a product has anyway. A
/// tile of this family takes as long for one row as for 64. 0 where no such kernel serves.
fn decode_rows(problem: &Problem) -> u32 {
    if !mixes_lengths(problem) {
        return 0;
    }
    let holds_a_token = |rows: &u32| i64::from(*rows) >= problem.group_size();
    let rows = [16, 32, 64].into_iter().find(holds_a_token);
    rows.filter(|rows| short_sequences(problem, *rows).is_some()).unwrap_or(0)
}

/// Whether a decode kernel may take the short sequences of a batch.
fn mixes_lengths(problem: &Problem) -> bool {
    let Features { varlen, paged, block_mask, .. } = problem.features;
    varlen.is_some() && paged.is_some() && block_mask.is_none() && !problem.batch_invariant
}

/// The decode kernel of those sequences, for a typical device of the one architecture that this
/// family runs on.
fn short_sequences(problem: &Problem, rows: u32) -> Option<KernelSpec> {
    let device = Device::typical(Arch::Sm(9, 0))?;
    decode::of_short_sequences(problem, rows, &device)
}

/// Whether the kernel may split the keys at all.
fn may_split(problem: &Problem) -> bool {
    problem.features.block_mask.is_none() && !problem.batch_invariant
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
    let takes_more =
        modifies || features.varlen.is_some() || features.paged.is_some() || problem.left_shift().is_some();
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
    // Rows behind the last query are computed too: fewer rows that need no more tiles are better.
    let saves_tiles = |block_m: &u32| tiles(*block_m) < tiles(*block_m - 64);
    let heights: Vec<u32> = [256, 192, 128].into_iter().filter(fits).filter(saves_tiles).collect();
    let full = heights.iter().copied().find(fills).unwrap_or(64);
    let lower = heights.into_iter().filter(|block_m| *block_m < full);
    // A producer that copies keys itself takes registers that the consumers of 256 rows need.
    [full].into_iter().chain(lower).chain([64]).find_map(|block_m| of_rows(problem, device, block_m))
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
    let config = |(block_n, [k_stages, v_stages, q_stages]): (u32, [u32; 3])| ForwardKnobs {
        block_m,
        block_n,
        k_stages,
        v_stages,
        q_stages,
        tma_store: stores_by_tma(q_stages, problem),
        stale_max: u32::from(may_be_stale(problem)),
        group_mb: if !tiles_differ { 1 } else { 32 * u32::from(wants_groups(problem)) },
        num_splits: 1,
        decode_rows: decode_rows(problem),
    };
    let smaller = |block_n| [[2, 2, 1], [2, 1, 1], [1, 1, 1]].map(|stages| (block_n, stages));
    // A block of 64 keys divides pages of 64 and shares 32 with pages of 32, so TMA copies them.
    // Threads look up the fewest pages if a block is four times 16 keys.
    let keys = if problem.features.paged.is_some_and(|page_size| page_size % i64::from(keys) != 0) { 64 } else { keys };
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
    use crate::family::knob::Knobs;
    use crate::problem::{BlockMask, Features, Pass, Varlen, Window};

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        of_pass(Pass::Forward, head_dim, head_dim_v)
    }

    fn config(block_m: u32, block_n: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", block_n), ("q_stages", 1), ("stale_max", 0)];
        let order = [("k_stages", 2), ("v_stages", 2), ("group_mb", 1), ("tma_store", 0)];
        let launch = [("num_splits", 1), ("decode_rows", 0)];
        Config::new(Family::Sm90, tile.into_iter().chain(order).chain(launch))
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
        assert_eq!(breaks(&problem, "num_splits", 2), "num_splits");
        let few = Problem { batch_size: 1, num_heads_q: 1, num_heads_kv: 1, ..problem };
        let split = good.clone().with("num_splits", 10);
        assert_eq!((few.max_splits(), broken(&few, &split)), (10, None));
        assert_eq!(breaks(&few, "num_splits", 12), "num_splits");
        assert_eq!(broken(&Problem { batch_invariant: true, ..few }, &split).unwrap(), "num_splits");
        let block_mask = Some(BlockMask { block_q: 128, block_k: 128 });
        let listed = Features { block_mask, ..Features::NONE };
        assert_eq!(broken(&Problem { features: listed, ..few }, &split).unwrap(), "num_splits");
        let stored = split.clone().with("block_n", 64).with("q_stages", 2).with("tma_store", 1);
        assert_eq!(broken(&few, &stored).unwrap(), "tma_store");
        assert_eq!(broken(&few, &stored.with("num_splits", 1)), None);
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

    /// One head, whose tiles are a fifth of an H200's SMs.
    fn few_tiles() -> Problem {
        Problem { batch_size: 1, num_heads_q: 1, num_heads_kv: 1, seqlen_q: 3249, seqlen_k: 3249, ..problem(128, 128) }
    }

    #[test]
    fn keys_are_split_where_tiles_are_few_and_only_for_the_shape_itself() {
        let (few, many) = (few_tiles(), problem(128, 128));
        let num_splits = ForwardKnobs::LIST.iter().find(|knob| knob.name == "num_splits").unwrap();
        let usable = |problem: &Problem| ForwardKnobs::usable(num_splits, problem);
        assert_eq!((usable(&few), usable(&many)), (&SPLITS[..9], &SPLITS[..1]));
        let unsplit = ForwardKnobs::heuristic(&few, &h200()).unwrap();
        assert_eq!((unsplit.num_splits, unsplit.tma_store), (1, 1));
        let are_split = |problem: &Problem| {
            let alternatives = ForwardKnobs::alternatives(problem, &h200());
            assert!(alternatives.iter().any(|config| config.num_splits == 1));
            alternatives.iter().any(|config| config.num_splits > 1)
        };
        assert!(are_split(&few) && !are_split(&many));
        let measured = ForwardKnobs { num_splits: 4, tma_store: 0, ..unsplit };
        assert!(measured.fits(&few, &h200()));
        assert_eq!(measured.carried_over(&few, &many, &h200()), unsplit);
        assert_eq!(unsplit.carried_over(&many, &few, &h200()), unsplit);
    }

    #[test]
    fn short_sequences_over_pages_are_left_to_a_decode_kernel() {
        let varlen = Some(Varlen { total_q: Some(4000), ..Varlen::default() });
        let features = Features { varlen, paged: Some(64), ..Features::NONE };
        let of_heads = |num_heads_kv| Problem { num_heads_q: 32, num_heads_kv, features, ..problem(128, 128) };
        let templates = |problem: &Problem| {
            let knobs = ForwardKnobs::heuristic(problem, &h200()).unwrap();
            assert!(knobs.fits(problem, &h200()));
            (knobs.decode_rows, knobs.kernels(problem).iter().map(|spec| spec.template).collect::<Vec<_>>())
        };
        assert_eq!(templates(&of_heads(8)), (16, vec!["sm90_forward", "decode"]));
        assert_eq!(templates(&of_heads(1)).0, 32, "a token has 32 packed rows");
        assert_eq!(templates(&Problem { num_heads_q: 128, ..of_heads(1) }).0, 0, "no tile has so many rows");
        assert_eq!(templates(&Problem { batch_invariant: true, ..of_heads(8) }).0, 0);
        // A record may stand for a problem of another group: 17 heads have the bucket of 16.
        let knobs = ForwardKnobs::heuristic(&of_heads(2), &h200()).unwrap();
        assert!(knobs.decode_rows == 16 && knobs.fits(&Problem { num_heads_q: 34, ..of_heads(2) }, &h200()));
        let contiguous = Features { paged: None, ..features };
        assert_eq!(templates(&Problem { features: contiguous, ..of_heads(8) }), (0, vec!["sm90_forward"]));
    }

    #[test]
    fn splits_are_expected_to_pay_where_tiles_are_few() {
        let faster = |problem: &Problem, num_splits| {
            let unsplit = ForwardKnobs { tma_store: 0, ..ForwardKnobs::heuristic(problem, &h200()).unwrap() };
            let split = ForwardKnobs { num_splits, ..unsplit };
            let us = |knobs: &ForwardKnobs| knobs.work(problem, &h200()).unwrap().us(&h200());
            assert_eq!(split.cost(problem, &h200()) < unsplit.cost(problem, &h200()), us(&split) < us(&unsplit));
            us(&split) < us(&unsplit)
        };
        assert!(faster(&few_tiles(), 2) && faster(&few_tiles(), 5));
        assert!(!faster(&problem(128, 128), 2));
        let short = Problem { seqlen_q: 512, seqlen_k: 512, ..few_tiles() };
        assert!(!faster(&short, 2), "the second kernel takes longer than it saves");
    }
}
