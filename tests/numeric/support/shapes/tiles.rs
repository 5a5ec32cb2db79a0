//! Shapes with many tiles: cases for errors that appear only after several tiles, or only when a
//! CTA runs several tiles or shares its output with others.

use super::unless_one_is_given;
use crate::support::case::Case;
use crate::support::extras::{Extras, Sides};
use flashtune::problem::{Causal, Dtype, Window};

/// Many tiles in both directions, with tails, for errors that appear only after several tiles.
pub fn long(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (seqlen_q, seqlen_k, head_dim, causal)): (usize, (i64, i64, i64, Causal))| Case {
        num_heads_q: 2,
        seqlen_k,
        causal,
        dropout_p: if index == 2 { 0.1 } else { 0.0 },
        seed: 70 + index as u64,
        ..Case::plain(dtypes[index % dtypes.len()], seqlen_q, head_dim)
    };
    let shapes = [
        (1025, 1025, 64, Causal::BottomRight),
        (700, 1500, 128, Causal::None),
        (1300, 777, 64, Causal::TopLeft),
        (333, 1999, 96, Causal::BottomRight),
    ];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}

fn windowed(left: i64, right: Option<i64>) -> Extras {
    Extras { window: Window { left: Some(left), right, top_left: false }, ..Extras::default() }
}

fn packed() -> Extras {
    Extras { cu_seqlens: Sides::BOTH, ..Extras::default() }
}

/// Many times more tiles than any GPU has multiprocessors, each small. They test the state that a
/// persistent CTA carries from one tile to the next. Tiles differ in length, end within a block or
/// see nothing.
pub fn many_tiles(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (seqlen_q, seqlen_k, head_dim, causal, extras)): (usize, (i64, i64, i64, Causal, Extras))| Case {
        batch_size: 5,
        num_heads_q: 72,
        num_heads_kv: 24,
        seqlen_k,
        causal,
        seed: 90 + index as u64,
        extras,
        ..Case::plain(dtypes[index % dtypes.len()], seqlen_q, head_dim)
    };
    let none = Extras::default();
    let shapes = [
        (330, 330, 64, Causal::BottomRight, none),
        (260, 200, 64, Causal::None, none),
        (200, 330, 128, Causal::BottomRight, none),
        (330, 130, 128, Causal::BottomRight, none),
        (70, 100, 32, Causal::None, none),
        (150, 150, 256, Causal::TopLeft, none),
        (330, 330, 64, Causal::None, windowed(70, Some(20))),
        (200, 330, 128, Causal::BottomRight, windowed(90, None)),
        (330, 330, 64, Causal::BottomRight, packed()),
        (200, 330, 128, Causal::None, Extras { window: windowed(90, Some(0)).window, ..packed() }),
        (200, 200, 128, Causal::TopLeft, Extras { seqused: Sides::BOTH, ..none }),
    ];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}

/// As many tiles of keys for the backward pass; some see no query and some end within one. Every
/// second case is deterministic; among the others each kernel has cases that draw their tiles. A
/// few cases have the last dtype, the others one of the first two.
pub fn many_key_tiles(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (seqlen_q, seqlen_k, head_dim, causal, extras)): (usize, (i64, i64, i64, Causal, Extras))| Case {
        batch_size: 2,
        num_heads_q: 60,
        num_heads_kv: 30,
        seqlen_k,
        causal,
        dropout_p: if index == 3 || index == 6 { 0.2 } else { 0.0 },
        deterministic: index % 2 == 0,
        seed: 110 + index as u64,
        extras,
        ..Case::plain(dtypes[if index % 7 == 2 { dtypes.len() - 1 } else { index / 2 % 2 }], seqlen_q, head_dim)
    };
    let none = Extras::default();
    let shapes = [
        (150, 700, 64, Causal::BottomRight, none),
        (90, 600, 128, Causal::None, none),
        (200, 520, 128, Causal::TopLeft, none),
        (130, 640, 64, Causal::None, none),
        (300, 640, 96, Causal::BottomRight, none),
        (150, 400, 256, Causal::BottomRight, none),
        (130, 300, 192, Causal::None, none),
        // Each CTA gets many tiles, so its slots are reused.
        (70, 1500, 256, Causal::None, none),
        (40, 2000, 64, Causal::BottomRight, none),
        (300, 640, 64, Causal::BottomRight, windowed(150, None)),
        (300, 640, 128, Causal::None, windowed(70, Some(20))),
        (300, 640, 64, Causal::None, packed()),
        (300, 640, 128, Causal::BottomRight, Extras { window: windowed(150, None).window, ..packed() }),
        (150, 640, 64, Causal::TopLeft, Extras { seqused: Sides::BOTH, ..none }),
        (300, 640, 160, Causal::BottomRight, windowed(150, None)),
        (150, 640, 128, Causal::BottomRight, none),
        (150, 300, 96, Causal::BottomRight, none),
        (300, 400, 192, Causal::BottomRight, packed()),
        (130, 300, 256, Causal::TopLeft, none),
        (300, 400, 256, Causal::None, windowed(70, Some(20))),
    ];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}

/// Several tiles of keys that add to the same queries, for every kernel of the backward pass. The
/// cases are small enough for a thousand runs.
pub fn deterministic(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (seqlen_q, seqlen_k, head_dim, causal)): (usize, (i64, i64, i64, Causal))| Case {
        batch_size: 2,
        num_heads_q: if index % 2 == 0 { 6 } else { 3 },
        num_heads_kv: 3,
        seqlen_k,
        causal,
        dropout_p: if index % 3 == 1 { 0.2 } else { 0.0 },
        deterministic: true,
        seed: 130 + index as u64,
        ..Case::plain(dtypes[index % dtypes.len()], seqlen_q, head_dim)
    };
    let shapes = [
        (300, 700, 64, Causal::None),
        (700, 700, 64, Causal::BottomRight),
        (260, 520, 128, Causal::BottomRight),
        (300, 650, 128, Causal::None),
        (500, 300, 96, Causal::TopLeft),
        (300, 600, 40, Causal::TopLeft),
        (260, 500, 256, Causal::None),
        (400, 400, 192, Causal::BottomRight),
    ];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}

/// Deterministic cases with more tiles than a GPU holds at once.
pub fn long_deterministic(dtypes: &[Dtype]) -> Vec<Case> {
    let of = |(index, (seqlen, head_dim, causal)): (usize, (i64, i64, Causal))| Case {
        num_heads_q: 8,
        num_heads_kv: 4,
        causal,
        deterministic: true,
        seed: 150 + index as u64,
        ..Case::plain(dtypes[index % dtypes.len()], seqlen, head_dim)
    };
    let shapes = [(8192, 128, Causal::None), (8192, 64, Causal::BottomRight), (4096, 256, Causal::BottomRight)];
    unless_one_is_given(shapes.into_iter().enumerate().map(of).collect())
}
