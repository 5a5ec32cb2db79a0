//! The kernels that combine the partial states of splits, which two families share: one for few
//! query rows and one for many.

use super::spec::{Axis, KernelSpec};
use super::split_rest::SplitRest;
use crate::problem::{MAX_SEGMENTS, MAX_SPLITS, Problem};

/// A row with each CTA, whose warps share the splits.
pub const COMBINE: &str = "combine";
/// Many rows with each CTA, each with as many threads as take four columns of it once.
pub const COMBINE_ROWS: &str = "combine_rows";

/// A row with each CTA of one warp, which merges segments in order (`batch_invariant`).
pub const COMBINE_SEGMENTS: &str = "combine_segments";

/// The same where runs of segments have left their states, for many query rows.
pub const COMBINE_RUNS: &str = "combine_runs";

const THREADS: u32 = 128;

/// For few query rows.
pub fn few_rows(most_splits: u32) -> KernelSpec {
    KernelSpec {
        template: COMBINE,
        entry: "flashtune_combine",
        threads: THREADS,
        is_main: false,
        most_splits,
        ..KernelSpec::MAIN
    }
}

/// For the short sequences of a mixed batch: those of at most `most_rows` packed rows.
pub fn short_rows(most_rows: u32) -> KernelSpec {
    KernelSpec { axis: Axis::ShortRows, most_rows, ..few_rows(MAX_SPLITS as u32) }
}

/// For the segments of a batch-invariant problem.
pub fn segments() -> KernelSpec {
    KernelSpec {
        template: COMBINE_SEGMENTS,
        entry: "flashtune_combine_segments",
        threads: 32,
        is_main: false,
        most_splits: MAX_SEGMENTS as u32,
        ..KernelSpec::MAIN
    }
}

/// The same where tiles of many query rows have left the states of runs of segments.
pub fn runs(problem: &Problem) -> KernelSpec {
    KernelSpec {
        template: COMBINE_RUNS,
        entry: "flashtune_combine_runs",
        threads: THREADS,
        rows: THREADS / threads_of_row(problem),
        // The main kernel alone knows the tiles, whose runs decide.
        most_splits: 1,
        ..segments()
    }
}

/// For many query rows: all, or those of split tiles.
pub fn many_rows(problem: &Problem, most_splits: u32, split_rest: Option<SplitRest>) -> KernelSpec {
    KernelSpec {
        template: COMBINE_ROWS,
        entry: "flashtune_combine_rows",
        threads: THREADS,
        rows: THREADS / threads_of_row(problem),
        is_main: false,
        most_splits,
        split_rest,
        ..KernelSpec::MAIN
    }
}

fn threads_of_row(problem: &Problem) -> u32 {
    (problem.partial_cols() as u32 / 4).next_power_of_two().min(32)
}
