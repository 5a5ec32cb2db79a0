//! The segments of a batch-invariant problem's keys, their groups, and the runs into which the keys
//! of a tile of many queries are split.
//!
//! It mirrors device/attention/fixed_order.cuh and segment_runs.cuh, and knows no config.

use super::{Features, Problem};

impl Problem {
    /// Whether a kernel of many queries may split a batch-invariant problem at its segments: sm90's
    /// forward pass, whose sequences have equally many queries and no feature but pages.
    pub fn may_split_segments(&self) -> bool {
        let is_plain = Features { varlen: None, paged: None, ..self.features } == Features::NONE && !self.dropout;
        self.batch_invariant && is_plain && self.may_split_tiles() && !self.has_varlen_queries()
    }

    /// Places of the states of each row of such a problem, 1 if its keys are not split: one for
    /// each segment or, if these would take too much room, one for each group. 1, too, where a GPU
    /// has enough tiles or the groups would take too much room.
    pub fn places_of_segments(&self) -> i64 {
        let Some(most) = self.most_places() else { return 1 };
        let segments = segments(self.seqlen_k);
        match (segments, groups(segments)) {
            (segments, _) if segments <= most => segments.max(1),
            (_, groups) if groups <= most => groups,
            _ => 1,
        }
    }

    /// The numbers of keys with the most places of segments and with the most places of groups,
    /// whatever the problem's `seqlen_k`; None if it is split with no number of keys.
    pub fn keys_of_most_places(&self) -> Option<[i64; 2]> {
        let most = self.most_places()?;
        Some([most, most * GROUP_SEGMENTS].map(keys_of_segments))
    }

    fn most_places(&self) -> Option<i64> {
        let tiles = self.tiles_of_least_rows();
        let splits = self.may_split_segments() && (1..=MOST_TILES_OF_SEGMENTS).contains(&tiles);
        splits.then(|| PLACES_OF_ALL_TILES / tiles)
    }

    /// The runs into which the keys of such a problem's tiles of so many rows are split: about one
    /// run of a long tile for each SM. Causal tiles of few keys differ in length, so they have
    /// more.
    pub fn runs_of_segments(&self, tile_rows: u32) -> u32 {
        let rows = i64::from(tile_rows);
        let tiles = self.batch_size * self.num_heads_q * ((self.seqlen_q + rows - 1) / rows);
        let hidden = if self.right_shift().is_some() { self.seqlen_q.min(self.seqlen_k) / 2 } else { 0 };
        let runs = CTAS_OF_RUNS * self.seqlen_k / (tiles * (self.seqlen_k - hidden)).max(1);
        runs.clamp(1, self.places_of_segments().min(MAX_RUNS)) as u32
    }

    /// The places of states that a launch with tiles of so many rows uses: one for each group if
    /// the longest run of whole groups has at most an eighth more than its share of the keys.
    pub fn places_of_runs(&self, tile_rows: u32) -> u32 {
        let places = self.places_of_segments();
        let of_groups = groups(segments(self.seqlen_k));
        let (count, keys) = (i64::from(self.runs_of_segments(tile_rows)), self.seqlen_k);
        let longest = longest_run(count, keys, GROUP_SEGMENTS);
        if 8 * count * longest <= 9 * keys { places.min(of_groups) as u32 } else { places as u32 }
    }

    /// The states of a row of such a tile that sees all keys, and the keys of its longest run.
    pub fn states_of_runs(&self, tile_rows: u32) -> (i64, i64) {
        let (count, keys) = (i64::from(self.runs_of_segments(tile_rows)), self.seqlen_k.max(1));
        let unit = if i64::from(self.places_of_runs(tile_rows)) < segments(keys) { GROUP_SEGMENTS } else { 1 };
        let lowest = lowest_of_run(0, count, keys, unit);
        let is_part = lowest % GROUP_SEGMENTS != 0 && groups(lowest) < groups(segments(keys));
        (1 + i64::from(is_part) + lowest / unit, longest_run(count, keys, unit))
    }

    /// The segments of the longest sequence of a batch-invariant problem.
    pub fn segments(&self) -> u32 {
        segments(self.seqlen_k).clamp(1, MAX_SEGMENTS) as u32
    }
}

/// Keys of a segment, up to `EQUAL_SEGMENTS` segments. Beyond, each doubling of the keys has
/// `SEGMENTS_OF_DOUBLING`.
const SEGMENT_KEYS: i64 = 1024;
const EQUAL_SEGMENTS: i64 = 64;
const SEGMENTS_OF_DOUBLING: i64 = 32;
const GROUP_SEGMENTS: i64 = 4;
/// The most segments, with which sequences of 2^31 keys are done.
pub const MAX_SEGMENTS: i64 = EQUAL_SEGMENTS + 15 * SEGMENTS_OF_DOUBLING;

/// SMs of an H100 or H200, which runs of segments fill.
const CTAS_OF_RUNS: i64 = 132;
/// The limit of places times the query tiles of 64 rows over all heads: 68 MB at head dim 128.
const PLACES_OF_ALL_TILES: i64 = 2048;
/// The most runs, which the kernels' integers are made for.
const MAX_RUNS: i64 = 32;
/// The most such tiles whose segments are split: two of them for each SM of the largest GPUs.
const MOST_TILES_OF_SEGMENTS: i64 = 288;

/// The lowest segment of a run of a tile that sees so many keys, where runs are of units of
/// segments. As SegmentRuns::lowest.
fn lowest_of_run(nth: i64, count: i64, keys: i64, unit: i64) -> i64 {
    if nth + 1 >= count {
        return 0;
    }
    let key = keys - keys * (nth + 1) / count;
    let lowest = segment_of(key) / unit * unit;
    let [begin, end] = [lowest, lowest + unit].map(keys_of_segments);
    let is_late = 2 * (key - begin) >= end - begin;
    (lowest + if is_late { unit } else { 0 }).min(segment_of(keys - 1) / unit * unit)
}

fn longest_run(count: i64, keys: i64, unit: i64) -> i64 {
    let begin = |nth: i64| keys_of_segments(lowest_of_run(nth, count, keys, unit));
    let run = |nth: i64| (if nth == 0 { keys } else { begin(nth - 1) }) - begin(nth);
    (0..count).map(run).max().unwrap_or(0)
}

/// Segments of so many keys, whose places in the sequence alone decide.
fn segments(keys: i64) -> i64 {
    if keys <= 0 { 0 } else { segment_of(keys - 1) + 1 }
}

fn segment_of(key: i64) -> i64 {
    let equal = SEGMENT_KEYS * EQUAL_SEGMENTS;
    if key < equal {
        return key / SEGMENT_KEYS;
    }
    let doublings = i64::from(key.ilog2() - equal.ilog2());
    let (begin, segment) = (equal << doublings, (equal << doublings) / SEGMENTS_OF_DOUBLING);
    EQUAL_SEGMENTS + doublings * SEGMENTS_OF_DOUBLING + (key - begin) / segment
}

fn groups(segments: i64) -> i64 {
    (segments + GROUP_SEGMENTS - 1) / GROUP_SEGMENTS
}

/// The most keys with so many segments: the first key of the next one.
fn keys_of_segments(segments: i64) -> i64 {
    if segments <= EQUAL_SEGMENTS {
        return segments * SEGMENT_KEYS;
    }
    let (doublings, past) =
        ((segments - EQUAL_SEGMENTS) / SEGMENTS_OF_DOUBLING, (segments - EQUAL_SEGMENTS) % SEGMENTS_OF_DOUBLING);
    let begin = (SEGMENT_KEYS * EQUAL_SEGMENTS) << doublings.min(32);
    begin + past * (begin / SEGMENTS_OF_DOUBLING)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{BlockMask, Causal, Dtype, Pass, Varlen};

    fn of(num_heads: i64, seqlen_q: i64, seqlen_k: i64) -> Problem {
        let square = Problem::dense(Pass::Forward, Dtype::Bf16, 1, num_heads, seqlen_q, 128);
        Problem { seqlen_k, batch_invariant: true, ..square }
    }

    #[test]
    fn a_state_has_a_place_for_each_segment_or_for_each_group() {
        let few = of(32, 256, 8192);
        assert_eq!((few.max_splits(), few.workspace_bytes()), (8, 8 * 32 * 256 * 130 * 4));
        for (num_heads, seqlen_q, seqlen_k, places) in [
            (32, 256, 8193, 9),
            (32, 256, 1024, 1),
            (32, 256, 1 << 14, 16),
            (32, 256, (1 << 14) + 1, 5),
            (32, 256, 1 << 16, 16),
            (32, 256, (1 << 16) + 1, 1),
            (4, 9216, 1024, 1),
            (4, 4608, 4608, 5),
            (4, 4609, 4609, 1),
        ] {
            assert_eq!(of(num_heads, seqlen_q, seqlen_k).max_splits(), places, "{seqlen_q} x {seqlen_k}");
        }
        let most = [1 << 14, 1 << 16];
        assert_eq!(few.keys_of_most_places(), Some(most));
        let bytes = most.map(|seqlen_k| Problem { seqlen_k, ..few }.workspace_bytes());
        for seqlen_k in (1..200_000).step_by(97) {
            assert!(Problem { seqlen_k, ..few }.workspace_bytes() <= bytes[0].max(bytes[1]), "{seqlen_k}");
            let count = segments(seqlen_k);
            assert!(keys_of_segments(count) >= seqlen_k && keys_of_segments(count - 1) < seqlen_k, "{seqlen_k}");
        }
        let paged = Features { paged: Some(16), varlen: Some(Varlen::default()), ..Features::NONE };
        assert_eq!(Problem { features: paged, ..few }.max_splits(), 8);
        let of_block = Some(BlockMask { block_q: 128, block_k: 128 });
        let packed = Some(Varlen { total_q: Some(256), ..Varlen::default() });
        let others = [
            Features { block_mask: of_block, ..Features::NONE },
            Features { varlen: packed, ..paged },
            Features { softcap: true, ..Features::NONE },
        ];
        assert_eq!(others.map(|features| Problem { features, ..few }.workspace_bytes()), [0; 3]);
    }

    #[test]
    fn runs_of_whole_groups_leave_a_state_for_each_group() {
        let of = |num_heads, seqlen_q, seqlen_k| {
            let problem = Problem { causal: Causal::BottomRight, ..of(num_heads, seqlen_q, seqlen_k) };
            let (states, longest) = problem.states_of_runs(128);
            (problem.runs_of_segments(128), problem.places_of_runs(128), states, longest)
        };
        assert_eq!(of(32, 256, 8192), (2, 2, 2, 4096));
        assert_eq!(of(32, 128, 4096), (4, 4, 4, 1024), "of segments, since there is one group");
        assert_eq!(of(32, 128, 32768), (4, 8, 7, 8192));
        assert_eq!(of(26, 40, 12_500), (5, 13, 12, 3072), "a part of a group, and the group behind it");
        assert_eq!(of(44, 70, 12_500), (3, 4, 3, 4308));
        assert_eq!(of(64, 256, 8192), (1, 2, 1, 8192));
    }

    #[test]
    fn runs_have_all_keys() {
        for (keys, count) in (1..300_000).step_by(1773).flat_map(|keys| [1, 2, 3, 5, 8, 32].map(|count| (keys, count)))
        {
            for unit in [1, GROUP_SEGMENTS] {
                let lowest: Vec<_> = (0..count).map(|nth| lowest_of_run(nth, count, keys, unit)).collect();
                assert!(lowest.windows(2).all(|pair| pair[0] >= pair[1]) && lowest[count as usize - 1] == 0);
                assert!(lowest.iter().all(|segment| segment % unit == 0 && keys_of_segments(*segment) < keys));
                assert!(longest_run(count, keys, unit) * count >= keys, "{keys} in {count}");
            }
        }
    }
}
