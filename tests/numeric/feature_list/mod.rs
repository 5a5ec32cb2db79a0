//! The features of README's table, each as a case that asks for it, and what a backend or kernel family lacks, with the reason.
//!
//! A new feature is a line of `features`; where it is not in all families at once, a line of `LACKS`.

use crate::support::blocks::Blocks;
use crate::support::case::{Case, Strides};
use crate::support::extras::{Extras, Sides, Spread};
use flashtune::config::{Config, Family};
use flashtune::problem::{Causal, Dtype, Pass, Window};

/// One row of the table.
pub struct Feature {
    pub name: &'static str,
    ask: fn(&mut Case),
    /// The one pass that it belongs to; None: both.
    only: Option<Pass>,
    /// Whether a config has it; those that merely run the case do not have the feature.
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

    /// Head dim 64 in bf16, equal heads, packed tensors, of these lengths; and what is asked for.
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
        new("causal, aligned to the bottom right", |case| case.causal = Causal::BottomRight),
        new("causal, aligned to the top left", |case| case.causal = Causal::TopLeft),
        new("sliding window", |case| case.extras.window = WINDOW),
        new("soft cap", |case| case.extras.softcap = 1.5),
        new("ALiBi slopes", |case| case.extras.alibi = Some(Spread::of("h"))),
        new("bias", |case| case.extras.bias = Some(Spread::of("hqk"))),
        new("gradient of a bias", |case| {
            case.extras = Extras { bias: Some(Spread::of("hqk")), dbias: true, ..case.extras };
        })
        .of_pass(Pass::Backward),
        new("mask of bytes", |case| case.extras.mask = Some(Spread::of("bqk"))),
        new("mask of bits", |case| {
            case.extras = Extras { mask: Some(Spread::of("bqk")), mask_bits: true, ..case.extras };
        }),
        new("block mask", |case| case.extras.block_mask = Some(Blocks::new(128, 128))),
        new("attention sinks, with their gradient", |case| case.extras.sinks = true),
        new("gradient into the LSE", |case| case.extras.dlse = true).of_pass(Pass::Backward),
        new("dropout", |case| case.dropout_p = 0.2),
        new("deterministic gradients", |case| case.deterministic = true).of_pass(Pass::Backward),
        new("batch-invariant mode", |case| case.extras.batch_invariant = true).of_pass(Pass::Forward),
        new("sequences end to end (`cu_seqlens`)", |case| case.extras.cu_seqlens = Sides::BOTH),
        new("padded sequences (`seqused`)", |case| case.extras.seqused = Sides::BOTH),
        new("paged KV", |case| case.extras.page_size = Some(16)).of_pass(Pass::Forward),
        Feature {
            has: |config| config.get("num_splits") > 1,
            ..new("few queries, their keys split over the GPU", |case| (case.seqlen_q, case.seqlen_k) = (4, 4000))
                .of_pass(Pass::Forward)
        },
        new("grouped heads (GQA, MQA)", |case| case.num_heads_kv = 1),
        new("another head dim for v", |case| case.head_dim_v = 32),
        new("head dims up to 256", |case| (case.head_dim, case.head_dim_v) = (256, 256)),
        new("head dims up to 512", |case| (case.head_dim, case.head_dim_v) = (512, 512)),
        new("odd head dims", |case| (case.head_dim, case.head_dim_v) = (33, 33)),
        new("odd strides", |case| case.strides = Strides::OddGaps),
        new("fp32", |case| case.dtype = Dtype::Fp32),
    ]
}

/// What some columns of the table lack, in the passes that the feature belongs to.
pub struct Lack {
    pub feature: &'static str,
    pub families: &'static [Family],
    /// A clause that goes after "since"; it follows the table in README.
    pub reason: &'static str,
}

const fn lack(families: &'static [Family], feature: &'static str, reason: &'static str) -> Lack {
    Lack { feature, families, reason }
}

pub const LACKS: [Lack; 9] = [
    lack(&[Family::Decode], "block mask", "its tiles hold rows of several heads, whose lists of blocks differ"),
    lack(&[Family::Decode], "dropout", "nothing is dropped while decoding"),
    lack(&[Family::Sm80, Family::Sm90], "paged KV", "they take their keys from where strides say"),
    lack(
        &[Family::Cpu, Family::Sm80, Family::Sm90],
        "few queries, their keys split over the GPU",
        "they do such a call with each row's keys in one piece",
    ),
    lack(&[Family::Sm90], "head dims up to 512", "the N of wgmma and the registers of the backward pass end at 256"),
    lack(&[Family::Sm90], "odd head dims", "TMA copies multiples of 16 bytes"),
    lack(&[Family::Sm90], "odd strides", "TMA copies multiples of 16 bytes"),
    lack(
        &[Family::Sm90],
        "fp32",
        "wgmma reads operands of 4 bytes along the inner dimension alone, which most lie across",
    ),
    lack(&[Family::Decode], "fp32", "its products are of 16-bit elements"),
];
