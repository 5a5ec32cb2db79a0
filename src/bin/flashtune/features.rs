//! A problem's features as the user writes them: one struct for the options of the command line and
//! for a line of a problem file.

use crate::names::by_name;
use flashtune::problem::features::help;
use flashtune::problem::{BlockMask, Causal, Eight, EightBits, Features, Four, Pass, Problem, Varlen, Window};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Options of the command line, and fields of a line of a problem file. Their help stands in the
/// table of features.
#[derive(Clone, Copy, Default, clap::Args, Deserialize, Serialize)]
#[serde(default)]
pub struct FeatureArgs {
    #[arg(long, value_name = "N", help = help("window_left"))]
    pub window_left: Option<i64>,
    #[arg(long, value_name = "N", help = help("window_right"))]
    pub window_right: Option<i64>,
    #[arg(long, help = help("softcap"))]
    pub softcap: bool,
    #[arg(long, help = help("alibi"))]
    pub alibi: bool,
    #[arg(long, help = help("bias"))]
    pub bias: bool,
    #[arg(long, help = help("dbias"))]
    pub dbias: bool,
    #[arg(long, help = help("mask"))]
    pub mask: bool,
    #[arg(long, conflicts_with = "mask", help = help("mask_bits"))]
    pub mask_bits: bool,
    #[arg(long, help = help("sinks"))]
    pub sinks: bool,
    #[arg(long, help = help("dlse"))]
    pub dlse: bool,
    #[arg(long, help = help("varlen"))]
    pub varlen: bool,
    #[arg(long, value_name = "N", help = help("page_size"))]
    pub page_size: Option<i64>,
    #[arg(long, help = help("key_starts"))]
    pub key_starts: bool,
    #[arg(long, value_name = "N", help = help("block_mask"))]
    pub block_mask: Option<i64>,
    #[arg(long, value_name = "TYPE", value_parser = by_name::<Eight>, help = help("kv_dtype"))]
    pub kv_dtype: Option<Eight>,
    #[arg(long, value_name = "N", value_parser = group_of_four, conflicts_with = "kv_dtype")]
    #[arg(help = help("kv_int4"))]
    #[serde(deserialize_with = "four_of_group", serialize_with = "group_of")]
    pub kv_int4: Option<Four>,
    #[arg(long, requires = "kv_dtype", help = help("fp8_q"))]
    pub fp8_q: bool,
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true, requires = "kv_dtype")]
    #[arg(help = help("keys_per_scale"))]
    pub keys_per_scale: i64,
}

impl FeatureArgs {
    /// What the command line says by `requires` and `conflicts_with`, for a line of a problem file.
    pub fn check(&self) -> Result<(), &'static str> {
        match (self.kv_dtype, self.fp8_q, self.keys_per_scale) {
            (None, true, _) => Err("fp8_q is true without kv_dtype; q is e4m3 beside k and v of e4m3 alone"),
            (None, false, 1..) => Err("keys_per_scale is given without kv_dtype; keys of 16 bits have no scales"),
            (Some(_), ..) if self.kv_int4.is_some() => {
                Err("kv_dtype and kv_int4 are both given; k and v have one format")
            }
            _ if self.mask && self.mask_bits => Err("mask and mask_bits are both true; a problem has one mask"),
            _ => Ok(()),
        }
    }

    /// Whether no backward pass has these features.
    pub fn are_forward_only(&self) -> bool {
        self.page_size.is_some() || self.kv_dtype.is_some() || self.kv_int4.is_some() || self.key_starts
    }

    /// The problem with these features. Features of the backward pass stay off in a forward pass.
    pub fn on(self, problem: Problem) -> Problem {
        let is_backward = problem.pass == Pass::Backward;
        let total = |seqlen: i64| Some(problem.batch_size.saturating_mul(seqlen));
        // With pages or starts of keys, `seqused_k` gives the lengths, and k has no total.
        let has_total_k = self.page_size.is_none() && !self.key_starts;
        let total_k = total(problem.seqlen_k).filter(|_| has_total_k);
        // Alone, key_starts leaves q a tensor of equal lengths.
        let total_q = total(problem.seqlen_q).filter(|_| self.varlen);
        let varlen = Varlen { total_q, total_k, ..Varlen::default() };
        let window = match (self.window_left, self.window_right) {
            (None, None) => Window::default(),
            (left, right) => Window { left, right, top_left: problem.causal == Causal::TopLeft },
        };
        let features = Features {
            window,
            softcap: self.softcap,
            alibi: self.alibi,
            bias: self.bias,
            dbias: self.dbias && is_backward,
            mask: self.mask || self.mask_bits,
            mask_bits: self.mask_bits,
            sinks: self.sinks,
            dlse: self.dlse && is_backward,
            varlen: (self.varlen || self.key_starts).then_some(varlen),
            paged: self.page_size,
            key_starts: self.key_starts,
            block_mask: self.block_mask.map(|size| BlockMask { block_q: size, block_k: size }),
            eight_bits: self.kv_dtype.map(|keys| EightBits {
                keys,
                queries: self.fp8_q,
                keys_per_scale: self.keys_per_scale,
            }),
            four_bits: self.kv_int4,
        };
        let problem = Problem { features, ..problem };
        Problem { layout: problem.layout.max(problem.widest_layout()), ..problem }
    }
}

fn of_group(group: i64) -> Result<Four, String> {
    let found = Four::ALL.into_iter().find(|four| four.group() == group);
    found.ok_or_else(|| format!("kv_int4 is {group}; it must be 32 or 64"))
}

fn group_of_four(text: &str) -> Result<Four, String> {
    of_group(text.parse().map_err(|error| format!("{error}"))?)
}

fn four_of_group<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Four>, D::Error> {
    let group = Option::<i64>::deserialize(deserializer)?;
    group.map(of_group).transpose().map_err(serde::de::Error::custom)
}

fn group_of<S: Serializer>(four: &Option<Four>, serializer: S) -> Result<S::Ok, S::Error> {
    four.map(Four::group).serialize(serializer)
}
