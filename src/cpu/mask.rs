//! Mask: the keys that a query sees, and the queries that see a key.
//!
//! Every row sees a range of keys, and neither end of it decreases with the row. A block of rows
//! therefore sees the keys from its first row's first to its last row's last; a block of keys
//! likewise.

use std::ops::Range;

#[derive(Clone, Copy)]
pub struct Mask {
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    /// Row i sees keys j >= i + this; None: from the first key on.
    pub left_shift: Option<i64>,
    /// Row i sees keys j <= i + this; None: up to the last key.
    pub right_shift: Option<i64>,
}

impl Mask {
    pub fn keys_of(&self, row: usize) -> Range<usize> {
        self.key_begin(row)..self.key_end(row)
    }

    pub fn rows_of(&self, key: usize) -> Range<usize> {
        self.row_begin(key)..self.row_end(key)
    }

    /// The keys that any of the rows sees; there is at least one row.
    pub fn keys_of_block(&self, rows: Range<usize>) -> Range<usize> {
        self.key_begin(rows.start)..self.key_end(rows.end - 1)
    }

    /// The rows that see any of the keys; there is at least one key.
    pub fn rows_of_block(&self, keys: Range<usize>) -> Range<usize> {
        self.row_begin(keys.start)..self.row_end(keys.end - 1)
    }

    fn key_begin(&self, row: usize) -> usize {
        self.left_shift.map_or(0, |shift| clamp(row as i64 + shift, self.seqlen_k))
    }

    fn key_end(&self, row: usize) -> usize {
        self.right_shift.map_or(self.seqlen_k, |shift| clamp(row as i64 + shift + 1, self.seqlen_k))
    }

    fn row_begin(&self, key: usize) -> usize {
        self.right_shift.map_or(0, |shift| clamp(key as i64 - shift, self.seqlen_q))
    }

    fn row_end(&self, key: usize) -> usize {
        self.left_shift.map_or(self.seqlen_q, |shift| clamp(key as i64 - shift + 1, self.seqlen_q))
    }
}

fn clamp(index: i64, length: usize) -> usize {
    index.clamp(0, length as i64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_keys_agree_on_who_sees_whom() {
        let shifts = [None, Some(-9), Some(-2), Some(0), Some(3), Some(20)];
        for (seqlen_q, seqlen_k) in [(1, 9), (7, 5), (6, 6), (3, 0)] {
            for (left_shift, right_shift) in shifts.iter().flat_map(|left| shifts.map(|right| (*left, right))) {
                if left_shift.zip(right_shift).is_some_and(|(left, right)| left > right) {
                    continue;
                }
                let mask = Mask { seqlen_q, seqlen_k, left_shift, right_shift };
                for (row, key) in (0..seqlen_q).flat_map(|row| (0..seqlen_k).map(move |key| (row, key))) {
                    let distance = key as i64 - row as i64;
                    let sees = left_shift.is_none_or(|shift| distance >= shift)
                        && right_shift.is_none_or(|shift| distance <= shift);
                    assert_eq!(mask.keys_of(row).contains(&key), sees, "row {row} key {key}");
                    assert_eq!(mask.rows_of(key).contains(&row), sees, "row {row} key {key}");
                }
            }
        }
    }
}
