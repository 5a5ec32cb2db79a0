//! Tile: the size of a tile of scores, the lines that it is worked on by, and how much of a block
//! counts.
//!
//! Both passes, the score modifiers and the block map speak of tiles in these words. Nothing here
//! reads a tensor.

pub use crate::family::cpu::scratch::TileSize;

/// Tile sizes are multiples of this: a register of the widest instruction set, and a patch of the
/// dropout mask.
pub const BLOCK_STEP: u32 = 16;
/// Larger tiles only move out of the caches.
pub const MAX_BLOCK: u32 = 1024;

/// A line of a tile from (row, key) on.
#[derive(Clone, Copy)]
pub struct Line {
    pub head: usize,
    pub row: usize,
    pub key: usize,
    pub axis: Axis,
}

/// What changes from one score of a line to the next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    Rows,
    Keys,
}

impl Line {
    /// The rest of the line after this many scores.
    pub fn after(self, scores: usize) -> Line {
        match self.axis {
            Axis::Rows => Line { row: self.row + scores, ..self },
            Axis::Keys => Line { key: self.key + scores, ..self },
        }
    }
}

/// How much of a block of a block mask counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Empty,
    /// The scores that causal, window and mask leave.
    Partial,
    /// The scores that causal and window leave; the mask is not read.
    Full,
}
