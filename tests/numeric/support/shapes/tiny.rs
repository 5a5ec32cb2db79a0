//! Problems so small that the emulator of tests/emulator runs them in a moment, with every feature
//! and a kernel of each kind.

use super::unless_one_is_given;
use crate::support::blocks::Blocks;
use crate::support::case::{Case, Strides};
use crate::support::extras::{Extras, Sides, Spread};
use flashtune::problem::{Causal, Dtype, Four, Window};

const NONE: Extras = Extras {
    window: Window { left: None, right: None, top_left: false },
    softcap: 0.0,
    alibi: None,
    bias: None,
    dbias: false,
    mask: None,
    mask_bits: false,
    sinks: false,
    dlse: false,
    cu_seqlens: Sides { q: false, k: false },
    seqused: Sides { q: false, k: false },
    page_size: None,
    key_starts: false,
    batch_invariant: false,
    alone: None,
    among_others: false,
    block_mask: None,
    eight: None,
    four: None,
};

fn of(dtype: Dtype, lengths: (i64, i64), head_dim: i64, causal: Causal) -> Case {
    let (seqlen_q, seqlen_k) = lengths;
    Case { num_heads_q: 2, num_heads_kv: 1, seqlen_k, causal, seed: 3, ..Case::plain(dtype, seqlen_q, head_dim) }
}

/// Both passes. Lengths end within a tile, and most problems have several tiles of queries and of
/// keys.
pub fn tiny() -> Vec<Case> {
    use Causal::{BottomRight, None as Full, TopLeft};
    use Dtype::{Bf16, Fp16, Fp32};
    let window = Window { left: Some(50), ..Window::default() };
    let bias = Extras { bias: Some(Spread::of("hqk")), dbias: true, sinks: true, dlse: true, ..NONE };
    let scores = Extras { softcap: 15.0, alibi: Some(Spread::of("h")), window, ..NONE };
    let mask = Extras { mask: Some(Spread::of("bqk")), mask_bits: true, ..NONE };
    let varlen = Extras { cu_seqlens: Sides::BOTH, seqused: Sides { q: false, k: true }, ..NONE };
    let blocks = Extras { block_mask: Some(Blocks { of_head: true, ..Blocks::new(64, 128) }), ..NONE };
    unless_one_is_given(vec![
        of(Bf16, (150, 290), 64, BottomRight),
        Case { dropout_p: 0.2, ..of(Fp16, (140, 200), 128, Full) },
        // The last tile has no keys for the second consumer, and the last block few queries.
        of(Bf16, (150, 300), 128, Full),
        of(Fp16, (100, 310), 64, Full),
        Case { deterministic: true, strides: Strides::Gaps, ..of(Bf16, (200, 200), 128, BottomRight) },
        Case { head_dim_v: 128, ..of(Bf16, (100, 210), 192, TopLeft) },
        of(Bf16, (70, 150), 256, BottomRight),
        of(Bf16, (70, 75), 256, Full),
        of(Bf16, (70, 130), 256, BottomRight),
        Case { strides: Strides::OddGaps, softmax_scale: -0.2, ..of(Fp16, (70, 90), 40, Full) },
        of(Fp32, (70, 90), 40, BottomRight),
        Case { extras: bias, ..of(Bf16, (90, 150), 64, Full) },
        Case { extras: scores, ..of(Bf16, (150, 150), 64, BottomRight) },
        Case { extras: mask, ..of(Fp16, (90, 150), 72, Full) },
        Case { batch_size: 3, extras: varlen, ..of(Bf16, (150, 150), 64, BottomRight) },
        Case { extras: blocks, ..of(Bf16, (200, 400), 64, Full) },
    ])
}

/// Forward: few queries, pages, and few queries in pages.
pub fn tiny_decode() -> Vec<Case> {
    let seqused = Sides { q: false, k: true };
    let paged = |page_size| Extras { page_size: Some(page_size), seqused, ..NONE };
    let few = Case { batch_size: 2, num_heads_q: 8, num_heads_kv: 2, seqlen_k: 300, ..Case::plain(Dtype::Bf16, 1, 64) };
    let several = Case { seqlen_q: 3, causal: Causal::BottomRight, ..few.clone() };
    unless_one_is_given(vec![
        few.clone(),
        Case { extras: paged(16), ..few.clone() },
        Case { extras: Extras { sinks: true, softcap: 9.0, ..paged(3) }, ..several.clone() },
        Case { dtype: Dtype::Fp16, extras: paged(64), ..Case { head_dim: 128, head_dim_v: 128, ..several } },
        Case { dtype: Dtype::Fp32, ..few },
    ])
}

/// Forward: many queries in pages that TMA copies by boxes of 8, 16, 32 and 64 rows, and in pages
/// that threads copy; alone, and in batches with single tokens.
pub fn tiny_pages() -> Vec<Case> {
    use Causal::{BottomRight, None as Full, TopLeft};
    let paged =
        |page_size, extras| Extras { page_size: Some(page_size), seqused: Sides { q: false, k: true }, ..extras };
    let window = Extras { window: Window { left: Some(90), ..Window::default() }, sinks: true, ..NONE };
    let varlen = Extras { cu_seqlens: Sides { q: true, k: false }, ..NONE };
    let of = |dtype, page_size, extras, head_dim, causal| Case {
        batch_size: 2,
        extras: paged(page_size, extras),
        ..of(dtype, (130, 230), head_dim, causal)
    };
    unless_one_is_given(vec![
        of(Dtype::Bf16, 16, NONE, 64, BottomRight),
        of(Dtype::Fp16, 96, window, 128, BottomRight),
        Case { batch_size: 6, num_heads_kv: 2, strides: Strides::Gaps, ..of(Dtype::Bf16, 64, varlen, 128, Full) },
        Case { batch_size: 6, strides: Strides::PackedQkv, ..of(Dtype::Bf16, 3, varlen, 64, BottomRight) },
        of(Dtype::Fp16, 12, Extras { softcap: 9.0, ..NONE }, 256, TopLeft),
        of(Dtype::Fp32, 16, NONE, 40, BottomRight),
        Case { seqlen_k: 1100, num_heads_kv: 2, ..of(Dtype::Bf16, 16, varlen, 128, BottomRight) },
        // More blocks than rings have slots, in pages of whole blocks.
        Case { seqlen_k: 1500, ..of(Dtype::Bf16, 64, NONE, 128, BottomRight) },
        Case { strides: Strides::Bhsd, ..of(Dtype::Fp16, 8, NONE, 192, BottomRight) },
    ])
}

/// Forward: a few chunks and single tokens over pages, whose decode kernel splits keys. The tokens
/// have from no key to more than two splits hold, in GQA groups of 1 to 20 heads.
pub fn tiny_mixed() -> Vec<Case> {
    use Causal::{BottomRight, None as Full};
    let window = Window { left: Some(300), ..Window::default() };
    let mixed = |page_size, extras| Extras {
        page_size: Some(page_size),
        seqused: Sides { q: false, k: true },
        cu_seqlens: Sides { q: true, k: false },
        ..extras
    };
    let of = |dtype, (num_heads_q, num_heads_kv), extras, head_dim, causal| Case {
        batch_size: 7,
        num_heads_q,
        num_heads_kv,
        extras,
        seed: 10 * head_dim as u64 + num_heads_q as u64,
        ..of(dtype, (40, 1100), head_dim, causal)
    };
    let sinks = Extras { sinks: true, ..NONE };
    let scores = Extras { window, softcap: 9.0, sinks: true, ..NONE };
    let int4 = Extras { four: Some(Four::Int4g32), ..NONE };
    unless_one_is_given(vec![
        of(Dtype::Bf16, (8, 2), mixed(16, sinks), 64, BottomRight),
        of(Dtype::Fp16, (2, 2), mixed(64, scores), 128, BottomRight),
        Case { strides: Strides::PackedQkv, ..of(Dtype::Bf16, (8, 1), mixed(3, NONE), 40, Full) },
        Case { strides: Strides::Gaps, ..of(Dtype::Fp16, (20, 1), mixed(64, NONE), 64, BottomRight) },
        // Prompts whose int4 keys are widened, beside single queries whose keys are split.
        Case { seqlen_q: 130, ..of(Dtype::Bf16, (8, 2), mixed(16, int4), 64, BottomRight) },
    ])
}

/// Few tiles of many keys, forward and backward: what split kernels are for.
pub fn tiny_splits() -> Vec<Case> {
    let of = |dtype, head_dim, causal| Case { seed: 5, ..of(dtype, (130, 1100), head_dim, causal) };
    let window = Extras { window: Window { left: Some(400), ..Window::default() }, sinks: true, ..NONE };
    unless_one_is_given(vec![
        of(Dtype::Bf16, 64, Causal::BottomRight),
        of(Dtype::Fp16, 128, Causal::TopLeft),
        Case { extras: window, ..of(Dtype::Bf16, 64, Causal::BottomRight) },
        // Backward: parts of a walk of many queries, whose tile writes dQ.
        Case { seqlen_q: 700, seqlen_k: 77, ..of(Dtype::Bf16, 256, Causal::None) },
    ])
}

/// Backward: few tiles of keys a head. The last of up to four writes dQ.
pub fn tiny_few_keys() -> Vec<Case> {
    use Causal::{BottomRight, None as Full, TopLeft};
    use Dtype::{Bf16, Fp16};
    let of = |dtype, lengths, head_dim, causal| Case { batch_size: 2, ..of(dtype, lengths, head_dim, causal) };
    let bias = Extras { bias: Some(Spread::of("hqk")), dbias: true, sinks: true, dlse: true, ..NONE };
    unless_one_is_given(vec![
        of(Bf16, (300, 77), 64, Full),
        of(Fp16, (60, 90), 128, BottomRight),
        Case { dropout_p: 0.2, deterministic: true, ..of(Bf16, (70, 128), 80, TopLeft) },
        Case { strides: Strides::Gaps, extras: bias, ..of(Fp16, (90, 100), 72, Full) },
        of(Bf16, (197, 197), 64, Full),
        // The second tile has no keys for the second consumer.
        of(Bf16, (150, 170), 128, Full),
        of(Fp16, (256, 256), 128, BottomRight),
        Case { deterministic: true, strides: Strides::Gaps, ..of(Bf16, (140, 180), 128, BottomRight) },
        Case { dropout_p: 0.2, strides: Strides::PackedQkv, ..of(Bf16, (150, 150), 40, TopLeft) },
        Case { extras: bias, ..of(Bf16, (130, 200), 96, Full) },
        // The first queries see no key, and their block meets the first tile.
        of(Bf16, (114, 113), 64, BottomRight),
        of(Fp16, (271, 256), 128, BottomRight),
        of(Bf16, (80, 90), 192, Full),
        Case { dropout_p: 0.2, strides: Strides::Gaps, ..of(Fp16, (140, 130), 136, BottomRight) },
        of(Fp16, (100, 130), 160, Full),
        of(Bf16, (150, 197), 192, BottomRight),
        of(Bf16, (150, 60), 256, Full),
        Case { strides: Strides::Gaps, ..of(Fp16, (100, 100), 200, BottomRight) },
        Case { dropout_p: 0.2, num_heads_q: 4, num_heads_kv: 2, ..of(Bf16, (150, 250), 256, BottomRight) },
        Case { extras: bias, strides: Strides::Gaps, ..of(Fp16, (90, 100), 232, Full) },
        // Three and four tiles, of which the second one and the third add to the sum.
        of(Bf16, (300, 300), 128, BottomRight),
        of(Fp16, (390, 400), 128, BottomRight),
        Case { deterministic: true, strides: Strides::Gaps, ..of(Bf16, (400, 400), 64, TopLeft) },
        Case { dropout_p: 0.2, num_heads_q: 4, num_heads_kv: 2, ..of(Bf16, (300, 390), 112, BottomRight) },
        // Three tiles of 64 keys add to dQ, or a pair of CTAs does two of 128.
        of(Bf16, (150, 154), 256, Full),
        Case { deterministic: true, ..of(Fp16, (130, 180), 216, BottomRight) },
    ])
}

/// Backward: heads of several tiles that are alike, in more than one wave of four SMs.
pub fn tiny_waves() -> Vec<Case> {
    use Causal::None as Full;
    use Dtype::{Bf16, Fp16};
    let of = |dtype, lengths, head_dim| of(dtype, lengths, head_dim, Full);
    unless_one_is_given(vec![
        // The last tile of a head has no keys for the second consumer.
        Case { num_heads_q: 3, num_heads_kv: 3, ..of(Bf16, (300, 300), 64) },
        Case { strides: Strides::Gaps, num_heads_q: 6, num_heads_kv: 3, ..of(Fp16, (200, 380), 128) },
        Case { batch_size: 3, strides: Strides::PackedQkv, ..of(Bf16, (290, 290), 96) },
        Case { num_heads_q: 3, num_heads_kv: 3, ..of(Bf16, (200, 280), 192) },
        Case { num_heads_q: 3, num_heads_kv: 3, ..of(Fp16, (150, 300), 256) },
    ])
}

/// Backward: heads of two tiles of keys and enough queries for two parts of them.
pub fn tiny_pairs_of_tiles() -> Vec<Case> {
    use Causal::None as Full;
    use Dtype::{Bf16, Fp16};
    let of = |dtype, lengths, head_dim| of(dtype, lengths, head_dim, Full);
    unless_one_is_given(vec![
        of(Bf16, (300, 200), 64),
        // The second tile has no keys for the second consumer.
        Case { strides: Strides::Gaps, num_heads_q: 4, num_heads_kv: 2, ..of(Fp16, (271, 154), 128) },
        Case { dropout_p: 0.2, deterministic: true, ..of(Bf16, (260, 226), 96) },
        of(Bf16, (300, 154), 256),
        Case { num_heads_q: 4, num_heads_kv: 2, ..of(Fp16, (200, 150), 160) },
    ])
}

/// Backward: heads whose Q, dO and dQ take more than half a megabyte, so that groups of a megabyte
/// have one K/V head each where the GPU has two SMs.
pub fn tiny_groups() -> Vec<Case> {
    use Causal::{BottomRight, None as Full};
    use Dtype::{Bf16, Fp16};
    let of = |dtype, lengths, head_dim, causal| Case {
        num_heads_q: 6,
        num_heads_kv: 3,
        ..of(dtype, lengths, head_dim, causal)
    };
    let window = Extras { window: Window { left: Some(130), ..Window::default() }, ..NONE };
    let varlen = Extras { cu_seqlens: Sides::BOTH, ..NONE };
    unless_one_is_given(vec![
        of(Bf16, (520, 520), 64, BottomRight),
        of(Fp16, (260, 400), 128, BottomRight),
        Case { extras: window, ..of(Bf16, (300, 300), 128, BottomRight) },
        Case { batch_size: 3, extras: varlen, ..of(Bf16, (300, 300), 128, BottomRight) },
        Case { num_heads_kv: 6, ..of(Bf16, (520, 300), 128, BottomRight) },
        of(Fp16, (180, 200), 192, BottomRight),
        of(Bf16, (130, 260), 256, BottomRight),
        of(Bf16, (260, 200), 128, Full),
    ])
}

/// Forward: sequences of one or two blocks of keys, of which two CTAs share an SM.
pub fn tiny_short() -> Vec<Case> {
    let of = |lengths, head_dim, causal| Case { batch_size: 3, ..of(Dtype::Bf16, lengths, head_dim, causal) };
    unless_one_is_given(vec![
        of((60, 100), 64, Causal::BottomRight),
        of((70, 100), 40, Causal::None),
        Case { strides: Strides::Gaps, ..of((50, 110), 192, Causal::None) },
    ])
}

/// One problem, which shows whether a changed template is still right.
pub fn one() -> Vec<Case> {
    unless_one_is_given(vec![of(Dtype::Bf16, (200, 330), 64, Causal::BottomRight)])
}
