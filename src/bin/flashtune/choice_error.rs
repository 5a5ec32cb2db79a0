//! `flashtune records choice-error`: how much slower the chosen configs are than the fastest ones,
//! at problems that `bench/random_configs.py` has timed with many configs each.

use crate::failure::{Failure, print_json};
use flashtune::device::Device;
use flashtune::plan::{Known, Record, candidates, choices};
use flashtune::problem::{Causal, Dtype, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize, Serialize)]
struct Case {
    kind: String,
    batch: i64,
    heads: i64,
    heads_kv: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    head_dim: i64,
    causal: bool,
}

/// A problem and the microseconds of each config, by its name.
#[derive(Deserialize, Serialize)]
pub struct Timed {
    case: Case,
    backward: bool,
    us: BTreeMap<String, f64>,
    /// The config that the library chooses, in a list of candidates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chosen: Option<String>,
}

impl Timed {
    fn problem(&self) -> Problem {
        let pass = if self.backward { Pass::Backward } else { Pass::Forward };
        let case = &self.case;
        Problem {
            num_heads_kv: case.heads_kv,
            seqlen_k: case.seqlen_k,
            causal: if case.causal { Causal::BottomRight } else { Causal::None },
            ..Problem::dense(pass, Dtype::Bf16, case.batch, case.heads, case.seqlen_q, case.head_dim)
        }
    }
}

/// Writes each problem with its chosen config and those predicted to take at most `most` times the
/// least time. Predicted times stand in place of measured ones.
pub fn print_candidates(timed: Vec<Timed>, records: Vec<Record>, device: &Device, most: f64) -> Result<(), Failure> {
    let known = known(records);
    let predicted = |one: Timed| {
        let problem = one.problem();
        let timed = candidates(&known, &problem, device);
        let chosen = choices(&known, &problem, device).swap_remove(0).config;
        let least = timed.first().map_or(0.0, |(us, _)| *us);
        let is_near = |(us, config): &(f64, _)| *us <= most * least || *config == chosen;
        let us = timed.into_iter().filter(is_near).map(|(us, config)| (config.to_string(), us)).collect();
        Timed { us, chosen: Some(chosen.to_string()), ..one }
    };
    print_json(&timed.into_iter().map(predicted).collect::<Vec<_>>())
}

fn known(records: Vec<Record>) -> Known {
    Known { shipped: records.into_iter().map(Arc::new).collect(), ..Known::default() }
}

pub fn run(timed: &[Timed], records: Vec<Record>, device: &Device) -> Result<(), Failure> {
    let known = known(records);
    let mut groups: BTreeMap<(bool, &str), (Vec<f64>, usize)> = BTreeMap::new();
    for one in timed {
        let problem = one.problem();
        let Some((fastest, least)) = one.us.iter().min_by(|a, b| a.1.total_cmp(b.1)) else { continue };
        let choice = choices(&known, &problem, device).swap_remove(0);
        let word = if one.backward { "backward" } else { "forward" };
        let Case { kind, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, causal } = &one.case;
        let mask = if *causal { " causal" } else { "" };
        let shape = format!("{word} {kind} b{batch} h{heads}/{heads_kv} q{seqlen_q} k{seqlen_k} d{head_dim}{mask}");
        match one.us.get(&choice.config.to_string()) {
            Some(us) => {
                let ratio = us / least;
                println!("{ratio:.3} {shape}: {least:.1} us by {fastest}; chosen {}", choice.config);
                groups.entry((one.backward, kind)).or_default().0.push(ratio);
            }
            None => {
                println!("not timed {shape}: {least:.1} us by {fastest}; chosen {}", choice.config);
                groups.entry((one.backward, kind)).or_default().1 += 1;
            }
        }
    }
    for ((backward, kind), (ratios, not_timed)) in groups {
        let word = if backward { "backward" } else { "forward" };
        if ratios.is_empty() {
            println!("{word} {kind}: {not_timed} problems, whose choice was not timed");
            continue;
        }
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let most = ratios.iter().copied().fold(1.0, f64::max);
        let count = ratios.len();
        println!(
            "{word} {kind}: {count} problems, chosen over fastest {mean:.3}, at most {most:.3}; {not_timed} not timed"
        );
    }
    Ok(())
}
