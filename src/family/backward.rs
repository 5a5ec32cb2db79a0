//! The small kernels of the backward pass that every GPU family shares: before its main kernel and
//! after it.

use super::spec::{Axis, KEY_COLS, KernelSpec};
use super::tile::tile_bytes;
use crate::problem::Problem;

/// The small kernels' tiles; their templates take threads and rows from here.
const DELTA_THREADS: u32 = 128;
const DELTA_ROWS: u32 = 64;
const CONVERT_ROWS: u32 = 32;
const SINKS_THREADS: u32 = 1024;
const SINKS_ROWS: u32 = 256;

/// The kernel that writes the gradients of attention sinks, which a call need not ask for.
pub const SINKS: &str = "backward_sinks";

/// The backward pass's kernels in launch order. Where the main kernel writes dQ itself, no
/// accumulator is cleared, and only splits leave something to convert.
pub fn around(problem: &Problem, main: KernelSpec) -> Vec<KernelSpec> {
    // The dQ accumulator's tiles have 16 columns each where it is transposed, else 8.
    let columns = if main.dq_transposed { problem.workspace_cols() } else { problem.head_dim };
    let (may_split, direct_tiles) = (main.split_waves > 0 || main.most_splits > 1, main.direct_tiles);
    let columns = if may_split { columns.max(KEY_COLS) } else { columns };
    let small = KernelSpec { is_main: false, direct_tiles, dq_transposed: main.dq_transposed, ..KernelSpec::MAIN };
    let delta = KernelSpec {
        template: "backward_delta",
        entry: "flashtune_backward_delta",
        threads: DELTA_THREADS,
        rows: DELTA_ROWS,
        ..small
    };
    let convert = KernelSpec {
        template: "backward_convert",
        entry: "flashtune_backward_convert",
        threads: CONVERT_ROWS / 16 * 32,
        rows: CONVERT_ROWS,
        axis: match (may_split, direct_tiles > 0) {
            (true, true) => Axis::KeySlices,
            (true, false) => Axis::QueriesAndKeys,
            (false, _) => Axis::Queries,
        },
        smem_bytes: tile_bytes(problem.dtype, CONVERT_ROWS, columns),
        most_splits: main.most_splits,
        split_rest: main.split_rest,
        ..small
    };
    let sinks = KernelSpec {
        template: SINKS,
        entry: "flashtune_backward_sinks",
        threads: SINKS_THREADS,
        rows: SINKS_ROWS,
        axis: Axis::Heads,
        ..small
    };
    let convert = (may_split || direct_tiles == 0).then_some(convert);
    [delta, main].into_iter().chain(convert).chain(problem.features.sinks.then_some(sinks)).collect()
}
