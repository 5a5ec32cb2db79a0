//! The forward pass for Q, K and V in e4m3: each consumer warpgroup computes 64 query rows.
//!
//! The tiles are those of `forward`, with two differences. wgmma takes 8-bit operands with the
//! inner dimension contiguous alone, so the producer warpgroup transposes V into slots of its own,
//! or a kernel of its own writes V^T to the workspace. And its products take half the time of
//! 16-bit ones, so the exponentials weigh twice as much.

use super::forward_geometry::usable_splits;
use super::fp8_geometry::Fp8Knobs;
use super::fp8_heuristic::{alternatives, heuristic, may_split, stored_by_tma};
use super::warpgroup::{WARPGROUP_ROWS, hidden_blocks, last_wave, padded, tiles_differ};
use super::work;
use crate::device::Device;
use crate::family::combine;
use crate::family::knob::{Constraint, Knob};
use crate::family::limits::{divides_mask_blocks, divides_scale_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, Boxes, KernelSpec, Schedule};
use crate::family::time::Work;
use crate::problem::{Layout, Problem, SCALE_BLOCK, TRANSPOSED_V_KEYS, TRANSPOSED_V_QUERIES};

/// Why the family does not do a problem with e4m3 queries, whatever the config; None where it does.
pub fn refusal(problem: &Problem) -> Option<&'static str> {
    let features = &problem.features;
    if problem.head_dim.max(problem.head_dim_v) > 256 {
        Some("head dims of e4m3 queries end at 256: the N of wgmma, and what registers hold")
    } else if problem.layout != Layout::Vec8 {
        Some("TMA needs addresses, strides and rows of multiples of 16 bytes: e4m3 head dims are multiples of 16")
    } else if features.eight_bits.is_some_and(|eight| ![0, SCALE_BLOCK].contains(&eight.keys_per_scale)) {
        Some("a block of keys has one factor, so keys_per_descale is 0 or 128 with e4m3 queries")
    } else if features.paged.is_some_and(|page_size| page_size % LEAST_PAGE_ROWS != 0) {
        Some("TMA copies boxes of at least 16 keys, so pages have a multiple of 16 keys")
    } else if features.block_mask.is_some_and(|mask| mask.block_q % 64 != 0 || mask.block_k % 64 != 0) {
        Some("tiles are multiples of 64 queries and 64 keys, which the block mask's blocks are not")
    } else {
        None
    }
}

/// Keys of a split, on average: twice those after which an unsplit tile moves its sums
/// (docs/tuning/eight-bits.md).
const MOST_SPLIT_KEYS: i64 = 4096;

/// Whether the workspace has room for V^T, and also that of problems in the same record, whose
/// lengths are up to one and a half times shorter.
fn keeps_transposed_v_nearby(problem: &Problem) -> bool {
    2 * problem.seqlen_q >= 3 * TRANSPOSED_V_QUERIES
        && 2 * problem.seqlen_k >= 3 * TRANSPOSED_V_KEYS
        && problem.keeps_transposed_v()
}

/// Keys that a page must have a multiple of.
const LEAST_PAGE_ROWS: i64 = 16;

impl Space for Fp8Knobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "num_splits",
            reason: "a launch makes no more splits than the workspace has room for; the keys under a block mask are no range",
            holds: |p, k, _| k.num_splits == 1 || may_split(p) && i64::from(k.num_splits) <= p.max_splits(),
        },
        Constraint {
            name: "split_keys",
            reason: "a split adds its keys up in wgmma's 13 bits, so it has few of them",
            holds: |p, k, _| k.num_splits == 1 || p.seqlen_k <= i64::from(k.num_splits) * MOST_SPLIT_KEYS,
        },
        Constraint {
            name: "tma_store",
            reason: "a split's O is fp32, which O's slot does not hold",
            holds: |_, k, _| k.tma_store == 0 || k.num_splits == 1,
        },
        Constraint {
            name: "scales",
            reason: "a block of keys has one factor, so factors of 128 keys go with blocks of 64 or 128",
            holds: |p, k, _| divides_scale_blocks(p, k.block_n),
        },
        Constraint {
            name: "stages",
            reason: "consumers use K one block ahead of V, so K needs as many stages as transposed V or one more; and V is transposed a block late",
            holds: |_, k, _| matches!(k.k_stages.checked_sub(k.vt_stages), Some(0 | 1)) && k.v_stages <= k.vt_stages,
        },
        Constraint {
            name: "window",
            reason: "a warpgroup that sees none of a tile's last blocks holds a slot of transposed V until it knows the next tile, which follows the loads of those blocks: K's slots hold all of them, and V's do with the other transposed ones",
            holds: |p, k, _| {
                let hidden = hidden_blocks(k.block_m, k.block_n, p);
                k.k_stages >= hidden && k.v_stages + k.vt_stages > hidden
            },
        },
        Constraint {
            name: "transposed_v",
            reason: "a kernel of its own transposes V where the workspace has room for V^T, also for shorter problems that share a record",
            holds: |p, k, _| !k.transposes_before() || keeps_transposed_v_nearby(p),
        },
        Constraint {
            name: "group_mb",
            reason: "if all tiles have the same length, groups of heads with 1 MB of K and V use L2 best",
            holds: |p, k, _| k.group_mb == 1 || tiles_differ(p),
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        Constraint {
            name: "registers",
            reason: "O, S and P of a consumer thread must fit the registers that setmaxnreg gives it",
            holds: |p, k, _| k.registers(p) <= k.warpgroup_registers().consumer,
        },
        grid(),
    ];

    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    fn usable(knob: &Knob, problem: &Problem) -> &'static [u32] {
        match knob.name {
            "num_splits" => usable_splits(problem),
            _ => knob.values,
        }
    }

    /// Splits are for the shape alone that they were measured on.
    fn carried_over(self, _from: &Problem, to: &Problem, device: &Device) -> Self {
        stored_by_tma(Fp8Knobs { num_splits: 1, ..self }, to, device)
    }

    /// The expected time over that of a perfect config.
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, q_stages] = [self.block_m, self.block_n, self.q_stages].map(f64::from);
        let (tiles_differ, seqlen_k) = (tiles_differ(problem), (problem.seqlen_k as f64).max(1.0));
        let heads = (problem.batch_size * problem.num_heads_q) as f64;
        let tiles = heads * (problem.seqlen_q as f64 / block_m).ceil();
        // Each block costs one search for the maximum, one vote and one pass of the barriers.
        let per_block = 17.0 / block_n;
        let few_consumers = [0.3, 0.05, 0.0, 0.0][self.consumers() as usize - 1];
        let in_flight = 5.0 / (f64::from(self.k_stages) * block_n) + 5.0 / (f64::from(self.vt_stages) * block_n);
        let prologue = 60.0 / q_stages / seqlen_k;
        let epilogue = 24.0 * (1.0 - f64::from(self.tma_store)) / seqlen_k;
        let work = padded(problem.seqlen_q, block_m) * padded(problem.seqlen_k, block_n);
        let last_wave = last_wave(tiles, device.sm_count, tiles_differ);
        let split = match self.num_splits {
            1 => 1.0,
            _ => self.us(problem, device) / Fp8Knobs { num_splits: 1, ..*self }.us(problem, device),
        };
        work * split * last_wave * (1.0 + per_block + few_consumers + in_flight + prologue + epilogue)
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        let main = KernelSpec {
            template: "sm90_forward_fp8",
            entry: "flashtune_sm90_forward_fp8",
            threads: 128 * (self.consumers() + 1),
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_m,
            schedule: Schedule::Persistent,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: WARPGROUP_ROWS, key_rows: self.box_rows(problem) },
                is_dynamic: true,
            },
            registers: Some(self.warpgroup_registers()),
            most_splits: self.num_splits,
            ..KernelSpec::MAIN
        };
        let transpose = self.transposes_before().then(|| self.transpose(problem));
        let combine = (self.num_splits > 1).then(|| combine::many_rows(problem, self.num_splits, None));
        transpose.into_iter().chain([main]).chain(combine).collect()
    }

    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        alternatives(problem, device)
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        work::fp8_forward(self, problem, device)
    }
}

impl Fp8Knobs {
    /// The kernel that writes V^T: a thread for each 16 keys and 16 columns of a block.
    fn transpose(&self, problem: &Problem) -> KernelSpec {
        let tiles = self.block_n / 16 * (problem.head_dim_v as u32).div_ceil(16);
        KernelSpec {
            template: "sm90_transpose_v",
            entry: "flashtune_sm90_transpose_v",
            threads: tiles.next_multiple_of(32),
            rows: self.block_n,
            axis: Axis::Keys,
            is_main: false,
            ..KernelSpec::MAIN
        }
    }

    /// The expected time, where every sequence counts as the longest.
    fn us(&self, problem: &Problem, device: &Device) -> f64 {
        self.work(&problem.of_longest(), device).map_or(f64::INFINITY, |work| work.us(device))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{broken, h200};
    use super::*;
    use crate::config::{Config, Family};
    use crate::device::Arch;
    use crate::family::{check, families, heuristic, supported};
    use crate::problem::{BlockMask, Causal, Dtype, Eight, EightBits, Features, Pass, Varlen, Window};

    fn features(keys_per_scale: i64) -> Features {
        Features { eight_bits: Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale }), ..Features::NONE }
    }

    fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
        let plain = Problem::dense(Pass::Forward, Dtype::Bf16, 4, 16, 4096, head_dim);
        Problem { head_dim_v, features: features(0), ..plain }
    }

    fn config(block_m: u32, block_n: u32) -> Config {
        let tile = [("block_m", block_m), ("block_n", block_n), ("q_stages", 1), ("group_mb", 1), ("num_splits", 1)];
        let stages = [("k_stages", 2), ("v_stages", 1), ("vt_stages", 2), ("tma_store", 0)];
        Config::new(Family::Sm90Fp8, tile.into_iter().chain(stages))
    }

    #[test]
    fn slots_hold_the_blocks_that_a_window_hides() {
        let window = Window { left: Some(256), ..Window::default() };
        let of = |dim, block_m, block_n, [k, v, vt]: [u32; 3]| {
            let plain = problem(dim, dim);
            let windowed = Problem { features: Features { window, ..plain.features }, ..plain };
            let config = config(block_m, block_n).with("k_stages", k).with("v_stages", v).with("vt_stages", vt);
            assert_ne!(broken(&plain, &config).as_deref(), Some("window"));
            broken(&windowed, &config).as_deref() == Some("window")
        };
        // The last of three warpgroups sees none of two blocks of 96 keys.
        assert_eq!([[2, 0, 2], [3, 0, 3], [2, 1, 2]].map(|stages| of(128, 192, 96, stages)), [true, false, false]);
        // And the last of four none of three blocks of 64.
        assert_eq!([[2, 2, 2], [3, 1, 2], [3, 2, 2]].map(|stages| of(64, 256, 64, stages)), [true, true, false]);
    }

    #[test]
    fn the_heuristic_has_a_config_at_every_head_dim_and_with_any_features() {
        let window = Window { left: Some(256), ..Window::default() };
        let varlen = Some(Varlen::default());
        let block_mask = Some(BlockMask { block_q: 64, block_k: 64 });
        for (dim, dim_v) in (16..=256).step_by(16).flat_map(|dim| [(dim, dim), (dim, 256), (dim, 16), (256, dim)]) {
            for keys_per_scale in [0, 128] {
                let plain = features(keys_per_scale);
                let modified = Features { softcap: true, alibi: true, bias: true, mask: true, sinks: true, ..plain };
                let paged = Features { paged: Some(16), varlen, ..plain };
                let with_window = Features { window, varlen, ..plain };
                let listed = Features { block_mask, ..plain };
                for features in [plain, modified, paged, with_window, listed] {
                    for (seqlen_q, seqlen_k) in [(0, 7), (1, 9000), (65, 0), (4096, 4096), (1 << 20, 1 << 20)] {
                        for causal in [Causal::None, Causal::BottomRight] {
                            let problem = Problem { features, seqlen_q, seqlen_k, causal, ..problem(dim, dim_v) };
                            let config = heuristic(&problem, &h200());
                            let checked = check(&problem, &config, &h200());
                            assert_eq!((config.family, checked), (Family::Sm90Fp8, Ok(())), "{problem:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_model_of_time_prefers_the_tiles_that_were_fastest() {
        // (head dim, keys, causal) and the fastest of the tiles in one run on an H100.
        let measured = [
            (64, 1024, Causal::None, (256, 64)),
            (64, 4096, Causal::None, (192, 160)),
            (64, 4096, Causal::BottomRight, (192, 160)),
            (64, 16384, Causal::None, (192, 160)),
            (128, 4096, Causal::None, (192, 96)),
            (128, 4096, Causal::BottomRight, (192, 96)),
            (256, 1024, Causal::None, (128, 128)),
            (256, 16384, Causal::None, (128, 128)),
        ];
        for (dim, keys, causal, fastest) in measured {
            let (batch_size, heads) = (16384 / keys, 2048 / dim);
            let problem = Problem {
                batch_size,
                num_heads_q: heads,
                num_heads_kv: heads,
                seqlen_q: keys,
                seqlen_k: keys,
                causal,
                ..problem(dim, dim)
            };
            let tiles: &[(u32, u32)] = match dim {
                64 => &[(192, 160), (192, 128), (192, 96), (256, 64), (128, 192), (128, 128)],
                128 => &[(192, 96), (192, 64), (128, 224), (128, 192), (128, 128)],
                _ => &[(128, 128), (128, 96), (128, 64), (64, 128)],
            };
            let us = |tile: &(u32, u32)| {
                crate::family::work(&problem, &config(tile.0, tile.1), &h200()).unwrap().us(&h200())
            };
            let chosen = *tiles.iter().min_by(|a, b| us(a).total_cmp(&us(b))).unwrap();
            assert_eq!(chosen, fastest, "{problem:?}");
        }
    }

    #[test]
    fn alternatives_fit_and_are_those_of_plain_problems() {
        let plain = problem(64, 64);
        let tiles = |problem: &Problem| -> Vec<(u32, u32)> {
            let all = Fp8Knobs::alternatives(problem, &h200());
            assert!(all.iter().all(|config| config.fits(problem, &h200())));
            all.iter().map(|config| (config.block_m, config.block_n)).collect()
        };
        assert_eq!(tiles(&plain), [(192, 160), (192, 128), (256, 64)]);
        assert_eq!(tiles(&Problem { features: features(128), ..plain }), [(192, 128), (256, 64)]);
        assert!(tiles(&Problem { features: Features { softcap: true, ..features(0) }, ..plain }).is_empty());
        assert_eq!(tiles(&problem(128, 128)), [(192, 96)], "it reads V^T");
        let wide = problem(256, 256);
        let before = Fp8Knobs::alternatives(&wide, &h200());
        assert_eq!(
            before.iter().map(|config| (config.block_m, config.block_n, config.v_stages)).collect::<Vec<_>>(),
            [(128, 128, 0)]
        );
        assert!(before[0].fits(&wide, &h200()));
        let softcap = Features { softcap: true, ..features(0) };
        assert!(tiles(&Problem { features: softcap, ..wide }).is_empty());
        assert!(tiles(&Problem { seqlen_q: 64, ..wide }).is_empty(), "the workspace has no room");
    }

    #[test]
    fn the_model_of_time_transposes_v_before_where_that_was_faster() {
        // (head dim, keys, causal), and whether it was by 3 % or more on an H200.
        let measured = [
            (128, 16384, Causal::None, true),
            (128, 16384, Causal::BottomRight, false),
            (128, 4096, Causal::None, false),
            (128, 1024, Causal::None, false),
            (160, 16384, Causal::None, true),
            (192, 16384, Causal::None, true),
            (192, 16384, Causal::BottomRight, true),
            (192, 8192, Causal::None, true),
            (192, 8192, Causal::BottomRight, false),
            (192, 4096, Causal::None, false),
            (192, 4096, Causal::BottomRight, false),
            (224, 16384, Causal::None, true),
            (224, 4096, Causal::None, false),
            (256, 16384, Causal::None, true),
            (256, 8192, Causal::BottomRight, true),
            (256, 4096, Causal::None, true),
            (256, 4096, Causal::BottomRight, false),
            (256, 2048, Causal::None, false),
            (256, 1024, Causal::None, false),
        ];
        for (dim, keys, causal, is_faster) in measured {
            let (batch_size, heads) = (16384 / keys, 2048 / dim);
            let sizes = Problem { batch_size, num_heads_q: heads, num_heads_kv: heads, causal, ..problem(dim, dim) };
            let problem = Problem { seqlen_q: keys, seqlen_k: keys, ..sizes };
            let [heuristic, before] =
                [<Fp8Knobs as Space>::heuristic(&problem, &h200()), Fp8Knobs::alternatives(&problem, &h200()).pop()]
                    .map(|config| config.unwrap().us(&problem, &h200()));
            assert_eq!(before < 0.97 * heuristic, is_faster, "{problem:?}: {before} {heuristic}");
        }
    }

    #[test]
    fn a_kernel_of_its_own_transposes_v_where_there_is_room_for_it() {
        let plain = problem(256, 256);
        let before = Fp8Knobs { v_stages: 0, ..<Fp8Knobs as Space>::heuristic(&plain, &h200()).unwrap() };
        assert!(before.fits(&plain, &h200()));
        let kernels = before.kernels(&plain);
        assert_eq!(kernels.iter().map(|kernel| kernel.is_main).collect::<Vec<_>>(), [false, true]);
        // 128 x 256 numbers of a block, 256 for each thread.
        assert_eq!((kernels[0].template, kernels[0].threads, kernels[0].rows), ("sm90_transpose_v", 128, 128));
        assert_eq!(kernels[0].grid(&plain, 132)[0], 4 * 16 * 4096 / 128);
        let few = Problem { batch_size: 1, num_heads_q: 1, num_heads_kv: 1, ..plain };
        let split = Fp8Knobs { num_splits: 2, tma_store: 0, ..before };
        assert!(split.fits(&few, &h200()));
        assert_eq!(split.kernels(&few).len(), 3);
        // Problems in the same record have at least 128 queries and 256 keys.
        let of = |seqlen_q, seqlen_k| Problem { seqlen_q, seqlen_k, ..plain };
        assert!(before.fits(&of(192, 384), &h200()));
        let broken = |problem: &Problem| before.broken(problem, &h200()).map(|constraint| constraint.name);
        let paged = Features { paged: Some(64), varlen: Some(Varlen::default()), ..plain.features };
        for problem in [of(191, 384), of(192, 383), Problem { features: paged, ..plain }] {
            assert_eq!(broken(&problem), Some("transposed_v"), "{problem:?}");
        }
    }

    #[test]
    fn each_constraint_refuses_what_it_names() {
        let (problem, good) = (problem(128, 128), config(128, 192));
        assert_eq!(broken(&problem, &good), None);
        let breaks = |problem: &Problem, knob, value| broken(problem, &good.clone().with(knob, value)).unwrap();
        assert_eq!(breaks(&problem, "num_splits", 2), "num_splits");
        let few = Problem { batch_size: 1, num_heads_q: 1, num_heads_kv: 1, ..problem };
        assert_eq!(broken(&few, &good.clone().with("num_splits", 10)), None);
        assert_eq!(broken(&few, &good.clone().with("num_splits", 10).with("tma_store", 1)).unwrap(), "tma_store");
        let by_block = Problem { features: features(128), ..problem };
        assert_eq!(broken(&by_block, &good).unwrap(), "scales");
        assert_eq!(broken(&by_block, &config(128, 128)), None);
        assert_eq!(breaks(&problem, "k_stages", 4), "stages");
        assert_eq!(breaks(&problem, "group_mb", 32), "group_mb");
        assert_eq!(breaks(&problem, "block_m", 256), "registers");
        assert_eq!(broken(&problem, &config(192, 128)).unwrap(), "registers");
        assert_eq!(broken(&problem, &config(192, 96)), None);
        assert_eq!(broken(&Problem { head_dim: 256, head_dim_v: 256, ..problem }, &config(128, 128)), None);
        assert_eq!(
            broken(&problem, &good.clone().with("k_stages", 4).with("vt_stages", 3).with("q_stages", 2)).unwrap(),
            "shared_memory"
        );
        let block_mask = Some(BlockMask { block_q: 64, block_k: 64 });
        let listed = Problem { features: Features { block_mask, ..features(0) }, ..problem };
        assert_eq!(broken(&listed, &config(64, 128)).unwrap(), "mask_blocks");
        assert_eq!(broken(&listed, &config(64, 64)), None);
    }

    #[test]
    fn what_the_family_does_not_do_is_refused_with_the_reason() {
        let plain = problem(128, 128);
        let refused = |problem: Problem, device: &Device| {
            assert!(families(&problem, device).is_empty());
            supported(&problem, device).unwrap_err().to_string()
        };
        assert_eq!(families(&plain, &h200()), [Family::Sm90Fp8]);
        assert!(refused(Problem { head_dim: 272, ..plain }, &h200()).contains("end at 256"));
        assert!(refused(Problem { layout: Layout::Vec4, ..plain }, &h200()).contains("multiples of 16"));
        assert!(refused(Problem { features: features(1), ..plain }, &h200()).contains("keys_per_descale"));
        assert!(refused(Problem { batch_invariant: true, ..plain }, &h200()).contains("batch_invariant"));
        let paged = Features { paged: Some(8), varlen: Some(Varlen::default()), ..features(0) };
        assert!(refused(Problem { features: paged, ..plain }, &h200()).contains("pages"));
        let block_mask = Some(BlockMask { block_q: 32, block_k: 64 });
        assert!(
            refused(Problem { features: Features { block_mask, ..features(0) }, ..plain }, &h200())
                .contains("block mask")
        );
        let a100 = Device::typical(Arch::Sm(8, 0)).unwrap();
        assert!(refused(plain, &a100).contains("sm_90 alone"));
    }

    #[test]
    fn keys_are_not_split_on_another_shape_than_the_measured_one() {
        let few = Problem { batch_size: 1, num_heads_q: 1, num_heads_kv: 1, ..problem(128, 128) };
        let split = Fp8Knobs { num_splits: 4, tma_store: 0, ..heuristic_of_few(&few) };
        assert!(split.fits(&few, &h200()));
        assert_eq!(split.carried_over(&few, &problem(128, 128), &h200()).num_splits, 1);
        assert!(split.kernels(&few).iter().any(|kernel| kernel.template != "sm90_forward_fp8"));
    }

    fn heuristic_of_few(problem: &Problem) -> Fp8Knobs {
        <Fp8Knobs as Space>::heuristic(problem, &h200()).unwrap()
    }
}
