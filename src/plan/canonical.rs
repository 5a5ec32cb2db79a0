//! Canonical: the problem that stands for all problems with one record key, and the distance
//! between shapes.
//!
//! Sizes are rounded, so that one choice serves every problem of a canonical one, whichever came
//! first. Few queries, varlen and paged problems are rounded to the buckets of keys, so that a
//! sequence that grows by one token does not make a plan at each step. The others are rounded to
//! less than tiles, so that their waves and padding are seen: several canonical problems share a
//! key. The engine makes a `Canonical` once, where a problem comes in; lookup, tuning and building
//! take it from there. This file knows nothing of keys and records.

use crate::config::Config;
use crate::device::Device;
use crate::family;
use crate::problem::{ANY_SEQLEN, Causal, Features, Pass, Problem, Varlen, Window};
use std::ops::Deref;

/// Query rows of all heads from which on a batch-invariant problem has the tiles of a full GPU: a
/// GPU of 144 SMs takes 19 waves of tiles of 192 rows.
const MANY_ROWS: i64 = 1 << 19;
/// The fewest queries that a batch-invariant problem is planned for. Fewer may be few queries, for
/// which another family is chosen.
const LEAST_SEQLEN_Q: i64 = 128;

/// A problem that `canonical` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Canonical(Problem);

impl Deref for Canonical {
    type Target = Problem;

    fn deref(&self) -> &Problem {
        &self.0
    }
}

/// The problem that stands for all problems that choose alike. They have its record key.
pub fn canonical(problem: &Problem) -> Canonical {
    if problem.batch_invariant {
        return Canonical(of_any_batch(problem));
    }
    if has_tiles_of_its_lengths(problem) {
        let rounded = Problem {
            batch_size: within_bucket(problem.batch_size, 1),
            seqlen_q: within_bucket(problem.seqlen_q, STEP),
            seqlen_k: within_bucket(problem.seqlen_k, STEP),
            ..with_any_alignment(problem)
        };
        let is_alike = rounded.validate().is_ok() && has_tiles_of_its_lengths(&rounded);
        return Canonical(if is_alike { rounded } else { with_any_alignment(problem) });
    }
    let any = with_any_alignment(problem);
    let num_heads_kv = (bucket(problem.num_heads_q) / bucket(problem.group_size())).max(1);
    let rounded = Problem {
        batch_size: bucket(problem.batch_size),
        num_heads_q: num_heads_kv * bucket(problem.group_size()),
        num_heads_kv,
        seqlen_q: bucket(problem.seqlen_q),
        seqlen_k: bucket(problem.seqlen_k),
        features: Features { varlen: queries_of(problem), ..any.features },
        ..any
    };
    // At the far end of the ranges a bucket may be too large to be a problem.
    Canonical(if rounded.validate().is_ok() { rounded } else { *problem })
}

/// An error if the config breaks a constraint both at the problem's own sizes and at those that it
/// is planned for. A plan's config serves every problem of a canonical one, so what either accepts
/// is right for the problem.
pub fn check(problem: &Problem, config: &Config, device: &Device) -> Result<(), String> {
    let planned = || family::check(&canonical(problem), config, device);
    family::check(problem, config, device).or_else(|reason| planned().map_err(|_| reason))
}

/// Whether the lengths tell the tiles of a launch, which are then as many as they are.
pub fn has_tiles_of_its_lengths(problem: &Problem) -> bool {
    let features = &problem.features;
    features.varlen.is_none() && features.paged.is_none() && !family::is_bound_by_keys(problem)
}

/// Sides of all tiles are multiples of this many rows or keys.
pub const STEP: i64 = 16;

/// The next multiple of a step, or of a 64th of the power of two below, if it has the same bucket.
fn within_bucket(size: i64, step: i64) -> i64 {
    let step = step.max((1i64 << size.max(1).ilog2()) / 64);
    let rounded = (size + step - 1) / step * step;
    if bucket(rounded) == bucket(size) { rounded } else { size }
}

/// The batch-invariant problem that stands for others. Few queries run as in every batch. Other
/// problems tell the number of their tiles, since tiles of any number of rows give a row the same
/// bits. Where lengths do not tell it, or tiles are many, they are those of a full GPU.
fn of_any_batch(problem: &Problem) -> Problem {
    let any = with_any_alignment(&problem.in_any_batch());
    let is_counted = !problem.has_few_queries_in_any_batch() && !problem.has_varlen_queries();
    let (batch_size, seqlen_q) = (bucket(problem.batch_size), bucket(problem.seqlen_q.max(LEAST_SEQLEN_Q)));
    let rows = batch_size.saturating_mul(seqlen_q).saturating_mul(problem.num_heads_q);
    if !is_counted || problem.features.block_mask.is_some() || rows >= MANY_ROWS || seqlen_q > ANY_SEQLEN {
        return any;
    }
    // Under a causal mask tiles differ where there are about as many keys as queries.
    let has_more_keys = bucket(problem.seqlen_k) >= 2 * seqlen_q && 2 * seqlen_q <= ANY_SEQLEN;
    Problem { batch_size, seqlen_q, seqlen_k: if has_more_keys { ANY_SEQLEN } else { seqlen_q }, ..any }
}

/// The lengths of a varlen batch. A choice depends on them only by whether sequences may differ in
/// their numbers of queries.
fn queries_of(problem: &Problem) -> Option<Varlen> {
    problem.features.varlen.map(|_| Varlen { padded_q: problem.has_varlen_queries(), ..Varlen::default() })
}

/// The same problem for both alignments of the diagonal and for all totals of a varlen batch.
fn with_any_alignment(problem: &Problem) -> Problem {
    let window = &problem.features.window;
    let window = Window { left: window.left.map(bucket), right: window.right.map(bucket), top_left: false };
    let varlen = problem.features.varlen.map(|_| Varlen::default());
    Problem {
        causal: if problem.causal == Causal::None { Causal::None } else { Causal::BottomRight },
        features: Features { window, varlen, ..problem.features },
        ..*problem
    }
}

/// The nearest of the powers of two and three halves of them; 0 and 1 are themselves.
pub fn bucket(size: i64) -> i64 {
    if size < 4 {
        return size;
    }
    let power = 1i64 << size.ilog2();
    // The borders are the geometric means of neighbours: sqrt(3/2) = 1.2247, sqrt(3) = 1.7321, in
    // 1/1024.
    match (size as i128) * 1024 / i128::from(power) {
        ..1254 => power,
        1254..1774 => power + power / 2,
        _ => 2 * power,
    }
}

/// Sizes from `low` to `high` that have all of their buckets: the ends, and each bucket between.
pub fn bucket_sizes(low: i64, high: i64) -> Vec<i64> {
    let powers = (0..32).map(|exponent| 1i64 << exponent);
    let buckets = powers.flat_map(|power| [power, power + power / 2]).filter(|size| (low + 1..high).contains(size));
    sorted(buckets.chain([low, high]))
}

/// Sizes from `low` to `high` that have every rounded size, where all tiles are `step` rows.
pub fn rounded_sizes(low: i64, high: i64, step: i64) -> Vec<i64> {
    let mut sizes = vec![low];
    while let Some(last) = sizes.last().filter(|last| **last < high) {
        // All sizes up to the rounded one round to it, unless they have another bucket.
        let next = within_bucket(*last, step).max(*last) + 1;
        sizes.push(next.min(high));
    }
    sizes
}

fn sorted(sizes: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut sizes: Vec<i64> = sizes.collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The distance between two problems of one class: Euclidean, in powers of two, over parallelism,
/// both lengths, the GQA group and the window. Two problems of few queries (decoding) are measured
/// by what their kernels see: tiles hold a GQA group, so parallelism counts K/V heads; the keys'
/// length counts a quarter; a tile's rows count too.
///
/// The group size counts a quarter forward, where it changes what the cache shares and not the
/// work. Backward it counts whole: a tile of keys does the heads of its group one after the other.
pub fn distance(a: &Problem, b: &Problem) -> f64 {
    let log = |size: i64| (size.max(1) as f64).log2();
    let are_few = [a, b].into_iter().all(family::is_bound_by_keys);
    let heads = |p: &Problem| if are_few { p.num_heads_kv } else { p.num_heads_q };
    let parallelism = |p: &Problem| log(p.batch_size) + log(heads(p));
    // A split with more keys repeats the same work.
    let length = if are_few { 0.25 } else { 1.0 };
    let weight = if a.pass == Pass::Forward { 0.25 } else { 1.0 };
    let group = weight * (log(a.group_size()) - log(b.group_size()));
    // Tiles of few queries have as many rows as there are queries.
    let tile_rows = |p: &Problem| if p.may_decode() { log(p.packed_rows().clamp(16, 64)) } else { 0.0 };
    // A window counts as the share of the keys that it leaves.
    let window = log(seen(a)) - log(a.seqlen_k) - log(seen(b)) + log(b.seqlen_k);
    [
        parallelism(a) - parallelism(b),
        log(a.seqlen_q) - log(b.seqlen_q),
        length * (log(a.seqlen_k) - log(b.seqlen_k)),
        tile_rows(a) - tile_rows(b),
        group,
        window,
    ]
    .iter()
    .map(|d| d * d)
    .sum::<f64>()
    .sqrt()
}

/// The most keys that a window lets one row see.
fn seen(problem: &Problem) -> i64 {
    let side = |keys: Option<i64>| keys.unwrap_or(problem.seqlen_k);
    (side(problem.features.window.left) + side(problem.keys_after_diagonal())).min(problem.seqlen_k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::problem::{Dtype, Eight, EightBits};

    #[test]
    fn buckets_are_monotonic_and_their_own_buckets() {
        let mut last = 0;
        for size in 0..100_000 {
            let bucket = bucket(size);
            assert!(bucket >= last, "{size}");
            assert_eq!(self::bucket(bucket), bucket, "{size}");
            if size > 0 {
                let factor = bucket as f64 / size as f64;
                assert!((0.78..1.25).contains(&factor), "{size} -> {bucket}");
            }
            last = bucket;
        }
        assert_eq!(bucket(i32::MAX as i64), 1 << 31);
    }

    /// A plan's config may be pinned, measured and imported for each problem that has the plan.
    #[test]
    fn a_plans_config_is_accepted_for_every_problem_of_the_plan() {
        let lengths = [1, 15, 16, 63, 113, 114, 120, 127, 128, 129, 200, 255, 256, 257, 300, 500, 1000, 1030];
        let causals = [Causal::None, Causal::BottomRight, Causal::TopLeft];
        let mut direct = 0;
        for arch in [Arch::Sm(9, 0), Arch::Sm(8, 0)] {
            let device = Device::typical(arch).unwrap();
            for (pass, dim, causal) in [Pass::Forward, Pass::Backward]
                .into_iter()
                .flat_map(|pass| [64, 128, 192].map(|dim| (pass, dim)))
                .flat_map(|(pass, dim)| causals.map(|causal| (pass, dim, causal)))
            {
                for (seqlen_q, seqlen_k) in lengths.into_iter().flat_map(|q| lengths.map(|k| (q, k))) {
                    let dense = Problem::dense(pass, Dtype::Bf16, 3, 5, seqlen_q, dim);
                    let problem = Problem { seqlen_k, causal, ..dense };
                    let config = family::heuristic(&canonical(&problem), &device);
                    check(&problem, &config, &device).unwrap_or_else(|reason| panic!("{problem:?}: {reason}"));
                    let writes_dq = config.get("direct_dq").is_some_and(|tiles| tiles > 0);
                    // A CTA does all tiles of keys, so the true lengths must allow that.
                    if writes_dq {
                        family::check(&problem, &config, &device).unwrap();
                        direct += 1;
                    }
                }
            }
        }
        assert!(direct > 100, "{direct}");
    }

    #[test]
    fn v_is_transposed_where_every_problem_of_the_plan_has_room_for_it() {
        let device = Device::typical(Arch::Sm(9, 0)).unwrap();
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
        let features = Features { eight_bits, ..Features::NONE };
        let mut accepted = 0;
        for (seqlen_q, seqlen_k) in (100..500).step_by(7).flat_map(|q| (200..700).step_by(11).map(move |k| (q, k))) {
            let dense = Problem::dense(Pass::Forward, Dtype::Bf16, 3, 5, seqlen_q, 128);
            let problem = Problem { seqlen_k, features, ..dense };
            let config = family::heuristic(&problem, &device).with("v_stages", 0);
            if check(&problem, &config, &device).is_ok() {
                assert!(problem.keeps_transposed_v(), "{problem:?}");
                accepted += 1;
            }
        }
        assert!(accepted > 1000, "{accepted}");
    }

    #[test]
    fn a_config_that_neither_size_allows_is_refused() {
        let device = Device::typical(Arch::Sm(9, 0)).unwrap();
        let causal = Causal::BottomRight;
        let problem = |seqlen_q, seqlen_k| Problem {
            seqlen_k,
            causal,
            ..Problem::dense(Pass::Backward, Dtype::Bf16, 2, 4, seqlen_q, 64)
        };
        let config = family::heuristic(&canonical(&problem(114, 113)), &device);
        assert_eq!(config.get("direct_dq"), Some(1));
        check(&problem(114, 113), &config, &device).unwrap();
        check(&problem(128, 113), &config, &device).unwrap();
        // The first 16 queries see no key, and 300 keys are three tiles.
        assert!(check(&problem(128, 112), &config, &device).unwrap_err().contains("direct_dq"));
        assert!(check(&problem(300, 300), &config, &device).unwrap_err().contains("direct_dq"));
    }

    #[test]
    fn listed_sizes_have_all_rounded_sizes() {
        for (low, high) in [(1, 1), (1, 2), (5, 7), (3, 5000), (1000, 1001), (17, 131_072)] {
            let distinct = |sizes: &[i64], round: &dyn Fn(i64) -> i64| sorted(sizes.iter().map(|size| round(*size)));
            let all: Vec<i64> = (low..=high).collect();
            let buckets = bucket_sizes(low, high);
            assert!(buckets.first() == Some(&low) && buckets.last() == Some(&high), "{buckets:?}");
            assert_eq!(distinct(&buckets, &bucket), distinct(&all, &bucket));
            for step in [1, STEP] {
                let round = |size| within_bucket(size, step);
                assert_eq!(distinct(&rounded_sizes(low, high, step), &round), distinct(&all, &round), "{low} {high}");
            }
        }
    }
}
