//! Lengths: how long the sequences of the tuner's own tensors are and which rows they use, for
//! varlen problems.
//!
//! In a problem without varlen, every sequence has the full length and uses all rows.

use crate::problem::Problem;

/// The length of each sequence, in queries and in keys.
#[derive(Clone, Debug)]
pub struct Lengths {
    pub q: Vec<i64>,
    pub k: Vec<i64>,
}

impl Lengths {
    /// Equal lengths, for timing: the full length, or an equal share of the rows that lie end to
    /// end.
    pub fn even(problem: &Problem) -> Lengths {
        let share =
            |seqlen: i64, total: Option<i64>| total.map_or(seqlen, |rows| seqlen.min(rows / problem.batch_size.max(1)));
        let varlen = problem.features.varlen.unwrap_or_default();
        let all = |length| vec![length; problem.batch_size as usize];
        Lengths { q: all(share(problem.seqlen_q, varlen.total_q)), k: all(share(problem.seqlen_k, varlen.total_k)) }
    }

    /// Lengths for the check. With varlen some sequences are full, some shorter, and some have no
    /// queries or no keys.
    pub fn ragged(problem: &Problem) -> Lengths {
        let of = |seqlen: i64, sixths: [i64; RAGGED]| {
            let lengths = (0..problem.batch_size as usize).map(|entry| match problem.features.varlen {
                None => seqlen,
                // Rounding up keeps one row in every sequence that is not empty, even if sequences
                // have a single row.
                Some(_) => (seqlen * sixths[entry % RAGGED] + 5) / 6,
            });
            lengths.collect()
        };
        Lengths { q: of(problem.seqlen_q, [6, 4, 0, 1, 5]), k: of(problem.seqlen_k, [5, 6, 3, 0, 2]) }
    }

    /// For each row of a tensor, whether a sequence uses it. `total` is the number of rows end to
    /// end; without it each sequence has `seqlen` rows.
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

/// The period of the lengths in `Lengths::ragged`.
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
