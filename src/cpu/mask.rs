//! Which keys a query sees: for a row, for a block of rows, and the reverse for a key.
//!
//! Every row sees a prefix of the keys, and the prefix grows with the row, so that a count says all.

use crate::problem::{Causal, Problem};

#[derive(Clone, Copy)]
pub struct Mask {
    seqlen_q: usize,
    seqlen_k: usize,
    /// Row i sees keys j <= i + shift; None: all keys.
    causal_shift: Option<i64>,
}

impl Mask {
    pub fn new(problem: &Problem) -> Mask {
        Mask {
            seqlen_q: problem.seqlen_q as usize,
            seqlen_k: problem.seqlen_k as usize,
            causal_shift: match problem.causal {
                Causal::None => None,
                causal => Some(causal.shift(problem.seqlen_q, problem.seqlen_k)),
            },
        }
    }

    /// How many keys the row sees: exactly those below this index.
    pub fn keys_of(&self, row: usize) -> usize {
        match self.causal_shift {
            None => self.seqlen_k,
            Some(shift) => (row as i64 + shift + 1).clamp(0, self.seqlen_k as i64) as usize,
        }
    }

    /// The first row that sees the key, `seqlen_q` where none does.
    pub fn first_row_of(&self, key: usize) -> usize {
        match self.causal_shift {
            None => 0,
            Some(shift) => (key as i64 - shift).clamp(0, self.seqlen_q as i64) as usize,
        }
    }
}
