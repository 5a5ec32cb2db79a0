//! Cost: the least operations and bytes that a problem needs. The bench and the tuner's utilisation
//! compare measured times with them. They depend on the problem alone, not on a device or a clock.

use super::{Features, Pass, Problem, Varlen};

impl Problem {
    /// Operations of the matrix products that this pass needs: two products forward, five backward,
    /// and each multiply-add counts as two. A causal mask counts as half of the scores, by the
    /// field's convention; a window counts the scores inside it. Varlen counts every sequence as
    /// the longest, and a block mask counts as if it listed all blocks.
    pub fn flops(&self) -> f64 {
        let pairs = self.batch_size as f64 * self.num_heads_q as f64 * self.seqlen_q as f64 * self.keys_of_a_row();
        pairs * self.flops_of_a_score()
    }

    /// Operations of one query and one key, in all products of the pass.
    fn flops_of_a_score(&self) -> f64 {
        let (qk, v) = (self.head_dim as f64, self.head_dim_v as f64);
        2.0 * match self.pass {
            Pass::Forward => qk + v,
            Pass::Backward => 3.0 * qk + 2.0 * v,
        }
    }

    /// Operations that no kernel leaves out, at the lengths that the tuner measures varlen with. A
    /// mask counts the scores that it shows, where `flops` follows the field's convention. None
    /// with a block mask, whose lists decide.
    pub fn least_flops(&self) -> Option<f64> {
        let Varlen { total_q, total_k, .. } = self.features.varlen.unwrap_or_default();
        let share =
            |seqlen: i64, total: Option<i64>| total.map_or(seqlen, |rows| seqlen.min(rows / self.batch_size.max(1)));
        let measured = Problem {
            seqlen_q: share(self.seqlen_q, total_q),
            seqlen_k: share(self.seqlen_k, total_k),
            features: Features { varlen: None, ..self.features },
            ..*self
        };
        let heads = self.batch_size as f64 * self.num_heads_q as f64;
        let has_lists = self.features.block_mask.is_some();
        (!has_lists).then(|| heads * measured.scores_of_a_head() * self.flops_of_a_score())
    }

    /// Bytes of K and V, each read once. A window counts only the keys that some row sees. Varlen
    /// counts every sequence as the longest.
    pub fn key_value_bytes(&self) -> f64 {
        let side = |keys: Option<i64>| keys.unwrap_or(self.seqlen_k);
        let keys =
            (side(self.features.window.left) + side(self.keys_after_diagonal()) + self.seqlen_q).min(self.seqlen_k);
        let rows = self.batch_size as f64 * self.num_heads_kv as f64 * keys as f64;
        rows * self.bytes_of_key() as f64
    }

    /// The mean number of keys that a row sees. Each side of the diagonal counts half of the keys,
    /// or the window's keys if those are fewer; causality leaves none after the diagonal.
    fn keys_of_a_row(&self) -> f64 {
        let half = self.seqlen_k as f64 / 2.0;
        let side = |keys: Option<i64>| keys.map_or(half, |keys| (keys as f64).min(half));
        side(self.features.window.left) + side(self.keys_after_diagonal())
    }

    /// The scores of one head that the causal mask and the window show, without varlen. Row i sees
    /// the keys from i + left to i + right, as far as there are such keys.
    fn scores_of_a_head(&self) -> f64 {
        let (rows, keys) = (self.seqlen_q as f64, self.seqlen_k as f64);
        // The sum of `i` over all integers before `end`, each clamped to the keys' range.
        let clamped = |end: f64| {
            let within = end.clamp(0.0, keys + 1.0);
            within * (within - 1.0).max(0.0) / 2.0 + (end - keys - 1.0).max(0.0) * keys
        };
        // The sum of `i + shift` over the rows, clamped likewise.
        let sum = |shift: i64| clamped(rows + shift as f64) - clamped(shift as f64);
        let before_end = self.right_shift().map_or(rows * keys, |right| sum(right + 1));
        before_end - self.left_shift().map_or(0.0, sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{BlockMask, Causal, Dtype, Window};

    const PROBLEM: Problem = Problem::dense(Pass::Forward, Dtype::Bf16, 3, 5, 64, 8);

    /// The scores by trying each pair.
    fn counted(p: &Problem) -> i64 {
        let sees = |i: i64, j: i64| {
            p.right_shift().is_none_or(|right| j <= i + right) && p.left_shift().is_none_or(|left| j >= i + left)
        };
        (0..p.seqlen_q).map(|i| (0..p.seqlen_k).filter(|j| sees(i, *j)).count() as i64).sum()
    }

    #[test]
    fn the_least_operations_are_those_of_the_scores_that_are_shown() {
        for (seqlen_q, seqlen_k) in [(1, 1), (64, 64), (7, 40), (40, 7), (1, 33)] {
            for causal in [Causal::None, Causal::BottomRight, Causal::TopLeft] {
                for (left, right) in
                    [(None, None), (Some(0), None), (Some(9), None), (Some(100), None), (Some(3), Some(5))]
                {
                    let right = right.filter(|_| causal == Causal::None);
                    let window = Window { left, right, top_left: causal == Causal::TopLeft };
                    let features = Features { window, ..Features::NONE };
                    let problem = Problem { seqlen_q, seqlen_k, causal, features, ..PROBLEM };
                    let expected = (15 * counted(&problem) * 4 * 8) as f64;
                    assert_eq!(problem.least_flops(), Some(expected), "{problem:?}");
                }
            }
        }
    }

    #[test]
    fn varlen_counts_an_equal_share_of_the_rows_and_block_masks_count_nothing() {
        let varlen = Some(Varlen { total_q: Some(48), total_k: Some(96), padded_q: false });
        let packed = Problem { features: Features { varlen, ..Features::NONE }, ..PROBLEM };
        assert_eq!(packed.least_flops(), Some((15 * 16 * 32 * 4 * 8) as f64));
        let block_mask = Some(BlockMask { block_q: 64, block_k: 64 });
        assert_eq!(Problem { features: Features { block_mask, ..Features::NONE }, ..PROBLEM }.least_flops(), None);
    }
}
