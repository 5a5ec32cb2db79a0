//! Pages: where the keys of the tuner's own tensors lie if K and V are pages of a block table.
//!
//! Every sequence has its own pages, as many as the longest may need. They are scattered as in a
//! cache that has been in use: a fixed permutation gives the page of each block.

use crate::problem::Problem;

pub struct Pages {
    /// Keys of each page.
    pub size: i64,
    /// Pages of each sequence.
    pub blocks: i64,
    pub count: i64,
    step: i64,
}

impl Pages {
    pub fn of(problem: &Problem) -> Option<Pages> {
        let size = problem.features.paged?;
        let blocks = (problem.seqlen_k + size - 1) / size;
        let count = problem.batch_size * blocks;
        // Multiples of a number that is coprime to the count reach every page once.
        let step = [7919, 7907].into_iter().find(|prime| count % prime != 0).unwrap_or(1);
        Some(Pages { size, blocks, count, step })
    }

    /// The block table, one row for each sequence.
    pub fn table(&self) -> impl Iterator<Item = i64> + '_ {
        (0..self.count).map(|index| self.page(index))
    }

    fn page(&self, index: i64) -> i64 {
        index * self.step % self.count
    }

    /// For each key of all pages, in memory order, whether some sequence uses it.
    pub fn used(&self, lengths: &[i64]) -> Vec<bool> {
        let mut used = vec![false; (self.count * self.size) as usize];
        for (entry, length) in lengths.iter().enumerate() {
            for key in 0..*length {
                let page = self.page(entry as i64 * self.blocks + key / self.size);
                used[(page * self.size + key % self.size) as usize] = true;
            }
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(size: i64, blocks: i64, entries: i64, step: i64) -> Pages {
        Pages { size, blocks, count: entries * blocks, step }
    }

    #[test]
    fn every_page_is_one_sequences() {
        for count in [1, 2, 8, 100, 7919, 7919 * 2] {
            let step = if count % 7919 == 0 { 7907 } else { 7919 };
            let mut table: Vec<i64> = pages(16, count, 1, step).table().collect();
            table.sort();
            assert!(table.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn only_the_keys_of_a_sequences_length_are_used() {
        // Two sequences of two pages of three keys: pages 0 and 3, then 2 and 1.
        let pages = pages(3, 2, 2, 3);
        assert!(pages.table().eq([0, 3, 2, 1]));
        let used = pages.used(&[4, 2]);
        assert_eq!(used, [1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0].map(|used| used == 1));
    }
}
