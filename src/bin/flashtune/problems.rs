//! Problems as the user writes them: a preset, a file of JSON lines, or options of the command
//! line.

use crate::failure::{Failure, usage};
use crate::features::FeatureArgs;
use crate::presets;
use flashtune::plan::key;
use flashtune::problem::{Causal, Dtype, Features, Layout, Pass, Problem};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::collections::HashSet;
use std::path::Path;

/// A line of a problem file. What is left out has the default that is written beside it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Both.
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
    /// The widest that dtype and head dims allow; no wider one is taken, since no call has it.
    layout: Option<Layout>,
    /// All off. There is no backward pass with pages.
    #[serde(flatten)]
    features: FeatureArgs,
}

impl Line {
    /// In that dtype, or in the line's own.
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
            None if self.features.page_size.is_some() => vec![of_pass(Pass::Forward)],
            None => vec![of_pass(Pass::Forward), of_pass(Pass::Backward)],
        }
    }
}

/// The problems of presets and a file, in that dtype or in their own, each record key once.
pub fn collect(names: &[String], file: Option<&Path>, dtype: Option<Dtype>) -> Result<Vec<Problem>, Failure> {
    let mut problems = Vec::new();
    for name in names {
        let of_preset = presets::problems(name).ok_or_else(|| {
            usage(format_args!("there is no preset {name:?}; they are {}", presets::names().join(", ")))
        })?;
        problems.extend(of_preset.into_iter().map(|problem| match dtype {
            Some(dtype) => {
                let layout = Layout::widest(dtype, [problem.head_dim, problem.head_dim_v]);
                Problem { dtype, layout, ..problem }
            }
            None => problem,
        }));
    }
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).map_err(|error| usage(format_args!("{}: {error}", path.display())))?;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let at = |error: &dyn std::fmt::Display| usage(format_args!("{}:{}: {error}", path.display(), number + 1));
            let line: Line = serde_json::from_str(line).map_err(|error| at(&error))?;
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

/// A value of the command line by the name that problem files and records have for it.
pub fn by_name<T: DeserializeOwned>(name: &str) -> Result<T, serde::de::value::Error> {
    T::deserialize(name.into_deserializer())
}

/// The shape of a problem, by options.
#[derive(clap::Args)]
pub struct ShapeArgs {
    #[arg(long, value_name = "N", default_value = "1")]
    batch_size: i64,
    #[arg(long, value_name = "N", default_value = "16")]
    num_heads_q: i64,
    /// As many as num_heads_q, if not given
    #[arg(long, value_name = "N")]
    num_heads_kv: Option<i64>,
    /// 1024, of `render` 4096, if not given
    #[arg(long, value_name = "N")]
    seqlen_q: Option<i64>,
    /// As long as seqlen_q, if not given
    #[arg(long, value_name = "N")]
    seqlen_k: Option<i64>,
}

/// The class of a problem, by options.
#[derive(clap::Args)]
pub struct ClassArgs {
    /// forward or backward
    #[arg(long, value_parser = by_name::<Pass>)]
    pub pass: Pass,
    #[arg(long, value_name = "N")]
    pub head_dim: i64,
    /// Head dim of V and the output, if it differs
    #[arg(long, value_name = "N")]
    pub head_dim_v: Option<i64>,
    /// fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>, default_value = "bf16")]
    pub dtype: Dtype,
    /// The last query sees the last key
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
    /// A problem of this class and shape, and of this seqlen_q where the shape has none.
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
