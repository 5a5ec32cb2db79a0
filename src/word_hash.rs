//! Word hash: a fast hash of keys that are many integers, such as a problem.
//!
//! Each launch looks its plan up by such a key. SipHash took 0.1 to 0.2 us more
//! (docs/tuning/host-time.md#work-on-the-launch-path). The keys are the caller's own shapes, so
//! nobody gains by choosing them to collide. This file knows none of the keys.

use std::hash::{BuildHasherDefault, Hasher};

pub type BuildWordHasher = BuildHasherDefault<WordHasher>;

/// Mixes each word by a product of 128 bits, whose halves are joined by xor.
#[derive(Clone, Copy)]
pub struct WordHasher(u64);

/// 2^64 over the golden ratio, and the fraction of pi: both odd, with their bits spread.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const START: u64 = 0x243f_6a88_85a3_08d3;

impl Default for WordHasher {
    fn default() -> Self {
        WordHasher(START)
    }
}

impl WordHasher {
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * u128::from(FACTOR);
        self.0 = (product as u64) ^ (product >> 64) as u64 ^ self.0.rotate_left(23);
    }
}

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.mix(u64::from_ne_bytes(*word)));
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.mix(u64::from_ne_bytes(last));
        }
    }
    fn write_u8(&mut self, value: u8) {
        self.mix(value.into());
    }
    fn write_u32(&mut self, value: u32) {
        self.mix(value.into());
    }
    fn write_u64(&mut self, value: u64) {
        self.mix(value);
    }
    fn write_usize(&mut self, value: usize) {
        self.mix(value as u64);
    }
    /// Tables take the lowest bits, or the highest.
    fn finish(&self) -> u64 {
        let product = u128::from(self.0) * u128::from(FACTOR);
        (product as u64) ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::{BuildHasher, Hash};

    fn hash(of: impl Hash) -> u64 {
        BuildWordHasher::default().hash_one(of)
    }

    #[test]
    fn near_keys_differ_in_their_low_and_in_their_high_bits() {
        let keys: Vec<[i64; 6]> = (0..4096).map(|n| [1, n % 16, 128 * (n / 16 % 16), 8, 64 * (n / 256), 128]).collect();
        let hashes: Vec<u64> = keys.iter().map(hash).collect();
        assert_eq!(hashes.iter().collect::<HashSet<_>>().len(), keys.len());
        for shift in [0, 52] {
            let mut counts = [0; 64];
            hashes.iter().for_each(|hash| counts[(hash >> shift) as usize % 64] += 1);
            assert!(counts.iter().all(|count| (32..128).contains(count)), "{shift}: {counts:?}");
        }
    }

    #[test]
    fn the_order_and_the_length_of_words_count() {
        assert_ne!(hash([1u64, 2]), hash([2u64, 1]));
        assert_ne!(hash(vec![0u64; 3]), hash(vec![0u64; 4]));
        assert_ne!(hash("a"), hash("b"));
    }
}
