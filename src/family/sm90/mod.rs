//! The sm90 and sm90fp8 families: `wgmma` kernels in which one warpgroup loads by TMA and each of
//! the others computes, on compute capability 9.0.
//!
//! A consumer warpgroup computes 64 rows, of queries forward and of keys backward; backward past
//! head dim 128 it computes fewer keys, or a half of the columns. `forward*`, `fp8*` and
//! `backward*` have the knobs, constraints and heuristics of one template each, or of three for the
//! backward pass; `work` predicts the times of all. Which problems sm90 does is here, and `fp8` has
//! the same of sm90fp8. Whatever would make a kernel wrong is asserted once more in the templates.

mod backward;
mod backward_alternatives;
mod backward_geometry;
mod backward_heuristic;
mod backward_work;
mod forward;
mod forward_alternatives;
mod forward_geometry;
mod forward_heuristic;
mod forward_widening;
mod fp8;
mod fp8_geometry;
mod fp8_heuristic;
mod splits;
#[cfg(test)]
mod tests;
mod warpgroup;
mod work;

pub use backward_geometry::BackwardKnobs;
pub use forward_geometry::ForwardKnobs;
pub use fp8::refusal as fp8_refusal;
pub use fp8_geometry::Fp8Knobs;

use crate::problem::{BlockMask, Dtype, Layout, Pass, Problem};
use backward_geometry::BackwardKernel;

/// Why the family does not do a problem, whatever the config; None where it does.
pub fn refusal(problem: &Problem) -> Option<&'static str> {
    if problem.dtype == Dtype::Fp32 {
        Some(
            "wgmma reads 4-byte operands only if the reduction dimension is contiguous, and in most operands it is not",
        )
    } else if problem.head_dim.max(problem.head_dim_v) > 256 {
        Some("its head dims end at 256: the N of wgmma forward, and what registers hold backward")
    } else if problem.layout != Layout::Vec8 {
        Some("TMA needs addresses, strides and rows of multiples of 16 bytes")
    } else if problem.features.eight_bits.is_some() && problem.features.block_mask.is_some() {
        Some("its producer converts keys of 8 bits block by block, without the lists of a block mask")
    } else if problem.features.block_mask.is_some_and(|mask| !divides(problem, mask)) {
        Some(
            "its tiles are multiples of 64 queries and 64 keys forward and, at head dims from 136 to 192, backward, and of 128 keys at other head dims backward, which the block mask's blocks are not",
        )
    } else {
        None
    }
}

/// Whether a mixed batch is for this family and the decode kernel of its short sequences, though
/// its chunks have few enough queries for the decode family. There a token's tile has as many rows
/// as a chunk's. A GQA group is packed there, and has a tile for each head here. Over 8-bit
/// keys this was not timed.
pub fn serves_small_chunks(problem: &Problem) -> bool {
    let has_chunks = problem.short_rows().is_some_and(|rows| problem.packed_rows() > rows);
    let has_16_bits = problem.key_format() == 0;
    problem.mixes_lengths() && has_16_bits && problem.group_size() == 1 && has_chunks
}

/// Whether tiles of the family divide blocks of a block mask.
fn divides(problem: &Problem, BlockMask { block_q, block_k }: BlockMask) -> bool {
    match (problem.pass, BackwardKernel::of(problem)) {
        (Pass::Forward, _) | (Pass::Backward, BackwardKernel::Middle) => block_q % 64 == 0 && block_k % 64 == 0,
        (Pass::Backward, BackwardKernel::Narrow | BackwardKernel::Wide) => block_k % 128 == 0,
    }
}
