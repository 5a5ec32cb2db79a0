//! The features of a problem that are left when some feature bits are taken away, for ranges whose
//! problems may lack a feature.

use super::features::{Bit, Feature, Features, Varlen, bits};

impl Features {
    /// Only those of the features whose bits are among `all`, and those that have no bits.
    pub fn of_bits(self, all: u64) -> Features {
        let has = |bit: Bit| all & bit.value != 0;
        let has_any = |feature: Feature| feature.row().bits.iter().any(|bit| has(*bit));
        // The pattern has no `..`, so that a new field has to say which bits it needs.
        let Features {
            window,
            softcap,
            alibi,
            bias,
            dbias,
            mask,
            mask_bits,
            sinks,
            dlse,
            varlen,
            paged,
            block_mask,
            key_starts,
            eight_bits,
            four_bits,
        } = self;
        Features {
            window,
            softcap,
            alibi: alibi && has_any(Feature::Alibi),
            bias: bias && has_any(Feature::Bias),
            dbias: dbias && has_any(Feature::Dbias),
            mask: mask && (has_any(Feature::Mask) || has_any(Feature::MaskBits)),
            mask_bits: mask_bits && has_any(Feature::MaskBits),
            sinks: sinks && has_any(Feature::Sinks),
            dlse: dlse && has_any(Feature::Dlse),
            varlen: varlen.filter(|_| has_any(Feature::Varlen)).map(|varlen| Varlen {
                total_q: varlen.total_q.filter(|_| has(bits::CU_SEQLENS_Q)),
                total_k: varlen.total_k.filter(|_| has(bits::CU_SEQLENS_K)),
                padded_q: varlen.padded_q && has(bits::SEQUSED_Q),
            }),
            paged: paged.filter(|_| has_any(Feature::Paged)),
            block_mask: block_mask.filter(|_| has_any(Feature::BlockMask)),
            key_starts: key_starts && has_any(Feature::KeyStarts),
            eight_bits,
            four_bits,
        }
    }
}
