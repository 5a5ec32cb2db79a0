//! The knobs of sm90's forward pass for e4m3, and its shared memory and registers by arithmetic
//! alone.

use super::forward_geometry::{SPLITS, common_box_rows};
use super::warpgroup::{BARRIER_BYTES, WARPGROUP_ROWS, registers};
use crate::family::knob::knobs;
use crate::family::spec::WarpgroupRegisters;
use crate::family::tile::{TMA_ALIGNMENT_BYTES, boxed_tile_bytes};
use crate::problem::{Eight, ElementType, Problem};

knobs! {
    pub struct Fp8Knobs of Sm90Fp8 {
        block_m: "query rows of a tile, 64 for each consumer warpgroup" in [64, 128, 192, 256],
        block_n: "keys of a K or V block" in [64, 96, 128, 160, 192, 224],
        k_stages: "K blocks in flight" in [2, 3, 4],
        v_stages: "V blocks in flight before they are transposed, 0: a kernel of its own transposes V" in [0, 1, 2],
        vt_stages: "V blocks that are transposed and not multiplied yet" in [2, 3],
        q_stages: "Q tiles in flight" in [1, 2],
        tma_store or 0: "1: O is stored by TMA from a slot of its own, 0: from registers" in [0, 1],
        group_mb: "MB of K and V in a group of heads that tiles walk together, 0: one group" in [0, 1, 8, 32],
        num_splits: "splits of a tile's keys, each for its own CTA" in SPLITS,
    }
}

/// The columns of a tile of e4m3 as those of 16 bits.
fn pairs(columns: i64) -> i64 {
    ElementType::Eight(Eight::E4m3).units(columns)
}

impl Fp8Knobs {
    pub fn consumers(&self) -> u32 {
        self.block_m / WARPGROUP_ROWS
    }

    /// Whether a kernel of its own writes V^T to the workspace.
    pub fn transposes_before(&self) -> bool {
        self.v_stages == 0
    }

    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let (dim, dim_v) = (pairs(problem.head_dim), pairs(problem.head_dim_v));
        let q = self.q_stages * boxed_tile_bytes(self.block_m, dim);
        let k = self.k_stages * boxed_tile_bytes(self.block_n, dim);
        let v = self.v_stages * boxed_tile_bytes(self.block_n, dim_v);
        let rows_of_transposed = (problem.head_dim_v as u32).next_multiple_of(16);
        let vt = self.vt_stages
            * match self.transposes_before() {
                true => (rows_of_transposed * self.block_n).next_multiple_of(TMA_ALIGNMENT_BYTES),
                false => boxed_tile_bytes(rows_of_transposed, pairs(self.block_n.into())),
            };
        let o = self.tma_store * boxed_tile_bytes(self.block_m, problem.head_dim_v);
        TMA_ALIGNMENT_BYTES + q + k + v + vt + o + BARRIER_BYTES
    }

    /// Keys of a box of K or V.
    pub fn box_rows(&self, problem: &Problem) -> u32 {
        common_box_rows(self.block_n, problem) as u32
    }

    /// The shares of the launch's registers.
    pub fn warpgroup_registers(&self) -> WarpgroupRegisters {
        registers(self.consumers())
    }

    /// The least number of registers that a consumer thread needs: O and S in fp32, P in 8 bits,
    /// and 28 registers for addresses and row statistics.
    pub fn registers(&self, problem: &Problem) -> u32 {
        problem.head_dim_v as u32 / 2 + self.block_n / 2 + self.block_n / 8 + 28
    }
}
