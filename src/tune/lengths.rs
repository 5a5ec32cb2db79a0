//! Lengths: how long the sequences of the tuner's own tensors are, and which rows they use, for
//! problems that leave it to the launch.
//!
//! A problem without lengths of their own has those of the problem, and no row that is not used.

use crate::problem::Problem;

/// Of each sequence, in queries and in keys.
#[derive(Clone, Debug)]
pub struct Lengths {
    pub q: Vec<i64>,
    pub k: Vec<i64>,
}

impl Lengths {
    /// All of one length, for timing: as long as they may be, or their share of the rows where they
    /// lie end to end.
    pub fn even(problem: &Problem) -> Lengths {
        let share =
            |seqlen: i64, total: Option<i64>| total.map_or(seqlen, |rows| seqlen.min(rows / problem.batch_size.max(1)));
        let varlen = problem.features.varlen.unwrap_or_default();
        let all = |length| vec![length; problem.batch_size as usize];
        Lengths { q: all(share(problem.seqlen_q, varlen.total_q)), k: all(share(problem.seqlen_k, varlen.total_k)) }
    }

    /// For the check: as long as they may be, shorter, empty in one side or the other, where
    /// lengths are the launch's.
    pub fn ragged(problem: &Problem) -> Lengths {
        let of = |seqlen: i64, sixths: [i64; RAGGED]| {
            let lengths = (0..problem.batch_size as usize).map(|entry| match problem.features.varlen {
                None => seqlen,
                // Rounded up: of single rows all sequences but the empty ones have theirs.
                Some(_) => (seqlen * sixths[entry % RAGGED] + 5) / 6,
            });
            lengths.collect()
        };
        Lengths { q: of(problem.seqlen_q, [6, 4, 0, 1, 5]), k: of(problem.seqlen_k, [5, 6, 3, 0, 2]) }
    }

    /// Which rows of a tensor of `rows` a sequence uses: of `seqlen` for each where they do not lie
    /// end to end.
    pub fn used(lengths: &[i64], seqlen: i64, total: Option<i64>) -> Vec<bool> {
        let rows = total.unwrap_or(seqlen * lengths.len() as i64);
        let mut used = vec![false; rows as usize];
        let mut end_to_end = 0;
        for (entry, length) in lengths.iter().enumerate() {
            let first = if total.is_some() { end_to_end } else { entry as i64 * seqlen };
            used[first as usize..(first + length) as usize].fill(true);
            end_to_end += length;
        }
        used
    }
}

/// Sequences after which `Lengths::ragged` begins anew.
pub const RAGGED: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dtype, Features, Pass, Varlen};

    #[test]
    fn ragged_sequences_of_single_rows_are_not_all_empty() {
        let problem = Problem {
            seqlen_k: 600,
            features: Features { varlen: Some(Varlen::default()), ..Features::NONE },
            ..Problem::dense(Pass::Forward, Dtype::Bf16, 7, 1, 1, 64)
        };
        let Lengths { q, k } = Lengths::ragged(&problem);
        assert_eq!((q, k), (vec![1, 1, 0, 1, 1, 1, 1], vec![500, 600, 300, 0, 200, 500, 600]));
    }

    #[test]
    fn sequences_use_rows_of_their_own() {
        assert_eq!(Lengths::used(&[2, 0, 1], 3, None), [1, 1, 0, 0, 0, 0, 1, 0, 0].map(|used| used == 1));
        assert_eq!(Lengths::used(&[2, 0, 1], 3, Some(5)), [1, 1, 1, 0, 0].map(|used| used == 1));
    }
}
