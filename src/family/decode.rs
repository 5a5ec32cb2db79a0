//! The decode family's space: few query rows over many keys, bound by the reading of K and V, so what counts are the
//! bytes in flight on each SM, that all SMs have an equal share and, where there is TMA, that it copies them. Constraints
//! stand here with their reason and once more as static asserts in `templates/decode.cu.tera`.

use super::limits::{GRID, RESERVED_BYTES, SHARED_MEMORY, THREADS, register_budget};
use super::{Constraint, Knob};
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::family::geometry;
use crate::problem::{Layout, MAX_SPLITS, Problem};

const KNOBS: &[Knob] = &[
    Knob { name: "block_m", meaning: "packed query rows of a tile", values: &[16, 32, 64] },
    Knob { name: "block_n", meaning: "keys of a team's block", values: &[16, 32, 64] },
    Knob { name: "num_warps", meaning: "warps of a block of threads", values: &[1, 2, 4, 8] },
    Knob { name: "warps_m", meaning: "a team's warps along its rows", values: &[1, 2, 4] },
    Knob { name: "warps_v", meaning: "a team's warps along V's columns", values: &[1, 2] },
    Knob { name: "num_stages", meaning: "key blocks of a team's ring", values: &[2, 3, 4, 6, 8] },
    Knob { name: "ctas_per_sm", meaning: "blocks of threads that share an SM", values: &[1, 2, 3] },
    Knob { name: "tma", meaning: "whether TMA copies the keys", values: &[0, 1] },
    Knob { name: "num_splits", meaning: "splits of the keys, each for its own blocks of threads", values: SPLITS },
];

const SPLITS: &[u32] = &[1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128];

const CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "whole_teams",
        reason: "a block of threads is whole teams of warps_m x warps_v warps",
        holds: |_, c, _| c.get("num_warps") % geometry::decode_team(c) == 0,
    },
    Constraint {
        name: "whole_tiles",
        reason: "a warp owns whole 16-row tiles",
        holds: |_, c, _| c.get("block_m") % (16 * c.get("warps_m")) == 0,
    },
    Constraint {
        name: "rows_in_use",
        reason: "a tile of twice the rows there are computes the same as the next smaller one, in more memory",
        holds: |p, c, _| c.get("block_m") == 16 || i64::from(c.get("block_m")) < 2 * p.packed_rows(),
    },
    Constraint {
        name: "splits_in_use",
        reason: "more splits than the workspace has room for are not made; a batch-invariant launch makes those it has room for",
        holds: |p, c, _| i64::from(c.get("num_splits")) <= p.max_splits() || p.batch_invariant,
    },
    Constraint {
        name: "tma",
        reason: "TMA is there from sm_90 on, takes addresses, strides and rows of multiples of 16 bytes, and boxes of 64 columns by whole eights of keys of one page",
        holds: |p, c, d| c.get("tma") == 0 || takes_tma(p, c, d),
    },
    THREADS,
    Constraint {
        name: "registers",
        reason: "fragments of O, S and Q, the addresses of copies and 60 more must fit a thread's registers, or they spill",
        holds: |p, c, d| registers(p, c) <= register_budget(c, d),
    },
    SHARED_MEMORY,
    GRID,
];

/// Whether this family does a problem, and is preferred for it: its queries are few, and the keys are many to each
/// of them, so that reading them is what takes the time. With pages it is the only one.
pub fn serves(problem: &Problem) -> bool {
    is_bound_by_keys(problem) || problem.may_decode() && problem.features.paged.is_some()
}

/// Whether it is the reading of keys that takes the time, with pages or without.
pub fn is_bound_by_keys(problem: &Problem) -> bool {
    problem.may_decode() && problem.has_few_rows() && problem.seqlen_k >= KEYS_OF_A_QUERY * problem.seqlen_q
}

/// With fewer, tiles of queries of a short sequence are what the other families are made for.
const KEYS_OF_A_QUERY: i64 = 4;

pub fn knobs() -> &'static [Knob] {
    KNOBS
}

pub fn constraints() -> &'static [Constraint] {
    CONSTRAINTS
}

fn takes_tma(problem: &Problem, config: &Config, device: &Device) -> bool {
    let box_rows = i64::from(geometry::decode_box_rows(problem, config));
    let divides = |rows: i64| rows % box_rows == 0;
    let pages = problem
        .features
        .paged
        .is_none_or(|page_size| box_rows % 8 == 0 && divides(page_size) && divides(config.get("block_n").into()));
    let warps_v = config.get("warps_v").max(1);
    let boxes = warps_v == 1 || (geometry::decode_cols(problem, config) / warps_v).is_multiple_of(geometry::BOX_COLS);
    matches!(device.arch, Arch::Sm(9.., _)) && problem.layout == Layout::Vec8 && pages && boxes
}

/// As NVRTC 13.0 compiles them: what spills has more than this counts.
fn registers(problem: &Problem, config: &Config) -> u32 {
    let get = |knob| config.get(knob);
    let tiles = get("block_m") / (16 * get("warps_m"));
    let cols = geometry::decode_cols(problem, config) / get("warps_v");
    let (o, q) = (tiles * cols / 2, tiles * (problem.head_dim as u32).div_ceil(16) * 4);
    // Else Q is loaded at each use.
    let q = if q + o <= 128 { q } else { 0 };
    let chunks = (problem.head_dim as u32).div_ceil(problem.layout.elements() as u32);
    let copies = match problem.layout {
        _ if config.get("tma") != 0 => 4,
        Layout::Vec8 => (get("block_n") * chunks).div_ceil(32 * geometry::decode_team(config)),
        // Narrower ones are not all unrolled.
        _ => 8,
    };
    let of_rows = if needs_more_addresses(problem) { 16 * tiles } else { 0 };
    o + tiles * get("block_n") / 2 + q + 2 * copies + of_rows + 60
}

/// Whether there are pages, or what belongs to each row's head and position.
fn needs_more_addresses(problem: &Problem) -> bool {
    problem.features.modifies_scores() || problem.features.paged.is_some()
}

/// The first of a list of tiles that passes every constraint, with the splits that fill the device.
pub fn heuristic(problem: &Problem, device: &Device) -> Config {
    // Too small a tile costs more than TMA gives: where pages fit no regular one, they go without it.
    let [by_tma, by_threads] = [1, 0].map(|tma| tiles(problem, tma));
    let (regular, smallest) = (by_tma.len() - SMALLEST, &by_threads[by_threads.len() - SMALLEST..]);
    let mut in_turn = by_tma[..regular].iter().chain(&by_threads[..regular]).chain(&by_tma[regular..]).chain(smallest);
    let is_fit = |config: &&Config| super::check(problem, config, device).is_ok();
    let is_even = |config: &&Config| waits_for_memory(problem, config) && runs_evenly(problem, config, device);
    let even = by_tma[..regular].iter().filter(is_fit).find(is_even);
    let tile = even.or_else(|| in_turn.find(is_fit)).or(smallest.last()).expect("the list is not empty").clone();
    // Where there are many blocks of threads, smaller blocks of keys are enough in flight.
    let half = tile.clone().with("block_n", tile.get("block_n") / 2);
    let is_enough = waits_for_memory(problem, &tile) && keeps_memory_busy(problem, &half, device);
    let tile = if is_enough && runs_evenly(problem, &half, device) && is_fit(&&half) { half } else { tile };
    if problem.batch_invariant {
        // Each sequence's own length says how many of them it has.
        return tile.with("num_splits", if problem.max_splits() > 1 { MAX_SPLITS as u32 } else { 1 });
    }
    let splits = SPLITS.iter().copied().filter(|splits| i64::from(*splits) <= worthwhile_splits(problem, &tile));
    // Beyond what fills the device, splits only cost: the fewest that come near the best.
    let best = splits.clone().map(|splits| balance(problem, &tile, splits, device)).fold(0.0, f64::max);
    let chosen = splits.into_iter().find(|splits| balance(problem, &tile, *splits, device) >= 0.95 * best);
    tile.with("num_splits", chosen.unwrap_or(1))
}

/// The last ones of `tiles`, which fit wherever any does.
const SMALLEST: usize = 3;

/// Stages and blocks of threads on an SM, in the order of preference. Threads that copy for themselves want many bytes in flight, and
/// so do tiles that compute for long; of 16 rows one block on TMA's way to each team is enough, and more are slower (DESIGN.md, Decoding).
const FLOWS: [(u32, u32); 8] = [(6, 2), (4, 2), (3, 2), (6, 1), (4, 1), (3, 1), (2, 2), (2, 1)];
const LEAN_FLOWS: [(u32, u32); 8] = [(2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (4, 1), (6, 2), (6, 1)];

/// Unsplit.
fn tiles(problem: &Problem, tma: u32) -> Vec<Config> {
    let dim = problem.head_dim.max(problem.head_dim_v);
    let block_m = match problem.packed_rows() {
        ..=16 => 16,
        17..=32 => 32,
        _ => 64,
    };
    // Rows that a warp's registers hold of O.
    let warp_rows = if dim <= 128 && !needs_more_addresses(problem) { 32 } else { 16 };
    let warps_m = (block_m / warp_rows).max(1);
    // O of 16 rows, and beside it what scores are modified with, as far as a warp's registers hold it.
    let most_cols = if problem.features.modifies_scores() { 192 } else { 256 };
    let warps_v = if problem.head_dim_v > most_cols { 2 } else { 1 };
    let block_n = match dim {
        ..=32 => 64,
        33..=64 => 32,
        _ => 16,
    };
    let config = |block_m, block_n, num_warps, warps_m, num_stages, ctas_per_sm| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("num_warps", num_warps), ("warps_m", warps_m)];
        let flow = [("num_stages", num_stages), ("ctas_per_sm", ctas_per_sm), ("warps_v", warps_v), ("num_splits", 1)];
        Config::new(Family::Decode, tile.into_iter().chain(flow).chain([("tma", tma)]))
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
    let halves = config(16, 16, 2, 1, 2, 1).with("warps_v", 2);
    let smallest: [Config; SMALLEST] = [config(16, 16, 2, 1, 3, 1), config(16, 16, warps_v, 1, 2, 1), halves];
    configs.extend(smallest);
    configs
}

/// Splits that leave every team at least two blocks of keys.
fn worthwhile_splits(problem: &Problem, config: &Config) -> i64 {
    // No whole team is a constraint's to refuse.
    let teams = (config.get("num_warps") / geometry::decode_team(config)).max(1);
    (problem.seqlen_k / i64::from(2 * teams * config.get("block_n"))).clamp(1, problem.max_splits())
}

/// A config that was measured on one problem, for another: with as many splits as give the device as many blocks of
/// threads. How many fill it follows from batch and heads, and a record's are not those of a problem nearby. Where these would
/// run in uneven waves, which those it was measured with did not, the heuristic's.
pub fn carried_over(config: &Config, from: &Problem, to: &Problem, device: &Device) -> Config {
    let is_even = |problem: &Problem| runs_evenly(problem, config, device);
    if waits_for_memory(to, config) && is_even(from) && !is_even(to) {
        return heuristic(to, device);
    }
    let blocks = |problem: &Problem| unsplit_blocks(problem, config).max(1.0);
    let most = worthwhile_splits(to, config) as f64;
    let wanted = (f64::from(config.get("num_splits")) * blocks(from) / blocks(to)).clamp(1.0, most);
    let off = |splits: u32| (f64::from(splits) / wanted).ln().abs();
    let splits = SPLITS.iter().copied().filter(|splits| f64::from(*splits) <= most);
    let nearest = splits.min_by(|a, b| off(*a).total_cmp(&off(*b)));
    config.clone().with("num_splits", nearest.unwrap_or(1))
}

fn unsplit_blocks(problem: &Problem, config: &Config) -> f64 {
    let tiles = (problem.packed_rows() as f64 / f64::from(config.get("block_m").max(1))).ceil();
    tiles * (problem.batch_size * problem.num_heads_kv) as f64
}

/// The share of the device that has something to do, in the mean over the waves of blocks of threads: up to 1. An SM has
/// enough to do with as many blocks as cover memory's latency, though it holds more.
fn balance(problem: &Problem, config: &Config, num_splits: u32, device: &Device) -> f64 {
    let blocks = unsplit_blocks(problem, config) * f64::from(num_splits);
    let enough = (f64::from(ENOUGH_IN_FLIGHT) / bytes_in_flight(problem, config)).ceil();
    let places = f64::from(device.sm_count) * enough.clamp(1.0, f64::from(config.get("ctas_per_sm").max(1)));
    blocks / ((blocks / places).ceil() * places).max(1.0)
}

/// Packed rows of one tile, whose products are short beside the copies.
const LEAN_ROWS: i64 = 16;

/// Whether nothing but the order and number of TMA's copies decides the rate.
fn waits_for_memory(problem: &Problem, config: &Config) -> bool {
    config.get("tma") != 0 && problem.packed_rows() <= LEAN_ROWS
}

/// Whether the blocks of threads of an unsplit launch all run at once, or in waves that are three quarters full in all: a few that are
/// left over share few SMs, and those are slower than the memory, which counts less the more waves there are.
fn runs_evenly(problem: &Problem, config: &Config, device: &Device) -> bool {
    let (blocks, places) =
        (unsplit_blocks(problem, config), f64::from(device.sm_count) * resident(problem, config, device));
    blocks <= places || blocks >= 0.75 * (blocks / places).ceil() * places
}

/// Whether the blocks of threads of an unsplit launch read at the memory's full rate, as two on most SMs do with 16 KB in flight each.
fn keeps_memory_busy(problem: &Problem, config: &Config, device: &Device) -> bool {
    let of_sm = unsplit_blocks(problem, config) / f64::from(device.sm_count);
    of_sm.min(resident(problem, config, device)) * bytes_in_flight(problem, config) >= f64::from(FULL_RATE_IN_FLIGHT)
}

/// Blocks of threads that an SM's shared memory holds; its registers may hold fewer.
fn resident(problem: &Problem, config: &Config, device: &Device) -> f64 {
    f64::from((device.smem_per_sm / (geometry::decode_smem(problem, config) + RESERVED_BYTES)).max(1))
}

/// Of a block of threads, without padding: all stages of its teams' rings but the one that is read.
fn bytes_in_flight(problem: &Problem, config: &Config) -> f64 {
    let get = |knob| f64::from(config.get(knob));
    let teams = get("num_warps") / f64::from(geometry::decode_team(config));
    let bytes_of_key = ((problem.head_dim + problem.head_dim_v) * problem.dtype.bytes() as i64) as f64;
    (teams * (get("num_stages") - 1.0) * get("block_n") * bytes_of_key).max(1.0)
}

/// Expected cost of a config, only to order candidates: the time that memory takes, longer where too little is in
/// flight to cover its latency or SMs are idle, and what splits and teams cost beside it.
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    let get = |knob| f64::from(config.get(knob));
    let team = f64::from(geometry::decode_team(config));
    let in_flight = get("ctas_per_sm") * bytes_in_flight(problem, config);
    let latency = (f64::from(ENOUGH_IN_FLIGHT) / in_flight).max(1.0);
    let few_warps = (8.0 / (get("num_warps") * get("ctas_per_sm")) - 1.0).max(0.0);
    let re_read = (problem.packed_rows() as f64 / get("block_m")).ceil() - 1.0;
    let idle_rows = get("block_m") / problem.packed_rows().max(16) as f64 - 1.0;
    let splits = (get("num_splits") / worthwhile_splits(problem, config) as f64 - 1.0).max(0.0);
    let share = balance(problem, config, config.get("num_splits"), device).max(1e-3);
    latency / share
        + 0.1 * few_warps
        + 0.3 * re_read
        + 0.05 * idle_rows.max(0.0)
        + 0.02 * (team - 1.0)
        + 0.2 * splits
        + 0.001 * get("num_splits")
        + if takes_tma(problem, config, device) { 0.1 * (1.0 - get("tma")) } else { 0.0 }
}

/// Bytes in flight on an SM that cover the latency of device memory: an H200's 4.8 TB/s for two thirds of a microsecond, over 132 SMs.
const ENOUGH_IN_FLIGHT: u32 = 24 << 10;
/// With which it reads at its full rate: an H200 does with 31 KB, and with 16 KB at 0.77 of it (DESIGN.md, Decoding).
const FULL_RATE_IN_FLIGHT: u32 = 30 << 10;

#[cfg(test)]
mod tests {
    use super::super::{check, families};
    use super::*;
    use crate::config::Family::{Decode, Sm90};
    use crate::problem::{Causal, Dtype, Features, MAX_SPLITS, Pass};

    fn devices() -> [Device; 4] {
        [(8, 0), (8, 6), (9, 0), (12, 0)].map(|(major, minor)| Device::typical(Arch::Sm(major, minor)).unwrap())
    }

    fn problem(batch_size: i64, group_size: i64, seqlen_q: i64, seqlen_k: i64, head_dim: i64) -> Problem {
        Problem {
            num_heads_kv: 8,
            seqlen_k,
            causal: Causal::BottomRight,
            layout: Layout::widest(Dtype::Bf16, [head_dim]),
            ..Problem::dense(Pass::Forward, Dtype::Bf16, batch_size, 8 * group_size, seqlen_q, head_dim)
        }
    }

    #[test]
    fn the_heuristic_fits_every_head_dim_on_every_device() {
        for device in devices() {
            let widths = |d| [(d, d), (d, 512), (d, 1), (d, 513 - d), (d, 16), (d, 80), (d, 256)];
            for (head_dim, head_dim_v) in (1..=512).flat_map(widths) {
                for (group_size, seqlen_q) in [(1, 1), (8, 1), (4, 8), (1, 33), (64, 1)] {
                    let paged = [None, Some(5), Some(16)].map(|paged| Features { paged, ..Features::NONE });
                    for features in paged.into_iter().chain([Features { softcap: true, ..Features::NONE }]) {
                        let plain = problem(3, group_size, seqlen_q, 5000, head_dim);
                        let layout = Layout::widest(Dtype::Bf16, [head_dim, head_dim_v]);
                        let problem = Problem { head_dim_v, layout, features, ..plain };
                        let config = heuristic(&problem, &device);
                        assert_eq!(check(&problem, &config, &device), Ok(()), "{} {problem:?}", device.name);
                    }
                }
            }
        }
    }

    #[test]
    fn it_is_preferred_for_few_queries_over_many_keys_alone() {
        for device in devices() {
            let first = |problem: &Problem| families(problem, &device)[0];
            assert_eq!(first(&problem(1, 4, 1, 8192, 128)), Family::Decode);
            assert_eq!(first(&problem(1, 4, 16, 8192, 128)), Family::Decode);
            let others = [
                problem(1, 4, 17, 8192, 128),
                problem(1, 1, 64, 64, 128),
                problem(1, 1, 0, 64, 128),
                Problem { dropout: true, ..problem(1, 4, 1, 8192, 128) },
                Problem { pass: Pass::Backward, ..problem(1, 4, 1, 8192, 128) },
            ];
            for other in others {
                assert!(!families(&other, &device).contains(&Family::Decode), "{other:?}");
            }
        }
    }

    #[test]
    fn up_to_16_queries_are_few_though_they_fill_two_tiles() {
        let [_, _, h200, _] = devices();
        let first = |group_size, seqlen_q| families(&problem(1, group_size, seqlen_q, 8192, 128), &h200)[0];
        assert_eq!([first(8, 16), first(8, 17), first(4, 16), first(4, 17)], [Decode, Sm90, Decode, Sm90]);
        assert_eq!([first(128, 1), first(129, 1), first(1, 64), first(1, 65)], [Decode, Sm90, Decode, Sm90]);
    }

    #[test]
    fn pages_have_no_other_family_however_many_queries_there_are() {
        for device in devices() {
            for seqlen_q in [0, 1, 4096] {
                let features = Features { paged: Some(16), ..Features::NONE };
                let problem = Problem { features, ..problem(2, 4, seqlen_q, 4096, 128) };
                assert_eq!(families(&problem, &device), [Family::Decode]);
                assert_eq!(check(&problem, &heuristic(&problem, &device), &device), Ok(()));
            }
        }
    }

    #[test]
    fn splits_fill_the_device_and_stop_there() {
        let [_, _, h200, _] = devices();
        let splits = |batch_size, seqlen_k| {
            let problem = problem(batch_size, 4, 1, seqlen_k, 128);
            let config = heuristic(&problem, &h200);
            (config.get("num_splits"), balance(&problem, &config, config.get("num_splits"), &h200))
        };
        // A block of threads on nearly each of 132 SMs, which is enough; eight heads.
        assert_eq!(splits(1, 8192).0, 16);
        assert!(splits(1, 8192).1 > 0.9);
        // A batch that fills it alone is not split, and no split is without a block of keys for each warp.
        assert_eq!(splits(32, 8192).0, 1);
        assert_eq!(splits(1, 64).0, 1);
        assert!(splits(1, 1024).0 <= 8);
    }

    #[test]
    fn blocks_of_threads_run_at_once_or_in_even_waves_with_enough_in_flight() {
        let [sm80, _, h200, _] = devices();
        let tile = |device: &Device, batch_size, head_dim| {
            let problem = problem(batch_size, 4, 1, 8192, head_dim);
            let config = heuristic(&problem, device);
            (config.get("num_stages"), config.get("block_n"))
        };
        // Three of 132 SMs' blocks of 8 heads: 396 run at once, and of 512 a few would be left over.
        assert_eq!(
            [16, 32, 64, 128].map(|batch_size| tile(&h200, batch_size, 128)),
            [(2, 16), (2, 16), (3, 16), (2, 16)]
        );
        // Of four waves and 8 blocks those 8 are little; of one and 8 they are half of the time.
        let lean = problem(1, 4, 1, 8192, 128);
        let config = heuristic(&lean, &h200);
        let blocks = |batch_size| runs_evenly(&Problem { batch_size, ..lean }, &config, &h200);
        assert_eq!([49, 50, 74, 75, 99, 100, 199].map(blocks), [true, false, false, true, true, false, true]);
        // Smaller blocks of keys are enough where an SM has two blocks of threads.
        assert_eq!([16, 32].map(|batch_size| tile(&h200, batch_size, 64)), [(2, 32), (2, 16)]);
        // Rows of four tiles compute for as long as more stages take to arrive.
        let many_rows = problem(16, 4, 16, 8192, 128);
        assert_eq!(heuristic(&many_rows, &h200).get("num_stages"), 3);
        // What each thread copies is in flight for longer.
        assert_eq!([16, 64].map(|batch_size| tile(&sm80, batch_size, 128)), [(4, 16), (4, 16)]);
    }

    #[test]
    fn a_config_keeps_the_device_as_full_on_another_problem() {
        let (from, [_, _, h200, _]) = (problem(2, 4, 1, 8192, 128), devices());
        let config = heuristic(&from, &h200).with("num_splits", 16);
        let splits = |to: &Problem| carried_over(&config, &from, to, &h200).get("num_splits");
        let of = |batch_size, seqlen_k| splits(&problem(batch_size, 4, 1, seqlen_k, 128));
        assert_eq!([of(2, 8192), of(1, 8192), of(4, 8192), of(64, 8192)], [16, 32, 8, 1]);
        assert_eq!(of(2, 16384), 16, "longer keys ask for no more");
        // Of 64 sequences a few blocks of threads would be left over from the waves of those that ran at once.
        let (few, many) = (problem(16, 4, 1, 8192, 128), problem(64, 4, 1, 8192, 128));
        let measured = heuristic(&few, &h200);
        assert_eq!(carried_over(&measured, &few, &problem(32, 4, 1, 8192, 128), &h200), measured);
        assert_eq!(carried_over(&measured, &few, &many, &h200), heuristic(&many, &h200));
        let short = problem(2, 4, 1, 512, 128);
        assert_eq!(i64::from(splits(&short)), worthwhile_splits(&short, &config), "short ones have room for few");
    }

    #[test]
    fn the_knob_reaches_the_most_splits_that_there_may_be() {
        assert_eq!(SPLITS.last(), Some(&(MAX_SPLITS as u32)));
    }

    #[test]
    fn each_constraint_refuses_what_it_names() {
        let [_, _, h200, _] = devices();
        let problem = problem(1, 8, 1, 8192, 128);
        let good = heuristic(&problem, &h200);
        let broken = [
            ("whole_teams", good.clone().with("num_warps", 2).with("warps_m", 4)),
            ("whole_tiles", good.clone().with("warps_m", 2)),
            ("rows_in_use", good.clone().with("block_m", 32)),
            ("registers", good.clone().with("num_warps", 8).with("ctas_per_sm", 3)),
            ("shared_memory", good.clone().with("num_stages", 8)),
        ];
        for (name, config) in broken {
            let error = check(&problem, &config, &h200).unwrap_err();
            assert!(error.contains(&format!("breaks {name}:")), "{name}: {error}");
        }
        let short = Problem { seqlen_k: 127, ..problem };
        assert!(check(&short, &good.with("num_splits", 2), &h200).unwrap_err().contains("breaks splits_in_use:"));
    }

    #[test]
    fn tma_copies_what_it_can() {
        let [a100, _, h200, sm_120] = devices();
        let plain = problem(1, 8, 1, 8192, 128);
        let paged = |page_size| Problem { features: Features { paged: Some(page_size), ..Features::NONE }, ..plain };
        let narrow = Problem { layout: Layout::Vec4, ..plain };
        let tma = |problem: &Problem, device: &Device| heuristic(problem, device).get("tma");
        assert_eq!([tma(&plain, &a100), tma(&plain, &h200), tma(&plain, &sm_120), tma(&narrow, &h200)], [0, 1, 1, 0]);
        // Whole blocks of 16 keys, or two pages of 8 to a block; else a box would reach into another page.
        let sizes = [1, 4, 8, 12, 16, 48, 64, 100];
        assert_eq!(sizes.map(|page_size| tma(&paged(page_size), &h200)), [0, 0, 1, 0, 1, 1, 1, 0]);
        // Of many rows, where a block is of 32 keys, pages of 48 would take the smallest tile with them.
        let many = Problem { features: paged(48).features, ..problem(2, 64, 1, 8192, 128) };
        let config = heuristic(&many, &h200);
        assert_eq!(["tma", "block_m", "num_warps"].map(|knob| config.get(knob)), [0, 64, 8]);
        let refused = |problem: &Problem, config: Config| {
            let error = check(problem, &config.with("tma", 1), &h200).unwrap_err();
            assert!(error.contains("breaks tma:"), "{error}");
        };
        refused(&paged(12), heuristic(&paged(12), &h200));
        refused(&narrow, heuristic(&narrow, &h200));
        // 48 columns of V are no whole boxes.
        refused(&Problem { head_dim_v: 96, ..plain }, heuristic(&plain, &h200).with("warps_v", 2));
    }
}
