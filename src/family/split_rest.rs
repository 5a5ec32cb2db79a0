//! The tiles of a launch that are split where the others are whole.
//!
//! Tiles that are alike run in whole waves. If the last wave is not full, its tiles are split. If
//! tiles differ, the longest ones are split, so that all SMs end at about the same time. The
//! backward pass splits only tiles that are alike. The launch, the constraint and the model of time
//! ask here, so that they agree. Nothing here knows a kernel: `QueryTiles` and `LastSplitTiles`
//! (templates/device/schedule/tile_order.cuh) have the order of such tiles.

use crate::problem::{Features, Pass, Problem};

/// A tile's query rows, backward its keys; the CTAs of an SM, and the SMs that do a tile together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRest {
    pub tile_rows: u32,
    pub ctas_per_sm: u32,
    pub sms_of_tile: u32,
}

/// The tiles of a head, and how many of them are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestTiles {
    pub all: i64,
    pub split: i64,
}

/// A tile is split in two, or in more parts, if it sees more than this share of a slot's keys.
const MOST_KEYS_OF_TWO: f64 = 0.72;
const MOST_KEYS: f64 = 1.0;

impl SplitRest {
    /// The tiles of a head, where each sequence counts as the longest. None where no tile would
    /// stay whole or none would be split, where the order of tiles is not made for it, and where
    /// the workspace has no room for the states.
    pub fn tiles(&self, problem: &Problem, sm_count: u32, num_splits: u32) -> Option<RestTiles> {
        if problem.pass == Pass::Backward {
            return self.tiles_of_keys(problem, sm_count, num_splits);
        }
        let is_served = problem.has_features_of_keys_alone() && !problem.batch_invariant && num_splits > 1;
        let (rows, slots) = (i64::from(self.tile_rows), self.slots(sm_count));
        let heads = problem.batch_size * problem.num_heads_q;
        let all = (problem.seqlen_q + rows - 1) / rows;
        if !is_served || all < 2 || heads < 1 {
            return None;
        }
        let of_longest = problem.of_longest();
        let split = match of_longest.right_shift() {
            None if all * heads < slots => 0,
            None => (all * heads % slots + heads - 1) / heads,
            Some(shift) => longest(&of_longest, rows, shift, slots, num_splits),
        };
        let has_room = i64::from(num_splits) * split * rows * heads <= problem.state_rows();
        (0 < split && split < all && has_room).then_some(RestTiles { all, split })
    }

    /// The same backward: the last tiles of each head are split. They are at least as many as those
    /// past whole waves, and are alike.
    fn tiles_of_keys(&self, problem: &Problem, sm_count: u32, num_splits: u32) -> Option<RestTiles> {
        let (keys, slots) = (i64::from(self.tile_rows), self.slots(sm_count));
        let heads = problem.batch_size * problem.num_heads_kv;
        let all = (problem.seqlen_k + keys - 1) / keys;
        let is_plain = problem.features == Features::NONE && !problem.deterministic && num_splits > 1;
        let is_served = is_plain && problem.right_shift().is_none() && heads > 0 && all * heads >= slots;
        let split = if is_served { (all * heads % slots + heads - 1) / heads } else { 0 };
        let split_keys = problem.seqlen_k - (all - split) * keys;
        let has_room = i64::from(num_splits) * ((split_keys + 15) / 16 * 16) <= problem.keys_of_partials();
        (0 < split && split < all && has_room).then_some(RestTiles { all, split })
    }

    /// The tiles that run at a time.
    fn slots(&self, sm_count: u32) -> i64 {
        i64::from(sm_count * self.ctas_per_sm / self.sms_of_tile).max(1)
    }

    /// The rows of a head in split tiles: its first rows or, with a mask, its last ones; backward
    /// its last keys. 0 where `tiles` is None.
    pub fn rows(&self, problem: &Problem, sm_count: u32, num_splits: u32) -> i64 {
        let of = |tiles: RestTiles| match problem.right_shift() {
            None if problem.pass == Pass::Backward => {
                problem.seqlen_k - (tiles.all - tiles.split) * i64::from(self.tile_rows)
            }
            None => tiles.split * i64::from(self.tile_rows),
            Some(_) => problem.seqlen_q - (tiles.all - tiles.split) * i64::from(self.tile_rows),
        };
        self.tiles(problem, sm_count, num_splits).map_or(0, of)
    }
}

/// How many tiles of a head see more keys than their share of those of a slot.
fn longest(problem: &Problem, rows: i64, shift: i64, slots: i64, num_splits: u32) -> i64 {
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = (problem.seqlen_q + rows - 1) / rows;
    let keys = |nth: i64| ((nth * rows).min(problem.seqlen_q) + shift).clamp(0, problem.seqlen_k);
    let share = if num_splits == 2 { MOST_KEYS_OF_TWO } else { MOST_KEYS };
    let most = share * (keys_of_tiles(problem, rows, shift) * heads) as f64 / slots as f64;
    // Keys grow from tile to tile.
    (1..=tiles).rev().take_while(|nth| keys(*nth) as f64 > most).count() as i64
}

/// The keys that the tiles of a head see, in all. A launch asks for it, so it walks no tiles.
fn keys_of_tiles(problem: &Problem, rows: i64, shift: i64) -> i64 {
    let (last_keys, full) = (problem.seqlen_q + shift, (problem.seqlen_q - 1) / rows);
    // The first full tile that sees a key, and the last one that does not see all.
    let first = ((-shift).max(0) / rows + 1).min(full + 1);
    let last = ((problem.seqlen_k - shift).max(0) / rows).clamp(first - 1, full);
    let growing = (last - first + 1) * shift + rows * (first + last) * (last - first + 1) / 2;
    growing + (full - last) * problem.seqlen_k + last_keys.clamp(0, problem.seqlen_k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Causal, Dtype, Pass};

    #[test]
    fn keys_of_tiles_are_those_of_each_tile() {
        for (causal, rows) in [(Causal::BottomRight, 64), (Causal::TopLeft, 64), (Causal::BottomRight, 192)] {
            for (seqlen_q, seqlen_k) in
                [(1, 1), (64, 64), (65, 700), (640, 640), (1000, 130), (1000, 3000), (129, 4096)]
            {
                let dense = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 1, seqlen_q, 64);
                let problem = Problem { causal, seqlen_k, ..dense };
                let shift = problem.right_shift().unwrap();
                let ends = (1..=(seqlen_q + rows - 1) / rows).map(|nth| (nth * rows).min(seqlen_q));
                let expected: i64 = ends.map(|end| (end + shift).clamp(0, seqlen_k)).sum();
                assert_eq!(keys_of_tiles(&problem, rows, shift), expected, "{causal:?} {rows} {seqlen_q} {seqlen_k}");
            }
        }
    }
}
