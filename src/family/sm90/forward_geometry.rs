//! The knobs of sm90's forward pass, and its shared memory and registers by arithmetic alone.

use super::warpgroup::{
    BARRIER_BYTES, WARPGROUP_ROWS, registers, registers_of_conversion_in_place, registers_of_eight_bits,
    registers_of_pages, registers_of_sharing,
};
use crate::family::knob::knobs;
use crate::family::spec::WarpgroupRegisters;
use crate::family::split_rest::SplitRest;
use crate::family::tile::{BOX_COLS, TMA_ALIGNMENT_BYTES, boxed_tile_bytes, boxes};
use crate::problem::{Features, Problem};

/// Tiles that a producer passes on at a time (`TileSlots` in device/schedule/tile_slots.cuh).
const TILE_SLOTS: u32 = 4;

/// Rows after which the pattern of the 128-byte swizzle repeats: a box begins at such a row.
const SWIZZLE_ROWS: i64 = 8;

/// Shared memory of a CTA on sm_90 (CUDA Programming Guide, "Compute Capabilities").
pub const MOST_SHARED_BYTES: u32 = 227 << 10;
const WARPGROUP_THREADS: u32 = 128;

pub const SPLITS: [u32; 12] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32];

/// The value of `num_splits` of a batch-invariant problem whose keys are split into runs of
/// segments. Each launch has its own number of runs (`Problem::runs_of_segments`), and its
/// workspace has room for the states of all segments.
pub const SEGMENT_SPLITS: u32 = 32;

/// The numbers of splits that the workspace of a problem has room for.
pub fn usable_splits(problem: &Problem) -> &'static [u32] {
    let most = problem.max_splits();
    &SPLITS[..SPLITS.partition_point(|splits| i64::from(*splits) <= most)]
}

knobs! {
    pub struct ForwardKnobs of Sm90 {
        block_m: "query rows of a tile, 64 for each consumer warpgroup" in [64, 128, 192, 256],
        block_n: "keys of a K or V block" in [48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224],
        k_stages: "K blocks in flight" in [1, 2, 3, 4, 5, 6],
        v_stages: "V blocks in flight" in [1, 2, 3, 4, 5, 6],
        q_stages: "Q tiles in flight" in [1, 2],
        ctas_per_sm or 1: "CTAs that share an SM" in [1, 2, 3],
        tma_store: "1: O is stored by TMA, from Q's slot or, with one slot, from a buffer, 0: from registers" in [0, 1],
        stale_max: "1: blocks without a mask are not searched for a row maximum, 0: all blocks are" in [0, 1],
        group_mb: "MB of K and V in a group of heads that tiles walk together, 0: one group" in [0, 1, 4, 8, 16, 32],
        num_splits or 1: "splits of a tile's keys, each for its own CTA" in SPLITS,
        splits_rest or 0: "1: only tiles past whole waves are split or, with a mask, the longest ones, 0: all are" in [0, 1],
        decode_rows or 0: "packed query rows of the sequences of a varlen batch that a decode kernel takes at most, 0: none" in [0, 16, 32, 64],
        widens or 0: "1: a widening kernel first copies 8-bit or int4 K and V to the workspace in q's type" in [0, 1],
        decode_splits or 0: "1: the decode kernel of decode_rows may split keys, where num_splits is 1; 0: it does not" in [0, 1],
    }
}

impl ForwardKnobs {
    pub fn consumers(&self) -> u32 {
        self.block_m / WARPGROUP_ROWS
    }

    /// The problem as the main kernel sees it.
    pub fn main_problem(&self, problem: &Problem) -> Problem {
        if self.widens == 1 { problem.widened() } else { *problem }
    }

    /// Whether the main kernel multiplies scores by factors of single keys that lie beside K and V
    /// in the workspace.
    fn has_widened_key_scales(&self, problem: &Problem) -> bool {
        self.widens == 1 && problem.features.has_key_scales()
    }

    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let q = self.q_stages * boxed_tile_bytes(self.block_m, problem.head_dim);
        let k = self.k_stages * boxed_tile_bytes(self.block_n, problem.head_dim);
        let v = self.v_stages * boxed_tile_bytes(self.block_n, problem.head_dim_v);
        let slots = TMA_ALIGNMENT_BYTES + q + k + v + self.o_bytes(problem) + self.scale_bytes(problem) + BARRIER_BYTES;
        slots + self.merged_bytes(problem, MOST_SHARED_BYTES.saturating_sub(slots))
    }

    /// The tiles that are split where not all are.
    pub fn split_rest(&self) -> Option<SplitRest> {
        let rest = SplitRest { tile_rows: self.block_m, ctas_per_sm: self.ctas_per_sm, sms_of_tile: 1 };
        (self.splits_rest == 1).then_some(rest)
    }

    /// Whether O is stored by TMA from a buffer of its own.
    pub fn stores_apart(&self) -> bool {
        self.tma_store == 1 && self.q_stages == 1
    }

    /// That buffer, for half of the boxes of O.
    fn o_bytes(&self, problem: &Problem) -> u32 {
        let half = boxes(problem.head_dim_v) / 2 * BOX_COLS;
        if self.stores_apart() { boxed_tile_bytes(self.block_m, half.into()) } else { 0 }
    }

    /// Shared memory of a batch-invariant tile's merged O: as many pieces of 16 bytes of each
    /// thread as there is room for. The others are in local memory.
    fn merged_bytes(&self, problem: &Problem, room: u32) -> u32 {
        let pieces = if self.merges_in_pieces(problem) { (problem.head_dim_v as u32).div_ceil(8) } else { 0 };
        let piece = 16 * WARPGROUP_THREADS * self.consumers();
        piece * pieces.min(room / piece)
    }

    /// Bytes of the fp32 scales of K and V: for each tile slot, or for each slot of K.
    fn scale_bytes(&self, problem: &Problem) -> u32 {
        if self.widens == 1 {
            return match problem.features.eight_bits {
                None => 0,
                Some(_) if self.has_widened_key_scales(problem) => self.k_stages * self.block_n * 4,
                Some(_) => TILE_SLOTS * 8,
            };
        }
        let places = match problem.features.eight_bits.map(|eight| eight.keys_per_scale) {
            None => 0,
            Some(0) => TILE_SLOTS,
            // Padded rows of K for four lanes, 16 bytes for a unit, and V's in the order of keys.
            Some(1) if self.converts_in_place(problem) => self.k_stages * (self.block_n + 8 + 2),
            // Padded rows of four lanes, and two more for the largest of four warps.
            Some(1) => self.k_stages * (self.block_n + 16 + 2),
            Some(_) => self.k_stages,
        };
        places * 8
    }

    /// Whether a batch-invariant kernel merges O of its segments in memory, in pieces of 16 bytes
    /// of each thread: four consumers have no registers for it, three of more than 64 columns and
    /// two of more than 128.
    fn merges_in_pieces(&self, problem: &Problem) -> bool {
        let lacks_registers = match self.consumers() {
            4 => true,
            3 => problem.head_dim_v > 64,
            _ => problem.head_dim_v > 128,
        };
        problem.batch_invariant && lacks_registers
    }

    /// Keys of a box of K or V: all keys of a block or, if keys lie in pages, as many as divide a
    /// block and a page. 0 if these are no whole eights, or if a producer converts keys in
    /// registers: threads copy the keys then.
    pub fn box_rows(&self, problem: &Problem) -> u32 {
        let problem = &self.main_problem(problem);
        if problem.features.eight_bits.is_some() && !may_convert_in_place(problem, self.block_n) {
            return 0;
        }
        if problem.features.paged.is_none() {
            return self.block_n;
        }
        match common_box_rows(self.block_n, problem) {
            rows if rows % SWIZZLE_ROWS == 0 => rows as u32,
            _ => 0,
        }
    }

    /// Whether TMA brings 8-bit keys to the slots in which they become fp16.
    pub fn converts_in_place(&self, problem: &Problem) -> bool {
        self.main_problem(problem).features.eight_bits.is_some() && self.box_rows(problem) != 0
    }

    /// The shares of the launch's registers.
    pub fn warpgroup_registers(&self, problem: &Problem) -> WarpgroupRegisters {
        let Features { eight_bits, paged, .. } = self.main_problem(problem).features;
        match (eight_bits, paged) {
            _ if self.ctas_per_sm > 1 => registers_of_sharing(self.ctas_per_sm, self.consumers()),
            (Some(eight), _) if !self.converts_in_place(problem) => {
                registers_of_eight_bits(self.consumers(), eight.keys_per_scale)
            }
            (Some(eight), None) => {
                registers_of_conversion_in_place(self.consumers(), problem.head_dim_v, eight.keys_per_scale)
            }
            (None, None) => registers(self.consumers()),
            _ => registers_of_pages(self.consumers()),
        }
    }

    /// The least number of registers that a consumer thread needs: O and S in fp32, P in 16 bits,
    /// and 28 registers for addresses and row statistics. A batch-invariant kernel holds a second O
    /// unless that is in pieces in memory.
    pub fn registers(&self, problem: &Problem) -> u32 {
        let dim_v = (problem.head_dim_v as u32).next_multiple_of(16);
        let holds_merged = problem.batch_invariant && !self.merges_in_pieces(problem);
        let merged = if holds_merged { dim_v / 2 + 8 } else { 0 };
        let scales = if self.has_widened_key_scales(problem) { self.block_n / 4 } else { 0 };
        merged + scales + dim_v / 2 + self.block_n / 2 + self.block_n / 4 + 28
    }
}

/// Where a producer that converts 8-bit keys in shared memory was faster on an H100 than one that
/// does so in registers, or was taken to be (docs/tuning/eight-bits.md#prompts-on-hopper). One warp
/// starts all copies, which takes too long for small boxes beside three consumers.
pub fn may_convert_in_place(problem: &Problem, block_n: u32) -> bool {
    let Features { eight_bits, paged, varlen, .. } = problem.features;
    let Some(eight) = eight_bits else { return false };
    let takes_more = problem.features.modifies_scores() || varlen.is_some() || problem.left_shift().is_some();
    match (problem.head_dim.max(problem.head_dim_v), eight.keys_per_scale) {
        (129.., _) => true,
        _ if paged.is_some() => false,
        (_, 1) => true,
        (65.., 0) => block_n > 64 && !takes_more && !problem.dropout,
        _ => false,
    }
}

/// The most keys of a box that divide a block and, if keys lie in pages, a page.
pub fn common_box_rows(block_n: u32, problem: &Problem) -> i64 {
    problem.features.paged.map_or(i64::from(block_n), |page_size| greatest_common_divisor(block_n.into(), page_size))
}

const fn greatest_common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
