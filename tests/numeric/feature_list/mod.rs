//! The rows of the table in `docs/support.md`: each feature as a test case that uses it, and each
//! gap with its reason.
//!
//! A new feature adds a line to `features`. A feature that some family lacks also adds a line to
//! `LACKS`.

use crate::support::blocks::Blocks;
use crate::support::case::{Case, Strides};
use crate::support::extras::{Extras, Sides, Spread};
use flashtune::config::{Config, Family};
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Four, Pass, Window};

/// One row of the table.
pub struct Feature {
    pub name: &'static str,
    ask: fn(&mut Case),
    /// The only pass that has this feature; None: both passes have it.
    only: Option<Pass>,
    /// Whether a config implements the feature. Some configs run the case without the feature.
    pub has: fn(&Config) -> bool,
}

impl Feature {
    const fn new(name: &'static str, ask: fn(&mut Case)) -> Feature {
        Feature { name, ask, only: None, has: |_| true }
    }

    const fn of_pass(self, pass: Pass) -> Feature {
        Feature { only: Some(pass), ..self }
    }

    pub fn belongs_to(&self, pass: Pass) -> bool {
        self.only.is_none_or(|only| only == pass)
    }

    /// The plain case (bf16, head dim 64, 4 heads, packed tensors) with these lengths and this
    /// feature.
    pub fn case(&self, (seqlen_q, seqlen_k): (i64, i64)) -> Case {
        let plain = Case::plain(Dtype::Bf16, seqlen_q, 64);
        let mut case = Case { batch_size: 3, num_heads_q: 4, num_heads_kv: 4, seqlen_k, ..plain };
        (self.ask)(&mut case);
        case
    }
}

pub fn features() -> Vec<Feature> {
    const WINDOW: Window = Window { left: Some(40), right: Some(15), top_left: false };
    let new = Feature::new;
    vec![
        new("causal mask, bottom-right aligned", |case| case.causal = Causal::BottomRight),
        new("causal mask, top-left aligned", |case| case.causal = Causal::TopLeft),
        new("sliding window", |case| case.extras.window = WINDOW),
        new("soft cap", |case| case.extras.softcap = 1.5),
        new("ALiBi slopes", |case| case.extras.alibi = Some(Spread::of("h"))),
        new("bias", |case| case.extras.bias = Some(Spread::of("hqk"))),
        new("gradient of the bias", |case| {
            case.extras = Extras { bias: Some(Spread::of("hqk")), dbias: true, ..case.extras };
        })
        .of_pass(Pass::Backward),
        new("mask, one byte a score", |case| case.extras.mask = Some(Spread::of("bqk"))),
        new("mask, one bit a score", |case| {
            case.extras = Extras { mask: Some(Spread::of("bqk")), mask_bits: true, ..case.extras };
        }),
        new("block mask", |case| case.extras.block_mask = Some(Blocks::new(128, 128))),
        new("attention sinks and their gradient", |case| case.extras.sinks = true),
        new("gradient of the LSE", |case| case.extras.dlse = true).of_pass(Pass::Backward),
        new("dropout", |case| case.dropout_p = 0.2),
        new("deterministic gradients", |case| case.deterministic = true).of_pass(Pass::Backward),
        new("batch-invariant forward", |case| case.extras.batch_invariant = true).of_pass(Pass::Forward),
        new("varlen, packed sequences (`cu_seqlens`)", |case| case.extras.cu_seqlens = Sides::BOTH),
        new("varlen, padded sequences (`seqused`)", |case| case.extras.seqused = Sides::BOTH),
        new("K/V cache by index and with left padding (`cache_batch_idx`, `leftpad_k`)", |case| {
            (case.extras.key_starts, case.extras.seqused) = (true, Sides { q: false, k: true });
        })
        .of_pass(Pass::Forward),
        new("paged K/V cache", |case| case.extras.page_size = Some(16)).of_pass(Pass::Forward),
        Feature {
            has: |config| config.get("num_splits").is_some_and(|splits| splits > 1),
            ..new("few queries, keys split over CTAs", |case| (case.seqlen_q, case.seqlen_k) = (4, 4000))
                .of_pass(Pass::Forward)
        },
        new("8-bit k and v (e4m3, e5m2, int8), with scales", |case| {
            let eight = EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 1 };
            case.extras.eight = Some(eight);
        })
        .of_pass(Pass::Forward),
        new("8-bit q, k and v (e4m3)", |case| {
            let eight = EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 };
            case.extras.eight = Some(eight);
        })
        .of_pass(Pass::Forward),
        new("int4 k and v, with scales and zeros", |case| case.extras.four = Some(Four::Int4g32))
            .of_pass(Pass::Forward),
        new("GQA and MQA", |case| case.num_heads_kv = 1),
        new("`head_dim_v` different from `head_dim`", |case| case.head_dim_v = 32),
        new("head dims up to 256", |case| (case.head_dim, case.head_dim_v) = (256, 256)),
        new("head dims up to 512", |case| (case.head_dim, case.head_dim_v) = (512, 512)),
        new("odd head dims", |case| (case.head_dim, case.head_dim_v) = (33, 33)),
        new("odd strides", |case| case.strides = Strides::OddGaps),
        new("fp32", |case| case.dtype = Dtype::Fp32),
    ]
}

/// A feature that some families lack, in every pass that has the feature.
pub struct Lack {
    pub feature: &'static str,
    pub families: &'static [Family],
    /// A clause; the list below the table in `docs/support.md` prints it.
    pub reason: &'static str,
}

const fn lack(families: &'static [Family], feature: &'static str, reason: &'static str) -> Lack {
    Lack { feature, families, reason }
}

pub const LACKS: [Lack; 16] = [
    lack(&[Family::Decode], "block mask", "a tile holds rows of several heads, and their block lists differ"),
    lack(&[Family::Decode], "dropout", "decoding does not use dropout"),
    lack(&[Family::Sm90Fp8], "dropout", "no kernel has dropout for 8-bit tensors"),
    lack(&[Family::Sm90Fp8], "batch-invariant forward", "its sums of 8 bits move at places that depend on the tile"),
    lack(
        &[Family::Cpu, Family::Sm80],
        "few queries, keys split over CTAs",
        "one CTA or thread walks all keys of a row",
    ),
    lack(
        &[Family::Sm90],
        "few queries, keys split over CTAs",
        "few queries run in decode, which splits keys and reads them once for a whole group of heads",
    ),
    lack(
        &[Family::Sm90Fp8],
        "few queries, keys split over CTAs",
        "its first choice does not split; tuning tries splits",
    ),
    lack(
        &[Family::Sm90, Family::Sm90Fp8],
        "head dims up to 512",
        "the N of wgmma and the registers of the backward pass allow 256 at most",
    ),
    lack(&[Family::Sm90, Family::Sm90Fp8], "odd head dims", "TMA needs rows and strides of whole 16-byte units"),
    lack(&[Family::Sm90, Family::Sm90Fp8], "odd strides", "TMA needs rows and strides of whole 16-byte units"),
    lack(
        &[Family::Sm90],
        "fp32",
        "wgmma reads 4-byte operands only if the reduction dimension is contiguous, and in most operands it is not",
    ),
    lack(&[Family::Decode], "fp32", "its products take 16-bit elements"),
    lack(&[Family::Sm90Fp8], "fp32", "O is written in 16 bits"),
    lack(
        &[Family::Sm90Fp8],
        "8-bit k and v (e4m3, e5m2, int8), with scales",
        "its products are of e4m3 alone, so q is e4m3 too",
    ),
    lack(
        &[Family::Sm80, Family::Sm90, Family::Decode],
        "8-bit q, k and v (e4m3)",
        "there are no fp8 products before sm_89, and on sm_90 the family sm90fp8 has them",
    ),
    lack(
        &[Family::Sm80, Family::Sm90Fp8],
        "int4 k and v, with scales and zeros",
        "rows of int4 hold their scales; decode reads them, in prompts too, and sm90 widens them first",
    ),
];
