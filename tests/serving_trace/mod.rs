//! The calls of a server of Llama-3-8B: the range that it prepares, and seeded random calls inside.

use flashtune::plan::{Optional, Range, Sizes};
use flashtune::problem::features::bits;
use flashtune::problem::{Causal, Dtype, Features, Pass, Problem, Varlen};

/// The largest call of a server of Llama-3-8B: a prompt chunk over pages of 64 keys.
pub const LLAMA: Problem = Problem {
    seqlen_q: 8192,
    seqlen_k: 131_072,
    num_heads_kv: 8,
    causal: Causal::BottomRight,
    features: Features { paged: Some(64), varlen: Some(CHUNKS), ..Features::NONE },
    ..Problem::dense(Pass::Forward, Dtype::Bf16, 256, 32, 8192, 128)
};
const CHUNKS: Varlen = Varlen { total_q: Some(8192), total_k: None, padded_q: false };
pub const LLAMA_BITS: u64 = bits::PAGED.value | bits::CU_SEQLENS_Q.value | bits::SEQUSED_K.value;

/// Calls with `cu_seqlens_q` (chunks, or chunks beside single tokens) and without (decoding).
pub fn llama() -> Vec<Range> {
    let optional = Optional { features: bits::CU_SEQLENS_Q.value, ..Optional::default() };
    Range { largest: LLAMA, least: Sizes::ONE }.variants(LLAMA_BITS, &optional).unwrap()
}

/// Seeded random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }

    /// From 1 to `most`, each power of two as likely as the next.
    pub fn size(&mut self, most: i64) -> i64 {
        let bits = self.below(u64::from(most.ilog2()) + 1) as u32;
        let low = 1i64 << bits;
        (low + self.below(low as u64) as i64).min(most)
    }
}

/// A random call of a server: a decoding step, a prompt chunk, or a mix of both.
pub fn call(random: &mut Random) -> Problem {
    let (batch_size, seqlen_k) = (random.size(256), random.size(131_072));
    let decoding = Features { varlen: Some(Varlen::default()), ..LLAMA.features };
    let mixed = Features { varlen: Some(Varlen { total_q: Some(random.size(8192)), ..CHUNKS }), ..LLAMA.features };
    let problem = match random.below(4) {
        0 | 1 => Problem { batch_size, seqlen_q: 1, seqlen_k, features: decoding, ..LLAMA },
        2 => Problem { batch_size, seqlen_q: random.size(16), seqlen_k, features: decoding, ..LLAMA },
        _ => Problem { batch_size, seqlen_q: random.size(8192), seqlen_k, features: mixed, ..LLAMA },
    };
    problem.without_idle_causal()
}
