//! Range: problems that differ in their sizes and, with variants, in features: what a server may be
//! asked for after its start.
//!
//! A range names its largest problem and its least sizes. `contains` is the definition of what lies
//! inside. The problems inside cannot all be listed, so `samples` and `shapes` list some of them:
//! those that have all record keys, or all canonical problems where a problem follows no record.
//! `covering` chooses configs from them. This file knows no configs and no device.

use super::canonical::{self, Canonical, canonical};
use crate::error::{Error, Result};
use crate::problem::{Causal, MAX_SEQLEN, MOST_SPLIT_TILES, Pass, Problem, Window};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The problems between the least sizes and the largest problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// The largest sizes, and everything that is the same throughout the range.
    pub largest: Problem,
    pub least: Sizes,
}

/// The sizes that vary within a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    pub batch_size: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
}

impl Sizes {
    pub const ONE: Sizes = Sizes { batch_size: 1, seqlen_q: 1, seqlen_k: 1 };
}

/// What the problems of a range may lack: each of these is on in some and off in others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optional {
    pub causal: bool,
    pub window: bool,
    pub softcap: bool,
    pub dropout: bool,
    /// Bits of the feature table (`problem::features::bits`).
    pub features: u64,
}

/// Combinations of optional features that one call may ask for.
pub const MOST_VARIANTS: u32 = 64;
/// Shapes of a range whose problems follow no record, so that each shape's own config is prepared.
const MOST_EXACT_SHAPES: usize = 1 << 16;
/// Packed rows up to which a batch-invariant problem may count as one of few queries.
const MOST_FEW_QUERIES: i64 = 128;
/// More queries than this are split by tiles alone.
const MOST_SPLIT_QUERIES: i64 = 192;
/// Up to this many queries, each bucket is looked at; beyond, each power of two.
const EACH_BUCKET: i64 = 32;
/// With fewer keys nothing is chosen otherwise: they are one tile.
const FEW_KEYS: i64 = 64;

impl Range {
    /// Refuses sizes that are out of order, and problems that no backend does.
    pub fn validate(&self) -> Result<()> {
        let Range { largest, least } = self;
        largest.validate()?;
        for (name, least, largest) in [
            ("batch_size", least.batch_size, largest.batch_size),
            ("seqlen_q", least.seqlen_q, largest.seqlen_q),
            ("seqlen_k", least.seqlen_k, largest.seqlen_k),
        ] {
            if !(1..=largest).contains(&least) {
                return Err(Error::invalid(format!(
                    "least_{name} is {least}; it must be from 1 to the range's {name}, which is {largest}"
                )));
            }
        }
        Ok(())
    }

    /// Whether a problem lies inside. Its sizes lie between the range's. Totals of varlen batches,
    /// and sizes of windows with the same sides, may be any; all else is the same.
    pub fn contains(&self, problem: &Problem) -> bool {
        let Range { largest, least } = self;
        let are_between = (least.batch_size..=largest.batch_size).contains(&problem.batch_size)
            && (least.seqlen_q..=largest.seqlen_q).contains(&problem.seqlen_q)
            && (least.seqlen_k..=largest.seqlen_k).contains(&problem.seqlen_k);
        are_between
            && without_sizes(&self.with_sizes(problem.batch_size, problem.seqlen_q, problem.seqlen_k))
                == without_sizes(problem)
    }

    /// The ranges of all combinations of what is optional; `bits` are the feature bits of the
    /// largest problem. A combination that is no legal problem is left out.
    pub fn variants(&self, bits: u64, optional: &Optional) -> Result<Vec<Range>> {
        let each_bit = (0..u64::BITS).map(|bit| 1 << bit).filter(|bit| optional.features & bits & bit != 0);
        let mut changes: Vec<Change> = each_bit.map(Change::Feature).collect();
        let problem = &self.largest;
        for (is_optional, change) in [
            (optional.causal && problem.causal != Causal::None, Change::Causal),
            (optional.window && problem.features.window != Window::default(), Change::Window),
            (optional.softcap && problem.features.softcap, Change::Softcap),
            (optional.dropout && problem.dropout, Change::Dropout),
        ] {
            changes.extend(is_optional.then_some(change));
        }
        let combinations = 1u64.checked_shl(changes.len() as u32).unwrap_or(u64::MAX);
        if combinations > MOST_VARIANTS.into() {
            return Err(Error::invalid(format!(
                "optional and optional_features have {} bits, which make {combinations} combinations; a range may have at most {MOST_VARIANTS}",
                changes.len()
            )));
        }
        let of_combination = |combination: u64| {
            let left_out = changes.iter().enumerate().filter(|(index, _)| combination >> index & 1 != 0);
            let (problem, _) =
                left_out.fold((self.largest, bits), |(problem, bits), (_, change)| change.apply(problem, bits));
            Range { largest: problem, ..*self }
        };
        let mut ranges: Vec<Range> = Vec::new();
        for range in (0..combinations).map(of_combination).filter(|range| range.largest.validate().is_ok()) {
            if !ranges.contains(&range) {
                ranges.push(range);
            }
        }
        Ok(ranges)
    }

    /// The most that a workspace has over the problems inside; `bytes` says how much one needs.
    /// Packed queries may be as many as the batch has sequences of the greatest length.
    /// Its size grows with the batch and the lengths, except where few tiles are split: all small
    /// batches and the lengths at the ends of tiles are looked at.
    pub fn largest_workspace(&self, bytes: impl Fn(&Problem) -> usize) -> usize {
        let Range { largest, least } = self;
        let from_least = |low: i64, high: i64, most: i64| (low..=high.min(most)).chain([high]);
        let tiles = |low: i64, high: i64, tile: i64| {
            let ends = (1..=MOST_SPLIT_TILES).map(move |tiles| tiles * tile).take_while(move |end| *end <= high);
            ends.filter(move |end| *end >= low).chain([high])
        };
        // Partial results of queries grow with the keys, and those of keys with the queries. V
        // transposed grows with the keys and the batch.
        let lengths: Vec<(i64, i64)> = match largest.pass {
            Pass::Forward => {
                let few = from_least(least.seqlen_q, largest.seqlen_q, MOST_SPLIT_QUERIES);
                let lengths = few.chain(tiles(least.seqlen_q, largest.seqlen_q, 64));
                lengths.map(|seqlen_q| (seqlen_q, largest.seqlen_k)).collect()
            }
            // One query needs no causal mask, and tiles without a mask may be split where others
            // are not.
            Pass::Backward => {
                let queries = [largest.seqlen_q].into_iter().chain((least.seqlen_q == 1).then_some(1));
                let keys = |seqlen_q| tiles(least.seqlen_k, largest.seqlen_k, 128).map(move |keys| (seqlen_q, keys));
                queries.flat_map(keys).collect()
            }
        };
        let batch_sizes = from_least(least.batch_size, largest.batch_size, MOST_SPLIT_TILES / largest.num_heads_kv);
        let sizes = batch_sizes.flat_map(|batch_size| lengths.iter().map(move |(q, k)| (batch_size, *q, *k)));
        let sizes: Vec<(i64, i64, i64)> = sizes.collect();
        let of_segments = sizes.iter().flat_map(|size| self.sizes_at_most_places(*size));
        let sizes: Vec<(i64, i64, i64)> =
            sizes.iter().copied().chain(of_segments).chain(self.sizes_at_most_widened(&lengths)).collect();
        let needed = sizes.into_iter().map(|(batch_size, seqlen_q, seqlen_k)| {
            let mut problem = Problem { batch_size, seqlen_q, seqlen_k, ..*largest };
            if let Some(total) = problem.features.varlen.as_mut().and_then(|varlen| varlen.total_q.as_mut()) {
                // More than the sequences hold only if the range itself says so.
                *total = (batch_size * seqlen_q).min(MAX_SEQLEN).max(*total);
            }
            bytes(&problem).max(bytes(&problem.without_idle_causal()))
        });
        needed.max().unwrap_or(0)
    }

    /// The sizes at which the states of a batch-invariant problem that is split at segments have
    /// the most places.
    fn sizes_at_most_places(&self, (batch_size, seqlen_q, seqlen_k): (i64, i64, i64)) -> Vec<(i64, i64, i64)> {
        let problem = Problem { batch_size, seqlen_q, seqlen_k, ..self.largest };
        let keys = problem.keys_of_most_places().into_iter().flatten().map(|keys| keys.min(seqlen_k));
        keys.filter(|keys| *keys >= self.least.seqlen_k).map(|keys| (batch_size, seqlen_q, keys)).collect()
    }

    /// Sizes at which K and V widened to 16 bits are as large as they become. Larger problems than
    /// that keep none. A batch size from which on nothing is split is looked at with the most
    /// queries alone.
    fn sizes_at_most_widened(&self, lengths: &[(i64, i64)]) -> Vec<(i64, i64, i64)> {
        let Range { largest, least } = self;
        let most_split = MOST_SPLIT_TILES / largest.num_heads_kv;
        let of_batch = |batch_size: i64| {
            let most = Problem { batch_size, ..*largest }.most_widened_keys().min(largest.seqlen_k);
            let looked_at = if batch_size <= most_split { lengths } else { &lengths[lengths.len() - 1..] };
            let keeps = |(seqlen_q, _): &&(i64, i64)| {
                let problem = Problem { batch_size, seqlen_q: *seqlen_q, seqlen_k: most, ..*largest };
                most >= least.seqlen_k && problem.keeps_widened_kv()
            };
            looked_at.iter().filter(keeps).map(move |(seqlen_q, _)| (batch_size, *seqlen_q, most)).collect::<Vec<_>>()
        };
        // With more sequences none has keys enough.
        let fits = |batch_size: &i64| Problem { batch_size: *batch_size, ..*largest }.most_widened_keys() > 0;
        (least.batch_size..=largest.batch_size).take_while(fits).flat_map(of_batch).collect()
    }

    /// Canonical problems to choose configs for. They have every shape at which a choice may change
    /// much; where a problem follows no record they are all canonical problems.
    pub fn samples(&self) -> Result<Vec<Canonical>> {
        let Range { largest, least } = self;
        if largest.follows_no_record().is_some() {
            return self.exact_shapes();
        }
        let is_power = |size: &i64| size.count_ones() == 1;
        let between = |low: i64, high: i64, passes: &dyn Fn(&i64) -> bool| -> Vec<i64> {
            let sizes = canonical::bucket_sizes(low, high).into_iter();
            sizes.filter(|size| *size == low || *size == high || passes(size)).collect()
        };
        let batch_sizes = between(least.batch_size, largest.batch_size, &is_power);
        let seqlens_q = between(least.seqlen_q, largest.seqlen_q, &|size| *size <= EACH_BUCKET || is_power(size));
        let seqlens_k = between(least.seqlen_k, largest.seqlen_k, &|size| *size >= FEW_KEYS && is_power(size));
        Ok(self.distinct(&batch_sizes, &seqlens_q, &seqlens_k))
    }

    /// Canonical problems of all record keys in the range.
    pub fn shapes(&self) -> Result<Vec<Canonical>> {
        let Range { largest, least } = self;
        if largest.follows_no_record().is_some() {
            return self.exact_shapes();
        }
        let buckets = canonical::bucket_sizes;
        Ok(self.distinct(
            &buckets(least.batch_size, largest.batch_size),
            &buckets(least.seqlen_q, largest.seqlen_q),
            &buckets(least.seqlen_k, largest.seqlen_k),
        ))
    }

    /// Memory of the host that preparing takes, from above: 4.4 MB were measured for a class on the
    /// CPU, and 12 KB for each shape where each has a config of its own.
    pub fn host_bytes(&self) -> usize {
        let shapes = match self.largest.follows_no_record() {
            None => 0,
            Some(_) if self.largest.batch_invariant => self.batch_invariant_shapes().len(),
            Some(_) => self.exact_sizes().iter().map(Vec::len).product::<usize>().min(MOST_EXACT_SHAPES),
        };
        (8 << 20) + (shapes << 14)
    }

    /// The sizes of all canonical problems: batch_size, seqlen_q and seqlen_k.
    fn exact_sizes(&self) -> [Vec<i64>; 3] {
        let Range { largest, least } = self;
        let sizes = |low, high, step| match canonical::has_tiles_of_its_lengths(largest) {
            true => canonical::rounded_sizes(low, high, step),
            false => canonical::bucket_sizes(low, high),
        };
        [
            sizes(least.batch_size, largest.batch_size, 1),
            sizes(least.seqlen_q, largest.seqlen_q, canonical::STEP),
            sizes(least.seqlen_k, largest.seqlen_k, canonical::STEP),
        ]
    }

    /// All canonical problems of a batch-invariant range: one for each number of few queries, and
    /// those that tell their tiles.
    fn batch_invariant_shapes(&self) -> Vec<Canonical> {
        let Range { largest, least } = self;
        let few: Vec<i64> = (least.seqlen_q..=largest.seqlen_q.min(MOST_FEW_QUERIES)).collect();
        let buckets = canonical::bucket_sizes;
        let sizes_of = [
            buckets(least.batch_size, largest.batch_size),
            buckets(least.seqlen_q, largest.seqlen_q),
            buckets(least.seqlen_k, largest.seqlen_k),
        ];
        let of_few = self.distinct(&[largest.batch_size], &few, &[largest.seqlen_k]);
        let of_tiles = self.distinct(&sizes_of[0], &sizes_of[1], &sizes_of[2]);
        let mut seen = HashSet::new();
        of_few.into_iter().chain(of_tiles).filter(|canonical| seen.insert(*canonical)).collect()
    }

    /// All canonical problems.
    fn exact_shapes(&self) -> Result<Vec<Canonical>> {
        if self.largest.batch_invariant {
            return Ok(self.batch_invariant_shapes());
        }
        let [batch_sizes, seqlens_q, seqlens_k] = self.exact_sizes();
        let count = batch_sizes.len() * seqlens_q.len() * seqlens_k.len();
        if count > MOST_EXACT_SHAPES {
            let dimensions = [("batch_size", &batch_sizes), ("seqlen_q", &seqlens_q), ("seqlen_k", &seqlens_k)];
            let most = dimensions.iter().max_by_key(|(_, sizes)| sizes.len()).map_or("batch_size", |(name, _)| name);
            return Err(Error::invalid(format!(
                "a deterministic range has {count} rounded shapes, each with a config of its own; at most {MOST_EXACT_SHAPES} are allowed, and {most} multiplies them most"
            )));
        }
        Ok(self.distinct(&batch_sizes, &seqlens_q, &seqlens_k))
    }

    fn distinct(&self, batch_sizes: &[i64], seqlens_q: &[i64], seqlens_k: &[i64]) -> Vec<Canonical> {
        let mut seen = HashSet::new();
        let mut distinct = Vec::new();
        for batch_size in batch_sizes {
            for seqlen_q in seqlens_q {
                for seqlen_k in seqlens_k {
                    let canonical = canonical(&self.with_sizes(*batch_size, *seqlen_q, *seqlen_k));
                    if seen.insert(canonical) {
                        distinct.push(canonical);
                    }
                }
            }
        }
        distinct
    }

    /// The range's problem of these sizes.
    fn with_sizes(&self, batch_size: i64, seqlen_q: i64, seqlen_k: i64) -> Problem {
        Problem { batch_size, seqlen_q, seqlen_k, ..self.largest }.without_idle_causal()
    }
}

/// A problem without what may be any in a range: sizes, totals of varlen batches, sizes of windows.
fn without_sizes(problem: &Problem) -> Problem {
    let mut own = Problem { batch_size: 1, seqlen_q: 1, seqlen_k: 1, ..*problem };
    let window = &mut own.features.window;
    (window.left, window.right) = (window.left.map(|_| 0), window.right.map(|_| 0));
    if let Some(varlen) = &mut own.features.varlen {
        (varlen.total_q, varlen.total_k) = (varlen.total_q.map(|_| 0), varlen.total_k.map(|_| 0));
    }
    own
}

/// One thing that a variant lacks.
enum Change {
    Causal,
    Window,
    Softcap,
    Dropout,
    Feature(u64),
}

impl Change {
    /// The problem without it, and the feature bits that are left.
    fn apply(&self, mut problem: Problem, mut bits: u64) -> (Problem, u64) {
        match self {
            Change::Causal => problem.causal = Causal::None,
            Change::Window => problem.features.window = Window::default(),
            Change::Softcap => problem.features.softcap = false,
            Change::Dropout => problem.dropout = false,
            Change::Feature(bit) => {
                bits &= !bit;
                problem.features = problem.features.of_bits(bits);
            }
        }
        (problem, bits)
    }
}
