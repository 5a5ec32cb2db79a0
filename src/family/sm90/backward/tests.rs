//! The constraints, splits and heuristic of the backward pass.

use super::super::backward_heuristic::*;
use super::super::backward_work;
use super::super::tests::{broken, h200, problem as of_pass};
use super::*;
use crate::config::{Config, Family};
use crate::problem::{BlockMask, Causal, Features, Pass, Varlen};

fn problem(head_dim: i64, head_dim_v: i64) -> Problem {
    of_pass(Pass::Backward, head_dim, head_dim_v)
}

fn config(block_m: u32) -> Config {
    let tile = [("block_m", block_m), ("block_n", 128), ("num_stages", 1), ("kv_stages", 1)];
    Config::new(
        Family::Sm90,
        tile.into_iter()
            .chain(["sink_softmax", "v_regs", "split_waves", "splits_rest", "direct_dq"].map(|knob| (knob, 0)))
            .chain([("group_mb", 16)]),
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
fn one_cta_does_all_tiles_of_a_head_where_they_are_few_and_heads_are_many() {
    let of = |batch_size, seqlen| Problem { batch_size, seqlen_q: seqlen, seqlen_k: seqlen, ..problem(128, 128) };
    let direct = |problem: &Problem| heuristic(problem, &h200()).unwrap().direct_dq;
    assert_eq!([of(64, 100), of(64, 128), of(64, 129), of(64, 256), of(64, 257)].map(|p| direct(&p)), [1, 1, 2, 2, 0]);
    assert_eq!([direct(&of(1, 100)), direct(&of(1, 256))], [1, 0], "few heads leave SMs idle");
    let causal_of = |seqlen| Problem { causal: Causal::BottomRight, ..of(64, seqlen) };
    assert_eq!([300, 384, 385, 512, 513].map(|seqlen| direct(&causal_of(seqlen))), [3, 3, 4, 4, 0]);
    let causal = Problem { causal: Causal::BottomRight, ..of(64, 100) };
    let more_queries = |count: i64| direct(&Problem { seqlen_q: 100 + count, ..causal });
    assert_eq!([0, 1, 15, 16].map(more_queries), [1, 1, 1, 0], "a block of queries without keys");
    let varlen = Features { varlen: Some(Varlen::default()), ..Features::NONE };
    assert_eq!(direct(&Problem { features: varlen, ..of(64, 100) }), 0);
    assert_eq!(broken(&of(64, 100), &config(64)), None, "a config of long keys may serve few");
    assert_eq!(broken(&of(64, 300), &config(64).with("direct_dq", 1)).as_deref(), Some("direct_dq"));
    for heads in [1, 14, 60, 200] {
        let few = Problem { num_heads_q: heads, num_heads_kv: heads, deterministic: true, ..of(1, 256) };
        let on = |sm_count, memory_bytes_per_second| {
            heuristic(&few, &Device { sm_count, memory_bytes_per_second, ..h200() }).unwrap()
        };
        let rate = h200().memory_bytes_per_second;
        assert!(on(78, rate / 2) == on(132, rate) && on(114, rate / 2) == on(132, rate), "{heads}");
    }
    for (rows, by) in [(112, None), (128, Some("direct_dq"))] {
        let two = Problem { head_dim: 64, head_dim_v: 64, ..of(64, 256) };
        assert_eq!(broken(&two, &config(rows).with("direct_dq", 2)).as_deref(), by);
    }
    let (long, short) = (of(16, 2048), of(64, 197));
    let carried = heuristic(&long, &h200()).unwrap().carried_over(&long, &short, &h200());
    assert_eq!(carried, heuristic(&short, &h200()).unwrap());
}

#[test]
fn few_keys_past_head_dim_192_are_a_tile_of_64_or_pairs_that_write_dq() {
    let of = |seqlen_k| Problem { batch_size: 64, seqlen_q: 64, seqlen_k, ..problem(256, 256) };
    let tile = |problem: &Problem| {
        let config = heuristic(problem, &h200()).unwrap();
        (config.block_n, config.direct_dq, config.kernel(problem), config.main(problem).dq_transposed)
    };
    assert_eq!(tile(&of(64)), (64, 1, BackwardKernel::Middle, false));
    assert_eq!(tile(&of(128)), (128, 1, BackwardKernel::Wide, true));
    let few_heads = Problem { batch_size: 1, num_heads_q: 4, num_heads_kv: 4, seqlen_q: 1024, ..of(300) };
    assert_eq!(tile(&few_heads), (128, 0, BackwardKernel::Wide, true), "three tiles add to dQ");
    assert_eq!(tile(&of(257)), (128, 0, BackwardKernel::Wide, true));
    let few = |direct_dq: u32| config(64).with("block_n", 64).with("direct_dq", direct_dq);
    assert_eq!(broken(&of(64), &few(1)), None);
    assert_eq!(broken(&of(128), &few(2)), None);
    for (keys, direct_dq) in [(128, 1), (129, 2)] {
        assert_eq!(broken(&of(keys), &few(direct_dq)).as_deref(), Some("direct_dq"), "{keys} {direct_dq}");
    }
}

/// On an H100 256 x 12 heads of 197 tokens at head dim 192 took 1,643 us in pairs, and 2,335 in
/// tiles of 96 keys.
#[test]
fn pairs_write_dq_of_two_tiles_from_head_dim_136_on() {
    let of = |seqlen, head_dim| of_shape((64, 12, 12, seqlen, seqlen, head_dim));
    let pairs = |problem: &Problem| {
        let offered = <BackwardKnobs as Space>::alternatives(problem, &h200()).into_iter();
        let mut pairs = offered.filter(|knobs| knobs.kernel(problem) == BackwardKernel::Wide);
        pairs.next().map(|knobs| (knobs.block_n, knobs.direct_dq, knobs.num_stages))
    };
    assert_eq!(pairs(&of(128, 192)), Some((128, 1, 1)));
    assert_eq!([136, 192].map(|head_dim| pairs(&of(197, head_dim))), [Some((128, 2, 1)); 2]);
    assert_eq!(pairs(&of(96, 192)), None, "one tile of 96 keys");
    assert_eq!(pairs(&of(257, 192)), Some((128, 0, 1)));
    assert_eq!(pairs(&of(1024, 192)), None);
    let problem = of(197, 192);
    let offered = <BackwardKnobs as Space>::alternatives(&problem, &h200()).into_iter();
    let fastest = offered.min_by(|a, b| a.us(&problem, &h200()).total_cmp(&b.us(&problem, &h200()))).unwrap();
    assert_eq!(fastest.kernel(&problem), BackwardKernel::Wide);
}

/// 160 tiles are a wave of 132 SMs and 28 more, one of each of 40 heads.
#[test]
fn tiles_past_whole_waves_are_split_and_others_whole() {
    let problem = of_shape((2, 20, 20, 2304, 512, 128));
    let rest = |splits_rest| BackwardKnobs { splits_rest, ..heuristic(&problem, &h200()).unwrap() };
    let tiles = |problem: &Problem| rest(4).rest_tiles(problem, &h200()).map(|tiles| (tiles.all, tiles.split));
    assert_eq!(tiles(&problem), Some((4, 1)));
    assert_eq!(tiles(&Problem { seqlen_k: 1500, ..problem }), Some((12, 3)), "480 tiles are 84 more than 3 waves");
    let config = |splits_rest| config(64).with("v_regs", 2).with("num_stages", 2).with("splits_rest", splits_rest);
    assert_eq!(broken(&problem, &config(4)), None);
    let shared = config(4).with("split_waves", 4);
    assert_eq!(broken(&problem, &shared).as_deref(), Some("splits_rest"));
    let cannot = [
        Problem { causal: Causal::BottomRight, ..problem },
        Problem { deterministic: true, ..problem },
        Problem { batch_size: 1, ..problem },
        Problem { seqlen_k: 128, batch_size: 8, ..problem },
    ];
    for problem in cannot {
        assert_eq!(broken(&problem, &config(4)).as_deref(), Some("splits_rest"), "{problem:?}");
    }
    let (split, whole) = (rest(4), rest(0));
    assert_eq!(split.num_splits(&problem, &h200()), 4);
    assert_eq!(split.num_splits(&Problem { batch_size: 1, ..problem }, &h200()), 1, "a shorter one of the same key");
    assert!(split.us(&problem, &h200()) < 0.9 * whole.us(&problem, &h200()));
}

#[test]
fn three_tiles_of_few_keys_are_an_alternative_to_two_pairs() {
    let problem = Problem { batch_size: 4, num_heads_q: 10, num_heads_kv: 10, seqlen_q: 300, ..problem(256, 256) };
    let problem = Problem { seqlen_k: 154, ..problem };
    let few = |knobs: &BackwardKnobs| (knobs.block_n, knobs.direct_dq) == (64, 0);
    let offered = <BackwardKnobs as Space>::alternatives(&problem, &h200());
    let few = *offered.iter().find(|knobs| few(knobs)).unwrap();
    let pairs = BackwardKnobs { block_n: 128, direct_dq: 0, ..heuristic(&problem, &h200()).unwrap() };
    assert_eq!(few.kernel(&problem), BackwardKernel::Middle);
    // 120 tiles run at once, and 80 of pairs in two waves. Longer heads have neither in one wave.
    assert!(few.us(&problem, &h200()) < 0.97 * pairs.us(&problem, &h200()));
    let long = Problem { batch_size: 2, seqlen_q: 1024, ..problem };
    assert!(few.us(&long, &h200()) > pairs.us(&long, &h200()));
}

/// On an H200 blocks of 64 rows took 25.5 us where those of 96 took 28.6 (docs/tuning/choice.md).
#[test]
fn blocks_of_all_rows_that_write_dq_may_add_to_it_and_share_walks() {
    let problem = of_shape((2, 12, 1, 300, 100, 72));
    let offered = <BackwardKnobs as Space>::alternatives(&problem, &h200());
    for block_m in [96, 80, 64] {
        for (direct_dq, is_split) in [(0, false), (0, true), (1, false), (1, true)] {
            let is_it = |knobs: &&BackwardKnobs| {
                (knobs.block_m, knobs.direct_dq, knobs.split_waves > 0) == (block_m, direct_dq, is_split)
            };
            assert!(offered.iter().any(|knobs| is_it(&knobs)), "{block_m} {direct_dq} {is_split}");
        }
    }
}

/// Two splits took 0.93 of the time unsplit on an H200, and 1.12 and 1.15 on an H100
/// (docs/tuning/choice.md).
#[test]
fn busy_tiles_that_are_alike_are_split_where_memory_is_fast_enough() {
    let problem = of_shape((4, 20, 20, 9216, 512, 96));
    let are_split = |device: &Device| {
        let offered = <BackwardKnobs as Space>::alternatives(&problem, device);
        offered.iter().any(|knobs| knobs.split_waves > 0)
    };
    let h100 = Device { memory_bytes_per_second: 3_352_000_000_000, ..h200() };
    assert_eq!([are_split(&h200()), are_split(&h100)], [true, false]);
}

/// Groups of 16 MB have 3, 3 and 2 heads, and those of 32 MB have 4 each. L2 holds what all heads
/// use, but not that of four times as many.
#[test]
fn causal_splits_are_offered_in_groups_that_end_evenly_too() {
    let problem = Problem { causal: Causal::BottomRight, ..of_shape((2, 8, 4, 2752, 2752, 96)) };
    let groups_of = |problem: &Problem| {
        let offered = <BackwardKnobs as Space>::alternatives(problem, &h200()).into_iter();
        let of_two = offered
            .filter(|knobs| (knobs.block_m, knobs.splits_rest) == (96, 0) && knobs.num_splits(problem, &h200()) == 2);
        of_two.map(|knobs| backward_work::backward_groups(&knobs, problem, &h200()).count).collect::<Vec<_>>()
    };
    assert_eq!(groups_of(&problem), [3, 2, 1]);
    let many = Problem { batch_size: 16, num_heads_kv: 2, seqlen_q: 1376, seqlen_k: 1376, ..problem };
    let groups_of_many = groups_of(&many);
    assert!(!groups_of_many.is_empty() && !groups_of_many.contains(&1), "{groups_of_many:?}");
    assert_eq!(groups_of(&Problem { causal: Causal::None, ..problem }).len(), 1, "equal tiles end together");
    let us = |group_mb| {
        let knobs = BackwardKnobs { group_mb, split_waves: 3, ..heuristic(&problem, &h200()).unwrap() };
        knobs.us(&problem, &h200())
    };
    assert!(us(32) < 0.95 * us(16));
}

#[test]
fn a_config_from_another_shape_is_grouped_where_l2_holds_few_heads() {
    let of = |seqlen, heads_q, heads_kv| Problem {
        batch_size: 1,
        num_heads_q: heads_q,
        num_heads_kv: heads_kv,
        causal: Causal::BottomRight,
        ..Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..problem(128, 128) }
    };
    let measured = BackwardKnobs { group_mb: 0, ..heuristic(&of(4096, 32, 8), &h200()).unwrap() };
    let carried = |to: &Problem| measured.carried_over(&of(4096, 32, 8), to, &h200()).group_mb;
    assert_eq!(carried(&of(65536, 32, 8)), 0, "walks alternate, and the last group would end unevenly");
    assert_eq!(carried(&of(8192, 32, 8)), 0, "few tiles for each SM");
    assert_eq!(carried(&of(65536, 32, 32)), 16, "each tile walks one head");
    let full = |seqlen| Problem { causal: Causal::None, ..of(seqlen, 32, 32) };
    assert_eq!(carried(&full(4096)), 16);
    assert_eq!(carried(&full(512)), 0, "L2 holds what all heads use");
    assert_eq!(carried(&full(1024)), 4, "K, V and their gradients take L2, too; rows are few");
    assert_eq!(carried(&of(4096, 32, 2)), 16, "tiles share a walk");
    let batch = |batch_size| Problem { batch_size, ..of(634, 8, 8) };
    assert_eq!([16, 4, 2].map(|size| carried(&batch(size))), [32, 32, 0], "few tiles, and many heads or not");
    assert_eq!(heuristic(&batch(16), &h200()).unwrap().group_mb, 32);
}

#[test]
fn the_model_draws_the_groups_of_a_launch() {
    let problem = Problem { causal: Causal::BottomRight, ..of_shape((1, 64, 8, 5122, 5122, 128)) };
    let groups = |group_mb, split_waves| {
        let knobs = BackwardKnobs { group_mb, split_waves, ..heuristic(&problem, &h200()).unwrap() };
        knobs.work(&problem, &h200()).unwrap().groups.count
    };
    assert_eq!(groups(0, 0), 1);
    assert_eq!(groups(16, 0), 3, "a head has 41 tiles, and 132 SMs take those of three");
    assert_eq!(groups(16, 6), 8, "a head has 82 tiles in two splits");
}

#[test]
fn walks_that_alternate_go_in_groups_where_these_end_evenly() {
    let of = |shape| Problem { causal: Causal::BottomRight, ..of_shape(shape) };
    let unsplit_groups = |problem: &Problem| {
        let knobs = heuristic(problem, &h200()).unwrap();
        assert_eq!(knobs.split_waves, 0);
        knobs.group_mb
    };
    assert_eq!(unsplit_groups(&of((8, 32, 4, 2048, 2048, 128))), 16, "four groups of 128 tiles");
    assert_eq!(unsplit_groups(&of((4, 16, 8, 1560, 1560, 112))), 0, "four groups of 104 tiles");
    assert_eq!(unsplit_groups(&of((2, 32, 8, 5715, 5715, 72))), 0, "eight groups of 90 tiles");
    let deterministic = Problem { deterministic: true, ..of((2, 32, 8, 5715, 5715, 72)) };
    assert_eq!(unsplit_groups(&deterministic), 16);
}

#[test]
fn lower_blocks_past_head_dim_192_pay_where_they_pad_fewer_rows() {
    let us = |block_m, seqlen| {
        let problem = Problem { batch_size: 13, causal: Causal::BottomRight, ..problem(256, 256) };
        let problem = Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..problem };
        BackwardKnobs { block_m, ..heuristic(&problem, &h200()).unwrap() }.us(&problem, &h200())
    };
    // 480 rows in place of 512, and 528.
    assert!(us(48, 473) < 0.98 * us(64, 473));
    assert!(us(48, 512) > us(64, 512));
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
        assert_eq!(broken(&problem(dim, dim), &tile(64, 128)), None, "{dim}: a pair of CTAs");
        assert_eq!(broken(&problem(dim, dim), &tile(64, 128).with("num_stages", 2)).as_deref(), Some("num_stages"));
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
    assert_eq!([keys(&problem(192, 192)), keys(&with_dropout(192, 192)), keys(&with_dropout(192, 128))], [96, 64, 96]);
    assert_eq!(knobs(&Problem { seqlen_q: 16384, ..problem(128, 128) })[3], 0);
    assert_eq!(knobs(&Problem { deterministic: true, ..problem(128, 128) })[3], 16);
}

#[test]
fn problem_without_sequences_has_a_config() {
    let empty = Problem { batch_size: 0, ..problem(128, 128) };
    assert!(heuristic(&empty, &h200()).is_some());
}
