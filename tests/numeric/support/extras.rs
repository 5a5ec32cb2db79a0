//! Extras: the features that a case uses beyond softmax(scale * Q K^T) V, and their part of the
//! case's line, which omits defaults.

use super::blocks::Blocks;
use flashtune::problem::{Eight, EightBits, Features, Four, Pass, Varlen, Window};
use std::collections::HashMap;
use std::fmt;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extras {
    pub window: Window,
    /// 0 means no softcap.
    pub softcap: f32,
    /// Slopes for each head, or for each batch entry and head.
    pub alibi: Option<Spread>,
    pub bias: Option<Spread>,
    /// Backward: gradient of the bias, with the same spread.
    pub dbias: bool,
    pub mask: Option<Spread>,
    /// The mask holds one bit a score instead of one byte.
    pub mask_bits: bool,
    pub sinks: bool,
    pub dlse: bool,
    /// The sides whose tensors hold packed sequences.
    pub cu_seqlens: Sides,
    /// The sides that use only the first rows of each sequence.
    pub seqused: Sides,
    /// Forward: keys are in pages of this size.
    pub page_size: Option<i64>,
    /// Forward: keys lie in entries of a cache that an array names, after some padding. Needs
    /// `seqused.k`.
    pub key_starts: bool,
    /// Forward.
    pub batch_invariant: bool,
    /// Lengths in queries and keys of every sequence, where lengths come from `cu_seqlens` or
    /// `seqused`.
    pub alone: Option<[i64; 2]>,
    /// `alone` is for the first sequence only; the others have lengths from the seed.
    pub among_others: bool,
    pub block_mask: Option<Blocks>,
    /// Forward: k and v, and perhaps q, have 8 bits.
    pub eight: Option<EightBits>,
    /// Forward: k and v are int4.
    pub four: Option<Four>,
}

/// The dimensions along which a (batch, heads_q, seqlen_q, seqlen_k) tensor varies; its stride is 0
/// along the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    pub batch: bool,
    pub head: bool,
    pub row: bool,
    pub key: bool,
}

impl Spread {
    /// From the letters b, h, q and k.
    pub const fn of(letters: &str) -> Spread {
        let mut spread = Spread { batch: false, head: false, row: false, key: false };
        let mut at = 0;
        while at < letters.len() {
            match letters.as_bytes()[at] {
                b'b' => spread.batch = true,
                b'h' => spread.head = true,
                b'q' => spread.row = true,
                b'k' => spread.key = true,
                _ => panic!("a spread consists of the letters b, h, q and k"),
            }
            at += 1;
        }
        spread
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = [(self.batch, 'b'), (self.head, 'h'), (self.row, 'q'), (self.key, 'k')];
        letters.iter().filter(|(is_on, _)| *is_on).try_for_each(|(_, letter)| write!(f, "{letter}"))
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sides {
    /// The side of q, out, dout and dq.
    pub q: bool,
    /// The side of k, v, dk and dv.
    pub k: bool,
}

impl Sides {
    pub const BOTH: Sides = Sides { q: true, k: true };

    pub fn any(&self) -> bool {
        self.q || self.k
    }
}

impl Extras {
    pub fn is_varlen(&self) -> bool {
        self.cu_seqlens.any() || self.seqused.any()
    }

    pub fn features(&self, pass: Pass, totals: Varlen) -> Features {
        let is_backward = pass == Pass::Backward;
        Features {
            window: self.window,
            softcap: self.softcap != 0.0,
            alibi: self.alibi.is_some(),
            bias: self.bias.is_some(),
            dbias: self.dbias && is_backward,
            mask: self.mask.is_some(),
            mask_bits: self.mask.is_some() && self.mask_bits,
            sinks: self.sinks,
            dlse: self.dlse && is_backward,
            varlen: self.is_varlen().then_some(totals),
            paged: self.page_size,
            key_starts: self.key_starts && !is_backward,
            block_mask: self.block_mask.map(|blocks| blocks.mask()),
            eight_bits: self.eight.filter(|_| !is_backward),
            four_bits: self.four.filter(|_| !is_backward),
        }
    }

    /// Reads the fields of a case's line.
    pub fn parse(fields: &HashMap<&str, &str>) -> Result<Extras, String> {
        let number = |name: &str| match fields.get(name) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|error| format!("{name}: {error}")),
        };
        let flag = |name: &str| fields.get(name).is_some_and(|text| *text == "true");
        let spread = |name: &str| fields.get(name).map(|letters| Spread::of(letters));
        let sides = |name: &str| {
            let has = |side| fields.get(name).is_some_and(|text| text.contains(side));
            Sides { q: has('q'), k: has('k') }
        };
        let softcap = fields.get("softcap").map_or(Ok(0.0), |text| text.parse());
        Ok(Extras {
            window: Window {
                left: number("window_left")?,
                right: number("window_right")?,
                top_left: flag("window_top_left"),
            },
            softcap: softcap.map_err(|error| format!("softcap: {error}"))?,
            alibi: spread("alibi"),
            bias: spread("bias"),
            dbias: flag("dbias"),
            mask: spread("mask"),
            mask_bits: flag("mask_bits"),
            sinks: flag("sinks"),
            dlse: flag("dlse"),
            cu_seqlens: sides("cu_seqlens"),
            seqused: sides("seqused"),
            page_size: number("page_size")?,
            key_starts: flag("key_starts"),
            batch_invariant: flag("batch_invariant"),
            alone: number("alone_q")?.zip(number("alone_k")?).map(Into::into),
            among_others: flag("among_others"),
            block_mask: fields.get("block_mask").map(|text| text.parse()).transpose()?,
            four: fields.get("kv_dtype").and_then(|name| Four::ALL.into_iter().find(|four| four.name() == *name)),
            eight: match fields.get("kv_dtype").filter(|name| Four::ALL.iter().all(|four| four.name() != **name)) {
                None => None,
                Some(name) => Some(EightBits {
                    keys: *Eight::ALL.iter().find(|eight| eight.name() == *name).ok_or(format!("kv_dtype={name}"))?,
                    queries: flag("fp8_q"),
                    keys_per_scale: number("keys_per_scale")?.unwrap_or(0),
                }),
            },
        })
    }
}

impl fmt::Display for Extras {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("window_left", self.window.left),
            ("window_right", self.window.right),
            ("page_size", self.page_size),
            ("alone_q", self.alone.map(|[q, _]| q)),
            ("alone_k", self.alone.map(|[_, k]| k)),
            ("keys_per_scale", self.eight.map(|eight| eight.keys_per_scale)),
        ];
        self.eight.iter().try_for_each(|eight| write!(f, " kv_dtype={}", eight.keys.name()))?;
        self.four.iter().try_for_each(|four| write!(f, " kv_dtype={}", four.name()))?;
        for (name, keys) in numbers {
            keys.iter().try_for_each(|keys| write!(f, " {name}={keys}"))?;
        }
        if self.softcap != 0.0 {
            write!(f, " softcap={}", self.softcap)?;
        }
        for (name, spread) in [("alibi", self.alibi), ("bias", self.bias), ("mask", self.mask)] {
            spread.iter().try_for_each(|spread| write!(f, " {name}={spread}"))?;
        }
        for (name, sides) in [("cu_seqlens", self.cu_seqlens), ("seqused", self.seqused)] {
            if sides.any() {
                write!(f, " {name}={}{}", if sides.q { "q" } else { "" }, if sides.k { "k" } else { "" })?;
            }
        }
        self.block_mask.iter().try_for_each(|blocks| write!(f, " block_mask={blocks}"))?;
        let flags = [
            ("window_top_left", self.window.top_left),
            ("mask_bits", self.mask_bits),
            ("key_starts", self.key_starts),
            ("batch_invariant", self.batch_invariant),
            ("among_others", self.among_others),
            ("dbias", self.dbias),
            ("sinks", self.sinks),
            ("dlse", self.dlse),
            ("fp8_q", self.eight.is_some_and(|eight| eight.queries)),
        ];
        flags.iter().filter(|(_, is_on)| *is_on).try_for_each(|(name, _)| write!(f, " {name}=true"))
    }
}
