//! The dropout mask: a pure function of (seed, offset, batch, head, row, key), equal on every
//! backend and tile size.
//!
//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One draw
//! of 128 bits serves eight elements, 16 bits each: rows {r, r+8} x keys {c, c+1, c+8, c+9} of an
//! aligned 16 x 16 block, r = row mod 8, c even. That patch is what one lane of an `mma`
//! accumulator holds, in the scores and in their transpose, so a kernel draws once per eight
//! elements in either orientation.
//!
//! ```text
//!     key     = (seed low, seed high XOR offset high)
//!     counter = ((key / 16) * 4 + (key mod 8) / 2, (row / 16) * 8 + row mod 8,
//!                batch * num_heads_q + head, offset low)
//!     word    = (row mod 16) / 8 + 2 * ((key mod 16) / 8);  half = key mod 2 (0: low 16 bits)
//!     dropped = 16 bits < threshold,  threshold = round(p * 65536), at most 65535
//! ```
//!
//! Kept weights are scaled by 65536 / (65536 - threshold), the exact inverse of the probability of
//! keeping. `templates/device/attention/dropout.cuh` is the same function in CUDA; a test compares
//! them bit for bit.

/// The dropout of a launch. Seed and offset come from device memory if the pointers are set (u64
/// each).
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Probability of dropping, in [0, 1).
    pub p: f32,
    pub seed: u64,
    pub offset: u64,
    pub seed_ptr: *const u64,
    pub offset_ptr: *const u64,
}

impl Dropout {
    pub const NONE: Dropout =
        Dropout { p: 0.0, seed: 0, offset: 0, seed_ptr: std::ptr::null(), offset_ptr: std::ptr::null() };

    /// A 16-bit draw below this drops its weight.
    pub fn threshold(&self) -> u32 {
        ((self.p as f64 * 65536.0).round() as u32).min(65535)
    }

    /// The factor of a kept weight.
    pub fn keep_scale(&self) -> f32 {
        (65536.0 / (65536 - self.threshold()) as f64) as f32
    }
}

/// Philox4x32 with ten rounds. Inlined, so that a loop over draws becomes vector code.
#[inline(always)]
pub const fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < 10 {
        let a = 0xD251_1F53_u64 * counter[0] as u64;
        let b = 0xCD9E_8D57_u64 * counter[2] as u64;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        round += 1;
    }
    counter
}

/// The mask of one (batch, head): seed, offset and head folded into Philox's key and upper counter
/// words.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask {
    key: [u32; 2],
    head: u32,
    offset_low: u32,
    threshold: u32,
}

impl DropoutMask {
    /// `head` is batch * num_heads_q + head.
    pub fn new(seed: u64, offset: u64, head: u32, threshold: u32) -> Self {
        DropoutMask {
            key: [seed as u32, (seed >> 32) as u32 ^ (offset >> 32) as u32],
            head,
            offset_low: offset as u32,
            threshold,
        }
    }

    /// The four words of the patch that holds (row, key).
    #[inline(always)]
    pub fn draw(&self, row: u32, key: u32) -> [u32; 4] {
        let column = (key / 16) * 4 + (key % 8) / 2;
        philox4x32_10([column, (row / 16) * 8 + row % 8, self.head, self.offset_low], self.key)
    }

    pub fn keeps(&self, row: u32, key: u32) -> bool {
        let words = self.draw(row, key);
        let word = words[((row % 16) / 8 + 2 * ((key % 16) / 8)) as usize];
        (word >> (16 * (key % 2))) & 0xffff >= self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn philox_matches_the_published_vectors() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32_10([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn the_share_of_dropped_elements_is_p() {
        let dropout = Dropout { p: 0.1, ..Dropout::NONE };
        let mask = DropoutMask::new(42, 7, 3, dropout.threshold());
        let dropped = (0..512).flat_map(|i| (0..512).map(move |j| (i, j))).filter(|(i, j)| !mask.keeps(*i, *j)).count();
        // 262144 draws: four standard deviations are 614.
        assert!((dropped as f64 - 0.1 * 262144.0).abs() < 614.0, "{dropped} dropped");
    }

    #[test]
    fn every_input_changes_the_mask() {
        let bits = |seed, offset, head| {
            let mask = DropoutMask::new(seed, offset, head, 32768);
            (0..32).flat_map(|i| (0..32).map(move |j| (i, j))).map(|(i, j)| mask.keeps(i, j)).collect::<Vec<_>>()
        };
        let base = bits(1, 2, 3);
        for other in [bits(2, 2, 3), bits(1, 3, 3), bits(1, 2, 4), bits(1 | 1 << 40, 2, 3), bits(1, 2 | 1 << 40, 3)] {
            let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!((384..640).contains(&same), "{same} of 1024 bits agree");
        }
    }
}
