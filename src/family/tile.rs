//! Tiles in shared memory: their bytes in the two layouts that kernels use.

use crate::problem::{Dtype, ElementType, Problem};

/// Columns of a padded tile: the head dim up to a multiple of 8 (device/layout/padded_tile.cuh).
pub const fn tile_cols(dim: i64) -> u32 {
    (dim as u32).div_ceil(8) * 8
}

/// Bytes of a padded tile: an odd number of 16-byte chunks a row (device/layout/padded_tile.cuh).
pub const fn tile_bytes(dtype: Dtype, rows: u32, dim: i64) -> u32 {
    rows * ((tile_cols(dim) * dtype.bytes() as u32 / 16) | 1) * 16
}

/// Columns of a box, in which TMA writes tiles of 16-bit elements.
pub const BOX_COLS: u32 = 64;

/// The most that TMA's 128-byte swizzle loses at the start of shared memory, which is only 16-byte
/// aligned.
pub const TMA_ALIGNMENT_BYTES: u32 = 1024;

/// Bytes of a tile of 16-bit elements as TMA writes it: boxes side by side.
pub const fn boxed_tile_bytes(rows: u32, dim: i64) -> u32 {
    rows * boxes(dim) * BOX_COLS * 2
}

/// Boxes of a row of so many columns.
pub const fn boxes(dim: i64) -> u32 {
    (dim as u32).div_ceil(BOX_COLS)
}

/// Numbers of a column of K's and V's tiles, which has 16 bits (device/layout/key_unit.cuh).
pub fn key_unit(problem: &Problem) -> u32 {
    match problem.key_type() {
        ElementType::Plain(_) => 1,
        ElementType::Eight(_) => 2,
        ElementType::Four(_) => 4,
    }
}

/// Columns of the tile that holds rows of `dim` numbers of K or V, scales included.
pub fn key_cols(problem: &Problem, dim: i64) -> i64 {
    let element = problem.key_type();
    match element {
        ElementType::Four(_) => element.units(element.elements(dim)),
        _ => dim / i64::from(key_unit(problem)),
    }
}
