//! The forward pass of the sm90 family: each consumer warpgroup computes 64 query rows.

use super::forward_alternatives;
use super::forward_geometry::{ForwardKnobs, SEGMENT_SPLITS, usable_splits};
use super::forward_heuristic::{
    MOST_KEYS_OF_8_MB, decode_rows, decode_splits, fits_q_slot, group_mb, may_be_stale, may_split, may_store_apart,
    short_sequences, stored_by_tma,
};
use super::forward_widening::{heuristic, us};
use super::warpgroup::{WARPGROUP_ROWS, hidden_blocks, last_wave, padded, tiles_differ};
use super::work;
use crate::device::Device;
use crate::family::combine;
use crate::family::knob::{Constraint, Knob};
use crate::family::limits::{divides_mask_blocks, divides_scale_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, Boxes, KernelSpec, Schedule, Turn};
use crate::family::time::Work;
use crate::problem::{MAX_SEGMENTS, MAX_SPLITS, Problem};

/// Keys of 8 bits that a producer's four warps convert in registers at a time, eight each.
const CONVERTED_ROWS: u32 = 32;

impl Space for ForwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "num_splits",
            reason: "a launch makes no more splits than the workspace has room for; the keys under a block mask are no range; batch-invariant splits are segments, whose number each launch finds",
            holds: |p, k, _| match p.batch_invariant {
                _ if k.splits_rest == 1 => k.num_splits > 1,
                true => k.num_splits == 1 || k.num_splits == SEGMENT_SPLITS && p.may_split_segments(),
                false => k.num_splits == 1 || may_split(p) && i64::from(k.num_splits) <= p.max_splits(),
            },
        },
        Constraint {
            name: "splits_rest",
            reason: "some tiles of a head are whole and some are split, with no feature but pages and lengths of keys, as far as the workspace has room for their states",
            holds: |p, k, d| k.split_rest().is_none_or(|rest| rest.tiles(p, d.sm_count, k.num_splits).is_some()),
        },
        Constraint {
            name: "stale_max",
            reason: "with a stale maximum, weights need the range of bf16, which is that of fp32, unless the kernel bounds them as it does over 8-bit keys; and the code that recomputes failed rows handles neither dropout nor modified scores, nor scales of keys or blocks beside a q in fp16",
            holds: |p, k, _| k.stale_max == 0 || may_be_stale(&k.main_problem(p)),
        },
        Constraint {
            name: "fixed_order",
            reason: "a batch-invariant sum is in blocks of 64 keys",
            holds: |p, k, _| !p.batch_invariant || k.block_n == 64,
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
            reason: "O is stored from its tile's Q slot, into which it must fit, while the next tile uses another, or where Q has one slot past head dim 128 from a buffer; the fp32 O of a split fits neither, and a batch-invariant tile's merged O takes the buffer's place",
            holds: |p, k, _| {
                k.tma_store == 0
                    || k.num_splits == 1 && (if k.stores_apart() { may_store_apart(p) } else { fits_q_slot(p) })
            },
        },
        Constraint {
            name: "window",
            reason: "a warpgroup that sees none of a tile's last blocks holds a slot of V until it knows the next tile, which follows the loads of those blocks, so v_stages is above their number",
            holds: |p, k, _| k.v_stages > hidden_blocks(k.block_m, k.block_n, p),
        },
        Constraint {
            name: "decode_rows",
            reason: "a decode kernel takes short sequences out of varlen batches over pages, up to the rows of its tile; it has no block mask, and sums in another order than batch_invariant asks",
            holds: |p, k, _| k.decode_rows == 0 || p.mixes_lengths() && short_sequences(p, k.decode_rows).is_some(),
        },
        Constraint {
            name: "decode_splits",
            reason: "the decode kernel splits the keys of short sequences, so decode_rows must be above 0",
            holds: |_, k, _| k.decode_splits == 0 || k.decode_rows > 0,
        },
        Constraint {
            name: "ctas_per_sm",
            reason: "CTAs that share an SM have registers for one consumer warpgroup and an O of 192 columns each, or two CTAs for two and an O of 64; and for a producer that copies by TMA and converts nothing",
            holds: |p, k, _| {
                let copies_by_tma = k.box_rows(p) > 0 && !k.converts_in_place(p);
                let widest_o = match (k.ctas_per_sm, k.consumers()) {
                    (_, 1) => 192,
                    (2, 2) => 64,
                    _ => 0,
                };
                k.ctas_per_sm == 1 || p.head_dim_v <= widest_o && copies_by_tma
            },
        },
        Constraint {
            name: "eight_bits",
            reason: "where four warps convert keys in registers, they have equally many groups of eight, so block_n is a multiple of 32; with scales of 128 keys, block_n divides 128",
            holds: |p, k, _| {
                k.main_problem(p).features.eight_bits.is_none()
                    || (k.converts_in_place(p) || k.block_n % CONVERTED_ROWS == 0) && divides_scale_blocks(p, k.block_n)
            },
        },
        Constraint {
            name: "widens",
            reason: "a kernel of its own widens 8-bit and int4 K and V where the workspace has room for them, also for other problems that share a record; no kernel of this family reads int4",
            holds: |p, k, _| if k.widens == 1 { p.keeps_widened_kv_nearby() } else { p.features.four_bits.is_none() },
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

    /// The config whose main kernel reads the caller's K and V or, where that is expected to be
    /// faster, one that widens them first. The former splits no keys: `alternatives` has split
    /// configs, for the model to choose.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    fn usable(knob: &Knob, problem: &Problem) -> &'static [u32] {
        match knob.name {
            "num_splits" => usable_splits(problem),
            // A search does not vary this knob. `alternatives` offers it.
            "splits_rest" => only(knob, 0),
            "decode_rows" => only(knob, decode_rows(problem)),
            "decode_splits" => only(knob, decode_splits(problem)),
            "widens" if !problem.keeps_widened_kv_nearby() => only(knob, 0),
            "widens" if problem.features.four_bits.is_some() => only(knob, 1),
            _ => knob.values,
        }
    }

    /// Splits are for the shape alone that they were measured on. `decode_rows` and `decode_splits`
    /// follow from the problem. So do `tma_store` and `stale_max`: a measurement over many waves
    /// hardly tells their values apart, and a launch of one wave feels them. So does `group_mb`
    /// where either problem has few keys, since those have another best value.
    fn carried_over(self, from: &Problem, to: &Problem, _device: &Device) -> Self {
        let has_few_keys = from.seqlen_k.min(to.seqlen_k) <= MOST_KEYS_OF_8_MB;
        let unsplit = self.unsplit(to);
        ForwardKnobs {
            stale_max: u32::from(may_be_stale(&self.main_problem(to))),
            decode_rows: decode_rows(to),
            decode_splits: decode_splits(to),
            group_mb: if has_few_keys { group_mb(to) } else { unsplit.group_mb },
            ..unsplit
        }
    }

    fn on_another_gpu(self, problem: &Problem, _device: &Device) -> Self {
        let group_mb = if problem.seqlen_k <= MOST_KEYS_OF_8_MB { group_mb(problem) } else { self.group_mb };
        ForwardKnobs { group_mb, ..self }
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
        let few_consumers = [0.2, 0.08, 0.01, 0.0][(self.consumers() * self.ctas_per_sm) as usize - 1];
        let in_flight = 5.0 / (k_stages * block_n) + 5.0 / (v_stages * block_n);
        let order = match (self.group_mb, group_mb(problem)) {
            (mine, best) if mine == best => 0.0,
            (0, _) => 0.1,
            _ => 0.02,
        };
        let prologue = 60.0 / q_stages / seqlen_k;
        let epilogue = 60.0 * (1.0 - tma_store) / seqlen_k;
        let work = padded(problem.seqlen_q, block_m) * padded(problem.seqlen_k, block_n);
        let order = if tiles_differ { order } else { 0.0 };
        let last_wave = last_wave(tiles, device.sm_count * self.ctas_per_sm, tiles_differ);
        let split = match self.num_splits {
            1 => 1.0,
            _ => us(self, problem, device) / us(&self.unsplit(problem), problem, device),
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
            ctas_per_sm: self.ctas_per_sm,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: WARPGROUP_ROWS, key_rows: self.box_rows(problem) },
                is_dynamic: tiles_differ(problem) || self.main_problem(problem).features.paged.is_none(),
            },
            registers: Some(self.warpgroup_registers(problem)),
            most_splits: self.num_splits,
            split_rest: self.split_rest(),
            reads_widened: self.widens == 1,
            ..KernelSpec::MAIN
        };
        if problem.batch_invariant && self.num_splits > 1 {
            return ForwardKnobs::of_segments(main, problem);
        }
        let widen = (self.widens == 1).then(|| self.widen());
        let combine = (self.num_splits > 1).then(|| combine::many_rows(problem, self.num_splits, self.split_rest()));
        let mut of_short = self.of_short_sequences(problem).into_iter();
        let attend: Vec<KernelSpec> = match combine {
            // It writes the rows of short sequences too, so their kernel comes last.
            Some(combine) => [main, combine].into_iter().chain(of_short).collect(),
            // This family's CTAs come to the SMs that the decode kernel leaves idle.
            None => of_short.next().into_iter().chain([main]).chain(of_short).collect(),
        };
        widen.into_iter().chain(attend).collect()
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::forward(self, problem, device)
    }

    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        forward_alternatives::of(problem, device)
    }
}

impl ForwardKnobs {
    /// The decode kernel of short sequences and what combines its splits. Where this family's
    /// kernel splits keys, that one does not: the workspace has room for the states of one of them.
    fn of_short_sequences(&self, problem: &Problem) -> Vec<KernelSpec> {
        if self.decode_rows == 0 {
            return Vec::new();
        }
        // A config whose rows no such kernel has breaks a constraint.
        let Some(decode) = short_sequences(problem, self.decode_rows) else { return Vec::new() };
        match self.decode_splits == 1 && self.num_splits == 1 {
            true => {
                let combine = KernelSpec { lent: decode.lent, ..combine::short_rows(self.decode_rows) };
                vec![KernelSpec { most_splits: MAX_SPLITS as u32, ..decode }, combine]
            }
            false => vec![decode],
        }
    }

    /// The kernels of a batch-invariant problem whose keys are split at segments: the main one, the
    /// one that merges states, and a main one that merges all segments itself. Launches whose
    /// workspace has no room for the states take the last one.
    fn of_segments(main: KernelSpec, problem: &Problem) -> Vec<KernelSpec> {
        let of_whole = KernelSpec { is_main: false, turn: Turn::Unsplit, most_splits: 1, ..main };
        let split = KernelSpec { turn: Turn::Split, most_splits: MAX_SEGMENTS as u32, ..main };
        vec![split, combine::runs(problem), of_whole]
    }

    /// The kernel that writes K and V in 16 bits: two CTAs, of K and of V, for each 128 keys of a
    /// head. A main kernel that leaves short sequences to a decode kernel waits for no kernel
    /// before it starts, so this one ends first.
    fn widen(&self) -> KernelSpec {
        KernelSpec {
            template: "sm90_widen_kv",
            entry: "flashtune_sm90_widen_kv",
            threads: 256,
            rows: 128,
            axis: Axis::Keys,
            slices: 2,
            is_main: false,
            ends_alone: self.decode_rows > 0,
            ..KernelSpec::MAIN
        }
    }

    /// The config without splits. It stores O by TMA where it may, which a split does not.
    fn unsplit(self, problem: &Problem) -> Self {
        stored_by_tma(ForwardKnobs { num_splits: 1, splits_rest: 0, ..self }, problem)
    }
}

/// The one value of a knob that follows from the problem.
fn only(knob: &Knob, value: u32) -> &'static [u32] {
    let at = knob.values.iter().position(|listed| *listed == value).unwrap_or(0);
    &knob.values[at..=at]
}

#[cfg(test)]
mod tests {
    use super::super::forward_geometry::SPLITS;
    use super::super::tests::{broken, h200, problem as of_pass};
    use super::*;
    use crate::config::{Config, Family};
    use crate::family::knob::Knobs;
    use crate::problem::{BlockMask, Causal, Dtype, Eight, EightBits, Features, Pass, Varlen, Window};

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        of_pass(Pass::Forward, head_dim, head_dim_v)
    }

    fn config(block_m: u32, block_n: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", block_n), ("q_stages", 1), ("stale_max", 0), ("ctas_per_sm", 1)];
        let order = [("k_stages", 2), ("v_stages", 2), ("group_mb", 1), ("tma_store", 0)];
        let splits = [("num_splits", 1), ("splits_rest", 0)];
        let launch = [("decode_rows", 0), ("decode_splits", 0), ("widens", 0)];
        Config::new(Family::Sm90, tile.into_iter().chain(order).chain(splits).chain(launch))
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
        assert_eq!([(64, 128), (160, 160)].map(|(d, v)| tma_store(d, v)), [Some(0); 2]);
    }

    #[test]
    fn a_tile_with_one_q_slot_stores_by_tma_where_a_buffer_fits() {
        let wide = problem(256, 256);
        let of = |problem: &Problem| heuristic(problem, &h200()).unwrap();
        assert!(of(&wide).stores_apart());
        assert!(!of(&Problem { dropout: true, ..wide }).stores_apart());
        let stored = config(128, 64).with("tma_store", 1);
        assert_eq!(broken(&wide, &stored), None);
        assert_eq!(broken(&wide, &stored.clone().with("k_stages", 3)).unwrap(), "shared_memory");
        assert_eq!(broken(&problem(128, 128), &stored).unwrap(), "tma_store");
        assert_eq!(broken(&Problem { batch_invariant: true, ..wide }, &stored).unwrap(), "tma_store");
    }

    #[test]
    fn slots_of_v_hold_the_blocks_before_a_window() {
        let features = Features { window: Window { left: Some(9), ..Window::default() }, ..Features::NONE };
        let windowed = Problem { features, ..problem(64, 64) };
        let of = |block_m, block_n, stages| {
            let config = config(block_m, block_n).with("k_stages", stages).with("v_stages", stages);
            broken(&windowed, &config.with("group_mb", 16))
        };
        for (block_m, block_n, least) in [(64, 48, 1), (128, 64, 2), (128, 48, 3), (192, 80, 3), (256, 64, 4)] {
            assert_eq!(of(block_m, block_n, least), None, "{block_m} x {block_n}");
            let fewer = (least > 1).then(|| of(block_m, block_n, least - 1).unwrap());
            assert!(fewer.is_none_or(|by| by == "window"), "{block_m} x {block_n}");
        }
    }

    #[test]
    fn each_constraint_refuses_what_it_names() {
        let (problem, good) = (problem(128, 128), config(128, 128));
        assert_eq!(broken(&problem, &good), None);
        let breaks = |problem: &Problem, knob, value| broken(problem, &good.clone().with(knob, value)).unwrap();
        assert_eq!(breaks(&Problem { dtype: Dtype::Fp16, ..problem }, "stale_max", 1), "stale_max");
        assert_eq!(breaks(&Problem { dropout: true, ..problem }, "stale_max", 1), "stale_max");
        let over_eight = |dtype, keys_per_scale| {
            let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale });
            let problem = Problem { dtype, features: Features { eight_bits, ..Features::NONE }, ..problem };
            broken(&problem, &config(128, 64).with("stale_max", 1))
        };
        assert_eq!(
            [over_eight(Dtype::Fp16, 0), over_eight(Dtype::Bf16, 1), over_eight(Dtype::Bf16, 128)],
            [None, None, None]
        );
        assert_eq!(over_eight(Dtype::Fp16, 1).as_deref(), Some("stale_max"));
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
        assert_eq!(breaks(&problem, "ctas_per_sm", 2), "ctas_per_sm");
        let shared = config(64, 64).with("ctas_per_sm", 2);
        assert_eq!(broken(&problem, &shared), None);
        assert_eq!(broken(&problem, &shared.clone().with("k_stages", 4).with("v_stages", 4)).unwrap(), "shared_memory");
        assert_eq!(broken(&Problem { head_dim_v: 200, ..problem }, &shared).unwrap(), "ctas_per_sm");
        let narrow = Problem { head_dim: 64, head_dim_v: 64, ..problem };
        let pair = config(128, 48).with("ctas_per_sm", 2);
        assert_eq!(broken(&narrow, &pair), None);
        assert_eq!(broken(&narrow, &pair.clone().with("block_n", 64)).unwrap(), "registers");
        assert_eq!(broken(&Problem { head_dim_v: 72, ..narrow }, &pair).unwrap(), "ctas_per_sm");
        assert_eq!(breaks(&problem, "tma_store", 1), "tma_store");
        let stored = good.clone().with("block_n", 64).with("q_stages", 2).with("tma_store", 1);
        assert_eq!(broken(&problem, &stored), None);
        assert_eq!(broken(&Problem { head_dim: 64, ..problem }, &stored).unwrap(), "tma_store");
        assert_eq!(broken(&Problem { head_dim: 72, ..problem }, &stored), None, "both take two boxes");
        let endless = Problem { batch_size: 1 << 16, num_heads_q: 1 << 14, num_heads_kv: 1 << 14, ..problem };
        assert_eq!(broken(&endless, &good).unwrap(), "grid");
    }

    #[test]
    fn carried_groups_are_smaller_for_few_keys() {
        let of = |seqlen| Problem {
            causal: Causal::BottomRight,
            ..Problem::dense(Pass::Forward, Dtype::Bf16, 8, 16, seqlen, 128)
        };
        let carried = |from: i64, to: i64, group_mb: u32| {
            let measured = ForwardKnobs { group_mb, ..heuristic(&of(from), &h200()).unwrap() };
            measured.carried_over(&of(from), &of(to), &h200()).group_mb
        };
        assert_eq!([carried(4096, 256, 32), carried(256, 4096, 16), carried(512, 300, 32)], [16, 32, 16]);
        assert_eq!(carried(8192, 4096, 0), 0, "as it was measured");
    }

    /// Bytes of the merged O: 2 KB for 8 columns of a consumer.
    #[test]
    fn a_batch_invariant_tile_merges_in_the_shared_memory_that_its_slots_leave() {
        let merged = |head_dim, block_m, k_stages, v_stages, q_stages| {
            let stages = [("k_stages", k_stages), ("v_stages", v_stages), ("q_stages", q_stages)];
            let config = stages.iter().fold(config(block_m, 64), |config, (knob, value)| config.with(knob, *value));
            let knobs = ForwardKnobs::of(&config).unwrap();
            let plain = problem(head_dim, head_dim);
            knobs.smem_bytes(&Problem { batch_invariant: true, ..plain }) - knobs.smem_bytes(&plain)
        };
        assert_eq!(merged(128, 192, 3, 2, 1), 16 * 3 * 2048, "all of 16 pieces");
        assert_eq!(merged(128, 192, 3, 3, 1), 13 * 3 * 2048);
        assert_eq!(merged(128, 192, 4, 4, 2), 0);
        assert_eq!(merged(64, 256, 4, 4, 2), 8 * 4 * 2048);
        assert_eq!([(128, 128), (64, 192)].map(|(dim, rows)| merged(dim, rows, 2, 2, 1)), [0; 2], "in registers");
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

    /// On an H200 two splits of these tiles were the fastest config (docs/tuning/choice.md).
    #[test]
    fn ctas_that_share_an_sm_may_be_split() {
        let (num_heads_q, num_heads_kv, causal) = (2, 2, Causal::BottomRight);
        let sizes = Problem { batch_size: 1, num_heads_q, num_heads_kv, seqlen_q: 6840, seqlen_k: 6840, ..few_tiles() };
        let problem = Problem { head_dim: 64, head_dim_v: 64, causal, ..sizes };
        let most_splits = |ctas_per_sm: u32| {
            let alternatives = ForwardKnobs::alternatives(&problem, &h200()).into_iter();
            let of_tile = |config: &ForwardKnobs| (config.block_m, config.block_n) == (64, 128);
            let of_all = alternatives.filter(of_tile).filter(|it| it.splits_rest == 0);
            of_all.filter(|it| it.ctas_per_sm == ctas_per_sm).map(|it| it.num_splits).max()
        };
        assert_eq!((most_splits(1), most_splits(2)), (Some(1), Some(2)));
    }

    /// On an H100 two splits of 256 rows took 0.92 to 0.97 of the time of 192 x 80
    /// (docs/tuning/choice.md).
    #[test]
    fn tall_tiles_of_long_heads_may_be_split_and_those_of_few_columns_have_80_keys() {
        let of = |seqlen, dim| {
            let sizes = Problem { batch_size: 2, num_heads_q: 2, num_heads_kv: 2, ..problem(dim, dim) };
            Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..sizes }
        };
        let offered = |problem: &Problem, [block_n, q_stages, num_splits]: [u32; 3]| {
            let is_it = |it: ForwardKnobs| {
                let tile = (it.block_m, it.block_n, it.q_stages);
                tile == (256, block_n, q_stages) && (it.num_splits, it.splits_rest) == (num_splits, 0)
            };
            ForwardKnobs::alternatives(problem, &h200()).into_iter().any(is_it)
        };
        assert!(offered(&of(11438, 64), [64, 1, 2]) && !offered(&of(8000, 64), [64, 1, 2]));
        let full = of(4819, 40);
        assert!(offered(&full, [80, 2, 1]) && !offered(&of(4819, 64), [80, 2, 1]));
        assert!(!offered(&Problem { causal: Causal::BottomRight, ..full }, [80, 2, 1]));
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
        let of_many = Problem { batch_size: 64, ..of_heads(8) };
        assert_eq!(templates(&of_many), (16, vec!["decode", "sm90_forward"]));
        assert_eq!(templates(&of_heads(8)), (16, vec!["decode", "sm90_forward", "combine"]), "few sequences");
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
    fn either_tiles_or_short_sequences_have_their_keys_split() {
        let varlen = Some(Varlen { total_q: Some(4000), ..Varlen::default() });
        let few = Problem { features: Features { varlen, paged: Some(64), ..Features::NONE }, ..few_tiles() };
        let unsplit = ForwardKnobs::heuristic(&few, &h200()).unwrap();
        assert_eq!((unsplit.decode_rows, unsplit.decode_splits), (16, 1));
        let splits = |knobs: ForwardKnobs| {
            assert!(knobs.fits(&few, &h200()));
            knobs.kernels(&few).iter().map(|spec| (spec.template, spec.most_splits)).collect::<Vec<_>>()
        };
        assert_eq!(splits(unsplit), [("decode", 128), ("sm90_forward", 1), ("combine", 128)]);
        let split = ForwardKnobs { num_splits: 4, tma_store: 0, ..unsplit };
        assert_eq!(splits(split), [("sm90_forward", 4), ("combine_rows", 4), ("decode", 1)]);
        let alone = ForwardKnobs { decode_rows: 0, ..unsplit };
        assert_eq!(broken(&few, &alone.to_config()).unwrap(), "decode_splits");
        let many = Problem { batch_size: 264, ..few };
        assert_eq!(unsplit.carried_over(&few, &many, &h200()).decode_splits, 0);
    }

    #[test]
    fn a_launch_leaves_short_sequences_whole_beside_long_chunks() {
        let launched = |total_q| {
            let varlen = Some(Varlen { total_q: Some(total_q), ..Varlen::default() });
            let features = Features { varlen, paged: Some(64), ..Features::NONE };
            let lengths = Problem { batch_size: 7, seqlen_q: 855, seqlen_k: 1917, ..problem(128, 128) };
            let problem = Problem { num_heads_q: 32, num_heads_kv: 8, features, ..lengths };
            let kernels = ForwardKnobs::heuristic(&problem, &h200()).unwrap().kernels(&problem);
            kernels.iter().map(|spec| (spec.template, spec.num_splits(&problem, 132))).collect::<Vec<_>>()
        };
        assert_eq!(launched(7), [("decode", 4), ("sm90_forward", 1), ("combine", 4)], "tokens alone");
        assert_eq!(launched(861), [("decode", 1), ("sm90_forward", 1), ("combine", 1)]);
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
