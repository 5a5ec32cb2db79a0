//! Problems with 8-bit k and v, and with 8-bit q too.

use super::{MASKS, random_case, random_extras, unless_one_is_given};
use crate::support::blocks::Blocks;
use crate::support::case::{Case, Random, Strides};
use crate::support::extras::{Extras, Sides, Spread};
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Window};

const SCALES: [i64; 3] = [0, 1, 128];

fn eight(keys: Eight, keys_per_scale: i64) -> Option<EightBits> {
    Some(EightBits { keys, queries: false, keys_per_scale })
}

const FP8_Q: fn(i64) -> Option<EightBits> =
    |keys_per_scale| Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale });

/// Each format with each kind of scales, over rows, pages, packed sequences and entries of a cache.
pub fn eight_bits() -> Vec<Case> {
    let keys = Sides { q: false, k: true };
    let of = |index: usize| {
        let (format, keys_per_scale) = (Eight::ALL[index % 3], SCALES[index / 3 % 3]);
        let dim = [64, 128, 40, 96][index % 4];
        let none = Extras { eight: eight(format, keys_per_scale), ..Extras::default() };
        let extras = match index / 3 % 5 {
            0 => none,
            1 => Extras { page_size: Some([16, 3, 64][index % 3]), seqused: keys, sinks: true, ..none },
            2 => Extras { cu_seqlens: Sides::BOTH, softcap: 9.0, ..none },
            3 => Extras { key_starts: true, seqused: keys, ..none },
            _ => Extras { window: Window { left: Some(100), ..Window::default() }, seqused: keys, ..none },
        };
        let causal = MASKS[if index / 3 % 5 == 4 { 1 } else { index % 3 }];
        Case {
            batch_size: 3,
            num_heads_q: 4,
            num_heads_kv: [1, 2, 4][index % 3],
            seqlen_k: [300, 150, 517][index / 2 % 3],
            head_dim_v: if index % 5 == 4 { 80 } else { dim },
            causal,
            strides: [Strides::Bshd, Strides::Bhsd, Strides::Gaps][index / 4 % 3],
            seed: 2100 + index as u64,
            extras,
            ..Case::plain([Dtype::Bf16, Dtype::Fp16][index / 2 % 2], [1, 70, 5][index / 5 % 3], dim)
        }
    };
    let of_fp8 = |index: usize| {
        let case = of(index);
        Case { extras: Extras { eight: FP8_Q(SCALES[index % 3]), ..case.extras }, ..case }
    };
    unless_one_is_given((0..45).map(of).chain((0..12).map(of_fp8)).collect())
}

/// Random problems with random features and formats.
pub fn random_eight_bits(dtypes: &[Dtype], count: u64, max_seqlen: i64, seed: u64) -> Vec<Case> {
    let of = |seed| {
        let case = random_case(dtypes, max_seqlen, seed);
        let mut random = Random::new(seed ^ 0xe18b);
        let dim = [64, 128, 40, 192][seed as usize % 4];
        let case = Case {
            head_dim: dim,
            head_dim_v: if seed % 8 == 5 { 72 } else { dim },
            softmax_scale: (dim as f32).powf(-0.5),
            seqlen_q: random.pick(&[1, 2, 5, case.seqlen_q]),
            dropout_p: 0.0,
            deterministic: false,
            strides: random.pick(&[Strides::Bshd, Strides::Bhsd, Strides::Gaps]),
            ..case
        };
        let extras = random_extras(&case);
        let page_size = random.pick(&[None, Some(1), Some(16), Some(16), Some(64)]);
        let packs_k = extras.cu_seqlens.k && page_size.is_none();
        let extras = Extras {
            dbias: false,
            dlse: false,
            block_mask: None,
            cu_seqlens: Sides { k: packs_k, ..extras.cu_seqlens },
            page_size,
            eight: eight(random.pick(&Eight::ALL), random.pick(&SCALES)),
            ..extras
        };
        Case { extras, ..case }
    };
    unless_one_is_given((seed..seed + count).map(of).collect())
}

/// Few queries for the emulator: each format, each kind of scales, rows and pages, both dtypes, a
/// negative scale of the softmax, and head dims with an odd number of k-steps.
pub fn tiny_eight_bits() -> Vec<Case> {
    let keys = Sides { q: false, k: true };
    let few = |dtype, format, keys_per_scale, head_dim| Case {
        batch_size: 2,
        num_heads_q: 8,
        num_heads_kv: 2,
        seqlen_k: 300,
        seed: 7,
        extras: Extras { eight: eight(format, keys_per_scale), ..Extras::default() },
        ..Case::plain(dtype, 1, head_dim)
    };
    let with = |case: Case, change: fn(&mut Extras)| {
        let mut extras = case.extras;
        change(&mut extras);
        Case { extras: Extras { seqused: keys, ..extras }, ..case }
    };
    let paged = |case| with(case, |extras| extras.page_size = Some(16));
    unless_one_is_given(vec![
        few(Dtype::Bf16, Eight::E4m3, 0, 64),
        few(Dtype::Fp16, Eight::E5m2, 0, 128),
        Case { softmax_scale: -0.1, strides: Strides::Gaps, ..few(Dtype::Bf16, Eight::Int8, 1, 80) },
        paged(few(Dtype::Fp16, Eight::E4m3, 1, 128)),
        with(few(Dtype::Bf16, Eight::E5m2, 128, 64), |extras| (extras.page_size, extras.softcap) = (Some(3), 9.0)),
        Case { seqlen_q: 3, causal: Causal::BottomRight, ..paged(few(Dtype::Fp16, Eight::Int8, 128, 72)) },
        with(few(Dtype::Bf16, Eight::E4m3, 1, 64), |extras| (extras.key_starts, extras.sinks) = (true, true)),
        // CTAs of several heads, whose rows of 64 bytes lie one after the other or do not.
        paged(Case { num_heads_kv: 4, ..few(Dtype::Bf16, Eight::E4m3, 1, 64) }),
        Case { num_heads_kv: 8, strides: Strides::Gaps, ..few(Dtype::Fp16, Eight::Int8, 0, 64) },
        Case { num_heads_kv: 8, strides: Strides::Bhsd, ..few(Dtype::Bf16, Eight::E4m3, 1, 64) },
    ])
}

/// Tiles of queries for the emulator, over rows and pages.
pub fn tiny_eight_bits_prefill() -> Vec<Case> {
    let of = |dtype, format, keys_per_scale, head_dim, causal| Case {
        batch_size: 2,
        num_heads_q: 2,
        num_heads_kv: 1,
        seqlen_k: 230,
        causal,
        seed: 9,
        extras: Extras { eight: eight(format, keys_per_scale), ..Extras::default() },
        ..Case::plain(dtype, 130, head_dim)
    };
    let with = |case: Case, change: fn(&mut Extras)| {
        let mut extras = case.extras;
        change(&mut extras);
        Case { extras, ..case }
    };
    unless_one_is_given(vec![
        of(Dtype::Bf16, Eight::E4m3, 0, 64, Causal::BottomRight),
        with(of(Dtype::Fp16, Eight::E5m2, 1, 128, Causal::None), |extras| extras.cu_seqlens = Sides::BOTH),
        with(of(Dtype::Bf16, Eight::Int8, 128, 80, Causal::BottomRight), |extras| {
            (extras.page_size, extras.seqused) = (Some(16), Sides { q: false, k: true });
        }),
        with(of(Dtype::Fp16, Eight::Int8, 1, 64, Causal::TopLeft), |extras| extras.alibi = Some(Spread::of("h"))),
        // The last listed blocks end behind the last key, where there is no scale.
        with(of(Dtype::Bf16, Eight::E4m3, 1, 64, Causal::None), |extras| extras.block_mask = Some(Blocks::new(64, 64))),
    ])
}

/// Tiles of queries for kernels that convert keys on their way to shared memory: each format with
/// each kind of scales, each width of a row, over rows and over pages that hold blocks, parts of
/// blocks and no whole eights of keys.
pub fn tiny_converted_keys() -> Vec<Case> {
    use Causal::{BottomRight, None as Full, TopLeft};
    use Dtype::{Bf16, Fp16};
    let keys = Sides { q: false, k: true };
    let queries = Sides { q: true, k: false };
    let window = Window { left: Some(90), ..Window::default() };
    let of = |dtype, format, keys_per_scale, head_dim, causal, extras| Case {
        batch_size: 2,
        num_heads_q: 2,
        num_heads_kv: 1,
        seqlen_k: 230,
        causal,
        seed: 13,
        extras: Extras { eight: eight(format, keys_per_scale), ..extras },
        ..Case::plain(dtype, 130, head_dim)
    };
    let none = Extras::default();
    let paged = |page_size, extras| Extras { page_size: Some(page_size), seqused: keys, ..extras };
    unless_one_is_given(vec![
        of(Bf16, Eight::E5m2, 0, 256, Full, none),
        Case { head_dim_v: 128, ..of(Fp16, Eight::E4m3, 128, 192, BottomRight, paged(64, none)) },
        of(Bf16, Eight::Int8, 0, 128, BottomRight, paged(3, Extras { window, sinks: true, ..none })),
        of(Fp16, Eight::E4m3, 1, 128, TopLeft, paged(16, Extras { softcap: 9.0, ..none })),
        of(Bf16, Eight::E4m3, 1, 64, BottomRight, Extras { cu_seqlens: Sides::BOTH, window, ..none }),
        // Single tokens go to a decode kernel.
        Case {
            batch_size: 6,
            num_heads_q: 4,
            num_heads_kv: 2,
            ..of(Bf16, Eight::E4m3, 0, 128, BottomRight, paged(16, Extras { cu_seqlens: queries, ..none }))
        },
        of(Fp16, Eight::E5m2, 0, 80, BottomRight, paged(256, Extras { softcap: 9.0, ..none })),
        Case { head_dim_v: 32, ..of(Bf16, Eight::Int8, 1, 160, Full, paged(12, none)) },
        Case { softmax_scale: -0.1, strides: Strides::Gaps, ..of(Fp16, Eight::Int8, 0, 64, Full, none) },
        of(Bf16, Eight::E5m2, 128, 64, Full, Extras { key_starts: true, seqused: keys, ..none }),
        Case { softmax_scale: -0.1, ..of(Bf16, Eight::Int8, 1, 96, BottomRight, paged(16, none)) },
        of(Bf16, Eight::E4m3, 1, 256, BottomRight, paged(16, none)),
        of(Fp16, Eight::Int8, 1, 256, Full, none),
    ])
}

/// The same with twice the query heads, so that a kernel may widen the keys before. Products of V
/// and scales of keys need bf16 there. Some pages have one key, and one batch has keys enough for
/// splits.
pub fn tiny_widened_keys() -> Vec<Case> {
    let of = |case: Case| {
        let has_key_scales = case.extras.eight.is_some_and(|eight| eight.keys_per_scale != 0);
        let page_size = case.extras.page_size.map(|rows| if rows == 12 { 1 } else { rows });
        Case {
            dtype: if has_key_scales { Dtype::Bf16 } else { case.dtype },
            num_heads_q: 2 * case.num_heads_q,
            strides: if case.strides == Strides::Gaps { Strides::Bhsd } else { case.strides },
            extras: Extras { page_size, ..case.extras },
            ..case
        }
    };
    let cases: Vec<Case> = tiny_converted_keys().into_iter().map(of).collect();
    // It is missing where one case is given.
    let long = cases.get(4).map(|case| Case { batch_size: 1, seqlen_k: 1100, ..*case });
    unless_one_is_given(cases.into_iter().chain(long).collect())
}

/// Two sequences of e4m3, whose query heads share K/V heads in pairs.
fn of_e4m3(
    num_heads_q: i64,
    dtype: Dtype,
    keys_per_scale: i64,
    lengths: [i64; 2],
    head_dim: i64,
    causal: Causal,
) -> Case {
    let [seqlen_q, seqlen_k] = lengths;
    Case {
        batch_size: 2,
        num_heads_q,
        num_heads_kv: num_heads_q / 2,
        seqlen_k,
        causal,
        seed: 11,
        extras: Extras { eight: FP8_Q(keys_per_scale), ..Extras::default() },
        ..Case::plain(dtype, seqlen_q, head_dim)
    }
}

/// E4m3 where a kernel of its own transposes V: lengths that are no multiples of a block, both
/// kinds of scales, several sequences, sums that move, and columns of V past a multiple of 32.
pub fn tiny_transposed_v() -> Vec<Case> {
    let of =
        |dtype, keys_per_scale, lengths, head_dim, causal| of_e4m3(2, dtype, keys_per_scale, lengths, head_dim, causal);
    let long = of(Dtype::Bf16, 0, [192, 2500], 80, Causal::None);
    unless_one_is_given(vec![
        of(Dtype::Bf16, 0, [200, 430], 128, Causal::BottomRight),
        of(Dtype::Fp16, 128, [192, 385], 256, Causal::None),
        Case { batch_size: 1, num_heads_q: 1, ..long },
        Case { head_dim_v: 80, ..of(Dtype::Bf16, 0, [195, 400], 48, Causal::None) },
        Case { batch_size: 3, ..of(Dtype::Bf16, 0, [200, 500], 96, Causal::BottomRight) },
    ])
}

/// Queries, keys and values in e4m3 for the emulator: both kinds of scales, rows and pages, tiles
/// without keys, more keys than two sums of products take, and head dims with half a k-step.
pub fn tiny_e4m3() -> Vec<Case> {
    let of =
        |dtype, keys_per_scale, lengths, head_dim, causal| of_e4m3(4, dtype, keys_per_scale, lengths, head_dim, causal);
    let with = |case: Case, change: fn(&mut Extras)| {
        let mut extras = case.extras;
        change(&mut extras);
        Case { extras, ..case }
    };
    let keys = Sides { q: false, k: true };
    unless_one_is_given(vec![
        // The first tiles of rows see no key.
        of(Dtype::Bf16, 0, [400, 130], 64, Causal::BottomRight),
        of(Dtype::Fp16, 0, [70, 4500], 64, Causal::None),
        // Three consumers take turns, and two of the last tile's have no rows.
        of(Dtype::Bf16, 0, [450, 300], 128, Causal::None),
        // Two consumers take turns, and skip different blocks.
        with(of(Dtype::Bf16, 0, [260, 500], 240, Causal::BottomRight), |extras| {
            extras.window = Window { left: Some(150), ..Window::default() };
        }),
        with(of(Dtype::Fp16, 128, [130, 300], 64, Causal::None), |extras| {
            extras.block_mask = Some(Blocks::new(64, 64))
        }),
        Case { softmax_scale: -0.1, head_dim_v: 96, ..of(Dtype::Bf16, 0, [150, 300], 80, Causal::None) },
        with(of(Dtype::Bf16, 128, [130, 300], 128, Causal::TopLeft), |extras| extras.cu_seqlens = Sides::BOTH),
        with(
            Case {
                extras: Extras { seqused: keys, ..Extras::default() },
                ..of(Dtype::Fp16, 0, [130, 300], 64, Causal::BottomRight)
            },
            |extras| {
                (extras.page_size, extras.eight) = (Some(16), FP8_Q(0));
            },
        ),
        with(of(Dtype::Bf16, 128, [100, 300], 64, Causal::None), |extras| {
            (extras.softcap, extras.sinks, extras.window) = (9.0, true, Window { left: Some(90), ..Window::default() });
        }),
    ])
}
