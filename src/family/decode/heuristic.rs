//! The choice without measurement: a tile, the copies in flight and the splits that fill a device,
//! and what each costs.

use super::geometry::{DecodeKnobs, SPLITS, least_rows, needs_more_addresses};
use crate::device::Device;
use crate::family::limits::RESERVED_BYTES;
use crate::family::space::Space;
use crate::family::tile::key_cols;
use crate::problem::{Dtype, Features, MAX_SPLITS, Problem};

/// The first of a list of tiles that passes every constraint, with the splits that fill the device.
pub fn heuristic(problem: &Problem, device: &Device) -> DecodeKnobs {
    let shared = of_shared_heads(problem, device).into_iter().map(|tile| with_splits(tile, problem, device));
    let shared: Vec<DecodeKnobs> = shared.collect();
    // If one wave of a tile's CTAs fills the device without splits, no states are combined.
    let is_whole = |tile: &&DecodeKnobs| {
        let places = f64::from(device.sm_count * tile.ctas_per_sm);
        let is_one_wave = tile.num_splits == 1 && tile.unsplit_ctas(problem) <= places;
        tile.tma == 1 && is_one_wave && tile.balance(problem, 1, device) >= FULL
    };
    let chosen = shared.iter().find(is_whole).or(shared.first());
    chosen.copied().unwrap_or_else(|| of_one_head(problem, device))
}

/// The balance from which on CTAs fill a device.
const FULL: f64 = 0.9;

/// Tiles of several heads, whose keys are copied together, for rows of int4 and of 8 bits
/// (docs/tuning/eight-bits.md#several-heads). TMA is used if the rows of several heads make whole
/// lines of 128 bytes and the row of one head does not. If threads copy, rows of whole sectors and
/// at least 128 bytes are as fast with one head for each CTA.
fn of_shared_heads(problem: &Problem, device: &Device) -> Vec<DecodeKnobs> {
    let dim = problem.head_dim.max(problem.head_dim_v);
    let row_bytes = [problem.head_dim, problem.head_dim_v].map(|dim| 2 * key_cols(problem, dim));
    let block_m = match problem.packed_rows() {
        ..=8 => 8,
        9..=16 if dim <= 128 => 16,
        _ => return Vec::new(),
    };
    let config = |(heads, num_warps, block_n, num_stages, ctas_per_sm): (u32, u32, u32, u32, u32), tma| DecodeKnobs {
        block_m,
        block_n,
        num_warps,
        warps_m: 1,
        warps_v: 1,
        num_stages,
        ctas_per_sm,
        tma,
        num_splits: 1,
        scoring_warps: 0,
        scoring_stages: 1,
        tile_ctas: 1,
        heads,
        splittable: 0,
    };
    let of_lines = |heads: i64| row_bytes.iter().all(|bytes| heads * bytes % LINE_BYTES == 0);
    let is_whole = |bytes: &i64| bytes % SECTOR_BYTES == 0 && *bytes >= LINE_BYTES;
    let by_tma = [(8, 8, 32, 2, 2), (8, 8, 32, 4, 1), (4, 8, 32, 4, 1), (4, 8, 16, 3, 1), (8, 8, 32, 2, 1)];
    // With one CTA on each SM nothing covers its start and its end, so keys must be long.
    let keys = problem.batch_size * problem.num_heads_kv * problem.seqlen_k;
    let is_long = keys * problem.bytes_of_key() >= LONG_SHARE * i64::from(device.sm_count);
    let by_tma = by_tma.into_iter().filter(|(heads, .., ctas_per_sm)| {
        !of_lines(1) && of_lines(i64::from(*heads)) && (is_long || *ctas_per_sm > 1)
    });
    // Two CTAs of eight warps are faster than three of four, and these than one CTA.
    let by_threads = [
        (8, 8, 32, 2, 2),
        (4, 8, 32, 2, 2),
        (4, 4, 32, 2, 3),
        (8, 8, 32, 4, 1),
        (8, 8, 32, 3, 1),
        (8, 8, 32, 2, 1),
        (4, 4, 32, 4, 2),
        (4, 4, 32, 3, 2),
        (4, 4, 32, 2, 2),
    ];
    let by_threads = by_threads.into_iter().filter(|_| !row_bytes.iter().all(is_whole));
    let all = by_tma.map(|flow| config(flow, 1)).chain(by_threads.map(|flow| config(flow, 0)));
    all.filter(|config| problem.num_heads_kv % i64::from(config.heads) == 0 && config.fits(problem, device)).collect()
}

/// Whether tiles of 8 rows, whose products are transposed, are faster over 8 bits. They were on an
/// H200, except with rows of 128 bytes and scales of keys over pages that hold no whole block
/// (docs/tuning/eight-bits.md#tiles-of-8-rows).
fn gains_by_transposing(problem: &Problem) -> bool {
    let has_scales_of_keys = problem.features.eight_bits.is_some_and(|eight| eight.keys_per_scale == 1);
    let cuts_blocks = problem.features.paged.is_some_and(|page_size| page_size % 32 != 0);
    let row_bytes = 2 * key_cols(problem, problem.head_dim.max(problem.head_dim_v));
    row_bytes / SECTOR_BYTES != 4 || !has_scales_of_keys || !cuts_blocks
}

/// The same with a head for each CTA.
pub fn of_one_head(problem: &Problem, device: &Device) -> DecodeKnobs {
    // Too small a tile costs more than TMA gains: threads copy pages that fit no regular tile.
    let [by_tma, by_threads] = [1, 0].map(|tma| tiles(problem, tma));
    let (regular, smallest) = (by_tma.len() - SMALLEST, &by_threads[by_threads.len() - SMALLEST..]);
    let mut in_order = by_tma[..regular].iter().chain(&by_threads[..regular]).chain(&by_tma[regular..]).chain(smallest);
    let fits = |tile: &&DecodeKnobs| tile.fits(problem, device);
    let is_even = |tile: &&DecodeKnobs| tile.waits_for_memory(problem) && tile.runs_evenly(problem, device);
    let even = by_tma[..regular].iter().filter(fits).find(is_even);
    let tile = *even.or_else(|| in_order.find(fits)).or(smallest.last()).expect("the list is not empty");
    // Where there are many CTAs, smaller blocks of keys are enough in flight. With 8 bits and fewer
    // the instructions of a block weigh more.
    let half = DecodeKnobs { block_n: tile.block_n / 2, ..tile };
    let is_enough =
        problem.key_format() == 0 && tile.waits_for_memory(problem) && half.keeps_memory_busy(problem, device);
    let tile = if is_enough && half.runs_evenly(problem, device) && half.fits(problem, device) { half } else { tile };
    with_splits(tile, problem, device)
}

/// The tile with the splits that fill the device.
fn with_splits(tile: DecodeKnobs, problem: &Problem, device: &Device) -> DecodeKnobs {
    if tile.keeps_narrow_keys_unsplit(problem, device) {
        return DecodeKnobs { num_splits: 1, ..tile };
    }
    let splits = SPLITS.into_iter().filter(|splits| tile.pays(problem, *splits));
    // Splits beyond those that fill the device only cost, so the fewest that come near the best are
    // chosen, and with lengths on the device the fewest of these that spread.
    let best = splits.clone().map(|splits| tile.balance(problem, splits, device)).fold(0.0, f64::max);
    let near = splits.filter(|splits| tile.balance(problem, *splits, device) >= 0.95 * best);
    let spreads = |splits: &u32| problem.features.varlen.is_none() || tile.spreads(problem, *splits, device);
    DecodeKnobs { num_splits: near.clone().find(spreads).or(near.min()).unwrap_or(1), ..tile }
}

/// The first of a list of tiles with blocks of 64 keys that passes every constraint; None for the
/// widest head dims, where none does. Warps that share V's columns share Q K^T too, so that a block
/// takes less time. The splits stand for one of each segment. Tiles of 16 rows whose keys TMA
/// copies have a second kernel.
pub fn in_fixed_order(problem: &Problem, device: &Device) -> Option<DecodeKnobs> {
    let block_m = match problem.packed_rows() {
        ..=16 => 16,
        17..=32 => 32,
        _ => 64,
    };
    let flows = [(4, 3, 2), (2, 3, 2), (1, 3, 2), (2, 2, 2), (1, 2, 2), (2, 3, 1), (1, 3, 1), (2, 2, 1), (1, 2, 1)];
    let config = |warps_v, tma, (teams, num_stages, ctas_per_sm)| DecodeKnobs {
        block_m,
        block_n: 64,
        num_warps: teams * warps_v * (block_m / 16),
        warps_m: block_m / 16,
        warps_v,
        num_stages,
        ctas_per_sm,
        tma,
        num_splits: MAX_SPLITS as u32,
        scoring_warps: 0,
        scoring_stages: 1,
        tile_ctas: 1,
        heads: 1,
        splittable: 0,
    };
    let widths: &[u32] = match problem.head_dim_v {
        257.. => &[2, 1],
        65.. if block_m == 16 => &[4, 2, 1],
        _ => &[1, 2],
    };
    let of_width = |tma| widths.iter().flat_map(move |warps_v| flows.map(|flow| (*warps_v, tma, flow)));
    let mut configs = [1, 0].into_iter().flat_map(of_width).map(|(warps_v, tma, flow)| config(warps_v, tma, flow));
    let config = configs.find(|config| config.fits(problem, device))?;
    let mut ahead = of_weights_ahead(problem).into_iter().map(|(scoring_warps, scoring_stages, tile_ctas)| {
        DecodeKnobs { scoring_warps, scoring_stages, tile_ctas, ..config }
    });
    Some(ahead.find(|config| config.fits(problem, device)).unwrap_or(config))
}

/// The second kernel of `in_fixed_order`: its warps that compute weights, blocks of each, and CTAs
/// of a tile (docs/tuning/batch-invariant.md#weights-ahead). With two CTAs of a tile this kernel
/// takes fewer launches, since each CTA has an SM.
fn of_weights_ahead(problem: &Problem) -> [(u32, u32, u32); 2] {
    match problem.head_dim_v {
        ..=64 => [(4, 1, 1), (3, 1, 1)],
        65..=128 => [(3, 2, 2), (3, 1, 2)],
        _ => [(4, 1, 2), (3, 1, 2)],
    }
}

/// The last ones of `tiles`, which fit wherever any does.
const SMALLEST: usize = 3;

/// Stages and CTAs on an SM, in the order of preference. Threads that copy for themselves want many
/// bytes in flight, and so do tiles that compute for long. If TMA loads tiles of 16 rows, one block
/// in flight for each team is enough, and more are slower (docs/tuning/decode.md).
const FLOWS: [(u32, u32); 8] = [(6, 2), (4, 2), (3, 2), (6, 1), (4, 1), (3, 1), (2, 2), (2, 1)];
const LEAN_FLOWS: [(u32, u32); 8] = [(2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (4, 1), (6, 2), (6, 1)];

/// The configs to choose from, the preferred ones first, without splits.
fn tiles(problem: &Problem, tma: u32) -> Vec<DecodeKnobs> {
    let dim = problem.head_dim.max(problem.head_dim_v);
    let least_rows =
        if problem.features.eight_bits.is_some() && !gains_by_transposing(problem) { 16 } else { least_rows(problem) };
    let block_m = match problem.packed_rows() {
        ..=8 => least_rows,
        9..=16 => 16,
        17..=32 => 32,
        // Eight rows for each of four warps, below.
        _ if problem.features.four_bits.is_some() && dim > 128 => 32,
        _ => 64,
    };
    // Rows that a warp's registers hold of O.
    let warp_rows = match problem.features.four_bits {
        Some(_) if dim <= 128 => 16,
        Some(_) => 8,
        None if dim <= 128 && !needs_more_addresses(problem) => 32,
        None => 16,
    };
    let warps_m = (block_m / warp_rows).max(1);
    // The columns of 16 rows of O that a warp's registers hold beside what modifies scores.
    let most_cols = if problem.features.modifies_scores() { 192 } else { 256 };
    let warps_v = if problem.head_dim_v > most_cols && problem.features.four_bits.is_none() { 2 } else { 1 };
    // By the bytes of a row of K or V.
    let block_n = match key_cols(problem, dim) {
        ..=32 => 64,
        33..=64 => 32,
        _ => 16,
    };
    let config = |block_m, block_n, num_warps, warps_m, num_stages, ctas_per_sm| DecodeKnobs {
        block_m,
        block_n,
        num_warps,
        warps_m,
        warps_v,
        num_stages,
        ctas_per_sm,
        tma,
        num_splits: 1,
        scoring_warps: 0,
        scoring_stages: 1,
        tile_ctas: 1,
        heads: 1,
        splittable: 0,
    };
    let is_lean = tma != 0 && problem.packed_rows() <= LEAN_ROWS;
    let flows = if is_lean { LEAN_FLOWS } else { FLOWS };
    let mut configs = Vec::new();
    for num_warps in [8, 4, 2] {
        let teams = num_warps / (warps_m * warps_v).min(num_warps);
        if teams > 4 || num_warps % (warps_m * warps_v) != 0 {
            continue;
        }
        // A team of several warps has larger blocks for as many copies of each.
        let block_n = if warps_m * warps_v > 1 && dim <= 256 { (2 * block_n).min(32) } else { block_n };
        configs.extend(flows.map(|(stages, ctas)| config(block_m, block_n, num_warps, warps_m, stages, ctas)));
    }
    // A tile of 8 rows is for no more of them, except beside int4.
    let rows = if problem.features.eight_bits.is_some() { block_m.min(16) } else { least_rows };
    let halves = DecodeKnobs { warps_v: 2, ..config(rows, 16, 2, 1, 2, 1) };
    let smallest: [DecodeKnobs; SMALLEST] = [config(rows, 16, 2, 1, 3, 1), config(rows, 16, warps_v, 1, 2, 1), halves];
    configs.extend(smallest);
    configs
}

/// Adapts a config that was measured on `from` to `to`. The number of splits changes so that the
/// launch has about as many CTAs as it had. Batch and heads decide how many splits fill the device,
/// and the two problems differ in them. The heuristic's config is returned instead if the memory
/// decides the time, and the CTAs ran in even waves on `from` but would not on `to`. It is, too,
/// where lengths are on the device and its CTAs spread (`spreads`) and these would not: sequences
/// of equal lengths were measured. It is also returned if the K/V heads of `to` are not a multiple
/// of a CTA's.
pub fn carried_over(knobs: DecodeKnobs, from: &Problem, to: &Problem, device: &Device) -> DecodeKnobs {
    if to.num_heads_kv % i64::from(knobs.heads) != 0 {
        return heuristic(to, device);
    }
    let is_even = |problem: &Problem| knobs.runs_evenly(problem, device);
    if knobs.waits_for_memory(to) && is_even(from) && !is_even(to) {
        return heuristic(to, device);
    }
    let ctas = |problem: &Problem| knobs.unsplit_ctas(problem).max(1.0);
    let most = knobs.worthwhile_splits(to) as f64;
    let wanted = (f64::from(knobs.num_splits) * ctas(from) / ctas(to)).clamp(1.0, most);
    let off = |splits: u32| (f64::from(splits) / wanted).ln().abs();
    // The keys of `from` were measured with its own splits.
    let was_measured = |splits: u32| splits == knobs.num_splits && to.seqlen_k >= from.seqlen_k;
    let pays = |splits: &u32| knobs.pays(to, *splits) || was_measured(*splits) && f64::from(*splits) <= most;
    let splits = SPLITS.into_iter().filter(pays);
    let nearest = splits.min_by(|a, b| off(*a).total_cmp(&off(*b)));
    let num_splits = nearest.unwrap_or(1);
    let reads_whole = knobs.keeps_narrow_keys_unsplit(to, device) && num_splits > 1;
    if reads_whole || to.features.varlen.is_some() && !knobs.spreads(to, num_splits, device) {
        let fresh = heuristic(to, device);
        if fresh.spreads(to, fresh.num_splits, device) {
            return fresh;
        }
    }
    DecodeKnobs { num_splits, splittable: if num_splits == 1 { knobs.splittable } else { 0 }, ..knobs }
}

/// CTAs for each SM where lengths are on the device. On an H200, 4 to 7 sequences of random lengths
/// took 1.2 to 1.3 times as long with one CTA for each SM as with two (docs/tuning/pages.md). The
/// number between was not timed.
const CTAS_OF_SM: f64 = 1.5;

/// The same for unsplit keys. On an H100, 128 unsplit CTAs took 0.78 to 0.97 of the time of two
/// splits with equal lengths, and 0.84 to 1.00 with random ones. 96 CTAs took 0.87 to 0.96 and 0.94
/// to 1.20 (docs/tuning/decode.md#one-wave-without-splits). Numbers between were not timed.
const UNSPLIT_CTAS_OF_SM: f64 = 0.95;

/// The same up to head dim 64. On an H100, 96 unsplit CTAs took 0.82 to 0.91 of the time of three
/// splits, with equal lengths and with random ones
/// (docs/tuning/decode.md#fewer-ctas-without-splits).
const UNSPLIT_NARROW_CTAS_OF_SM: f64 = 0.7;

/// The bytes of K and V that a CTA reads while partial states are combined, and the fewest keys of
/// a page from which on it reads as fast as from contiguous keys.
const COMBINE_BYTES: i64 = 144 << 10;
const WHOLE_PAGE: i64 = 64;

/// The most packed rows of a tile whose products are short beside the copies.
const LEAN_ROWS: i64 = 16;

impl DecodeKnobs {
    /// Splits that leave every team at least two blocks of keys.
    pub fn worthwhile_splits(&self, problem: &Problem) -> i64 {
        // A CTA of less than one team is for a constraint to refuse.
        let teams = (self.num_warps / self.team()).max(1);
        (problem.seqlen_k / i64::from(2 * teams * self.block_n)).clamp(1, problem.max_splits())
    }

    /// Whether so many splits are worthwhile and spare a CTA more bytes than the combining kernel
    /// costs. That takes 2.5 us on an H200, in which a CTA reads 144 KB of whole boxes
    /// (docs/tuning/decode.md#short-caches).
    fn pays(&self, problem: &Problem, num_splits: u32) -> bool {
        let splits = i64::from(num_splits);
        let spared = problem.seqlen_k * problem.bytes_of_key() * (splits - 1) / splits;
        let reads_slowly = problem.features.paged.is_some_and(|page_size| page_size < WHOLE_PAGE);
        splits == 1 || splits <= self.worthwhile_splits(problem) && (reads_slowly || spared >= COMBINE_BYTES)
    }

    /// Whether there are CTAs enough for lengths on the device. With splits, CTAs of short
    /// sequences leave their SMs to others. Without, the CTAs read at the memory's rate.
    fn spreads(&self, problem: &Problem, num_splits: u32, device: &Device) -> bool {
        let least = if num_splits == 1 { UNSPLIT_CTAS_OF_SM } else { CTAS_OF_SM };
        let ctas_of_sm = self.unsplit_ctas(problem) * f64::from(num_splits) / f64::from(device.sm_count);
        ctas_of_sm >= least || num_splits == 1 && self.keeps_narrow_keys_unsplit(problem, device)
    }

    /// Whether keys stay unsplit from `UNSPLIT_NARROW_CTAS_OF_SM` on: 16-bit keys up to head dim
    /// 64, with lengths on the device.
    fn keeps_narrow_keys_unsplit(&self, problem: &Problem, device: &Device) -> bool {
        let Features { varlen, eight_bits, four_bits, .. } = problem.features;
        let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64 && problem.dtype != Dtype::Fp32;
        let is_timed =
            is_narrow && varlen.is_some() && eight_bits.is_none() && four_bits.is_none() && !problem.batch_invariant;
        is_timed && self.unsplit_ctas(problem) >= UNSPLIT_NARROW_CTAS_OF_SM * f64::from(device.sm_count)
    }

    fn unsplit_ctas(&self, problem: &Problem) -> f64 {
        let tiles = (problem.packed_rows() as f64 / f64::from(self.block_m)).ceil();
        let groups = (problem.num_heads_kv as f64 / f64::from(self.heads)).ceil();
        tiles * problem.batch_size as f64 * groups
    }

    /// Heads of the CTAs that do not exist, for each one that does.
    fn idle_heads(&self, problem: &Problem) -> f64 {
        let (heads, existing) = (i64::from(self.heads), problem.num_heads_kv.max(1));
        ((existing + heads - 1) / heads * heads) as f64 / existing as f64 - 1.0
    }

    /// The mean share of the device that is busy, over the waves of CTAs: up to 1. An SM counts as
    /// busy with as many CTAs as cover memory's latency, though it may hold more.
    pub fn balance(&self, problem: &Problem, num_splits: u32, device: &Device) -> f64 {
        let ctas = self.unsplit_ctas(problem) * f64::from(num_splits);
        let enough = match self.heads {
            1 => (f64::from(ENOUGH_IN_FLIGHT) / self.bytes_in_flight(problem)).ceil(),
            // Their products take as long as their copies.
            _ => f64::from(self.ctas_per_sm),
        };
        let places = f64::from(device.sm_count) * enough.clamp(1.0, f64::from(self.ctas_per_sm));
        ctas / ((ctas / places).ceil() * places).max(1.0)
    }

    /// Whether the order and number of TMA's copies alone decide the rate.
    fn waits_for_memory(&self, problem: &Problem) -> bool {
        self.tma != 0 && problem.packed_rows() <= LEAN_ROWS
    }

    /// Whether the CTAs of an unsplit launch all run at once, or fill three quarters of their waves
    /// in total. A last wave of few CTAs runs on few SMs, which read more slowly than the memory
    /// could deliver. The more waves there are, the less the last one counts.
    pub fn runs_evenly(&self, problem: &Problem, device: &Device) -> bool {
        let (ctas, places) =
            (self.unsplit_ctas(problem), f64::from(device.sm_count) * self.resident_ctas(problem, device));
        ctas <= places || ctas >= 0.75 * (ctas / places).ceil() * places
    }

    /// Whether the CTAs of an unsplit launch read at the memory's full rate, as two on most SMs do
    /// with 16 KB in flight each.
    fn keeps_memory_busy(&self, problem: &Problem, device: &Device) -> bool {
        let of_sm = self.unsplit_ctas(problem) / f64::from(device.sm_count);
        of_sm.min(self.resident_ctas(problem, device)) * self.bytes_in_flight(problem) >= f64::from(FULL_RATE_IN_FLIGHT)
    }

    /// CTAs that an SM's shared memory holds; its registers may hold fewer.
    fn resident_ctas(&self, problem: &Problem, device: &Device) -> f64 {
        let held = (device.smem_per_sm / (self.smem_bytes(problem) + RESERVED_BYTES)).max(1);
        f64::from(if self.fills_sm(problem, device) { self.ctas_per_sm } else { held })
    }

    /// Whether a CTA takes unused shared memory, with which `ctas_per_sm` CTAs fill an SM
    /// (decode/shared.cuh).
    fn fills_sm(&self, problem: &Problem, device: &Device) -> bool {
        let filling = device.smem_per_sm / (self.ctas_per_sm + 1) - RESERVED_BYTES + 128;
        let lacking = filling.saturating_sub(self.smem_bytes(problem));
        let is_eight = problem.features.eight_bits.is_some() && self.block_m <= 16;
        is_eight
            && self.tma != 0
            && self.heads == 1
            && device.smem_per_sm == 228 << 10
            && (1..=40 << 10).contains(&lacking)
    }

    /// Bytes that a CTA has in flight, without padding: all stages of its teams' rings but the one
    /// that is read. Heads that do not exist bring none.
    pub(super) fn bytes_in_flight(&self, problem: &Problem) -> f64 {
        let [num_warps, num_stages, block_n] = [self.num_warps, self.num_stages, self.block_n].map(f64::from);
        let heads = num_warps / f64::from(self.team()) * i64::from(self.heads).min(problem.num_heads_kv) as f64;
        (heads * (num_stages - 1.0) * block_n * problem.bytes_of_key() as f64).max(1.0)
    }
}

/// The time that memory takes, longer where too little is in flight to cover its latency or SMs are
/// idle, and what splits and teams cost beside it.
pub fn cost(knobs: &DecodeKnobs, problem: &Problem, device: &Device) -> f64 {
    let [block_m, num_warps, ctas_per_sm] = [knobs.block_m, knobs.num_warps, knobs.ctas_per_sm].map(f64::from);
    let [tma, num_splits, team] = [knobs.tma, knobs.num_splits, knobs.team()].map(f64::from);
    let in_flight = ctas_per_sm * knobs.bytes_in_flight(problem);
    let latency = (f64::from(ENOUGH_IN_FLIGHT) / in_flight).max(1.0);
    let few_warps = (8.0 / (num_warps * ctas_per_sm) - 1.0).max(0.0);
    let re_read = (problem.packed_rows() as f64 / block_m).ceil() - 1.0;
    let idle_rows = block_m / problem.packed_rows().max(knobs.tile_rows(problem).into()) as f64 - 1.0;
    let splits = (num_splits / knobs.worthwhile_splits(problem) as f64 - 1.0).max(0.0);
    let share = knobs.balance(problem, knobs.num_splits, device).max(1e-3);
    latency / share
        + 0.1 * few_warps
        + 0.3 * re_read
        + 0.05 * idle_rows.max(0.0)
        // In their place the last head is read again.
        + 0.3 * knobs.idle_heads(problem)
        + 0.02 * (team - 1.0)
        + 0.2 * splits
        + 0.001 * num_splits
        + if knobs.takes_tma(problem, device) { 0.1 * (1.0 - tma) } else { 0.0 }
}

/// Bytes of K and V for each SM from which on one CTA of several heads may be faster than two. On
/// an H100 it was slower with 0.5 MB, and faster with 5 MB.
const LONG_SHARE: i64 = 2 << 20;
/// Bytes that L2 hands out at the least, and those of a line.
const SECTOR_BYTES: i64 = 32;
const LINE_BYTES: i64 = 128;
/// Bytes in flight on an SM that cover the latency of device memory: an H200's 4.8 TB/s for two
/// thirds of a microsecond, over 132 SMs.
const ENOUGH_IN_FLIGHT: u32 = 24 << 10;
/// Bytes in flight with which an H200 reads at its full rate: it does with 31 KB, and with 16 KB at
/// 0.77 of it (docs/tuning/decode.md).
const FULL_RATE_IN_FLIGHT: u32 = 30 << 10;
