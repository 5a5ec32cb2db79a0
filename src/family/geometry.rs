//! What a (Problem, Config) launches and what it costs, by arithmetic alone: kernels, threads, shared memory, grids.
//!
//! `check` discards by it what cannot fit, `launch` launches by it, and each template asserts the shared memory
//! that it is given here (`smem_bytes`), or takes its size from here (`threads`, `rows`), so the two sides cannot drift apart.

use crate::config::{Config, Family};
use crate::problem::{Dtype, Features, Pass, Problem};

/// One kernel of a pass, in launch order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// File under `templates/`, without `.cu.tera`.
    pub template: &'static str,
    /// The `extern "C"` name.
    pub entry: &'static str,
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub smem_bytes: u32,
    /// Whether this is the kernel whose registers and spills stand for the pass.
    pub is_main: bool,
    /// Query rows or keys of one block of threads, along the axis that `grid` divides; of `Heads` those that a warp takes at a time.
    pub rows: u32,
    axis: Axis,
    schedule: Schedule,
    pub arguments: Arguments,
    /// How the kernel shares out the launch's registers among its warpgroups, where it does.
    pub registers: Option<WarpgroupRegisters>,
}

/// Registers of a thread after `setmaxnreg`, of the one warpgroup that loads and of each that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpgroupRegisters {
    pub producer: u32,
    pub consumer: u32,
}

/// What a grid's first dimension counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    /// Tiles of query rows x batch x query heads.
    Queries,
    /// Tiles of keys x batch x key-value heads.
    Keys,
    /// Query heads.
    Heads,
    /// Tiles of packed query rows x batch x key-value heads; the second dimension counts splits of the keys.
    PackedRows,
}

/// Which block of threads does which tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Schedule {
    /// One tile each.
    OneTile,
    /// Tiles in turn: one block per SM for the whole launch.
    Persistent,
    /// The same by clusters of two blocks, which do a tile together.
    PersistentPairs,
}

/// What a kernel takes by value, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arguments {
    /// KernelParams.
    Params,
    /// KernelParams, and the tensor maps of K and V with boxes of so many keys.
    ParamsKeyMaps { box_rows: u32 },
    /// KernelParams, the tensor maps of Q, K, V and O, in the backward pass dO, and the address of a tile counter: NULL
    /// unless it `is_dynamic`.
    ParamsMapsCounter { boxes: Boxes, is_dynamic: bool },
}

/// The boxes in which TMA copies a kernel's tiles, by their rows; their columns are those of the swizzle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// Of Q, O and dO.
    pub query_rows: u32,
    /// Of K and V.
    pub key_rows: u32,
}

/// The small kernels' tiles; their templates take threads and rows from here.
const DELTA_THREADS: u32 = 128;
const DELTA_ROWS: u32 = 64;
const CONVERT_ROWS: u32 = 32;
const SINKS_THREADS: u32 = 1024;
const SINKS_ROWS: u32 = 256;
/// Merges partial states, a row with each block of threads.
pub const COMBINE: &str = "combine";
const COMBINE_THREADS: u32 = 128;

/// The kernels of a pass in launch order.
pub fn kernels(problem: &Problem, config: &Config) -> Vec<KernelSpec> {
    match (config.family, problem.pass) {
        (Family::Cpu, _) => Vec::new(),
        (Family::Sm80, Pass::Forward) => vec![KernelSpec {
            template: "sm80_forward",
            entry: "flashtune_sm80_forward",
            threads: config.get("num_warps") * 32,
            smem_bytes: sm80_forward_smem(problem, config),
            is_main: true,
            rows: config.get("block_m"),
            axis: Axis::Queries,
            schedule: Schedule::OneTile,
            arguments: Arguments::Params,
            registers: None,
        }],
        (Family::Sm90, Pass::Forward) => vec![KernelSpec {
            template: "sm90_forward",
            entry: "flashtune_sm90_forward",
            threads: 128 * (config.get("block_m") / SM90_WARPGROUP_ROWS + 1),
            smem_bytes: sm90_forward_smem(problem, config),
            is_main: true,
            rows: config.get("block_m"),
            axis: Axis::Queries,
            schedule: Schedule::Persistent,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: SM90_WARPGROUP_ROWS, key_rows: config.get("block_n") },
                is_dynamic: tiles_differ(problem),
            },
            registers: Some(sm90_registers(config.get("block_m"))),
        }],
        // No config of this family is for a backward pass: `check` refuses it.
        (Family::Decode, Pass::Backward) => Vec::new(),
        (Family::Decode, Pass::Forward) => decode(problem, config),
        (Family::Sm80, Pass::Backward) => backward(
            problem,
            config,
            KernelSpec {
                template: "sm80_backward",
                entry: "flashtune_sm80_backward",
                threads: config.get("num_warps") * 32,
                smem_bytes: sm80_backward_smem(problem, config),
                is_main: true,
                rows: config.get("block_n"),
                axis: Axis::Keys,
                schedule: Schedule::OneTile,
                arguments: Arguments::Params,
                registers: None,
            },
        ),
        (Family::Sm90, Pass::Backward) => {
            let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
            let (template, smem_bytes, schedule, key_rows) = match sm90_backward(problem) {
                Sm90Backward::Narrow => {
                    ("sm90_backward", sm90_backward_smem(problem, config), Schedule::Persistent, block_n)
                }
                Sm90Backward::Middle => {
                    let smem_bytes = sm90_backward_middle_smem(problem, config);
                    ("sm90_backward_middle", smem_bytes, Schedule::Persistent, block_n)
                }
                Sm90Backward::Wide => {
                    let smem_bytes = sm90_backward_wide_smem(problem, config);
                    ("sm90_backward_wide", smem_bytes, Schedule::PersistentPairs, SM90_WARPGROUP_ROWS)
                }
            };
            let main = KernelSpec {
                template,
                entry: "flashtune_sm90_backward",
                threads: 128 * (SM90_KEY_CONSUMERS + 1),
                smem_bytes,
                is_main: true,
                rows: block_n,
                axis: Axis::Keys,
                schedule,
                arguments: Arguments::ParamsMapsCounter {
                    boxes: Boxes { query_rows: block_m, key_rows },
                    // Deterministic tiles are drawn from the workspace.
                    is_dynamic: tiles_differ(problem) && !problem.deterministic,
                },
                registers: Some(sm90_backward_registers()),
            };
            backward(problem, config, main)
        }
    }
}

/// The kernel that writes the gradients of attention sinks, which a call need not want.
pub const SINKS: &str = "backward_sinks";
/// The kernel of the decode family and, where it may leave partial states, the one that merges them.
fn decode(problem: &Problem, config: &Config) -> Vec<KernelSpec> {
    let main = KernelSpec {
        template: "decode",
        entry: "flashtune_decode",
        threads: config.get("num_warps") * 32,
        smem_bytes: decode_smem(problem, config),
        is_main: true,
        rows: config.get("block_m"),
        axis: Axis::PackedRows,
        schedule: Schedule::OneTile,
        arguments: match config.get("tma") {
            0 => Arguments::Params,
            _ => Arguments::ParamsKeyMaps { box_rows: decode_box_rows(problem, config) },
        },
        registers: None,
    };
    let combine = KernelSpec {
        template: COMBINE,
        entry: "flashtune_combine",
        threads: COMBINE_THREADS,
        smem_bytes: 0,
        is_main: false,
        rows: 1,
        axis: Axis::Queries,
        arguments: Arguments::Params,
        ..main
    };
    [main].into_iter().chain((config.get("num_splits") > 1).then_some(combine)).collect()
}

/// Into how many splits a launch cuts the keys: the config's number, as far as the problem's workspace has room for them. A config
/// is shared by problems that differ a little, so the two may.
pub fn num_splits(problem: &Problem, config: &Config) -> u32 {
    config.get("num_splits").min(problem.max_splits() as u32).max(1)
}

/// The backward pass's kernels: before and after the main one, those that every family shares.
fn backward(problem: &Problem, config: &Config, main: KernelSpec) -> Vec<KernelSpec> {
    let of_rows = |template, entry, threads, rows, smem_bytes| KernelSpec {
        template,
        entry,
        threads,
        smem_bytes,
        is_main: false,
        rows,
        axis: Axis::Queries,
        schedule: Schedule::OneTile,
        arguments: Arguments::Params,
        registers: None,
    };
    // Those of the dQ accumulator's tiles, 16 or 8 each.
    let columns = if dq_transposed(problem, config.family) { problem.workspace_cols() } else { problem.head_dim };
    let mut kernels = vec![
        of_rows("backward_delta", "flashtune_backward_delta", DELTA_THREADS, DELTA_ROWS, 0),
        main,
        of_rows(
            "backward_convert",
            "flashtune_backward_convert",
            CONVERT_ROWS / 16 * 32,
            CONVERT_ROWS,
            tile_bytes(problem.dtype, CONVERT_ROWS, columns),
        ),
    ];
    if problem.features.sinks {
        let of_rows = of_rows(SINKS, "flashtune_backward_sinks", SINKS_THREADS, SINKS_ROWS, 0);
        kernels.push(KernelSpec { axis: Axis::Heads, ..of_rows });
    }
    kernels
}

/// Whether a family's backward pass computes dQ's transpose, which orders the accumulator (device/layout/dq_accum.cuh).
pub fn dq_transposed(problem: &Problem, family: Family) -> bool {
    family == Family::Sm90 && sm90_backward(problem) != Sm90Backward::Middle
}

/// The launch grid of one of `kernels`, with the keys in so many splits, on a GPU of so many SMs; a dimension is 0 where
/// there is nothing to launch.
pub fn grid(spec: &KernelSpec, problem: &Problem, config: &Config, num_splits: u32, sm_count: u32) -> [u32; 3] {
    let blocks = match spec.schedule {
        Schedule::OneTile => tiles(spec, problem),
        Schedule::Persistent => tiles(spec, problem).min(u64::from(sm_count)),
        Schedule::PersistentPairs => 2 * tiles(spec, problem).min(u64::from(sm_count / 2)),
    };
    let slices = match (spec.axis, config.get("block_dim_v")) {
        (Axis::PackedRows, _) => num_splits,
        (Axis::Queries, slice) if spec.is_main && slice > 0 => (problem.head_dim_v as u32).div_ceil(slice),
        _ => 1,
    };
    // More than 2^31 - 1 blocks is more than a grid holds: a launch refuses it, so this does not truncate.
    [blocks.min(i32::MAX as u64) as u32, slices, 1]
}

/// Tiles of a kernel, over all heads.
fn tiles(spec: &KernelSpec, problem: &Problem) -> u64 {
    let (length, heads) = match spec.axis {
        Axis::Queries => (problem.seqlen_q, problem.batch_size * problem.num_heads_q),
        Axis::Keys => (problem.seqlen_k, problem.batch_size * problem.num_heads_kv),
        Axis::Heads => return problem.num_heads_q as u64,
        Axis::PackedRows => (problem.packed_rows(), problem.batch_size * problem.num_heads_kv),
    };
    (length as u64).div_ceil(u64::from(spec.rows)) * heads as u64
}

/// Whether the tiles of every kernel of the pass fit what a launch allows (2^31 - 1 blocks in x) and kernels count in.
pub fn grids_fit(problem: &Problem, config: &Config) -> bool {
    kernels(problem, config).iter().all(|spec| grid_fits(spec, problem))
}

/// The same of one kernel.
pub fn grid_fits(spec: &KernelSpec, problem: &Problem) -> bool {
    tiles(spec, problem) < i32::MAX as u64
}

/// Columns of a shared tile: the head dim up to a multiple of 8 (device/layout/padded_tile.cuh).
const fn tile_cols(dim: i64) -> u32 {
    (dim as u32).div_ceil(8) * 8
}

/// Bytes of a shared tile: an odd number of 16-byte chunks a row (device/layout/padded_tile.cuh).
pub const fn tile_bytes(dtype: Dtype, rows: u32, dim: i64) -> u32 {
    rows * ((tile_cols(dim) * dtype.bytes() as u32 / 16) | 1) * 16
}

/// Columns of V that one block of threads does.
fn forward_dim_v(problem: &Problem, config: &Config) -> i64 {
    match config.get("block_dim_v") as i64 {
        0 => problem.head_dim_v,
        slice => slice.min(problem.head_dim_v),
    }
}

fn sm80_forward_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
    let dim_v = forward_dim_v(problem, config);
    let tile = |rows, dim| tile_bytes(problem.dtype, rows, dim);
    let q = tile(block_m, problem.head_dim).max(tile(block_m, dim_v));
    q + config.get("num_stages") * (tile(block_n, problem.head_dim) + tile(block_n, dim_v))
}

fn sm80_backward_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    let tile = |rows, dim| tile_bytes(problem.dtype, rows, dim);
    let weights = 2 * tile(block_m, block_n as i64);
    let of_rows = |rows| match config.get("num_stages") {
        0 => tile(rows, dim.max(dim_v)),
        _ => tile(rows, dim) + tile(rows, dim_v),
    };
    let stage = of_rows(block_m) + block_m * 8;
    of_rows(block_n) + weights + config.get("num_stages").max(1) * stage + 256
}

/// Columns of V that a decode team's tile has: whole 8-column products for each of the warps that share them.
pub fn decode_cols(problem: &Problem, config: &Config) -> u32 {
    let warps_v = config.get("warps_v").max(1);
    tile_cols((problem.head_dim_v as u32).div_ceil(warps_v).into()) * warps_v
}

/// Warps that share a ring of tiles.
pub fn decode_team(config: &Config) -> u32 {
    (config.get("warps_m") * config.get("warps_v")).max(1)
}

/// Bytes of one key block of a decode team's ring, K and V.
pub fn decode_stage_bytes(problem: &Problem, config: &Config) -> u32 {
    let tile = |dim| match config.get("tma") {
        0 => tile_bytes(problem.dtype, config.get("block_n"), dim),
        _ => boxed_tile_bytes(config.get("block_n"), dim),
    };
    tile(problem.head_dim) + tile(decode_cols(problem, config).into())
}

/// Keys that one copy of TMA takes while decoding: a team's block or, where a page is smaller, a page.
pub fn decode_box_rows(problem: &Problem, config: &Config) -> u32 {
    let block_n = config.get("block_n");
    problem.features.paged.map_or(block_n, |page_size| page_size.min(i64::from(block_n)) as u32)
}

/// Shared memory of a block of threads of the decode family.
pub fn decode_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, teams) = (config.get("block_m"), config.get("num_warps") / decode_team(config));
    let slots = teams * config.get("num_stages");
    let rings = slots * decode_stage_bytes(problem, config);
    // A barrier for each slot, behind all else.
    let (alignment, barriers) = if config.get("tma") == 0 { (0, 0) } else { (TMA_ALIGNMENT_BYTES, slots * 8) };
    // The teams' O, in place of the rings when they are done with: a stride of 8 words past a multiple of 32, and two more a row.
    let merged = teams * block_m * (decode_cols(problem, config).div_ceil(32) * 32 + 8 + 2) * 4;
    (alignment + rings + tile_bytes(problem.dtype, block_m, problem.head_dim)).max(merged) + barriers
}

/// What the launch's registers come to when they are shared out anew: in steps of 8, at most 240 where a product must not
/// be serialised, and the producer gets what is left (of an SM's 65536, 168, 128 and 96 a thread with 2, 3 and 4 consumers).
pub fn sm90_registers(rows: u32) -> WarpgroupRegisters {
    let (producer, consumer) = match rows / SM90_WARPGROUP_ROWS {
        ..=1 => (56, 240),
        2 => (24, 240),
        3 => (32, 160),
        _ => (32, 112),
    };
    WarpgroupRegisters { producer, consumer }
}

/// The same of the backward pass.
pub fn sm90_backward_registers() -> WarpgroupRegisters {
    sm90_registers(SM90_KEY_CONSUMERS * SM90_WARPGROUP_ROWS)
}

/// Rows of a consumer warpgroup: of queries forward, and of keys backward but in the middle kernel. The M of `wgmma`.
const SM90_WARPGROUP_ROWS: u32 = 64;
/// What TMA's 128-byte swizzle may lose at the start of shared memory, which is only 16-byte aligned.
const TMA_ALIGNMENT_BYTES: u32 = 1024;
const SM90_BARRIER_BYTES: u32 = 1024;
/// Consumer warpgroups of the backward pass.
const SM90_KEY_CONSUMERS: u32 = 2;

/// Whether a pass's tiles are not all equally long, so that who is done takes the next one.
pub fn tiles_differ(problem: &Problem) -> bool {
    let Features { varlen, block_mask, .. } = problem.features;
    problem.right_shift().is_some() || problem.left_shift().is_some() || varlen.is_some() || block_mask.is_some()
}

/// Columns of a box, in which TMA writes tiles of 16-bit elements.
pub const BOX_COLS: u32 = 64;

/// Bytes of a tile of 16-bit elements as TMA writes it: boxes side by side.
pub const fn boxed_tile_bytes(rows: u32, dim: i64) -> u32 {
    rows * boxes(dim) * BOX_COLS * 2
}

fn sm90_forward_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
    let q = config.get("q_stages") * boxed_tile_bytes(block_m, problem.head_dim);
    let k = config.get("k_stages") * boxed_tile_bytes(block_n, problem.head_dim);
    let v = config.get("v_stages") * boxed_tile_bytes(block_n, problem.head_dim_v);
    TMA_ALIGNMENT_BYTES + q + k + v + SM90_BARRIER_BYTES
}

/// The backward kernels of the sm90 family, by the larger head dim, which says how many registers dK and dV need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sm90Backward {
    /// Up to 128: a warpgroup holds 64 keys.
    Narrow,
    /// 136 to 192: a warpgroup holds fewer, transposed.
    Middle,
    /// 200 to 256: two warpgroups hold halves of the columns of 64 keys, and two blocks of threads share a tile.
    Wide,
}

pub fn sm90_backward(problem: &Problem) -> Sm90Backward {
    match boxes(problem.head_dim.max(problem.head_dim_v)) {
        ..=2 => Sm90Backward::Narrow,
        3 => Sm90Backward::Middle,
        _ => Sm90Backward::Wide,
    }
}

/// Boxes of a row of so many columns.
pub const fn boxes(dim: i64) -> u32 {
    (dim as u32).div_ceil(BOX_COLS)
}

/// Columns of a half of the columns of a wide backward tile, one consumer's: whole boxes.
pub const fn sm90_half_cols(dim: i64) -> u32 {
    boxes(dim).div_ceil(2) * BOX_COLS
}

fn sm90_backward_wide_smem(problem: &Problem, config: &Config) -> u32 {
    let block_m = config.get("block_m");
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    let keys = SM90_WARPGROUP_ROWS;
    let k_and_v = boxed_tile_bytes(keys, dim) + boxed_tile_bytes(keys, dim_v);
    let other_k = boxed_tile_bytes(keys, i64::from(sm90_half_cols(dim)));
    // P, two blocks each of dS and the other block's dS, and with dropout P again.
    let weights = (5 + u32::from(problem.dropout)) * boxed_tile_bytes(block_m, i64::from(keys));
    TMA_ALIGNMENT_BYTES + k_and_v + other_k + q_and_dout_bytes(problem, config) + weights + SM90_BARRIER_BYTES
}

fn sm90_backward_middle_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
    let k_and_v = boxed_tile_bytes(block_n, problem.head_dim) + boxed_tile_bytes(block_n, problem.head_dim_v);
    // P and two blocks of dS, each a box of either consumer's keys; and of dQ a box on its way out.
    let weights = 3 * SM90_KEY_CONSUMERS * boxed_tile_bytes(block_m, i64::from(BOX_COLS));
    let dq = SM90_KEY_CONSUMERS * block_m * BOX_COLS * 4;
    TMA_ALIGNMENT_BYTES + k_and_v + q_and_dout_bytes(problem, config) + weights + dq + SM90_BARRIER_BYTES
}

/// Two blocks of Q with their LSE and `num_stages` of dO with their delta, which is what kernels past head dim 128 have in flight.
fn q_and_dout_bytes(problem: &Problem, config: &Config) -> u32 {
    let (block_m, num_stages) = (config.get("block_m"), config.get("num_stages"));
    let of_block = |dim| boxed_tile_bytes(block_m, dim) + block_m * 4;
    2 * of_block(problem.head_dim) + num_stages * of_block(problem.head_dim_v)
}

fn sm90_backward_smem(problem: &Problem, config: &Config) -> u32 {
    let (block_m, block_n) = (config.get("block_m"), config.get("block_n"));
    let of_rows = |rows| boxed_tile_bytes(rows, problem.head_dim) + boxed_tile_bytes(rows, problem.head_dim_v);
    let statistics = block_m * 8;
    let loaded =
        config.get("kv_stages") * of_rows(block_n) + config.get("num_stages") * (of_rows(block_m) + statistics);
    TMA_ALIGNMENT_BYTES + loaded + 2 * boxed_tile_bytes(block_m, i64::from(block_n)) + SM90_BARRIER_BYTES
}
