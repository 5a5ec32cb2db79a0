//! How the keys of a forward tile are split, as the model of times sees it. It knows no time.

use crate::problem::Problem;

pub struct Splits {
    pub count: u32,
    /// The partial states of a row.
    pub states: f64,
    /// The keys of the longest split over those of the mean.
    pub longest: f64,
}

impl Splits {
    /// Equal splits, or a batch-invariant problem's runs of segments.
    pub fn new(count: u32, tile_rows: u32, problem: &Problem) -> Splits {
        if !problem.batch_invariant || count == 1 {
            return Splits { count, states: count.into(), longest: 1.0 };
        }
        // One choice serves a class, and the model sees the class's longest keys. They may be too
        // many to be split, so the model takes the most keys that can be.
        let most_keys = problem.keys_of_most_places().map_or(problem.seqlen_k, |[_, of_groups]| of_groups);
        let problem = &Problem { seqlen_k: problem.seqlen_k.min(most_keys), ..*problem };
        let (count, (states, keys)) = (problem.runs_of_segments(tile_rows), problem.states_of_runs(tile_rows));
        let longest = f64::from(count) * keys as f64 / problem.seqlen_k.max(1) as f64;
        Splits { count, states: states as f64, longest: longest.max(1.0) }
    }
}
