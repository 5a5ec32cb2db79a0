//! Where the family is preferred, how its heuristic fills a device, and which constraint refuses
//! what.

use super::geometry::{DecodeKnobs, SPLITS};
use super::heuristic::{carried_over, cost, heuristic, in_fixed_order};
use crate::config::Family::{self, Decode, Sm80, Sm90};
use crate::device::{Arch, Device};
use crate::family::knob::Knobs;
use crate::family::space::Space;
use crate::family::{check, families, kernels, supported};
use crate::problem::{
    BlockMask, Causal, Dtype, Eight, EightBits, Features, Four, Layout, MAX_SPLITS, Pass, Problem, Varlen,
};

fn devices() -> [Device; 4] {
    [(8, 0), (8, 6), (9, 0), (12, 0)].map(|(major, minor)| Device::typical(Arch::Sm(major, minor)).unwrap())
}

fn checked(problem: &Problem, knobs: DecodeKnobs, device: &Device) -> Result<(), String> {
    check(problem, &knobs.to_config(), device)
}

fn problem(batch_size: i64, group_size: i64, seqlen_q: i64, seqlen_k: i64, head_dim: i64) -> Problem {
    Problem {
        num_heads_kv: 8,
        seqlen_k,
        causal: Causal::BottomRight,
        layout: Layout::widest(Dtype::Bf16, [head_dim]),
        ..Problem::dense(Pass::Forward, Dtype::Bf16, batch_size, 8 * group_size, seqlen_q, head_dim)
    }
}

fn over_eight_bits(problem: Problem, keys_per_scale: i64) -> Problem {
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale });
    let problem = Problem { features: Features { eight_bits, ..problem.features }, ..problem };
    Problem { layout: problem.widest_layout(), ..problem }
}

#[test]
fn the_heuristic_fits_every_head_dim_on_every_device() {
    for device in devices() {
        let widths = |d| [(d, d), (d, 512), (d, 1), (d, 513 - d), (d, 16), (d, 80), (d, 256)];
        for (head_dim, head_dim_v) in (1..=512).flat_map(widths) {
            for (group_size, seqlen_q) in [(1, 1), (8, 1), (4, 8), (1, 33), (64, 1)] {
                let paged = [None, Some(5), Some(16)].map(|paged| Features { paged, ..Features::NONE });
                for features in paged.into_iter().chain([Features { softcap: true, ..Features::NONE }]) {
                    let plain = problem(3, group_size, seqlen_q, 5000, head_dim);
                    let layout = Layout::widest(Dtype::Bf16, [head_dim, head_dim_v]);
                    let problem = Problem { head_dim_v, layout, features, ..plain };
                    let config = heuristic(&problem, &device);
                    assert_eq!(checked(&problem, config, &device), Ok(()), "{} {problem:?}", device.name);
                }
            }
        }
    }
}

#[test]
fn it_is_preferred_for_few_queries_over_many_keys_alone() {
    for device in devices() {
        let first = |problem: &Problem| families(problem, &device)[0];
        assert_eq!(first(&problem(1, 4, 1, 8192, 128)), Family::Decode);
        assert_eq!(first(&problem(1, 4, 16, 8192, 128)), Family::Decode);
        let others = [
            problem(1, 4, 17, 8192, 128),
            problem(1, 1, 64, 64, 128),
            problem(1, 1, 0, 64, 128),
            Problem { dropout: true, ..problem(1, 4, 1, 8192, 128) },
            Problem { pass: Pass::Backward, ..problem(1, 4, 1, 8192, 128) },
        ];
        for other in others {
            assert!(!families(&other, &device).contains(&Family::Decode), "{other:?}");
        }
    }
}

#[test]
fn up_to_16_queries_are_few_though_they_fill_two_tiles() {
    let [_, _, h200, _] = devices();
    let first = |group_size, seqlen_q| families(&problem(1, group_size, seqlen_q, 8192, 128), &h200)[0];
    assert_eq!([first(8, 16), first(8, 17), first(4, 16), first(4, 17)], [Decode, Sm90, Decode, Sm90]);
    assert_eq!([first(128, 1), first(129, 1), first(1, 64), first(1, 65)], [Decode, Sm90, Decode, Sm90]);
}

#[test]
fn few_packed_rows_over_pages_are_decodes_and_more_are_its_last() {
    for device in devices() {
        let of = |seqlen_q, seqlen_k| {
            let features = Features { paged: Some(16), ..Features::NONE };
            Problem { features, ..problem(2, 4, seqlen_q, seqlen_k, 128) }
        };
        let others = if device.arch == Arch::Sm(9, 0) { &[Sm90, Sm80][..] } else { &[Sm80] };
        // 16 queries of 4 heads, whatever the number of keys.
        for few in [of(1, 4096), of(16, 4096), of(16, 20), of(1, 0)] {
            assert_eq!(families(&few, &device), [&[Decode], others].concat(), "{few:?}");
        }
        for many in [of(17, 4096), of(4096, 4096), of(0, 4096)] {
            assert_eq!(families(&many, &device), [others, &[Decode]].concat(), "{many:?}");
            assert_eq!(checked(&many, heuristic(&many, &device), &device), Ok(()));
        }
        let fp32 = Problem { dtype: Dtype::Fp32, layout: Layout::Vec4, ..of(1, 4096) };
        assert_eq!(families(&fp32, &device), [Sm80]);
    }
}

/// A token's tile has the rows of the longest chunk in the decode family. sm90 leaves tokens to a
/// decode kernel of their own, and its tiles read the keys once for each head of a group.
#[test]
fn small_chunks_beside_tokens_are_sm90s_where_a_group_has_one_head() {
    let of = |device: &Device, group_size, seqlen_q| {
        // A lookup does not know the tokens of a batch.
        let varlen = Some(Varlen::default());
        let features = Features { varlen, paged: Some(64), ..Features::NONE };
        let problem = Problem { features, ..problem(70, group_size, seqlen_q, 8192, 64) };
        assert_eq!(checked(&problem, heuristic(&problem, device), device), Ok(()));
        families(&problem, device)[0]
    };
    for device in devices() {
        let sm90_or_decode = if device.arch == Arch::Sm(9, 0) { Sm90 } else { Decode };
        assert_eq!([17, 48, 64].map(|queries| of(&device, 1, queries)), [sm90_or_decode; 3]);
        let others = [of(&device, 1, 16), of(&device, 2, 32), of(&device, 4, 16)];
        assert_eq!(others, [Decode; 3], "{}", device.name);
    }
}

#[test]
fn splits_fill_the_device_and_stop_there() {
    let [_, _, h200, _] = devices();
    let splits = |batch_size, seqlen_k| {
        let problem = problem(batch_size, 4, 1, seqlen_k, 128);
        let config = heuristic(&problem, &h200);
        (config.num_splits, config.balance(&problem, config.num_splits, &h200))
    };
    // A CTA on nearly each of 132 SMs, which is enough; eight heads.
    assert_eq!(splits(1, 8192).0, 16);
    assert!(splits(1, 8192).1 > 0.9);
    // A batch that fills it alone is not split, and no split is without a block of keys for each
    // warp.
    assert_eq!(splits(32, 8192).0, 1);
    assert_eq!(splits(1, 64).0, 1);
    assert!(splits(1, 1024).0 <= 8);
}

#[test]
fn ctas_run_at_once_or_in_even_waves_with_enough_in_flight() {
    let [sm80, _, h200, _] = devices();
    let tile = |device: &Device, batch_size, head_dim| {
        let problem = problem(batch_size, 4, 1, 8192, head_dim);
        let config = heuristic(&problem, device);
        (config.num_stages, config.block_n)
    };
    // Three of 132 SMs' CTAs of 8 heads: 396 run at once, and of 512 a few would be left over.
    assert_eq!([16, 32, 64, 128].map(|batch_size| tile(&h200, batch_size, 128)), [(2, 16), (2, 16), (3, 16), (2, 16)]);
    // 8 CTAs after four waves are little; after one wave they are half of the time.
    let lean = problem(1, 4, 1, 8192, 128);
    let config = heuristic(&lean, &h200);
    let blocks = |batch_size| config.runs_evenly(&Problem { batch_size, ..lean }, &h200);
    assert_eq!([49, 50, 74, 75, 99, 100, 199].map(blocks), [true, false, false, true, true, false, true]);
    // Smaller blocks of keys are enough where an SM has two CTAs.
    assert_eq!([16, 32].map(|batch_size| tile(&h200, batch_size, 64)), [(2, 32), (2, 16)]);
    // Rows of four tiles compute for as long as more stages take to arrive.
    let many_rows = problem(16, 4, 16, 8192, 128);
    assert_eq!(heuristic(&many_rows, &h200).num_stages, 3);
    // What each thread copies is in flight for longer.
    assert_eq!([16, 64].map(|batch_size| tile(&sm80, batch_size, 128)), [(4, 16), (4, 16)]);
}

#[test]
fn a_config_keeps_the_device_as_full_on_another_problem() {
    let (from, [_, _, h200, _]) = (problem(2, 4, 1, 8192, 128), devices());
    let config = DecodeKnobs { num_splits: 16, ..heuristic(&from, &h200) };
    let splits = |to: &Problem| carried_over(config, &from, to, &h200).num_splits;
    let of = |batch_size, seqlen_k| splits(&problem(batch_size, 4, 1, seqlen_k, 128));
    assert_eq!([of(2, 8192), of(1, 8192), of(4, 8192), of(64, 8192)], [16, 32, 8, 1]);
    assert_eq!(of(2, 16384), 16, "longer keys ask for no more");
    // With 64 sequences a few CTAs would be left over from the waves of those that ran at once.
    let (few, many) = (problem(16, 4, 1, 8192, 128), problem(64, 4, 1, 8192, 128));
    let measured = heuristic(&few, &h200);
    assert_eq!(carried_over(measured, &few, &problem(32, 4, 1, 8192, 128), &h200), measured);
    assert_eq!(carried_over(measured, &few, &many, &h200), heuristic(&many, &h200));
    let short = problem(2, 4, 1, 512, 128);
    assert_eq!(i64::from(splits(&short)), config.worthwhile_splits(&short), "short ones have room for few");
}

#[test]
fn heads_that_do_not_exist_are_not_carried_over_and_cost_more() {
    let [_, _, h200, _] = devices();
    let of = |num_heads_kv| {
        let plain = problem(16, 4, 1, 8192, 64);
        let features = Features { four_bits: Some(Four::Int4g32), ..Features::NONE };
        let of_heads = Problem { num_heads_kv, num_heads_q: 4 * num_heads_kv, features, ..plain };
        Problem { layout: of_heads.widest_layout(), ..of_heads }
    };
    let eight = heuristic(&of(8), &h200);
    assert_eq!(eight.heads, 8);
    assert_eq!(carried_over(eight, &of(8), &of(16), &h200).heads, 8);
    for few in [1, 2, 4, 9, 12] {
        let fresh = heuristic(&of(few), &h200);
        assert_eq!(of(few).num_heads_kv % i64::from(fresh.heads), 0);
        assert_eq!(carried_over(eight, &of(8), &of(few), &h200), fresh, "{few} heads");
    }
    // The same tiles of as many heads as there are.
    let cost = |heads, problem: &Problem| {
        let config = DecodeKnobs { heads, num_warps: 8, num_splits: 1, ..eight };
        assert_eq!(checked(problem, config, &h200), Ok(()));
        cost(&config, problem, &h200)
    };
    for heads in [2, 4] {
        // Teams of more warps cost at most 0.12.
        assert!(cost(8, &of(heads)) > cost(heads as u32, &of(heads)) + 0.25, "{heads} heads");
    }
    // Four teams of as many heads as there are, or one of eight.
    let in_flight = |heads, existing| DecodeKnobs { heads, num_warps: 8, ..eight }.bytes_in_flight(&of(existing));
    assert_eq!([in_flight(2, 2), in_flight(8, 8)], [in_flight(8, 8); 2]);
    assert_eq!(4.0 * in_flight(8, 2), in_flight(8, 8));
}

/// The fastest tiles on an H100 (docs/tuning/eight-bits.md#by-tma).
#[test]
fn heads_whose_rows_are_whole_lines_together_are_copied_by_tma() {
    let [a100, _, h200, _] = devices();
    let int4 = |batch_size, head_dim, four| {
        let plain = problem(batch_size, 4, 1, 8192, head_dim);
        let own = Problem { features: Features { four_bits: Some(four), ..Features::NONE }, ..plain };
        Problem { layout: own.widest_layout(), ..own }
    };
    let e4m3 = |batch_size, head_dim| over_eight_bits(problem(batch_size, 4, 1, 8192, head_dim), 0);
    let tile = |problem: &Problem| {
        let config = heuristic(problem, &h200);
        assert_eq!(checked(problem, config, &h200), Ok(()), "{problem:?}");
        [config.tma, config.heads, config.block_n, config.num_warps, config.num_stages, config.ctas_per_sm]
    };
    let (g32, g64) = (Four::Int4g32, Four::Int4g64);
    let (two_ctas, one_cta, of_four) = ([1, 8, 32, 8, 2, 2], [1, 8, 32, 8, 4, 1], [1, 4, 16, 8, 3, 1]);
    assert_eq!([64, 128].map(|dim| tile(&int4(64, dim, g64))), [two_ctas; 2]);
    assert_eq!([64, 128, 256].map(|dim| tile(&int4(64, dim, g32))), [two_ctas, one_cta, of_four]);
    assert_eq!((tile(&int4(64, 256, g64)), tile(&e4m3(64, 192))), ([1, 8, 32, 8, 2, 1], of_four));
    // An SM's share of the keys is short for one CTA.
    assert_eq!(tile(&int4(16, 128, g32))[..2], [0, 4]);
    assert_eq!((tile(&e4m3(16, 64)), tile(&e4m3(16, 128))[..2] == [1, 1]), (two_ctas, true));
    let in_pages = |rows| Problem { features: Features { paged: Some(rows), ..e4m3(16, 64).features }, ..e4m3(16, 64) };
    assert_eq!([16, 12].map(|rows| tile(&in_pages(rows))[0]), [1, 0]);
    assert_eq!(heuristic(&e4m3(16, 64), &a100).tma, 0);
    // One CTA on nearly each of 132 SMs, of eight heads or of four, whose keys nothing splits.
    let whole = |problem: &Problem| (tile(problem), heuristic(problem, &h200).num_splits);
    assert_eq!((whole(&e4m3(128, 64)), whole(&e4m3(64, 64))), ((one_cta, 1), ([1, 4, 32, 8, 4, 1], 1)));
    let varlen = Some(Varlen::default());
    let of_lengths = Problem { features: Features { varlen, ..e4m3(128, 64).features }, ..e4m3(128, 64) };
    assert_eq!(whole(&of_lengths), (one_cta, 1), "lengths on the device split no wave that fills the SMs");
}

#[test]
fn keys_of_few_columns_stay_whole_with_fewer_ctas() {
    let device = Device::typical(Arch::Sm(9, 0)).unwrap();
    let splits = |batch_size, head_dim, varlen| {
        let own =
            Problem { features: Features { varlen, ..Features::NONE }, ..problem(batch_size, 1, 1, 4096, head_dim) };
        heuristic(&own, &device).num_splits
    };
    let lengths = Some(Varlen::default());
    assert_eq!(splits(12, 64, lengths), 1);
    assert_eq!(
        [splits(12, 128, lengths), splits(10, 64, lengths), splits(12, 64, None)].map(|splits| splits > 1),
        [true; 3]
    );
}

#[test]
fn a_search_looks_at_small_tiles_and_several_heads_beside_8_bits_and_int4_alone() {
    let combinations = |problem: &Problem| -> usize {
        DecodeKnobs::LIST.iter().map(|knob| DecodeKnobs::usable(knob, problem).len()).product()
    };
    let plain = problem(16, 4, 1, 8192, 128);
    let int4 = Problem { features: Features { four_bits: Some(Four::Int4g32), ..Features::NONE }, ..plain };
    let fixed_order = Problem { batch_invariant: true, ..plain };
    assert_eq!([plain, fixed_order, int4].map(|p| combinations(&p)), [116_640, 174_960, 311_040]);
    assert_eq!(combinations(&over_eight_bits(plain, 0)), 2 * combinations(&int4));
}

#[test]
fn the_knob_reaches_the_most_splits_that_there_may_be() {
    assert_eq!(SPLITS.last(), Some(&(MAX_SPLITS as u32)));
}

#[test]
fn each_constraint_refuses_what_it_names() {
    let [_, _, h200, _] = devices();
    let problem = problem(1, 8, 1, 8192, 128);
    let good = heuristic(&problem, &h200);
    let broken = [
        ("whole_teams", DecodeKnobs { num_warps: 2, warps_m: 4, ..good }),
        ("whole_tiles", DecodeKnobs { warps_m: 2, ..good }),
        ("rows_in_use", DecodeKnobs { block_m: 32, ..good }),
        ("heads", DecodeKnobs { heads: 2, num_warps: 8, ..good }),
        ("registers", DecodeKnobs { num_warps: 8, ctas_per_sm: 3, ..good }),
        ("shared_memory", DecodeKnobs { num_stages: 8, ..good }),
    ];
    for (name, config) in broken {
        let error = checked(&problem, config, &h200).unwrap_err();
        assert!(error.contains(&format!("breaks {name}:")), "{name}: {error}");
    }
    let short = Problem { seqlen_k: 127, ..problem };
    assert!(
        checked(&short, DecodeKnobs { num_splits: 2, ..good }, &h200).unwrap_err().contains("breaks splits_in_use:")
    );
}

#[test]
fn tma_copies_what_it_can() {
    let [a100, _, h200, sm_120] = devices();
    let plain = problem(1, 8, 1, 8192, 128);
    let paged = |page_size| Problem { features: Features { paged: Some(page_size), ..Features::NONE }, ..plain };
    let narrow = Problem { layout: Layout::Vec4, ..plain };
    let tma = |problem: &Problem, device: &Device| heuristic(problem, device).tma;
    assert_eq!([tma(&plain, &a100), tma(&plain, &h200), tma(&plain, &sm_120), tma(&narrow, &h200)], [0, 1, 1, 0]);
    // Whole blocks of 16 keys, or two pages of 8 to a block; else a box would reach into another
    // page.
    let sizes = [1, 4, 8, 12, 16, 48, 64, 100];
    assert_eq!(sizes.map(|page_size| tma(&paged(page_size), &h200)), [0, 0, 1, 0, 1, 1, 1, 0]);
    // With many rows a block has 32 keys; pages of 48 keys would force the smallest tile with TMA.
    let many = Problem { features: paged(48).features, ..problem(2, 64, 1, 8192, 128) };
    let config = heuristic(&many, &h200);
    assert_eq!([config.tma, config.block_m, config.num_warps], [0, 64, 8]);
    let refused = |problem: &Problem, config: DecodeKnobs| {
        let error = checked(problem, DecodeKnobs { tma: 1, ..config }, &h200).unwrap_err();
        assert!(error.contains("breaks tma:"), "{error}");
    };
    refused(&paged(12), heuristic(&paged(12), &h200));
    refused(&narrow, heuristic(&narrow, &h200));
    // 48 columns of V are no whole boxes.
    refused(&Problem { head_dim_v: 96, ..plain }, DecodeKnobs { warps_v: 2, ..heuristic(&plain, &h200) });
}

#[test]
fn kernels_of_an_unlisted_value_are_an_error_that_names_the_knob() {
    let problem = problem(1, 1, 1, 1000, 128);
    let config = heuristic(&problem, &devices()[2]).to_config();
    assert!(kernels(&problem, &config).is_ok());
    for knob in ["warps_m", "warps_v", "num_warps"] {
        let error = kernels(&problem, &config.clone().with(knob, 0)).unwrap_err();
        assert!(error.message.starts_with(&format!("{knob} is 0; it must be one of [1, 2")), "{error}");
    }
}

#[test]
fn lengths_on_the_device_get_more_ctas_than_sms() {
    let dense = problem(8, 4, 1, 8192, 128);
    let varlen = Some(Varlen::default());
    let paged = Problem { features: Features { varlen, paged: Some(64), ..Features::NONE }, ..dense };
    let device = Device::typical(Arch::Sm(9, 0)).unwrap();
    let [equal, unknown] = [dense, paged].map(|problem| heuristic(&problem, &device));
    assert_eq!((equal.num_splits, unknown.num_splits), (2, 4), "64 K/V heads on 132 SMs");
    // A record of few CTAs is of sequences of equal lengths.
    let few = DecodeKnobs { num_splits: 1, ctas_per_sm: 1, ..unknown };
    let shorter = |problem: Problem| Problem { seqlen_k: 4096, ..problem };
    assert_eq!(carried_over(few, &shorter(paged), &paged, &device), unknown);
    assert_eq!(carried_over(few, &shorter(dense), &dense, &device).num_splits, 1);
}

#[test]
fn weights_are_computed_ahead_where_the_ctas_of_a_fixed_order_have_an_sm_each() {
    for device in devices() {
        let of = |head_dim, group_size| {
            let problem = Problem { batch_invariant: true, ..problem(1, group_size, 1, 8192, head_dim) };
            let config = in_fixed_order(&problem, &device)?;
            assert_eq!(checked(&problem, config, &device), Ok(()));
            Some((problem, config))
        };
        let has_tma = matches!(device.arch, Arch::Sm(9.., _));
        for head_dim in [64, 96, 128, 256] {
            let Some((problem, config)) = of(head_dim, 4) else {
                assert!(head_dim > 128, "{} has no order for {head_dim}", device.name);
                continue;
            };
            let kernels = config.kernels(&problem);
            assert_eq!(kernels.iter().any(|kernel| kernel.template == "decode_ahead"), has_tma, "{}", device.name);
            // In any launch one of the two runs.
            for batch_size in [1, 2, 3, 8, 100] {
                let problem = Problem { batch_size, ..problem };
                let launched: Vec<_> =
                    kernels.iter().filter(|k| !k.grid(&problem, device.sm_count).contains(&0)).collect();
                assert_eq!(launched.len(), 2, "{batch_size} sequences: {launched:?}");
                let [x, y, _] = launched[0].grid(&problem, device.sm_count);
                let is_ahead = launched[0].template == "decode_ahead";
                assert_eq!(launched[1].template, "combine_segments");
                assert!(!is_ahead || x * y <= device.sm_count);
                assert_eq!(is_ahead, has_tma && config.tile_ctas * 8 * batch_size as u32 * y <= device.sm_count);
            }
        }
        // Tiles of more rows have no such kernel.
        let (problem, config) = of(128, 32).unwrap();
        assert!(!config.has_kernel_ahead());
        let ahead = DecodeKnobs { scoring_warps: 4, ..config };
        assert!(checked(&problem, ahead, &device).unwrap_err().contains("breaks ahead:"));
    }
}

#[test]
fn int4_is_decodes_with_few_queries_and_many_and_prompts_on_hopper_are_first_sm90s() {
    let of = |four, seqlen_q, head_dim| {
        let features = Features { four_bits: Some(four), ..Features::NONE };
        let problem = Problem { features, ..problem(2, 4, seqlen_q, 4096, head_dim) };
        Problem { layout: problem.widest_layout(), ..problem }
    };
    for device in devices() {
        for (seqlen_q, dim) in
            [1, 5, 300, 4096].into_iter().flat_map(|queries| [64, 128, 256].map(|dim| (queries, dim)))
        {
            for (four, paged) in
                Four::ALL.into_iter().flat_map(|four| [None, Some(3), Some(64)].map(|size| (four, size)))
            {
                let plain = of(four, seqlen_q, dim);
                let problem = Problem { features: Features { paged, ..plain.features }, ..plain };
                let widens = seqlen_q >= 300 && device.arch == Arch::Sm(9, 0);
                let expected = if widens { &[Sm90, Decode][..] } else { &[Decode] };
                assert_eq!(families(&problem, &device), expected, "{problem:?}");
                let config = heuristic(&problem, &device);
                assert_eq!(checked(&problem, config, &device), Ok(()), "{} {problem:?}", device.name);
                assert_eq!((supported(&problem, &device), config.warps_v), (Ok(()), 1));
                // Rows of 128 bytes and more in whole sectors are copied by themselves.
                let row_bytes = four.row_bytes(dim);
                let is_whole = row_bytes >= 128 && row_bytes % 32 == 0;
                let shares_heads = seqlen_q == 1 && !is_whole;
                assert!(shares_heads || config.heads == 1, "{} {problem:?}", device.name);
                // Elsewhere shared memory may hold no second stage of several heads.
                assert!(!shares_heads || config.heads > 1 || device.arch != Arch::Sm(9, 0), "{problem:?}");
                // One query of a group of four heads is four rows.
                assert_eq!(config.block_m == 8, seqlen_q == 1, "{} {problem:?}", device.name);
                let split = DecodeKnobs { warps_v: 2, num_warps: 8, ..config };
                assert!(checked(&problem, split, &device).is_err(), "{} {problem:?}", device.name);
            }
        }
        let good = of(Four::Int4g32, 1, 128);
        let block_mask = Some(BlockMask { block_q: 64, block_k: 64 });
        let refused = [
            (Problem { batch_invariant: true, ..good }, "batch_invariant is true, which no kernel family takes"),
            (Problem { features: Features { block_mask, ..good.features }, ..good }, "there is a block mask, which no"),
            (of(Four::Int4g64, 1, 320), "head_dim or head_dim_v is above 256, which no"),
            (Problem { layout: Layout::Vec1, ..good }, "must be multiples of 4 bytes"),
        ];
        for (problem, words) in refused {
            let message = supported(&problem, &device).unwrap_err().message;
            assert!(message.starts_with("k and v are int4g") && message.contains(words), "{message}");
        }
    }
}

#[test]
fn tiles_of_8_rows_are_transposed_over_8_bits_and_others_are_not() {
    for device in devices() {
        for (head_dim, keys_per_scale) in (16..=512).step_by(8).flat_map(|dim| [0, 1, 128].map(|keys| (dim, keys))) {
            for paged in [None, Some(3), Some(16), Some(256)] {
                let of = |group_size, seqlen_q| {
                    let plain = problem(3, group_size, seqlen_q, 5000, head_dim);
                    let paged = Problem { features: Features { paged, ..plain.features }, ..plain };
                    over_eight_bits(paged, keys_per_scale)
                };
                for (problem, may_be_small) in
                    [(of(1, 1), true), (of(8, 1), true), (of(9, 1), false), (of(4, 8), false)]
                {
                    let config = heuristic(&problem, &device);
                    assert_eq!(checked(&problem, config, &device), Ok(()), "{} {problem:?}", device.name);
                    let cuts_blocks = paged.is_some_and(|page_size| page_size % 32 != 0);
                    let pays = !(128..160).contains(&head_dim) || keys_per_scale != 1 || !cuts_blocks;
                    let is_small = may_be_small && (pays || config.heads > 1);
                    assert_eq!((config.block_m == 8, config.transposes(&problem)), (is_small, is_small), "{problem:?}");
                    assert!(config.heads == 1 || is_small);
                }
            }
        }
    }
    // An SM of an H200 holds the two CTAs of each that are asked for, and they run in even waves.
    let [_, _, h200, _] = devices();
    for keys_per_scale in [0, 1] {
        let config = heuristic(&over_eight_bits(problem(64, 4, 1, 8192, 128), keys_per_scale), &h200);
        assert_eq!([config.block_m, config.num_stages, config.ctas_per_sm, config.num_splits], [8, 2, 2, 1]);
    }
    // A record of the tile of 16 rows, whose products are not transposed, still serves.
    let problem = over_eight_bits(problem(64, 4, 1, 8192, 128), 0);
    let tall = DecodeKnobs { block_m: 16, ..heuristic(&problem, &h200) };
    assert_eq!((checked(&problem, tall, &h200), tall.transposes(&problem)), (Ok(()), false));
}
