//! Problems with int4 k and v.

use super::{MASKS, random_case, random_extras, unless_one_is_given};
use crate::support::case::{Case, Random, Strides};
use crate::support::extras::{Extras, Sides};
use flashtune::problem::{Causal, Dtype, Four, Window};

const OF_KEYS: Sides = Sides { q: false, k: true };

/// Both groups over rows, pages, packed sequences and entries of a cache, with few and many
/// queries.
pub fn four_bits() -> Vec<Case> {
    let of = |index: usize| {
        let four = Four::ALL[index % 2];
        let dim = [64, 128, 192, 256][index / 2 % 4];
        let none = Extras { four: Some(four), ..Extras::default() };
        let extras = match index % 5 {
            0 => none,
            1 => Extras { page_size: Some([16, 3, 64][index % 3]), seqused: OF_KEYS, sinks: true, ..none },
            2 => Extras { cu_seqlens: Sides::BOTH, softcap: 9.0, ..none },
            3 => Extras { key_starts: true, seqused: OF_KEYS, ..none },
            _ => Extras { window: Window { left: Some(100), ..Window::default() }, seqused: OF_KEYS, ..none },
        };
        Case {
            batch_size: 3,
            num_heads_q: 4,
            num_heads_kv: [1, 2, 4][index % 3],
            seqlen_k: [300, 150, 517][index / 2 % 3],
            head_dim_v: if index % 7 == 4 { 64 } else { dim },
            causal: MASKS[if index % 5 == 4 { 1 } else { index % 3 }],
            strides: [Strides::Bshd, Strides::Bhsd, Strides::Gaps][index / 4 % 3],
            seed: 4100 + index as u64,
            extras,
            ..Case::plain([Dtype::Bf16, Dtype::Fp16][index / 3 % 2], [1, 70, 5][index / 5 % 3], dim)
        }
    };
    unless_one_is_given((0..30).map(of).collect())
}

/// Random problems with random features.
pub fn random_four_bits(dtypes: &[Dtype], count: u64, max_seqlen: i64, seed: u64) -> Vec<Case> {
    let of = |seed| {
        let case = random_case(dtypes, max_seqlen, seed);
        let mut random = Random::new(seed ^ 0x4b18);
        let four = random.pick(&Four::ALL);
        let dim = four.group() * random.between(1, 256 / four.group());
        let case = Case {
            head_dim: dim,
            head_dim_v: if seed % 4 == 1 { 2 * four.group() } else { dim },
            softmax_scale: (dim as f32).powf(-0.5),
            seqlen_q: random.pick(&[1, 2, 5, case.seqlen_q]),
            dropout_p: 0.0,
            deterministic: false,
            strides: random.pick(&[Strides::Bshd, Strides::Bhsd, Strides::Gaps]),
            ..case
        };
        let extras = random_extras(&case);
        let page_size = random.pick(&[None, Some(1), Some(16), Some(64)]);
        let packs_k = extras.cu_seqlens.k && page_size.is_none();
        let extras = Extras {
            dbias: false,
            dlse: false,
            block_mask: None,
            cu_seqlens: Sides { k: packs_k, ..extras.cu_seqlens },
            page_size,
            four: Some(four),
            ..extras
        };
        Case { extras, ..case }
    };
    unless_one_is_given((seed..seed + count).map(of).collect())
}

/// Prompts for the emulator, whose keys a kernel may widen: both groups, each way in which keys
/// lie, a batch with single tokens, and keys enough for splits.
pub fn tiny_widened_four_bits() -> Vec<Case> {
    use Causal::{BottomRight, None as Full, TopLeft};
    use Four::{Int4g32, Int4g64};
    let window = Window { left: Some(90), ..Window::default() };
    let of = |four, head_dim, causal, extras| Case {
        batch_size: 2,
        num_heads_q: 4,
        num_heads_kv: 1,
        seqlen_k: 230,
        causal,
        seed: 17,
        extras: Extras { four: Some(four), ..extras },
        ..Case::plain(Dtype::Bf16, 130, head_dim)
    };
    let none = Extras::default();
    let paged = |page_size, extras| Extras { page_size: Some(page_size), seqused: OF_KEYS, ..extras };
    let of_queries = Extras { cu_seqlens: Sides { q: true, k: false }, ..none };
    unless_one_is_given(vec![
        of(Int4g32, 128, BottomRight, none),
        of(Int4g64, 256, Full, paged(16, none)),
        Case { head_dim_v: 64, ..of(Int4g32, 96, TopLeft, paged(3, Extras { softcap: 9.0, ..none })) },
        of(Int4g64, 64, BottomRight, Extras { cu_seqlens: Sides::BOTH, window, ..none }),
        Case { batch_size: 6, num_heads_q: 8, num_heads_kv: 2, ..of(Int4g32, 128, BottomRight, paged(16, of_queries)) },
        of(Int4g32, 32, Full, Extras { key_starts: true, seqused: OF_KEYS, sinks: true, ..none }),
        Case { softmax_scale: -0.1, strides: Strides::Bhsd, ..of(Int4g64, 192, BottomRight, none) },
        Case { batch_size: 1, seqlen_k: 1100, ..of(Int4g32, 64, BottomRight, none) },
    ])
}

/// Problems for the emulator: both groups and dtypes, rows and pages that TMA copies and that
/// threads copy, one and several groups of a row, and more rows than a tile has.
pub fn tiny_four_bits() -> Vec<Case> {
    use Dtype::{Bf16, Fp16};
    use Four::{Int4g32, Int4g64};
    let few = |dtype, four, head_dim, extras| Case {
        batch_size: 2,
        num_heads_q: 8,
        num_heads_kv: 2,
        seqlen_k: 300,
        seed: 7,
        extras: Extras { four: Some(four), ..extras },
        ..Case::plain(dtype, 1, head_dim)
    };
    let none = Extras::default();
    let paged = |page_size, extras| Extras { page_size: Some(page_size), seqused: OF_KEYS, ..extras };
    unless_one_is_given(vec![
        few(Bf16, Int4g32, 64, none),
        few(Fp16, Int4g64, 128, none),
        Case { strides: Strides::Bhsd, ..few(Bf16, Int4g32, 128, none) },
        Case { softmax_scale: -0.1, strides: Strides::Gaps, ..few(Bf16, Int4g32, 96, none) },
        few(Fp16, Int4g32, 128, paged(16, none)),
        few(Bf16, Int4g64, 64, paged(3, Extras { softcap: 9.0, ..none })),
        Case { seqlen_q: 3, causal: Causal::BottomRight, ..few(Fp16, Int4g32, 32, paged(16, none)) },
        few(Bf16, Int4g32, 128, Extras { key_starts: true, seqused: OF_KEYS, sinks: true, ..none }),
        Case { head_dim_v: 128, ..few(Bf16, Int4g64, 192, Extras { cu_seqlens: Sides::BOTH, ..none }) },
        Case { seqlen_q: 40, causal: Causal::BottomRight, ..few(Bf16, Int4g32, 256, paged(64, none)) },
        Case { seqlen_q: 70, num_heads_q: 2, ..few(Fp16, Int4g64, 256, none) },
        // The last CTA of several heads has some that do not exist.
        Case { num_heads_q: 18, num_heads_kv: 9, ..few(Fp16, Int4g32, 64, Extras { sinks: true, ..none }) },
        Case { num_heads_q: 18, num_heads_kv: 9, head_dim_v: 64, ..few(Bf16, Int4g64, 128, paged(3, none)) },
    ])
}
