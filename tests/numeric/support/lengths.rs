//! Lengths of a case's sequences, made from its seed: the rows of each sequence in a tensor, and
//! the used ones among them.

use super::case::{Case, Kind, Random, Shape};
use flashtune::problem::Varlen;

/// The tensors with a row for each query, or with a row for each key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Q,
    K,
}

impl Side {
    pub fn of(kind: Kind) -> Side {
        match kind {
            Kind::Q | Kind::Dq | Kind::Out | Kind::Dout => Side::Q,
            Kind::K | Kind::Dk | Kind::V | Kind::Dv => Side::K,
        }
    }
}

/// The rows of one sequence in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Entry of the tensor's batch dimension.
    pub entry: usize,
    /// The first row within the entry.
    pub begin: usize,
    pub length: usize,
    /// Number of used rows.
    pub used: usize,
}

impl Case {
    pub fn is_packed(&self, side: Side) -> bool {
        match side {
            Side::Q => self.extras.cu_seqlens.q,
            Side::K => self.extras.cu_seqlens.k,
        }
    }

    pub fn seqlen(&self, side: Side) -> i64 {
        match side {
            Side::Q => self.seqlen_q,
            Side::K => self.seqlen_k,
        }
    }

    /// The rows of each sequence. The first sequence has the maximum length; others may be empty.
    pub fn rows(&self, side: Side) -> Vec<Rows> {
        let (longest, is_packed) = (self.seqlen(side), self.is_packed(side));
        let has_used = match side {
            Side::Q => self.extras.seqused.q,
            Side::K => self.extras.seqused.k,
        };
        let mut random = Random::new(self.seed ^ if side == Side::Q { 0x71 } else { 0x6b });
        let mut up_to = |longest: i64| match random.between(0, 4) {
            0 => 0,
            1 => longest,
            // As a decoding sequence in a batch of longer ones.
            2 => random.between(1, 4).min(longest),
            _ => random.between(0, longest),
        };
        let alone = self.extras.alone.map(|[q, k]| if side == Side::Q { q } else { k });
        let mut begin = 0;
        let of_entry = |entry| {
            let alone = alone.filter(|_| entry == 0 || !self.extras.among_others);
            let length = match alone {
                Some(alone) if is_packed => alone,
                _ if is_packed && entry > 0 => up_to(longest),
                _ => longest,
            };
            let used = if has_used { alone.unwrap_or_else(|| up_to(length)) } else { length };
            let (length, used) = (length as usize, used as usize);
            match is_packed {
                false => Rows { entry, begin: 0, length, used },
                true => {
                    begin += length;
                    Rows { entry: 0, begin: begin - length, length, used }
                }
            }
        };
        (0..self.batch_size as usize).map(of_entry).collect()
    }

    /// Rows of a packed tensor. Some may follow the last sequence.
    pub fn total(&self, side: Side) -> i64 {
        let last = self.rows(side).last().map_or(0, |rows| rows.begin + rows.length) as i64;
        last + (self.seed % 4) as i64
    }

    pub fn totals(&self) -> Varlen {
        let total = |side| self.is_packed(side).then(|| self.total(side));
        Varlen { total_q: total(Side::Q), total_k: total(Side::K), padded_q: self.extras.seqused.q }
    }

    /// `cu_seqlens` of a packed side.
    pub fn cu_seqlens(&self, side: Side) -> Vec<i32> {
        let ends = self.rows(side).into_iter().map(|rows| (rows.begin + rows.length) as i32);
        std::iter::once(0).chain(ends).collect()
    }

    pub fn seqused(&self, side: Side) -> Vec<i32> {
        let padding = if side == Side::K { self.leftpads() } else { vec![0; self.batch_size as usize] };
        self.rows(side).iter().zip(padding).map(|(rows, padding)| rows.used as i32 + padding).collect()
    }

    /// Rows before each sequence's first key; 0 unless the case has key starts.
    pub fn leftpads(&self) -> Vec<i32> {
        let mut random = Random::new(self.seed ^ 0x1e57);
        let room = |used: usize| if self.extras.key_starts { self.seqlen_k - used as i64 } else { 0 };
        self.rows(Side::K).iter().map(|rows| random.between(0, room(rows.used)) as i32).collect()
    }

    /// Whether each row (batch, position, head) of a tensor is used, in the order of `Shape::rows`.
    pub fn used(&self, kind: Kind) -> Vec<bool> {
        let Shape { batch, seqlen, heads, .. } = self.shape(kind);
        let mut used = vec![false; (batch * seqlen) as usize];
        for rows in self.rows(Side::of(kind)) {
            let first = rows.entry * seqlen as usize + rows.begin;
            used[first..first + rows.used].fill(true);
        }
        used.into_iter().flat_map(|used| std::iter::repeat_n(used, heads as usize)).collect()
    }

    /// Elements of lse and of dlse.
    pub fn lse_len(&self) -> usize {
        let rows = if self.is_packed(Side::Q) { self.total(Side::Q) } else { self.batch_size * self.seqlen_q };
        (rows * self.num_heads_q) as usize
    }

    /// Index in lse of a sequence's first row for a head.
    pub fn lse_begin(&self, batch: usize, head: usize) -> usize {
        match self.is_packed(Side::Q) {
            true => head * self.total(Side::Q) as usize + self.rows(Side::Q)[batch].begin,
            false => (batch * self.num_heads_q as usize + head) * self.seqlen_q as usize,
        }
    }

    pub fn used_lse(&self) -> Vec<bool> {
        let mut used = vec![false; self.lse_len()];
        for (batch, rows) in self.rows(Side::Q).iter().enumerate() {
            for head in 0..self.num_heads_q as usize {
                let first = self.lse_begin(batch, head);
                used[first..first + rows.used].fill(true);
            }
        }
        used
    }
}
