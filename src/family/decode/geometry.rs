//! The decode kernel: its knobs, and its teams, tiles, shared memory and registers by arithmetic
//! alone.

use crate::device::{Arch, Device};
use crate::family::knob::knobs;
use crate::family::tile::{BOX_COLS, TMA_ALIGNMENT_BYTES, boxed_tile_bytes, key_cols, key_unit, tile_bytes, tile_cols};
use crate::problem::{Layout, Problem};

pub const SPLITS: [u32; 18] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128];

/// Warps that share V's columns in the kernel that computes weights ahead.
const MULTIPLYING_WARPS: u32 = 4;

knobs! {
    pub struct DecodeKnobs of Decode {
        block_m: "packed query rows of a tile" in [8, 16, 32, 64],
        block_n: "keys of a team's block" in [16, 32, 64],
        num_warps: "warps of a CTA" in [1, 2, 4, 8],
        warps_m: "a team's warps along its rows" in [1, 2, 4],
        warps_v: "a team's warps along V's columns" in [1, 2, 4],
        num_stages: "key blocks of a team's ring" in [2, 3, 4, 6, 8],
        ctas_per_sm: "CTAs that share an SM" in [1, 2, 3],
        tma: "whether TMA copies the keys" in [0, 1],
        num_splits: "splits of the keys, each for its own CTAs" in SPLITS,
        scoring_warps or 0: "decode_ahead: warps that compute weights, 0: there is no such kernel" in [0, 3, 4],
        scoring_stages or 1: "decode_ahead: slots of each of these warps in the ring of keys" in [1, 2],
        tile_ctas or 1: "decode_ahead: CTAs that share a tile by V's columns" in [1, 2],
        heads or 1: "K/V heads of a CTA, whose keys are copied together" in [1, 2, 4, 8],
        splittable or 0: "1: where num_splits is 1, the kernel is one that may split keys; 0: it is one that does not" in [0, 1],
    }
}

impl DecodeKnobs {
    /// Warps that share a ring of tiles.
    pub fn team(&self) -> u32 {
        self.warps_m * self.warps_v * self.heads
    }

    /// Columns of V that a team's tile has: whole 8-column products for each of the warps that
    /// share them.
    pub fn cols(&self, problem: &Problem) -> u32 {
        let unit = key_unit(problem);
        tile_cols((problem.head_dim_v as u32).div_ceil(self.warps_v * unit).into()) * unit * self.warps_v
    }

    /// Bytes of one key block of a team's ring, K and V.
    fn stage_bytes(&self, problem: &Problem) -> u32 {
        let tile = |dim: i64| {
            let cols = i64::from(self.heads) * key_cols(problem, dim);
            match self.tma {
                0 => tile_bytes(problem.dtype, self.block_n, cols),
                _ => boxed_tile_bytes(self.block_n, cols),
            }
        };
        tile(problem.head_dim) + tile(self.cols(problem).into())
    }

    /// Keys that one copy of TMA takes: a team's block or, where a page is smaller, a page.
    pub fn box_rows(&self, problem: &Problem) -> u32 {
        problem.features.paged.map_or(self.block_n, |page_size| page_size.min(i64::from(self.block_n)) as u32)
    }

    /// Shared memory of a CTA.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let teams = self.num_warps / self.team();
        let slots = teams * self.num_stages;
        let rings = slots * self.stage_bytes(problem);
        // A team's scores of a block in fp32.
        let scores = if self.shares_scores(problem) { teams * self.block_m * self.block_n * 4 } else { 0 };
        // A barrier for each slot lies behind all else, and two where several heads share copies.
        let of_slot = if self.heads > 1 { 16 } else { 8 };
        let (alignment, barriers) = if self.tma == 0 { (0, 0) } else { (TMA_ALIGNMENT_BYTES, slots * of_slot) };
        // The teams' O takes the place of the rings once these are read: a stride of 8 words past a
        // multiple of 32, and two more words a row.
        let rows = self.heads * self.block_m;
        let merged = teams * rows * (self.cols(problem).div_ceil(32) * 32 + 8 + 2) * 4;
        // Q has whole k-steps of 16 beside keys of 8 bits, and pairs of them beside int4.
        let step = 8 * i64::from(key_unit(problem));
        let cols_of_q = (problem.head_dim + step - 1) / step * step;
        (alignment + rings + tile_bytes(problem.dtype, rows, cols_of_q) + scores).max(merged) + barriers
    }

    /// Whether a second kernel computes weights ahead of P V (decode_ahead.cu.tera): where few CTAs
    /// walk a batch-invariant problem's segments, the time is that of one walk.
    pub fn has_kernel_ahead(&self) -> bool {
        self.scoring_warps > 0
    }

    /// That kernel's threads: a warp copies keys, and others weigh and multiply them.
    pub fn threads_ahead(&self) -> u32 {
        32 * (1 + self.scoring_warps + MULTIPLYING_WARPS)
    }

    /// Columns of V of a CTA of that kernel: whole boxes.
    fn cols_ahead(&self, problem: &Problem) -> u32 {
        (problem.head_dim_v as u32).div_ceil(self.tile_ctas).next_multiple_of(BOX_COLS)
    }

    /// Whether each multiplying warp has whole boxes of V's columns, or a power of two below.
    pub fn divides_boxes_ahead(&self, problem: &Problem) -> bool {
        let cols = self.cols_ahead(problem) / MULTIPLYING_WARPS;
        cols.is_multiple_of(BOX_COLS) || BOX_COLS.is_multiple_of(cols)
    }

    /// Shared memory of a CTA of that kernel: Q, and for each slot tiles of K and V, weights,
    /// references and barriers (decode/ahead/shared.cuh).
    pub fn smem_bytes_ahead(&self, problem: &Problem) -> u32 {
        let tiles = boxed_tile_bytes(self.block_n, problem.head_dim)
            + boxed_tile_bytes(self.block_n, self.cols_ahead(problem).into());
        let weights = self.block_m * self.block_n * 2 + 32 * (16 + 8);
        let slot = tiles + weights + self.block_m * 4 + 7 * 8;
        let q = tile_bytes(problem.dtype, self.block_m, problem.head_dim);
        TMA_ALIGNMENT_BYTES + q + self.scoring_stages * self.scoring_warps * slot
    }

    /// Registers of a thread of that kernel, as `registers`.
    pub fn registers_ahead(&self, problem: &Problem) -> u32 {
        let (q, o) = ((problem.head_dim as u32).div_ceil(16) * 4, self.cols_ahead(problem) / MULTIPLYING_WARPS / 2);
        q.max(o) + self.block_n / 2 + 60
    }

    /// Whether warps with other columns of V share Q K^T (decode/shared_scores.cuh).
    fn shares_scores(&self, problem: &Problem) -> bool {
        problem.batch_invariant && self.warps_v > 1
    }

    /// Whether products are transposed: an accumulator of mma has 8 rows of Q. Products over int4
    /// are, and those over 8 bits in a tile of 8 rows.
    pub fn transposes(&self, problem: &Problem) -> bool {
        problem.features.four_bits.is_some() || problem.features.eight_bits.is_some() && self.block_m == 8
    }

    /// Rows of one product: mma's rows, or its columns where products are transposed.
    pub fn tile_rows(&self, problem: &Problem) -> u32 {
        if self.transposes(problem) { 8 } else { 16 }
    }

    /// Whether a CTA may have several heads (decode/keys_heads.cuh).
    pub fn may_share_heads(&self, problem: &Problem) -> bool {
        let is_served = self.transposes(problem) && problem.layout == Layout::Vec8;
        let has_all_rows = self.warps_m == 1 && self.warps_v == 1;
        let has_lanes = self.block_n == 32 || self.tma != 0 && self.block_n < 32;
        is_served && has_all_rows && has_lanes && !problem.features.modifies_scores()
    }

    pub fn takes_tma(&self, problem: &Problem, device: &Device) -> bool {
        let box_rows = i64::from(self.box_rows(problem));
        let divides = |rows: i64| rows % box_rows == 0;
        let pages = problem
            .features
            .paged
            .is_none_or(|page_size| box_rows % 8 == 0 && divides(page_size) && divides(self.block_n.into()));
        let cols = self.cols(problem) / self.warps_v;
        let boxes = self.warps_v == 1
            || cols.is_multiple_of(BOX_COLS * key_unit(problem))
            || self.shares_scores(problem) && BOX_COLS.is_multiple_of(cols);
        matches!(device.arch, Arch::Sm(9.., _)) && problem.layout == Layout::Vec8 && pages && boxes
    }

    /// Registers that a thread needs as NVRTC 13.0 compiles the kernel: a config that spills has
    /// more than this counts.
    pub fn registers(&self, problem: &Problem) -> u32 {
        if self.transposes(problem) {
            return self.registers_transposed(problem);
        }
        let tiles = self.block_m / (16 * self.warps_m);
        let cols = self.cols(problem) / self.warps_v;
        let (o, q) = (tiles * cols / 2, tiles * (problem.head_dim as u32).div_ceil(16) * 4);
        // Past 128 registers Q is loaded at each use.
        let q = if q + o <= 128 { q } else { 0 };
        let chunks = (problem.head_dim as u32).div_ceil(problem.layout.elements() as u32 * key_unit(problem));
        let copies = match problem.layout {
            _ if self.tma != 0 => 4,
            Layout::Vec8 => (self.block_n * chunks).div_ceil(32 * self.team()),
            // Narrower copies are not all unrolled.
            _ => 8,
        };
        let of_rows = if needs_more_addresses(problem) { 16 * tiles } else { 0 };
        o + tiles * self.block_n / 2 + q + 2 * copies + of_rows + self.registers_of_scales(problem) + 60
    }

    /// The part of them that holds scales of keys.
    fn registers_of_scales(&self, problem: &Problem) -> u32 {
        match problem.features.eight_bits {
            Some(eight) if eight.keys_per_scale != 0 => 12 + self.block_n / 8,
            _ => 0,
        }
    }

    /// The same for transposed products: O, S, Q, scales, numbers and copies. Beside int4 O has the
    /// zeros' part, and scales are those of four keys by four groups.
    fn registers_transposed(&self, problem: &Problem) -> u32 {
        let tiles = self.block_m / (8 * self.warps_m);
        let is_four = problem.features.four_bits.is_some();
        let o = tiles * (self.cols(problem) / self.warps_v / 4 + if is_four { 4 } else { 0 });
        let q = tiles * (problem.head_dim as u32).div_ceil(16) * 2;
        // Past 128 registers Q is loaded at each use.
        let q = if q + o <= 128 { q } else { 0 };
        let chunks = (key_cols(problem, problem.head_dim) as u32).div_ceil(8);
        let copies = match self.tma {
            0 if self.heads > 1 => 8,
            0 => (self.block_n * chunks).div_ceil(32 * self.team()),
            _ => 4,
        };
        // A warp that loads several heads by TMA holds the page of one of eight blocks.
        let holds_pages = needs_more_addresses(problem) && (self.heads == 1 || self.tma == 0);
        let of_rows = if holds_pages { 8 * tiles } else { 0 };
        // Spare ones: with several heads ptxas packs a kernel of 120 registers into fewer.
        let others = if self.heads > 1 { 40 } else { 60 };
        // The scales of a row's fourth group are live beside three others.
        let has_four_groups = problem.features.four_bits.is_some_and(|four| problem.head_dim_v > 3 * four.group());
        let of_scales = match is_four {
            true if self.tma != 0 && self.heads > 1 && has_four_groups => 24,
            true => 16,
            false => self.registers_of_scales(problem),
        };
        o + tiles * self.block_n / 4 + q + 2 * copies + of_rows + of_scales + others
    }
}

/// The least rows of a tile.
pub fn least_rows(problem: &Problem) -> u32 {
    if problem.key_format() == 0 { 16 } else { 8 }
}

/// Whether the kernel keeps the addresses of pages, or of the values that modify each row's scores.
pub fn needs_more_addresses(problem: &Problem) -> bool {
    problem.features.modifies_scores() || problem.features.paged.is_some()
}
