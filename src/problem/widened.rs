//! Keys of 8 bits and of int4 widened to 16 bits: where the workspace holds them, and the problem
//! that remains.
//!
//! A kernel writes K and V in q's type, the rows of a sequence one after the other, whether they
//! were packed end to end, in pages, or behind padding. The kernels that follow read rows of a
//! plain 16-bit problem.

use super::{Dtype, Features, Pass, Problem, Varlen};

/// Where the parts of a widened K and V begin, in bytes from the workspace's start on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WidenedPlaces {
    /// (heads_kv, batch, rows, head_dim)
    pub k: usize,
    /// (heads_kv, batch, rows, head_dim_v)
    pub v: usize,
    /// fp32 (heads_kv, batch, rows): factors of scores, where blocks of keys have their own.
    pub k_scales: usize,
    /// int32 (batch): the keys of each sequence.
    pub lengths: usize,
    pub end: usize,
}

impl Problem {
    /// Whether the workspace has room for K and V in 16 bits: those of 8 bits beside a 16-bit q and
    /// those of int4, in forward passes of many queries. A config widens them only where all
    /// problems that share its record keep them, too (`keeps_widened_kv_nearby`).
    pub fn keeps_widened_kv(&self) -> bool {
        let is_long = self.packed_rows() >= WIDENED_ROWS && self.seqlen_k >= WIDENED_KEYS;
        self.may_widen_kv() && is_long && self.widened_bytes() <= MOST_WIDENED_BYTES
    }

    /// Whether K and V of the class may be widened at all. A product of V and scales of keys needs
    /// the range of bf16, and so does a number of int4.
    fn may_widen_kv(&self) -> bool {
        let Features { eight_bits, four_bits, block_mask, .. } = self.features;
        let is_bf16 = self.dtype == Dtype::Bf16;
        let of_eight = eight_bits.is_some_and(|eight| !eight.queries && (eight.keys_per_scale == 0 || is_bf16));
        let is_served = of_eight || four_bits.is_some() && is_bf16;
        let fits_tma = [self.head_dim, self.head_dim_v].iter().all(|dim| dim % 16 == 0 && *dim <= 256);
        self.pass == Pass::Forward && is_served && block_mask.is_none() && !self.batch_invariant && fits_tma
    }

    /// Whether every problem that shares a record with this one keeps a widened K and V.
    pub fn keeps_widened_kv_nearby(&self) -> bool {
        let is_long = 2 * self.packed_rows() >= 3 * WIDENED_ROWS && 2 * self.seqlen_k >= 3 * WIDENED_KEYS;
        self.keeps_widened_kv() && is_long && self.largest_nearby().widened_bytes() <= MOST_WIDENED_BYTES
    }

    /// At least as large as every problem that shares a record with this one.
    fn largest_nearby(&self) -> Problem {
        let times = |size: i64, factor: f64| (size as f64 * factor).ceil() as i64;
        Problem {
            batch_size: times(self.batch_size, MOST_OF_BUCKET),
            num_heads_kv: times(self.num_heads_kv, MOST_HEADS_OF_BUCKET),
            seqlen_k: times(self.seqlen_k, MOST_OF_BUCKET),
            ..*self
        }
    }

    /// The problem of the kernel that reads the widened K and V.
    pub fn widened(&self) -> Problem {
        let varlen = self.features.varlen.map(|varlen| Varlen { total_k: None, ..varlen });
        let features =
            Features { eight_bits: None, four_bits: None, paged: None, key_starts: false, varlen, ..self.features };
        Problem { features, ..*self }
    }

    /// Rows from one sequence to the next. A kernel copies factors of 16 keys at a time.
    pub const fn widened_rows(&self) -> i64 {
        (self.seqlen_k + 15) / 16 * 16
    }

    /// The most keys of a sequence with which the problem would keep a widened K and V.
    pub fn most_widened_keys(&self) -> i64 {
        let of_rows = |seqlen_k| Problem { seqlen_k, ..*self }.widened_bytes();
        let (fixed, of_16) = (of_rows(0), (of_rows(16) - of_rows(0)).max(1));
        (MOST_WIDENED_BYTES.saturating_sub(fixed) / of_16 * 16) as i64
    }

    /// The bytes of K, V and what lies beside them.
    pub fn widened_bytes(&self) -> usize {
        let WidenedPlaces { k, end, .. } = self.widened_places(0);
        end - k
    }

    /// The parts, from the first multiple of 256 from `begin` on.
    pub fn widened_places(&self, begin: usize) -> WidenedPlaces {
        let rows = (self.batch_size * self.num_heads_kv * self.widened_rows()) as usize;
        let has_scales = self.features.has_key_scales();
        let k = begin.next_multiple_of(256);
        let v = k + rows * self.head_dim as usize * 2;
        let k_scales = v + rows * self.head_dim_v as usize * 2;
        // The last block of keys may begin at the last row.
        let lengths = k_scales + if has_scales { (rows + MAX_KEY_BLOCK as usize) * 4 } else { 0 };
        WidenedPlaces { k, v, k_scales, lengths, end: lengths + self.batch_size as usize * 4 }
    }
}

/// Packed rows from which on a workspace has room for a widened K and V: with fewer, writing them
/// takes longer than their conversion in the main kernel.
const WIDENED_ROWS: i64 = 256;
const WIDENED_KEYS: i64 = 64;

/// The most bytes of a widened K and V: with bounds of lengths far above the lengths, they would be
/// far more than the keys. A config widens up to about 520 MiB (`largest_nearby`).
const MOST_WIDENED_BYTES: usize = 1200 << 20;

/// How many times as large as its bucket (`plan::canonical`) a batch size or a number of keys may
/// be, and key-value heads, which follow from two buckets.
const MOST_OF_BUCKET: f64 = 1.225;
const MOST_HEADS_OF_BUCKET: f64 = 1.5;

/// Keys of the largest block of a forward kernel.
pub(super) const MAX_KEY_BLOCK: i64 = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{BlockMask, Eight, EightBits};

    fn problem(keys_per_scale: i64) -> Problem {
        let eight_bits = Some(EightBits { keys: Eight::E5m2, queries: false, keys_per_scale });
        let features = Features { eight_bits, ..Features::NONE };
        let plain = Problem::dense(Pass::Forward, Dtype::Bf16, 2, 32, 2048, 128);
        Problem { num_heads_kv: 8, seqlen_k: 16_380, head_dim_v: 64, features, ..plain }
    }

    #[test]
    fn the_parts_follow_each_other_and_factors_are_there_for_scales_of_keys() {
        let [of_heads, of_keys] = [0, 1].map(|keys_per_scale| problem(keys_per_scale).widened_places(300));
        let rows = 2 * 8 * 16_384;
        let (v, k_scales) = (512 + rows * 256, 512 + rows * 384);
        assert_eq!(of_heads, WidenedPlaces { k: 512, v, k_scales, lengths: k_scales, end: k_scales + 8 });
        let lengths = k_scales + (rows + 256) * 4;
        assert_eq!(of_keys, WidenedPlaces { k: 512, v, k_scales, lengths, end: lengths + 8 });
        assert_eq!(problem(1).workspace_bytes(), problem(1).places_of_widened().end);
        assert!(problem(1).workspace_bytes_unwidened() < 1 << 20);
    }

    #[test]
    fn long_prompts_within_the_limit_keep_widened_keys() {
        let keeps = |problem: Problem| problem.keeps_widened_kv();
        let (own, of_keys) = (problem(0), problem(128));
        assert!(keeps(own) && keeps(of_keys) && keeps(Problem { dtype: Dtype::Fp16, ..own }));
        assert!(!keeps(Problem { dtype: Dtype::Fp16, ..of_keys }), "V times scales in fp16");
        assert!(!keeps(Problem { seqlen_q: 63, ..own }) && keeps(Problem { seqlen_q: 64, ..own }));
        assert!(!keeps(Problem { seqlen_k: 63, ..own }) && keeps(Problem { seqlen_k: 64, ..own }));
        assert!(!keeps(Problem { head_dim: 136, ..own }) && !keeps(Problem { head_dim_v: 272, ..own }));
        assert!(!keeps(Problem { batch_invariant: true, ..own }));
        let block_mask = Some(BlockMask { block_q: 64, block_k: 64 });
        assert!(!keeps(Problem { features: Features { block_mask, ..own.features }, ..own }));
        for problem in [own, of_keys, Problem { batch_size: 77, ..of_keys }] {
            let most = problem.most_widened_keys();
            assert!(most > 0 && keeps(Problem { seqlen_k: most, ..problem }), "{most}");
            assert!(!keeps(Problem { seqlen_k: most + 1, ..problem }), "{most}");
        }
    }

    /// Sizes at the ends of a record's: batch size, keys, and query heads of K/V heads.
    #[test]
    fn problems_in_the_same_record_keep_them_too() {
        let largest = Problem { batch_size: 4, num_heads_q: 64, num_heads_kv: 16, seqlen_k: 8192, ..problem(1) };
        assert!(largest.keeps_widened_kv_nearby());
        let others = [(largest.batch_size + 1, 24, 10_032), (largest.batch_size, 11, 6700)];
        for (batch_size, num_heads_kv, seqlen_k) in others {
            let other = Problem { batch_size, num_heads_kv, seqlen_k, ..largest };
            assert!(other.keeps_widened_kv(), "{other:?}");
        }
        assert!(!Problem { seqlen_k: 40_000, ..largest }.keeps_widened_kv_nearby());
        // (batch size, key-value heads, keys) of a bucket, and the largest in it: keys are rounded
        // up to 16 rows.
        for (bucket, far) in
            [((256, 10, 512), (313, 15, 626)), ((1024, 10, 128), (1253, 15, 156)), ((4096, 2, 96), (5015, 3, 117))]
        {
            let of = |(batch_size, num_heads_kv, seqlen_k), dim| Problem {
                batch_size,
                num_heads_q: 8 * num_heads_kv,
                num_heads_kv,
                seqlen_k,
                head_dim: dim,
                head_dim_v: dim,
                ..problem(1)
            };
            for dim in (16..=256).step_by(16) {
                assert!(!of(bucket, dim).keeps_widened_kv_nearby() || of(far, dim).keeps_widened_kv(), "{far:?} {dim}");
            }
        }
        let few = Problem { seqlen_q: 64, ..problem(1) };
        assert!(few.keeps_widened_kv() && !few.keeps_widened_kv_nearby());
    }

    #[test]
    fn the_problem_that_remains_has_rows_of_16_bits() {
        let varlen = Varlen { total_q: Some(99), total_k: Some(77), padded_q: true };
        let features = Features { paged: Some(16), varlen: Some(varlen), sinks: true, ..problem(1).features };
        let remaining = Problem { features, ..problem(1) }.widened().features;
        let varlen = Some(Varlen { total_k: None, ..varlen });
        assert_eq!(remaining, Features { varlen, sinks: true, ..Features::NONE });
    }
}
