//! The three backward kernels of the sm90 family: their knobs, and their shared memory by
//! arithmetic alone.

use super::warpgroup::{BARRIER_BYTES, WARPGROUP_ROWS, registers};
use crate::device::Device;
use crate::family::knob::knobs;
use crate::family::spec::WarpgroupRegisters;
use crate::family::split_rest::{RestTiles, SplitRest};
use crate::family::tile::{BOX_COLS, TMA_ALIGNMENT_BYTES, boxed_tile_bytes, boxes};
use crate::problem::{Causal, Problem, Window};

/// The values of `split_waves`.
pub const SPLIT_WAVES: [u32; 9] = [0, 1, 2, 3, 4, 6, 8, 12, 16];

/// The values of `splits_rest`.
pub const SPLITS_REST: [u32; 6] = [0, 2, 3, 4, 6, 8];

knobs! {
    pub struct BackwardKnobs of Sm90 {
        block_m: "query rows of a block" in [16, 32, 48, 64, 80, 96, 112, 128],
        block_n: "keys of a tile" in [64, 96, 128],
        direct_dq or 0: "tiles of keys that a head has and one CTA does, or past head dim 128 a pair, which writes dQ; 0: any, which add to dQ in fp32" in [0, 1, 2, 3, 4],
        num_stages: "blocks of Q and dO in flight; past head dim 128 of dO alone" in [1, 2, 3],
        kv_stages: "tiles of K and V in flight" in [1, 2],
        group_mb: "MB of Q, dO and fp32 dQ in a group of heads that tiles walk together, 0: one group" in [0, 1, 4, 8, 16, 32],
        sink_softmax: "1: the compiler may sink the exponentials below the wait for dP" in [0, 1],
        v_regs: "dP's k16 steps that take V from registers" in [0, 2, 4],
        split_waves or 0: "waves of tiles up to which tiles share a walk through the queries, 0: none do" in SPLIT_WAVES,
        splits_rest or 0: "tiles that share the walk of each tile past whole waves, where the others do whole ones; 0: all tiles are alike in this" in SPLITS_REST,
    }
}

/// Consumer warpgroups of the narrow and the middle kernel, which share the keys of a tile.
pub const CONSUMERS: u32 = 2;

/// The kernel of a problem, by the larger head dim, which says how many registers dK and dV need.
/// Past head dim 192, tiles of 64 keys are the middle kernel's. From 136 to 192, tiles of 128 keys
/// are the wide kernel's (`BackwardKnobs::kernel`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardKernel {
    /// Up to 128: a warpgroup holds 64 keys.
    Narrow,
    /// 136 to 192, and beyond in tiles of 64 keys: a warpgroup holds fewer, transposed.
    Middle,
    /// 200 to 256, and from 136 on in tiles of 128 keys: two CTAs share a tile, 64 keys each. Two
    /// warpgroups hold halves of the columns of dV, and a third holds dK and computes dQ.
    Wide,
}

impl BackwardKernel {
    pub fn of(problem: &Problem) -> BackwardKernel {
        match boxes(problem.head_dim.max(problem.head_dim_v)) {
            ..=2 => BackwardKernel::Narrow,
            3 => BackwardKernel::Middle,
            _ => BackwardKernel::Wide,
        }
    }

    pub fn consumers(self) -> u32 {
        if self == BackwardKernel::Wide { 3 } else { CONSUMERS }
    }

    /// In the wide kernel the last consumer holds dK and dQ, the others dV's halves and a block of
    /// scores.
    pub fn registers(self) -> WarpgroupRegisters {
        match self {
            BackwardKernel::Wide => WarpgroupRegisters { producer: 24, consumer: 144, last_consumer: 200 },
            BackwardKernel::Narrow | BackwardKernel::Middle => registers(CONSUMERS),
        }
    }
}

pub fn is_narrow(problem: &Problem) -> bool {
    BackwardKernel::of(problem) == BackwardKernel::Narrow
}

/// The tiles of a head's keys if a CTA that does all of them may write dQ: every block of query
/// rows meets the first one, and their number is known, so without varlen. None if it may not.
///
/// A block meets the first tile if its last row sees the first key. Its first rows may see none.
pub fn direct_tiles(problem: &Problem, block_n: u32) -> Option<u32> {
    let features = &problem.features;
    let meet_the_first = problem.right_shift().is_none_or(|shift| shift > -LEAST_ROWS)
        && features.window == Window::default()
        && features.varlen.is_none()
        && features.block_mask.is_none();
    let tiles = (problem.seqlen_k as u64).div_ceil(block_n.into());
    let serves_more = matches!(problem.head_dim.max(problem.head_dim_v), (..=64) | 97..=128);
    let most = if serves_more && problem.causal != Causal::None { MOST_CAUSAL } else { 2 };
    (meet_the_first && (1..=most).contains(&tiles)).then_some(tiles as u32)
}

/// The most causal tiles of a head that one CTA does, at head dims up to 64 and from 97 to 128.
/// Elsewhere it does two. On an H200, four took 1.12 times as long for 32 x 16 heads of 512 tokens
/// at head dim 128 without the mask, and 1.16 times for 65 x 32 heads of 490 at 72 with it
/// (docs/tuning/sm90-backward.md).
const MOST_CAUSAL: u64 = 4;

/// Keys of a tile of the middle kernel past head dim 192.
pub const FEW_KEYS: u32 = 64;

/// Keys of a tile of the wide kernel.
pub const PAIR_KEYS: u32 = 128;

/// Rows of the least block: the first value of `block_m`.
const LEAST_ROWS: i64 = 16;

/// Columns of a half of the columns of a wide tile, a consumer's of dV or a CTA's of dQ: whole
/// boxes.
pub const fn half_cols(dim: i64) -> u32 {
    boxes(dim).div_ceil(2) * BOX_COLS
}

impl BackwardKnobs {
    /// The kernel that the config runs.
    pub fn kernel(&self, problem: &Problem) -> BackwardKernel {
        match BackwardKernel::of(problem) {
            BackwardKernel::Wide if self.block_n <= FEW_KEYS => BackwardKernel::Middle,
            BackwardKernel::Middle if self.block_n == PAIR_KEYS => BackwardKernel::Wide,
            kernel => kernel,
        }
    }

    /// Which tiles are split where others are whole.
    pub fn split_rest(&self, problem: &Problem) -> Option<SplitRest> {
        let sms_of_tile = if self.kernel(problem) == BackwardKernel::Wide { 2 } else { 1 };
        (self.splits_rest > 0).then_some(SplitRest { tile_rows: self.block_n, ctas_per_sm: 1, sms_of_tile })
    }

    /// How many tiles those are; None where all are alike in this.
    pub fn rest_tiles(&self, problem: &Problem, device: &Device) -> Option<RestTiles> {
        self.split_rest(problem)?.tiles(problem, device.sm_count, self.splits_rest)
    }

    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let tiles = match self.kernel(problem) {
            BackwardKernel::Narrow => self.narrow_bytes(problem),
            BackwardKernel::Middle => self.middle_bytes(problem),
            BackwardKernel::Wide => self.wide_bytes(problem),
        };
        TMA_ALIGNMENT_BYTES + tiles + BARRIER_BYTES
    }

    fn narrow_bytes(&self, problem: &Problem) -> u32 {
        let of_rows = |rows| boxed_tile_bytes(rows, problem.head_dim) + boxed_tile_bytes(rows, problem.head_dim_v);
        let statistics = self.block_m * 8;
        let loaded = self.kv_stages * of_rows(self.block_n) + self.num_stages * (of_rows(self.block_m) + statistics);
        loaded + 2 * boxed_tile_bytes(self.block_m, i64::from(self.block_n))
    }

    fn middle_bytes(&self, problem: &Problem) -> u32 {
        let k_and_v =
            boxed_tile_bytes(self.block_n, problem.head_dim) + boxed_tile_bytes(self.block_n, problem.head_dim_v);
        // P and two blocks of dS, each a box of either consumer's keys; and of dQ a box on its way
        // out, up to head dim 192.
        let weights = 3 * CONSUMERS * boxed_tile_bytes(self.block_m, i64::from(BOX_COLS));
        let dq = if boxes(problem.head_dim) > 3 { 0 } else { CONSUMERS * self.block_m * BOX_COLS * 4 };
        k_and_v + self.q_and_dout_bytes(problem) + weights + dq
    }

    fn wide_bytes(&self, problem: &Problem) -> u32 {
        let (dim, dim_v, keys) = (problem.head_dim, problem.head_dim_v, WARPGROUP_ROWS);
        let k_and_v = boxed_tile_bytes(keys, dim) + boxed_tile_bytes(keys, dim_v);
        let other_k = boxed_tile_bytes(keys, i64::from(half_cols(dim)));
        // Two blocks each of P, whose place dS takes, and of the other CTA's dS.
        let weights = 4 * boxed_tile_bytes(self.block_m, i64::from(keys));
        k_and_v + other_k + self.q_and_dout_bytes(problem) + weights
    }

    /// Two blocks of Q with their LSE and `num_stages` of dO with their delta, which the kernels
    /// past head dim 128 have in flight.
    fn q_and_dout_bytes(&self, problem: &Problem) -> u32 {
        let of_block = |dim| boxed_tile_bytes(self.block_m, dim) + self.block_m * 4;
        2 * of_block(problem.head_dim) + self.num_stages * of_block(problem.head_dim_v)
    }
}
