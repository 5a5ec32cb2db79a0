//! Problems as the user writes them: a preset, a file of JSON lines, or options of the command
//! line.

use crate::failure::{Failure, usage};
use crate::features::FeatureArgs;
use crate::names::by_name;
use crate::presets;
use crate::records::input_text;
use flashtune::plan::key;
use flashtune::problem::{Causal, Dtype, Features, Layout, Pass, Problem};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// A line of a problem file. The comment of an optional field is its default.
#[derive(Default, Deserialize, Serialize)]
struct Line {
    /// Both passes.
    pass: Option<Pass>,
    /// bf16
    dtype: Option<Dtype>,
    /// 1
    batch_size: Option<i64>,
    num_heads_q: i64,
    /// num_heads_q
    num_heads_kv: Option<i64>,
    seqlen_q: i64,
    /// seqlen_q
    seqlen_k: Option<i64>,
    head_dim: i64,
    /// head_dim
    head_dim_v: Option<i64>,
    /// none
    causal: Option<Causal>,
    /// false
    dropout: Option<bool>,
    /// The widest layout that the dtype and the head dims allow. A wider one is replaced by it,
    /// since no call has such a layout.
    layout: Option<Layout>,
    /// All off. A problem with pages, with starts of keys or with 8 bits has no backward pass.
    #[serde(flatten)]
    features: FeatureArgs,
}

impl Line {
    /// Checks the names of the fields first: serde would call a misspelled field missing, and it
    /// does not list the known ones where a field is flattened.
    fn parse(text: &str) -> Result<Line, String> {
        let given: Option<BTreeMap<String, IgnoredAny>> = serde_json::from_str(text).ok();
        let known = Line::fields();
        match given.into_iter().flatten().find(|(name, _)| !known.contains(name)) {
            Some((name, _)) => Err(format!("unknown field `{name}`, expected one of {}", known.join(", "))),
            None => serde_json::from_str(text).map_err(|error| error.to_string()).and_then(Line::checked),
        }
    }

    fn checked(self) -> Result<Line, String> {
        self.features.check()?;
        Ok(self)
    }

    fn fields() -> Vec<String> {
        let line = serde_json::to_value(Line::default()).expect("a line is plain data");
        line.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect()
    }

    /// The problems of the line, in the given dtype or else in the line's own.
    fn problems(self, dtype: Option<Dtype>) -> Vec<Problem> {
        let head_dim_v = self.head_dim_v.unwrap_or(self.head_dim);
        let dtype = dtype.or(self.dtype).unwrap_or(Dtype::Bf16);
        let widest = Layout::widest(dtype, [self.head_dim, head_dim_v]);
        let plain = |pass| Problem {
            pass,
            dtype,
            batch_size: self.batch_size.unwrap_or(1),
            num_heads_q: self.num_heads_q,
            num_heads_kv: self.num_heads_kv.unwrap_or(self.num_heads_q),
            seqlen_q: self.seqlen_q,
            seqlen_k: self.seqlen_k.unwrap_or(self.seqlen_q),
            head_dim: self.head_dim,
            head_dim_v,
            causal: self.causal.unwrap_or(Causal::None),
            dropout: self.dropout.unwrap_or(false),
            deterministic: false,
            batch_invariant: false,
            features: Features::NONE,
            layout: self.layout.map_or(widest, |layout| layout.max(widest)),
        };
        let of_pass = |pass| self.features.on(plain(pass)).without_idle_causal();
        match self.pass {
            Some(pass) => vec![of_pass(pass)],
            None if self.features.are_forward_only() => vec![of_pass(Pass::Forward)],
            None => vec![of_pass(Pass::Forward), of_pass(Pass::Backward)],
        }
    }
}

/// The problems of presets and a file, in the given dtype or else in their own. Each record key
/// appears once.
pub fn collect(names: &[String], file: Option<&Path>, dtype: Option<Dtype>) -> Result<Vec<Problem>, Failure> {
    let mut problems = Vec::new();
    for name in names {
        let of_preset = presets::problems(name).ok_or_else(|| {
            usage(format_args!("{name:?} is not a preset; the presets are {}", presets::names().join(", ")))
        })?;
        problems.extend(of_preset.into_iter().map(|problem| match dtype {
            Some(dtype) => {
                let problem = Problem { dtype, ..problem };
                Problem { layout: problem.widest_layout(), ..problem }
            }
            None => problem,
        }));
    }
    if let Some(path) = file {
        let text = input_text(path).map_err(|error| usage(format_args!("{}: {error}", path.display())))?;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let at = |error: &dyn std::fmt::Display| usage(format_args!("{}:{}: {error}", path.display(), number + 1));
            let line = Line::parse(line).map_err(|error| at(&error))?;
            for problem in line.problems(dtype) {
                problem.validate().map_err(|error| at(&error))?;
                problems.push(problem);
            }
        }
    }
    let mut seen = HashSet::new();
    problems.retain(|problem| seen.insert(key::record_key(problem)));
    Ok(problems)
}

/// The shape of a problem, from options.
#[derive(clap::Args)]
pub struct ShapeArgs {
    #[arg(long, value_name = "N", default_value = "1")]
    batch_size: i64,
    #[arg(long, value_name = "N", default_value = "16")]
    num_heads_q: i64,
    /// Key-value heads [default: num_heads_q]
    #[arg(long, value_name = "N")]
    num_heads_kv: Option<i64>,
    /// Queries of each sequence [default: 1024; render: 4096]
    #[arg(long, value_name = "N")]
    seqlen_q: Option<i64>,
    /// Keys of each sequence [default: seqlen_q]
    #[arg(long, value_name = "N")]
    seqlen_k: Option<i64>,
}

/// The class of a problem, from options.
#[derive(clap::Args)]
pub struct ClassArgs {
    /// forward or backward
    #[arg(long, value_parser = by_name::<Pass>)]
    pub pass: Pass,
    #[arg(long, value_name = "N")]
    pub head_dim: i64,
    /// Head dim of V and the output [default: head_dim]
    #[arg(long, value_name = "N")]
    pub head_dim_v: Option<i64>,
    /// fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>, default_value = "bf16")]
    pub dtype: Dtype,
    /// Causal mask: the last query sees the last key
    #[arg(long)]
    pub causal: bool,
    #[arg(long)]
    pub dropout: bool,
    /// Backward: the same bits at every run
    #[arg(long)]
    pub deterministic: bool,
    /// Forward: a sequence's result has the same bits alone and in any batch
    #[arg(long)]
    pub batch_invariant: bool,
    #[command(flatten)]
    pub features: FeatureArgs,
}

impl ClassArgs {
    /// A problem of this class and shape. `seqlen_q` applies if the shape has none.
    pub fn problem(&self, shape: &ShapeArgs, seqlen_q: i64) -> Result<Problem, Failure> {
        let &ShapeArgs { batch_size, num_heads_q, .. } = shape;
        let seqlen_q = shape.seqlen_q.unwrap_or(seqlen_q);
        let head_dim_v = self.head_dim_v.unwrap_or(self.head_dim);
        let problem = Problem {
            pass: self.pass,
            dtype: self.dtype,
            batch_size,
            num_heads_q,
            num_heads_kv: shape.num_heads_kv.unwrap_or(num_heads_q),
            seqlen_q,
            seqlen_k: shape.seqlen_k.unwrap_or(seqlen_q),
            head_dim: self.head_dim,
            head_dim_v,
            causal: if self.causal { Causal::BottomRight } else { Causal::None },
            dropout: self.dropout,
            deterministic: self.deterministic,
            batch_invariant: self.batch_invariant,
            features: Features::NONE,
            layout: Layout::widest(self.dtype, [self.head_dim, head_dim_v]),
        };
        let problem = self.features.on(problem);
        problem.validate().map_err(usage)?;
        Ok(problem.without_idle_causal())
    }
}
