//! Scratch: how many floats a worker thread of the CPU backend takes for its tiles.
//!
//! The space's constraint bounds them by the cache, and `cpu` allocates them. The code that divides
//! the scratch among tiles is `cpu`'s; it takes no more than is counted here.

use crate::problem::{Dtype, Pass, Problem};

#[derive(Clone, Copy)]
pub struct TileSize {
    /// Query rows.
    pub m: usize,
    /// Keys.
    pub n: usize,
}

/// Rows of an output of a product come in multiples of this: the widest register.
pub const LANES: usize = 16;

/// Rows of a tile that are worked on together, at most: those of the queries in the forward pass,
/// and those of the keys in the backward pass.
pub const STRIP: usize = 64;

/// Words of a row of a tile of bf16 pairs, and pairs that one instruction of a tile unit sums.
pub const WORDS: usize = 16;

/// Numbers of these pairs. Chunks begin at multiples of it, so a row's sums have one order.
pub const CHUNK: usize = 2 * WORDS;

/// Words of `numbers` numbers in whole chunks.
pub fn words(numbers: usize) -> usize {
    numbers.div_ceil(CHUNK) * WORDS
}

/// Bytes of tiles that each thread works on. The padding of a tile unit's pairs is not counted, so
/// that blocks do not depend on it.
pub fn bytes(problem: &Problem, tile_size: TileSize) -> usize {
    let floats = match problem.pass {
        Pass::Forward => forward(problem, tile_size),
        Pass::Backward => of_backward(problem, tile_size, 0),
    };
    floats * size_of::<f32>()
}

/// Floats of a task of the forward pass.
pub fn forward(problem: &Problem, tile_size: TileSize) -> usize {
    let [dim, dim_v] = padded_dims(problem);
    let TileSize { m, n } = tile_size;
    let tiles = 1 + usize::from(problem.dropout);
    (dim + dim_v) * (m + n) + tiles * n * STRIP + 3 * m
}

/// Floats of any task of the backward pass.
pub fn backward(problem: &Problem, tile_size: TileSize) -> usize {
    of_backward(problem, tile_size, pair_padding(problem, tile_size.m))
}

fn of_backward(problem: &Problem, tile_size: TileSize, padding: usize) -> usize {
    let [dim, dim_v] = padded_dims(problem);
    let accumulators = tile_size.n * (dim + dim_v) + tile_size.m * dim;
    let of_tiles = accumulators + tiles(problem, tile_size) + padding;
    of_tiles.max(statistics(tile_size.m, dim_v))
}

/// Floats of a key tile and a query tile of the backward pass.
pub fn backward_tiles(problem: &Problem, tile_size: TileSize) -> usize {
    tiles(problem, tile_size) + pair_padding(problem, tile_size.m)
}

fn tiles(problem: &Problem, tile_size: TileSize) -> usize {
    let [dim, dim_v] = padded_dims(problem);
    let TileSize { m, n } = tile_size;
    let strips = 1 + usize::from(problem.dropout) + usize::from(problem.features.softcap);
    n * (2 * dim + dim_v) + m * (dim + dim_v) + m * gradient_pitch(n) + strips * m * STRIP + 3 * m
}

/// What the query tile's pairs take more than its numbers: rows of q and dO as pairs of columns and
/// as pairs of rows, and weights in whole chunks.
fn pair_padding(problem: &Problem, m: usize) -> usize {
    if problem.dtype != Dtype::Bf16 {
        return 0;
    }
    let of_rows = |dim: usize| (m * words(dim) + dim * pair_pitch(m)).saturating_sub(m * dim);
    padded_dims(problem).map(of_rows).iter().sum::<usize>() + (m.next_multiple_of(CHUNK) - m) * STRIP
}

/// The pitch of columns of pairs of `rows` rows.
pub fn pair_pitch(rows: usize) -> usize {
    gradient_pitch(words(rows))
}

/// `head_dim` and `head_dim_v` rounded up to whole registers.
fn padded_dims(problem: &Problem) -> [usize; 2] {
    [problem.head_dim, problem.head_dim_v].map(|dim| (dim as usize).next_multiple_of(LANES))
}

/// The pitch of a tile of score gradients with `n` keys: an odd number of cache lines, so that a
/// column lies in all sets of a cache.
pub fn gradient_pitch(n: usize) -> usize {
    let lines = n.div_ceil(16);
    16 * (lines + usize::from(lines.is_multiple_of(2)))
}

/// Floats of O and dO, of which the backward pass's delta is made.
fn statistics(block_m: usize, dim_v: usize) -> usize {
    2 * block_m * dim_v
}
