//! How many bytes the kernels of the matrix may spill, by head dim, with the reasons.

use flashtune::device::Arch;
use flashtune::problem::{Pass, Problem};

/// Bytes that the kernels of each listed head dim may spill; kernels that are not listed may spill
/// none.
pub type MaySpill = [(Arch, Pass, (i64, i64), u32)];

pub fn may_spill(listed: &MaySpill, arch: Arch, problem: &Problem) -> u32 {
    let of = (arch, problem.pass, (problem.head_dim, problem.head_dim_v));
    listed.iter().find(|(arch, pass, dims, _)| (*arch, *pass, *dims) == of).map_or(0, |(.., bytes)| *bytes)
}

/// Spills of the heuristic's mma.sync kernels, with any feature.
///
/// These tiles fill all 255 registers and leave loop-invariant addresses and bounds on the stack.
/// That costs a few 4-byte loads beside the 256 to 640 products of an iteration, less than the next
/// smaller tile would. Tuning picks kernels that spill only if every other kernel is wrong.
pub const MMA_SYNC: &MaySpill = &[
    (Arch::Sm(8, 0), Pass::Backward, (128, 128), 8),
    (Arch::Sm(8, 0), Pass::Backward, (256, 256), 116),
    (Arch::Sm(8, 0), Pass::Backward, (512, 512), 64),
    (Arch::Sm(8, 6), Pass::Backward, (256, 256), 72),
    (Arch::Sm(8, 9), Pass::Backward, (256, 256), 72),
    (Arch::Sm(9, 0), Pass::Backward, (192, 192), 8),
    (Arch::Sm(10, 0), Pass::Forward, (96, 96), 68),
    (Arch::Sm(10, 0), Pass::Forward, (128, 128), 24),
    (Arch::Sm(10, 0), Pass::Forward, (192, 128), 16),
    (Arch::Sm(10, 0), Pass::Backward, (72, 72), 12),
    (Arch::Sm(10, 0), Pass::Backward, (192, 192), 72),
    (Arch::Sm(12, 0), Pass::Backward, (256, 256), 16),
];

/// More bytes for a deterministic pass: the ordered addition to dQ takes two registers that those
/// tiles do not have. A few loads take no time beside the wait.
pub const ORDERED_DQ_MAY_SPILL: u32 = 160;

/// The mma.sync kernels of `combined_features`.
pub const COMBINED: &MaySpill = &[
    (Arch::Sm(8, 0), Pass::Backward, (256, 256), 96),
    (Arch::Sm(8, 9), Pass::Forward, (128, 128), 12),
    (Arch::Sm(9, 0), Pass::Forward, (128, 128), 72),
    (Arch::Sm(9, 0), Pass::Backward, (128, 128), 80),
];

/// The fp32 kernels spill load addresses, of which they have twice as many. At head dim 512 a CTA
/// is one warp, because 99 KB hold no more, and each thread loads 64 chunks of a tile.
pub const FP32: &MaySpill = &[
    (Arch::Sm(8, 6), Pass::Forward, (512, 512), 1304),
    (Arch::Sm(9, 0), Pass::Forward, (33, 33), 56),
    (Arch::Sm(9, 0), Pass::Forward, (64, 64), 8),
];

/// Consumers of sm90's heuristic. Forward they spill what a tile's ends alone read, since each of
/// the two ways to end has its own last product; at head dim 40 with dropout also a number that
/// blocks under a mask read. At head dim 160 that reached 580 TFLOP/s on an H200, causal, 4096
/// keys; the best tile without spills reached 541.
///
/// Past head dim 192 backward, three consumers share the registers. The two of scores keep
/// addresses and bounds on the stack, of which a block reads about eight. Two consumers without
/// spills took 1.08 to 1.22 times as long (H200, head dims 200 and 256).
pub const CONSUMERS: &MaySpill = &[
    (Arch::Sm(9, 0), Pass::Forward, (40, 40), 16),
    (Arch::Sm(9, 0), Pass::Forward, (64, 64), 8),
    (Arch::Sm(9, 0), Pass::Forward, (96, 96), 36),
    (Arch::Sm(9, 0), Pass::Forward, (160, 160), 52),
    (Arch::Sm(9, 0), Pass::Backward, (256, 256), 288),
];

/// Consumers whose tiles may share a walk. Up to head dim 128 they keep two numbers on the stack
/// that a tile's end needs.
pub const SHARED_WALK_MAY_SPILL: u32 = 48;
