//! Features: what a problem may add to plain attention, and the one table of what the library knows
//! about each.
//!
//! The record key, the renderer, the command line and the checks of the C face follow from the
//! table. A new feature is a field of `Features`, a row of the table, and a line in `is_on` and in
//! `switch_on`; the compiler asks for each. The features themselves are implemented in
//! `templates/device` and `cpu`.

use super::{EightBits, Four, Pass, Problem};
use serde::{Deserialize, Serialize};

pub use super::feature_sizes::{BlockMask, Varlen, Window};

/// Additions to softmax(scale * Q K^T) V; all off by default. A kernel has no code for a feature
/// that is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Features {
    pub window: Window,
    /// Scores s become c * tanh(s / c).
    pub softcap: bool,
    /// -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key j.
    pub alibi: bool,
    /// A tensor is added to scores.
    pub bias: bool,
    /// Backward: the gradient of the bias is wanted.
    pub dbias: bool,
    /// A tensor of bytes or bits says which keys each row sees.
    pub mask: bool,
    /// The elements of the mask are bits.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mask_bits: bool,
    /// Each query head has a score that belongs to no key and takes its share of the softmax.
    pub sinks: bool,
    /// Backward: a gradient flows into the LSE.
    pub dlse: bool,
    /// seqlen_q and seqlen_k are upper bounds of the sequences' lengths.
    pub varlen: Option<Varlen>,
    /// Forward: k and v are pages of this many keys, (pages, page size, heads, dim). A block table
    /// names the pages of each sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paged: Option<i64>,
    /// Forward: each sequence's keys begin at a row of their own, in an entry of k and v that an
    /// array may name. Needs varlen, since the lengths follow.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub key_starts: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_mask: Option<BlockMask>,
    /// Forward: k and v, and perhaps q, hold 8-bit numbers with scales.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eight_bits: Option<EightBits>,
    /// Forward: k and v are rows of 4-bit numbers with their scales.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub four_bits: Option<Four>,
}

impl Features {
    pub const NONE: Features = Features {
        window: Window { left: None, right: None, top_left: false },
        softcap: false,
        alibi: false,
        bias: false,
        dbias: false,
        mask: false,
        mask_bits: false,
        sinks: false,
        dlse: false,
        varlen: None,
        paged: None,
        key_starts: false,
        block_mask: None,
        eight_bits: None,
        four_bits: None,
    };

    pub fn is_none(&self) -> bool {
        *self == Features::NONE
    }

    /// Whether single keys or blocks of keys of 8 bits have scales.
    pub fn has_key_scales(&self) -> bool {
        self.eight_bits.is_some_and(|eight| eight.keys_per_scale != 0)
    }

    /// Whether a feature changes scores before the softmax. The softmax scale alone is no such
    /// change.
    pub const fn modifies_scores(&self) -> bool {
        self.softcap || self.alibi || self.bias || self.mask
    }

    /// Whether q is e4m3 as k and v are.
    pub fn has_fp8_queries(&self) -> bool {
        self.eight_bits.is_some_and(|eight| eight.queries)
    }

    pub fn is_on(&self, feature: Feature) -> bool {
        // The pattern has no `..`, so that a new field has to name its feature.
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
            key_starts,
            block_mask,
            eight_bits,
            four_bits,
        } = *self;
        match feature {
            Feature::Window => window != Window::default(),
            Feature::Softcap => softcap,
            Feature::Alibi => alibi,
            Feature::Bias => bias,
            Feature::Dbias => dbias,
            Feature::Mask => mask && !mask_bits,
            Feature::MaskBits => mask_bits,
            Feature::Sinks => sinks,
            Feature::Dlse => dlse,
            Feature::Varlen => varlen.is_some(),
            Feature::Paged => paged.is_some(),
            Feature::KeyStarts => key_starts,
            Feature::BlockMask => block_mask.is_some(),
            Feature::EightBits => eight_bits.is_some(),
            Feature::FourBits => four_bits.is_some(),
        }
    }

    /// Switches on a feature that is a mere flag. A feature with sizes is on once its sizes are
    /// set.
    pub fn switch_on(&mut self, feature: Feature) {
        match feature {
            Feature::Softcap => self.softcap = true,
            Feature::Alibi => self.alibi = true,
            Feature::Bias => self.bias = true,
            Feature::Dbias => self.dbias = true,
            Feature::Mask => self.mask = true,
            Feature::MaskBits => (self.mask, self.mask_bits) = (true, true),
            Feature::Sinks => self.sinks = true,
            Feature::Dlse => self.dlse = true,
            Feature::KeyStarts => self.key_starts = true,
            Feature::Window | Feature::Varlen | Feature::Paged | Feature::BlockMask => {}
            Feature::EightBits | Feature::FourBits => {}
        }
    }
}

/// A bit of `features` in the C structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bit {
    pub value: u64,
    /// The name in the header.
    pub name: &'static str,
}

/// The bits. `capi::types` repeats them for the header, and a test there compares the two.
pub mod bits {
    use super::Bit;

    pub const ALIBI: Bit = Bit { value: 1 << 0, name: "FLASHTUNE_FEATURE_ALIBI" };
    pub const BIAS: Bit = Bit { value: 1 << 1, name: "FLASHTUNE_FEATURE_BIAS" };
    pub const MASK: Bit = Bit { value: 1 << 2, name: "FLASHTUNE_FEATURE_MASK" };
    pub const SINKS: Bit = Bit { value: 1 << 3, name: "FLASHTUNE_FEATURE_SINKS" };
    pub const CU_SEQLENS_Q: Bit = Bit { value: 1 << 4, name: "FLASHTUNE_FEATURE_CU_SEQLENS_Q" };
    pub const CU_SEQLENS_K: Bit = Bit { value: 1 << 5, name: "FLASHTUNE_FEATURE_CU_SEQLENS_K" };
    pub const SEQUSED_Q: Bit = Bit { value: 1 << 6, name: "FLASHTUNE_FEATURE_SEQUSED_Q" };
    pub const SEQUSED_K: Bit = Bit { value: 1 << 7, name: "FLASHTUNE_FEATURE_SEQUSED_K" };
    pub const DBIAS: Bit = Bit { value: 1 << 8, name: "FLASHTUNE_FEATURE_DBIAS" };
    pub const DLSE: Bit = Bit { value: 1 << 9, name: "FLASHTUNE_FEATURE_DLSE" };
    pub const PAGED: Bit = Bit { value: 1 << 10, name: "FLASHTUNE_FEATURE_PAGED" };
    pub const MASK_BITS: Bit = Bit { value: 1 << 11, name: "FLASHTUNE_FEATURE_MASK_BITS" };
    pub const BLOCK_MASK: Bit = Bit { value: 1 << 12, name: "FLASHTUNE_FEATURE_BLOCK_MASK" };
    pub const CACHE_BATCH_IDX: Bit = Bit { value: 1 << 13, name: "FLASHTUNE_FEATURE_CACHE_BATCH_IDX" };
    pub const LEFTPAD_K: Bit = Bit { value: 1 << 14, name: "FLASHTUNE_FEATURE_LEFTPAD_K" };
}

/// A `constexpr` that kernels may read.
pub struct Constant {
    /// The name in CUDA.
    pub name: &'static str,
    /// The name in template tags and in the header comment of a rendered text.
    pub tag: &'static str,
    pub meaning: &'static str,
    pub value: ConstantValue,
}

/// The function that computes a constant from the problem. In CUDA the constant is an int or a
/// bool.
pub enum ConstantValue {
    Integer(fn(&Problem) -> u32),
    Flag(fn(&Problem) -> bool),
}

/// The library's knowledge of one feature.
pub struct Row {
    /// The names of the feature's fields in a problem file (JSON lines for `flashtune autotune`),
    /// each with its text in `--help`. The command line's options have the same names with `-`
    /// instead of `_`.
    pub options: &'static [(&'static str, &'static str)],
    pub passes: &'static [Pass],
    /// Each of these bits switches the feature on. Without bits, a field of the C struct does.
    pub bits: &'static [Bit],
    /// The word in the record key of a problem that has the feature.
    pub word: fn(&Features) -> String,
    pub constants: &'static [Constant],
}

const BOTH: &[Pass] = &[Pass::Forward, Pass::Backward];

/// Makes the enum, the list of all its variants and the row of each from one table.
macro_rules! table {
    ($($feature:ident => $row:expr,)*) => {
        /// One thing that a problem may add to plain attention.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Feature {
            $($feature,)*
        }

        impl Feature {
            /// All features, in the order of their words in a record key.
            pub const ALL: &[Feature] = &[$(Feature::$feature,)*];

            pub const fn row(self) -> &'static Row {
                match self {
                    $(Feature::$feature => const { &$row },)*
                }
            }
        }
    };
}

table! {
    Window => Row {
        options: &[
            ("window_left", "Keys before its diagonal that a query sees; all if not given"),
            ("window_right", "Keys after its diagonal that a query sees; all if not given"),
        ],
        passes: BOTH,
        bits: &[],
        word: |_| "window".to_owned(),
        constants: &[Constant {
            name: "kHasWindow",
            tag: "has_window",
            meaning: "the window hides keys that lie too far before the diagonal",
            value: ConstantValue::Flag(|p| p.left_shift().is_some()),
        }],
    },
    Softcap => Row {
        options: &[("softcap", "A soft cap of the scores")],
        passes: BOTH,
        bits: &[],
        word: |_| "softcap".to_owned(),
        constants: &[Constant {
            name: "kHasSoftcap",
            tag: "has_softcap",
            meaning: "scores s become c * tanh(s / c) (device/attention/scores.cuh)",
            value: ConstantValue::Flag(|p| p.features.softcap),
        }],
    },
    Alibi => Row {
        options: &[("alibi", "ALiBi slopes")],
        passes: BOTH,
        bits: &[bits::ALIBI],
        word: |_| "alibi".to_owned(),
        constants: &[Constant {
            name: "kHasAlibi",
            tag: "has_alibi",
            meaning: "scores lose a multiple of the distance to the diagonal (device/attention/scores.cuh)",
            value: ConstantValue::Flag(|p| p.features.alibi),
        }],
    },
    Bias => Row {
        options: &[("bias", "A tensor that is added to the scores")],
        passes: BOTH,
        bits: &[bits::BIAS],
        word: |_| "bias".to_owned(),
        constants: &[Constant {
            name: "kHasBias",
            tag: "has_bias",
            meaning: "a tensor is added to scores",
            value: ConstantValue::Flag(|p| p.features.bias),
        }],
    },
    Dbias => Row {
        options: &[("dbias", "Backward: the gradient of the bias")],
        passes: &[Pass::Backward],
        bits: &[bits::DBIAS],
        word: |_| "dbias".to_owned(),
        constants: &[Constant {
            name: "kHasDbias",
            tag: "has_dbias",
            meaning: "the gradient of the bias is wanted",
            value: ConstantValue::Flag(|p| p.features.dbias),
        }],
    },
    Mask => Row {
        options: &[("mask", "A tensor of bytes that says which keys are seen")],
        passes: BOTH,
        bits: &[bits::MASK],
        word: |_| "mask".to_owned(),
        constants: &[Constant {
            name: "kHasMask",
            tag: "has_mask",
            meaning: "a tensor says which keys a row sees",
            value: ConstantValue::Flag(|p| p.features.mask),
        }],
    },
    MaskBits => Row {
        options: &[("mask_bits", "A tensor of bits that says which keys are seen")],
        passes: BOTH,
        bits: &[bits::MASK_BITS],
        word: |_| "maskbits".to_owned(),
        constants: &[Constant {
            name: "kMaskIsBits",
            tag: "mask_is_bits",
            meaning: "the elements of the mask are bits, else bytes",
            value: ConstantValue::Flag(|p| p.features.mask_bits),
        }],
    },
    Sinks => Row {
        options: &[("sinks", "A score of each head that belongs to no key")],
        passes: BOTH,
        bits: &[bits::SINKS],
        word: |_| "sinks".to_owned(),
        constants: &[Constant {
            name: "kHasSinks",
            tag: "has_sinks",
            meaning: "each query head has a score that belongs to no key (device/attention/sink.cuh)",
            value: ConstantValue::Flag(|p| p.features.sinks),
        }],
    },
    Dlse => Row {
        options: &[("dlse", "Backward: a gradient into the LSE")],
        passes: &[Pass::Backward],
        bits: &[bits::DLSE],
        word: |_| "dlse".to_owned(),
        constants: &[Constant {
            name: "kHasDlse",
            tag: "has_dlse",
            meaning: "a gradient flows into the LSE",
            value: ConstantValue::Flag(|p| p.features.dlse),
        }],
    },
    Varlen => Row {
        options: &[("varlen", "Sequences packed end to end, each of the full length")],
        passes: BOTH,
        bits: &[bits::CU_SEQLENS_Q, bits::CU_SEQLENS_K, bits::SEQUSED_Q, bits::SEQUSED_K],
        word: |_| "varlen".to_owned(),
        constants: &[Constant {
            name: "kIsVarlen",
            tag: "is_varlen",
            meaning: "each sequence has its own length, in device memory (device/attention/sequence.cuh)",
            value: ConstantValue::Flag(|p| p.features.varlen.is_some()),
        }],
    },
    Paged => Row {
        options: &[("page_size", "Forward: k and v are pages of N keys")],
        passes: &[Pass::Forward],
        bits: &[bits::PAGED],
        word: |features| format!("page{}", features.paged.unwrap_or(0)),
        constants: &[Constant {
            name: "kPageSize",
            tag: "page_size",
            meaning: "keys of a page of K and V (device/attention/key_pages.cuh); 0: not paged",
            value: ConstantValue::Integer(|p| p.features.paged.unwrap_or(0) as u32),
        }],
    },
    KeyStarts => Row {
        options: &[("key_starts", "Forward: keys begin at rows of their own (cache_batch_idx, leftpad_k); needs seqused")],
        passes: &[Pass::Forward],
        bits: &[bits::CACHE_BATCH_IDX, bits::LEFTPAD_K],
        word: |_| "keystarts".to_owned(),
        constants: &[Constant {
            name: "kHasKeyStarts",
            tag: "has_key_starts",
            meaning: "each sequence's keys begin at a row of their own (device/attention/sequence.cuh)",
            value: ConstantValue::Flag(|p| p.features.key_starts),
        }],
    },
    BlockMask => Row {
        options: &[("block_mask", "A block mask with blocks of N queries and N keys")],
        passes: BOTH,
        bits: &[bits::BLOCK_MASK],
        word: |features| {
            features.block_mask.map_or(String::new(), |mask| format!("blocks{}x{}", mask.block_q, mask.block_k))
        },
        constants: &[
            Constant {
                name: "kMaskBlockQ",
                tag: "mask_block_q",
                meaning: "queries of a block of the block mask (device/attention/block_list.cuh); 0: none",
                value: ConstantValue::Integer(|p| p.features.block_mask.map_or(0, |mask| mask.block_q as u32)),
            },
            Constant {
                name: "kMaskBlockK",
                tag: "mask_block_k",
                meaning: "keys of a block of the block mask; 0: none",
                value: ConstantValue::Integer(|p| p.features.block_mask.map_or(0, |mask| mask.block_k as u32)),
            },
        ],
    },
    EightBits => Row {
        options: &[
            ("kv_dtype", "Forward: k and v are e4m3, e5m2 or int8, with scales"),
            ("fp8_q", "Forward: q is e4m3 as k and v are, and dtype is that of out"),
            ("keys_per_scale", "Keys that share a scale: 0 (all of a sequence), 1 or 128"),
        ],
        passes: &[Pass::Forward],
        bits: &[],
        word: |features| features.eight_bits.map_or("eightbits".to_owned(), |eight| eight.word()),
        constants: &[
            Constant {
                name: "kKeyFormat",
                tag: "key_format",
                meaning: "k and v: 0 as q, 1 e4m3, 2 e5m2, 3 int8 (device/eight.cuh), 4 int4 (device/products/keys_four.cuh)",
                value: ConstantValue::Integer(Problem::key_format),
            },
            Constant {
                name: "kKeysPerScale",
                tag: "keys_per_scale",
                meaning: "keys that share an element of k_descale and v_descale: 1, 128, 0: all of a sequence",
                value: ConstantValue::Integer(|p| p.features.eight_bits.map_or(0, |e| e.keys_per_scale as u32)),
            },
        ],
    },
    FourBits => Row {
        options: &[("kv_int4", "Forward: k and v are int4, with a scale and a zero for each N columns: 32 or 64")],
        passes: &[Pass::Forward],
        bits: &[],
        word: |features| format!("kv{}", features.four_bits.map_or("int4", Four::name)),
        constants: &[Constant {
            name: "kKeyGroup",
            tag: "key_group",
            meaning: "columns of int4 k and v that share a scale; 0: k and v are no int4",
            value: ConstantValue::Integer(|p| p.features.four_bits.map_or(0, |four| four.group() as u32)),
        }],
    },
}

/// The `--help` text of an option in the table.
pub fn help(option: &str) -> &'static str {
    let mut options = Feature::ALL.iter().flat_map(|feature| feature.row().options);
    options.find(|(name, _)| *name == option).map(|(_, help)| *help).expect("an option of the table")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Dtype;

    #[test]
    fn no_two_features_share_a_name_anywhere() {
        let rows = || Feature::ALL.iter().map(|feature| feature.row());
        let bits: Vec<u64> = rows().flat_map(|row| row.bits).map(|bit| bit.value).collect();
        assert_eq!(bits.iter().fold(0, |all, bit| all | bit), bits.iter().sum::<u64>(), "{bits:?}");
        assert!(bits.iter().all(|bit| bit.is_power_of_two()));
        let words = rows().map(|row| (row.word)(&Features::NONE));
        let options = rows().flat_map(|row| row.options).map(|(name, _)| format!("--{name}"));
        let constants = rows().flat_map(|row| row.constants).flat_map(|c| [c.name.to_owned(), c.tag.to_owned()]);
        let mut names: Vec<String> = words.chain(options).chain(constants).collect();
        names.sort();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn a_flag_that_is_switched_on_is_on_and_no_other_is() {
        for feature in Feature::ALL {
            let mut features = Features::NONE;
            features.switch_on(*feature);
            let on: Vec<&Feature> = Feature::ALL.iter().filter(|other| features.is_on(**other)).collect();
            match feature {
                Feature::Window | Feature::Varlen | Feature::Paged | Feature::BlockMask => assert!(features.is_none()),
                Feature::EightBits | Feature::FourBits => assert!(features.is_none()),
                _ => assert_eq!(on, [feature]),
            }
        }
    }

    #[test]
    fn every_flag_changes_its_constant() {
        let plain = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 1, 64, 64);
        for feature in Feature::ALL {
            let mut features = Features::NONE;
            features.switch_on(*feature);
            let on = Problem { features, ..plain };
            for constant in feature.row().constants {
                if let ConstantValue::Flag(value) = constant.value {
                    assert_eq!((value(&plain), value(&on)), (false, !features.is_none()), "{}", constant.name);
                }
            }
        }
    }
}
