//! Split rest: the tiles of a forward launch that are split where only some are.
//!
//! Tiles that are alike run in whole waves, and those of a last wave that is not full are split. Of
//! tiles that differ the longest are split, so that all SMs end at about the same time. The launch,
//! the constraint and the model of time ask here, so that they agree. Nothing here knows a kernel;
//! `QueryTiles` (templates/device/schedule/tile_order.cuh) has the order of such tiles.

use crate::problem::{Features, Problem};

/// Tiles of so many rows, so many of which run at a time on an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRest {
    pub tile_rows: u32,
    pub ctas_per_sm: u32,
}

/// The tiles of a head: so many of them, of which so many are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestTiles {
    pub all: i64,
    pub split: i64,
}

/// Keys of a tile, as a share of those of a slot, above which it is split in two, and in more.
const MOST_KEYS_OF_TWO: f64 = 0.72;
const MOST_KEYS: f64 = 1.0;

impl SplitRest {
    /// The tiles of a head. None where no tile would stay whole or none would be split, where the
    /// order of tiles is not made for it, and where the workspace has no room for the states.
    pub fn tiles(&self, problem: &Problem, sm_count: u32, num_splits: u32) -> Option<RestTiles> {
        let is_served = problem.features == Features::NONE && !problem.batch_invariant && num_splits > 1;
        let (rows, slots) = (i64::from(self.tile_rows), i64::from(sm_count * self.ctas_per_sm));
        let heads = problem.batch_size * problem.num_heads_q;
        let all = (problem.seqlen_q + rows - 1) / rows;
        if !is_served || all < 2 || heads < 1 {
            return None;
        }
        let split = match problem.right_shift() {
            None if all * heads < slots => 0,
            None => (all * heads % slots + heads - 1) / heads,
            Some(shift) => longest(problem, rows, shift, slots, num_splits),
        };
        let has_room = i64::from(num_splits) * split * rows * heads <= problem.state_rows();
        (0 < split && split < all && has_room).then_some(RestTiles { all, split })
    }

    /// The rows of a head in split tiles: its first rows or, with a mask, its last ones. 0 where
    /// `tiles` is None.
    pub fn rows(&self, problem: &Problem, sm_count: u32, num_splits: u32) -> i64 {
        let of = |tiles: RestTiles| match problem.right_shift() {
            None => tiles.split * i64::from(self.tile_rows),
            Some(_) => problem.seqlen_q - (tiles.all - tiles.split) * i64::from(self.tile_rows),
        };
        self.tiles(problem, sm_count, num_splits).map_or(0, of)
    }
}

/// How many tiles of a head see more keys than their share of those of a slot.
fn longest(problem: &Problem, rows: i64, shift: i64, slots: i64, num_splits: u32) -> i64 {
    let heads = problem.batch_size * problem.num_heads_q;
    let keys = |end: i64| (end.min(problem.seqlen_q) + shift).clamp(0, problem.seqlen_k);
    let tiles = || (1..=(problem.seqlen_q + rows - 1) / rows).map(|nth| keys(nth * rows));
    let share = if num_splits == 2 { MOST_KEYS_OF_TWO } else { MOST_KEYS };
    let most = share * (tiles().sum::<i64>() * heads) as f64 / slots as f64;
    tiles().rev().take_while(|keys| *keys as f64 > most).count() as i64
}
