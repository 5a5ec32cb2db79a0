//! The generator of all test shapes: every boundary of a tile, seeded random problems, and cases
//! for one feature or kernel each. `tiles` has the cases with many tiles.
//!
//! `FLASHTUNE_TEST_CASE="…"`, the line that a failure prints, replaces all cases by that one.

mod eight;
mod four;
mod tiles;
mod tiny;

use super::blocks::Blocks;
use super::case::{ALL_STRIDES, Case, Random, Strides};
use super::extras::{Extras, Sides, Spread};
pub use eight::{
    eight_bits, random_eight_bits, tiny_converted_keys, tiny_e4m3, tiny_eight_bits, tiny_eight_bits_prefill,
    tiny_transposed_v, tiny_widened_keys,
};
use flashtune::problem::{Causal, Dtype, Window};
pub use four::{four_bits, random_four_bits, tiny_four_bits, tiny_widened_four_bits};
pub use tiles::{deterministic, long, long_deterministic, many_key_tiles, many_tiles};
pub use tiny::{
    one, tiny, tiny_decode, tiny_few_keys, tiny_groups, tiny_mixed, tiny_pages, tiny_pairs_of_tiles, tiny_short,
    tiny_splits, tiny_waves,
};

/// Head dims that models use, head dims between the widths of matrix instructions, and the smallest
/// ones.
const HEAD_DIMS: [i64; 16] = [64, 128, 32, 40, 72, 80, 96, 112, 16, 256, 8, 160, 1, 33, 192, 4];
/// (num_heads_q, num_heads_kv): MHA, MQA, and GQA with even and odd ratios.
const HEADS: [(i64, i64); 6] = [(2, 2), (4, 1), (4, 2), (3, 1), (6, 2), (1, 1)];
pub const MASKS: [Causal; 3] = [Causal::None, Causal::BottomRight, Causal::TopLeft];

/// One case at each edge of a tile of `tile` rows and keys, and at the edges of the sequences.
pub fn boundaries(dtypes: &[Dtype], tile: i64) -> Vec<Case> {
    let lengths = [
        (tile - 1, tile - 1),
        (tile, tile),
        (tile + 1, tile + 1),
        (1, 1),
        (1, tile + 1),
        (tile + 1, 1),
        (2 * tile + 3, tile - 1),
        (tile - 1, 2 * tile + 3),
        (0, tile),
        (tile, 0),
        (0, 0),
        (15, 17),
        (3 * tile, tile),
        (tile, 3 * tile),
    ];
    let all = lengths.into_iter().enumerate().flat_map(|(index, (seqlen_q, seqlen_k))| {
        MASKS.into_iter().enumerate().map(move |(mask, causal)| {
            let mix = index + mask;
            let (num_heads_q, num_heads_kv) = HEADS[mix % HEADS.len()];
            let head_dim = HEAD_DIMS[mix % 4];
            Case {
                // The dtype changes every four cases, so that each head dim meets every dtype and
                // dropout meets one.
                dtype: dtypes[mix / 4 % dtypes.len()],
                batch_size: 1 + mix as i64 % 2,
                num_heads_q,
                num_heads_kv,
                seqlen_q,
                seqlen_k,
                head_dim,
                head_dim_v: if mix % 5 == 0 { 24 } else { head_dim },
                causal,
                softmax_scale: (head_dim as f32).powf(-0.5),
                dropout_p: if mix / 2 % 3 == 1 { 0.2 } else { 0.0 },
                // Deterministic with one mask at each edge.
                deterministic: (index + 2 * mask) % 3 == 1,
                strides: ALL_STRIDES[mix % ALL_STRIDES.len()],
                extras: Extras::default(),
                seed: 1000 * tile as u64 + 10 * index as u64 + mask as u64,
            }
        })
    });
    unless_one_is_given(all.collect())
}

/// `count` problems from a seed. Lengths go up to `max_seqlen`; head dims come from the list and
/// from 1 to 512.
pub fn random(dtypes: &[Dtype], count: u64, max_seqlen: i64, seed: u64) -> Vec<Case> {
    unless_one_is_given((seed..seed + count).map(|seed| random_case(dtypes, max_seqlen, seed)).collect())
}

fn random_case(dtypes: &[Dtype], max_seqlen: i64, seed: u64) -> Case {
    let mut random = Random::new(seed);
    let (num_heads_q, num_heads_kv) = random.pick(&HEADS);
    let mut head_dim = || match random.between(0, 3) {
        0 => random.between(1, 512),
        _ => random.pick(&HEAD_DIMS),
    };
    let (head_dim, other_dim) = (head_dim(), head_dim());
    // Wide heads have shorter sequences, so that all cases take about the same time.
    let max_seqlen = (max_seqlen * 128 / (128 + head_dim)).max(16);
    let seqlen_q = random.between(0, max_seqlen);
    let other_length = random.between(0, max_seqlen);
    let seqlen_k = random.pick(&[seqlen_q, other_length, other_length]);
    Case {
        dtype: random.pick(dtypes),
        batch_size: random.between(1, 3),
        num_heads_q,
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v: random.pick(&[head_dim, head_dim, other_dim]),
        causal: random.pick(&MASKS),
        softmax_scale: (head_dim as f32).powf(-0.5) * random.pick(&[1.0, 1.0, 0.3, 2.0, -0.5]),
        dropout_p: random.pick(&[0.0, 0.0, 0.1, 0.5]),
        strides: random.pick(&ALL_STRIDES),
        extras: Extras::default(),
        deterministic: random.pick(&[false, false, true]),
        seed,
    }
}

/// `count` problems from a seed with random combinations of the features beyond plain attention.
pub fn with_extras(dtypes: &[Dtype], count: u64, max_seqlen: i64, seed: u64) -> Vec<Case> {
    let of = |seed| {
        let case = random_case(dtypes, max_seqlen, seed);
        // Few head dims, because a GPU builds a kernel for each.
        let dim = [64, 128, 40, 192][seed as usize % 4];
        let (head_dim, head_dim_v) = (dim, if seed % 8 == 5 { 72 } else { dim });
        let extras = random_extras(&case);
        // GPUs do not support both together.
        let deterministic = case.deterministic && extras.block_mask.is_none();
        Case { head_dim, head_dim_v, softmax_scale: (dim as f32).powf(-0.5), extras, deterministic, ..case }
    };
    unless_one_is_given((seed..seed + count).map(of).collect())
}

fn random_extras(case: &Case) -> Extras {
    let mut random = Random::new(case.seed ^ 0xfea7);
    let lengths = [0, 1, 7, 64, case.seqlen_k / 2, case.seqlen_k];
    let (left, right) = (sometimes(&mut random, &lengths), sometimes(&mut random, &lengths));
    let window = match case.causal {
        Causal::None => Window { left, right, top_left: (left, right) != (None, None) && random.pick(&[true, false]) },
        causal => Window { left, right: None, top_left: left.is_some() && causal == Causal::TopLeft },
    };
    let of_scores = ["bhqk", "hqk", "qk", "bqk", "bhk", "bk", "hk", "k"].map(Spread::of);
    let bias = sometimes(&mut random, &of_scores);
    let sides = [Sides::default(), Sides::BOTH, Sides { q: true, k: false }, Sides { q: false, k: true }];
    let is_varlen = random.pick(&[false, false, true]);
    let blocks = [(128, 128), (64, 64), (16, 48)]
        .map(|(q, k)| Blocks { of_batch: case.seed.is_multiple_of(3), ..Blocks::new(q, k) });
    let softcap = random.pick(&[0.0, 0.0, 2.0, 30.0]);
    let alibi = sometimes(&mut random, &["h", "bh"].map(Spread::of));
    let dbias = bias.is_some() && random.pick(&[true, true, false]);
    let mask = sometimes(&mut random, &of_scores);
    Extras {
        window,
        softcap,
        alibi,
        bias,
        dbias,
        mask,
        mask_bits: mask.is_some() && case.seed % 2 == 1,
        sinks: random.pick(&[true, false, false]),
        dlse: random.pick(&[true, false, false]),
        cu_seqlens: if is_varlen { random.pick(&sides) } else { Sides::default() },
        seqused: if is_varlen { random.pick(&sides) } else { Sides::default() },
        page_size: None,
        key_starts: false,
        batch_invariant: false,
        alone: None,
        among_others: false,
        block_mask: sometimes(&mut random, &blocks).filter(|_| !is_varlen),
        eight: None,
        four: None,
    }
}

/// None more often than a value.
fn sometimes<T: Clone>(random: &mut Random, of: &[T]) -> Option<T> {
    let one = random.pick(of);
    random.pick(&[None, None, None, Some(one.clone()), Some(one)])
}

/// Varlen batches for each way to give lengths, each with another mask. Some sequences are empty.
pub fn varlen(dtypes: &[Dtype]) -> Vec<Case> {
    let sides = [Sides::default(), Sides::BOTH, Sides { q: true, k: false }, Sides { q: false, k: true }];
    let pairs = sides.iter().flat_map(|cu_seqlens| sides.iter().map(move |seqused| (*cu_seqlens, *seqused)));
    let of = |(index, (cu_seqlens, seqused)): (usize, (Sides, Sides))| Case {
        batch_size: 5,
        num_heads_q: 4,
        num_heads_kv: 2,
        seqlen_k: [150, 200, 333][index % 3],
        causal: MASKS[index % 3],
        dropout_p: if index % 4 == 2 { 0.2 } else { 0.0 },
        deterministic: index % 4 == 1,
        strides: ALL_STRIDES[index % ALL_STRIDES.len()],
        seed: 230 + index as u64,
        extras: Extras { cu_seqlens, seqused, ..Extras::default() },
        ..Case::plain(
            dtypes[index % dtypes.len()],
            [270, 150, 200, 64][index % 4],
            if index % 2 == 0 { 64 } else { 128 },
        )
    };
    let varlen = pairs.filter(|(cu_seqlens, seqused)| cu_seqlens.any() || seqused.any());
    unless_one_is_given(varlen.enumerate().map(of).collect())
}

/// Paged K/V caches with page sizes of every kind, from one query to as many as paging allows, and
/// random combinations of the other forward features.
pub fn paged(dtypes: &[Dtype], count: u64, max_seqlen: i64, seed: u64) -> Vec<Case> {
    let of = |seed| {
        let case = random_case(dtypes, max_seqlen, seed);
        let mut random = Random::new(seed ^ 0x9a6ed);
        let dim = [64, 128, 40, 192][seed as usize % 4];
        let case = Case {
            head_dim: dim,
            head_dim_v: if seed % 8 == 5 { 72 } else { dim },
            softmax_scale: (dim as f32).powf(-0.5),
            seqlen_q: random.pick(&[1, 1, 2, 5, case.seqlen_q]),
            dropout_p: 0.0,
            deterministic: false,
            ..case
        };
        let extras = random_extras(&case);
        let seqused_k = random.pick(&[true, true, false]);
        Case {
            extras: Extras {
                dbias: false,
                dlse: false,
                cu_seqlens: Sides { k: false, ..extras.cu_seqlens },
                seqused: Sides { k: seqused_k, ..extras.seqused },
                block_mask: None,
                page_size: Some(random.pick(&[1, 3, 16, 16, 64, 100, 256])),
                ..extras
            },
            ..case
        }
    };
    unless_one_is_given((seed..seed + count).map(of).collect())
}

/// Many queries over paged keys, for the families that take tiles of queries: every kind of page
/// size, lengths of 0, of 1 and beside the blocks' ends, varlen queries, GQA, each width of a head,
/// each mask and feature, and strides of every kind. K and V of `PackedQkv` are interleaved.
pub fn paged_prefill(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |index: usize| {
        let page_size = [1, 3, 8, 16, 24, 48, 64, 80, 256][index % 9];
        let (head_dim, head_dim_v) =
            [(64, 64), (128, 128), (40, 40), (192, 128), (72, 72), (256, 256), (96, 64)][index % 7];
        let causal = MASKS[index % 3];
        let window = Window { left: Some(70), right: None, top_left: causal == Causal::TopLeft };
        let dtype = dtypes[index / 3 % dtypes.len()];
        let none = Extras::default();
        let extras = match index % 6 {
            0 => Extras { softcap: 3.0, sinks: true, ..none },
            1 => Extras { window, ..none },
            // Slopes make scores of hundreds, whose rounding in fp32 exceeds the rule without pages
            // too.
            2 if dtype != Dtype::Fp32 => Extras { alibi: Some(Spread::of("h")), ..none },
            4 => Extras { bias: Some(Spread::of("hqk")), mask: Some(Spread::of("bqk")), ..none },
            _ => none,
        };
        Case {
            batch_size: 3,
            num_heads_q: 4,
            num_heads_kv: [1, 2, 4][index / 2 % 3],
            seqlen_q: [129, 70, 200, 65][index % 4],
            seqlen_k: [193, 128, 320, 127, 64, 1, 250, 257][index % 8],
            head_dim_v,
            causal,
            softmax_scale: (head_dim as f32).powf(-0.5) * if index % 5 == 4 { -1.0 } else { 1.0 },
            strides: [Strides::Bshd, Strides::Gaps, Strides::PackedQkv, Strides::Bhsd, Strides::OddGaps][index % 5],
            seed: 860 + index as u64,
            extras: Extras {
                cu_seqlens: Sides { q: index % 4 == 1, k: false },
                seqused: Sides { q: index % 4 == 2, k: index % 8 != 7 },
                page_size: Some(page_size),
                ..extras
            },
            ..Case::plain(dtype, 1, head_dim)
        }
    };
    unless_one_is_given((0..45).map(of).collect())
}

/// Batches for batch-invariant mode, with few and many queries, each way to give lengths, and
/// features whose place depends on the lengths.
pub fn batch_invariant(dtypes: &[Dtype]) -> Vec<Case> {
    let keys = Sides { q: false, k: true };
    let none = Extras::default();
    let window = Window { left: Some(700), ..Window::default() };
    let forms = [
        (150, 333, none),
        (1, 3000, Extras { sinks: true, ..none }),
        (5, 3000, Extras { seqused: keys, alibi: Some(Spread::of("h")), ..none }),
        (1, 6000, Extras { seqused: keys, window, ..none }),
        (2, 3000, Extras { seqused: keys, page_size: Some(16), softcap: 20.0, ..none }),
        (70, 700, Extras { seqused: keys, page_size: Some(16), ..none }),
        (70, 700, Extras { seqused: Sides::BOTH, page_size: Some(64), sinks: true, ..none }),
        (70, 700, Extras { cu_seqlens: Sides { q: true, k: false }, seqused: keys, page_size: Some(16), ..none }),
        (270, 333, Extras { cu_seqlens: Sides::BOTH, softcap: 20.0, ..none }),
        (270, 333, Extras { seqused: Sides::BOTH, window: Window { left: Some(64), ..window }, ..none }),
    ];
    let of = |(index, (seqlen_q, seqlen_k, extras)): (usize, (i64, i64, Extras))| Case {
        batch_size: 6,
        num_heads_q: 8,
        num_heads_kv: 2,
        seqlen_k,
        causal: if index % 3 == 2 { Causal::None } else { Causal::BottomRight },
        seed: 500 + index as u64,
        extras: Extras { batch_invariant: true, ..extras },
        ..Case::plain(dtypes[index % dtypes.len()], seqlen_q, if index % 2 == 0 { 128 } else { 64 })
    };
    unless_one_is_given(forms.into_iter().enumerate().map(of).collect())
}

/// Block masks of every kind of size, with every other feature, for every kernel. Lists vary by
/// batch entry and head or are shared, blocks end past the sequence, and head dims have each width.
pub fn block_masks(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (q, k, seqlen_q, seqlen_k, head_dim)): (usize, (i64, i64, i64, i64, i64))| {
        let causal = MASKS[index % 3];
        let window = Window { left: Some(200), right: None, top_left: causal == Causal::TopLeft };
        let bias = (index % 5 == 3).then_some(Spread::of("hqk"));
        Case {
            batch_size: 2,
            num_heads_q: 4,
            num_heads_kv: [4, 2, 1][index % 3],
            seqlen_k,
            causal,
            softmax_scale: (head_dim as f32).powf(-0.5) * if index % 4 == 3 { -1.0 } else { 1.0 },
            dropout_p: if index % 5 == 2 { 0.2 } else { 0.0 },
            strides: if index % 4 == 1 { Strides::Bhsd } else { Strides::Bshd },
            seed: 610 + index as u64,
            extras: Extras {
                block_mask: Some(Blocks { of_batch: index % 2 == 0, of_head: index % 3 != 1, ..Blocks::new(q, k) }),
                window: if index % 6 == 5 { window } else { Window::default() },
                mask: (index % 4 == 2).then_some(Spread::of("bqk")),
                bias,
                dbias: bias.is_some(),
                softcap: if index % 7 == 6 { 2.0 } else { 0.0 },
                sinks: index % 4 == 1,
                ..Extras::default()
            },
            ..Case::plain(dtypes[index % dtypes.len()], seqlen_q, head_dim)
        }
    };
    let shapes = [
        (128, 128, 512, 512, 64),
        (128, 128, 700, 900, 128),
        (64, 128, 300, 650, 128),
        (128, 64, 500, 500, 64),
        (128, 128, 400, 400, 256),
        (256, 128, 600, 300, 96),
        (64, 64, 333, 444, 128),
        (128, 256, 200, 600, 192),
        (16, 32, 100, 150, 64),
        (48, 80, 250, 300, 40),
        (512, 384, 700, 800, 64),
        (128, 128, 400, 600, 160),
        (128, 128, 400, 1000, 64),
        (192, 128, 400, 500, 72),
        (128, 128, 130, 700, 512),
        (128, 128, 700, 700, 128),
    ];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}

/// Head dims of sm90's middle backward kernel, which holds Q, K and V in up to three boxes of 64
/// columns. The widths of Q/K and V are equal and different, each in both 16-bit dtypes,
/// deterministic and not. Each of these four cases has another mask, heads and lengths. Queries and
/// keys end within a tile, and several tiles add to each row of dQ.
pub fn three_boxes(dtypes: &[Dtype]) -> Vec<Case> {
    let dims = [
        (136, 136),
        (144, 144),
        (160, 160),
        (168, 168),
        (176, 176),
        (192, 192),
        (192, 128),
        (128, 192),
        (160, 64),
        (64, 160),
        (192, 136),
        (40, 168),
    ];
    let dtypes: Vec<Dtype> = dtypes.iter().copied().filter(|dtype| *dtype != Dtype::Fp32).collect();
    let of = |index: usize| {
        let (round, of_dims) = (index / dims.len(), index % dims.len());
        let (head_dim, head_dim_v) = dims[of_dims];
        let (num_heads_q, num_heads_kv) = HEADS[(of_dims + round) % HEADS.len()];
        Case {
            batch_size: 2,
            num_heads_q,
            num_heads_kv,
            seqlen_k: [300, 520, 129][(of_dims / 2 + round) % 3],
            head_dim_v,
            causal: MASKS[(of_dims + round) % 3],
            dropout_p: if index % 5 == 3 { 0.2 } else { 0.0 },
            deterministic: round % 2 == 1,
            seed: 160 + index as u64,
            ..Case::plain(dtypes[round / 2 % dtypes.len()], [270, 500, 97][(of_dims + 2 * round) % 3], head_dim)
        }
    };
    unless_one_is_given((0..4 * dims.len()).map(of).collect())
}

/// Small tensors of each memory layout, for tests that depend on strides alone.
pub fn each_layout(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |dtype: &Dtype, strides: &Strides| Case {
        batch_size: 2,
        num_heads_q: 4,
        num_heads_kv: 2,
        seqlen_k: 37,
        strides: *strides,
        ..Case::plain(*dtype, 21, 40)
    };
    dtypes.iter().flat_map(|dtype| ALL_STRIDES.iter().map(move |strides| of(dtype, strides))).collect()
}

/// All cases, or only the one of `FLASHTUNE_TEST_CASE`.
pub fn unless_one_is_given(cases: Vec<Case>) -> Vec<Case> {
    match std::env::var("FLASHTUNE_TEST_CASE") {
        Ok(line) => vec![line.parse().unwrap_or_else(|error| panic!("FLASHTUNE_TEST_CASE: {error}"))],
        Err(_) => cases,
    }
}
