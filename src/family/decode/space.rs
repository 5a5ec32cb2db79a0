//! The decode family's space: constraints with their reasons, and the kernels of a config.

use super::geometry::DecodeKnobs;
use super::heuristic;
use crate::device::Device;
use crate::family::combine;
use crate::family::knob::{Constraint, Knob, Knobs};
use crate::family::limits::{grid, register_budget, shared_memory, threads};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, KernelSpec, Lent, Turn};
use crate::problem::{MAX_SEGMENTS, MAX_SPLITS, Pass, Problem};

impl Space for DecodeKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "whole_teams",
            reason: "a CTA is whole teams of warps_m x warps_v warps for each head",
            holds: |_, k, _| k.num_warps % k.team() == 0,
        },
        Constraint {
            name: "whole_tiles",
            reason: "a warp owns whole tiles of 16 rows, or of 8 where products are transposed",
            holds: |p, k, _| k.block_m % (k.tile_rows(p) * k.warps_m) == 0,
        },
        Constraint {
            name: "rows_in_use",
            reason: "a tile of twice the rows of the problem computes the same as the next smaller one, in more memory",
            holds: |p, k, _| k.block_m == k.tile_rows(p) || i64::from(k.block_m) < 2 * p.packed_rows(),
        },
        Constraint {
            name: "splits_in_use",
            reason: "a launch makes no more splits than the workspace has room for; a batch-invariant one makes one for each segment",
            holds: |p, k, _| i64::from(k.num_splits) <= p.max_splits() || p.batch_invariant,
        },
        Constraint {
            name: "splittable",
            reason: "a config that splits keys has a kernel that may split them in any case",
            holds: |_, k, _| k.splittable == 0 || k.num_splits == 1,
        },
        Constraint {
            name: "fixed_order",
            reason: "a batch-invariant sum is in blocks of 64 keys, in segments that any split holds whole, and its segments are merged by a second kernel",
            holds: |p, k, _| !p.batch_invariant || k.block_n == 64 && k.num_splits == MAX_SPLITS as u32,
        },
        Constraint {
            name: "ahead",
            reason: "weights are computed ahead for tiles of 16 rows of a batch-invariant problem, whose keys TMA copies; a warp's columns of V are whole boxes of 64, or a power of two below; and a thread's Q, O and scores fit the registers of one CTA an SM",
            holds: |p, k, d| {
                let fits = k.registers_ahead(p) <= register_budget(k.threads_ahead() / 32, 1, d);
                let is_whole = k.block_m == 16 && k.tma == 1 && k.divides_boxes_ahead(p);
                !k.has_kernel_ahead() || p.batch_invariant && is_whole && fits
            },
        },
        Constraint {
            name: "tma",
            reason: "GPUs have TMA from sm_90 on; it takes addresses, strides and rows of multiples of 16 bytes, and boxes of 64 columns by whole eights of keys of one page",
            holds: |p, k, d| k.tma == 0 || k.takes_tma(p, d),
        },
        Constraint {
            name: "whole_rows",
            reason: "a warp takes whole rows of int4 V, whose scales lie at their ends",
            holds: |p, k, _| k.warps_v == 1 || p.features.four_bits.is_none(),
        },
        Constraint {
            name: "heads",
            reason: "threads copy the keys of several heads together where products are transposed and rows are chunks of 16 bytes, a warp has all rows of its head, and no head has values of its own that modify scores",
            holds: |p, k, _| k.heads == 1 || k.may_share_heads(p),
        },
        threads(),
        Constraint {
            name: "registers",
            reason: "fragments of O, S and Q, the addresses of copies and 60 more must fit a thread's registers, or they spill",
            holds: |p, k, d| k.registers(p) <= register_budget(k.num_warps, k.ctas_per_sm, d),
        },
        shared_memory(),
        grid(),
    ];

    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        match problem.batch_invariant {
            false => Some(heuristic::heuristic(problem, device)),
            true => heuristic::in_fixed_order(problem, device),
        }
    }

    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        heuristic::cost(self, problem, device)
    }

    /// `splittable` is for ranges, whose problems share kernels (`plan::covering`). A kernel that
    /// may split is no faster than one that does not, so no search looks at it. Four warps along
    /// V's columns pay where they share Q K^T. Beside int4 a warp has all columns. Over keys of q's
    /// type a tile has 16 rows or more, of one head.
    fn usable(knob: &Knob, problem: &Problem) -> &'static [u32] {
        let is_four = problem.features.four_bits.is_some();
        let is_plain = problem.key_format() == 0;
        match knob.name {
            "splittable" | "scoring_warps" | "scoring_stages" | "tile_ctas" => &knob.values[..1],
            "warps_v" if is_four => &knob.values[..1],
            "warps_v" if !problem.batch_invariant => &knob.values[..2],
            "block_m" if is_plain => &knob.values[1..],
            "heads" if is_plain => &knob.values[..1],
            _ => knob.values,
        }
    }

    fn carried_over(self, from: &Problem, to: &Problem, device: &Device) -> Self {
        heuristic::carried_over(self, from, to, device)
    }

    /// The main kernel and, where it may leave partial states, the one that combines them.
    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        // `families` never names this family for a backward pass.
        if problem.pass == Pass::Backward {
            return Vec::new();
        }
        let main = self.main(problem);
        let ahead = self.has_kernel_ahead().then(|| self.ahead(problem));
        let turn = ahead.map_or(Turn::Always, |_| Turn::MoreCtas(self.tile_ctas));
        [KernelSpec { turn, ..main }]
            .into_iter()
            .chain(ahead)
            .chain((self.num_splits > 1 || self.splittable == 1).then(|| match problem.batch_invariant {
                false => combine::few_rows(self.num_splits),
                true => combine::segments(),
            }))
            .collect()
    }
}

impl DecodeKnobs {
    /// The kernel for few CTAs.
    fn ahead(&self, problem: &Problem) -> KernelSpec {
        KernelSpec {
            template: "decode_ahead",
            entry: "flashtune_decode_ahead",
            threads: self.threads_ahead(),
            smem_bytes: self.smem_bytes_ahead(problem),
            is_main: false,
            slices: self.tile_ctas,
            turn: Turn::FewCtas(self.tile_ctas),
            ctas_per_sm: 1,
            ..self.main(problem)
        }
    }

    fn main(&self, problem: &Problem) -> KernelSpec {
        KernelSpec {
            template: "decode",
            entry: "flashtune_decode",
            threads: self.num_warps * 32,
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_m,
            heads: self.heads,
            axis: Axis::PackedRows,
            // A launch makes as many splits as the longest sequence has segments.
            most_splits: if problem.batch_invariant { MAX_SEGMENTS as u32 } else { self.num_splits },
            may_split: self.splittable == 1,
            ctas_per_sm: self.ctas_per_sm,
            arguments: match self.tma {
                0 => Arguments::Params,
                _ => Arguments::ParamsKeyMaps { box_rows: self.box_rows(problem), heads: self.heads },
            },
            ..KernelSpec::MAIN
        }
    }
}

/// The kernel that takes the sequences of at most `most_rows` packed rows out of a varlen batch,
/// whose other sequences another family takes. It splits no keys unless the caller raises
/// `most_splits`. Batch, heads and lengths do not choose the tile, so that a class has one such
/// kernel. None if no tile has so many rows.
pub fn of_short_sequences(problem: &Problem, most_rows: u32, device: &Device) -> Option<KernelSpec> {
    let typical = Problem {
        batch_size: TYPICAL_BATCH,
        num_heads_q: TYPICAL_HEADS * i64::from(most_rows),
        num_heads_kv: TYPICAL_HEADS,
        seqlen_q: 1,
        seqlen_k: TYPICAL_KEYS,
        ..*problem
    };
    let knobs = DecodeKnobs { num_splits: 1, splittable: 0, ..heuristic::of_one_head(&typical, device) };
    if knobs.block_m < most_rows || !knobs.fits(&typical, device) {
        return None;
    }
    let values = knobs.values();
    let named = std::array::from_fn(|index| (DecodeKnobs::LIST[index].name, values[index]));
    let lent = Some(Lent { family: DecodeKnobs::FAMILY, knobs: named });
    Some(KernelSpec { is_main: false, most_rows, lent, ..knobs.main(problem) })
}

const _: () = assert!(DecodeKnobs::LIST.len() == Lent::KNOBS, "each knob is lent");

/// A server's batch, K/V heads and keys, which fill a GPU.
const TYPICAL_BATCH: i64 = 64;
const TYPICAL_HEADS: i64 = 8;
const TYPICAL_KEYS: i64 = 4096;
