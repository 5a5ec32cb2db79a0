//! `flashtune records model-error`: how far the predicted times of near shapes are off, by leaving
//! out each record in turn and predicting it from the others.

use crate::failure::{Failure, print_json};
use flashtune::config::{Config, Family};
use flashtune::device::Device;
use flashtune::family;
use flashtune::plan::key::Class;
use flashtune::plan::{Known, Record, choices, predicted_us};
use flashtune::problem::Pass;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One record, predicted without it. Ratios are to the winner's time.
#[derive(Serialize)]
struct Row {
    key: String,
    measured_us: f64,
    predicted_us: f64,
    /// Measured and predicted, where the runner-up has another tile.
    runner_up: Option<[f64; 2]>,
    /// The same of the default, where it was slower; the config is today's heuristic's.
    default: Option<[f64; 2]>,
    /// Whether a lookup without the record chooses a config with the winner's tile.
    has_winners_tile: bool,
    #[serde(skip)]
    group: (&'static str, i64, &'static str),
}

pub fn run(records: &[Record], json: bool) -> Result<(), Failure> {
    let all: Vec<Arc<Record>> = records.iter().cloned().map(Arc::new).collect();
    let rows: Vec<Row> = all.iter().filter_map(|record| row(record, &all)).collect();
    if json {
        return rows.iter().try_for_each(print_json);
    }
    println!("| Pass, head dim, mask | Records | Time | Runner-up's ratio | Default's ratio | Winner's tile |");
    println!("|---|---|---|---|---|---|");
    let mut groups: BTreeMap<_, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| groups.entry(row.group).or_default().push(row));
    for ((pass, dim, mask), rows) in &groups {
        print_group(&format!("{pass} {dim} {mask}"), rows);
    }
    print_group("all", &rows.iter().collect::<Vec<_>>());
    Ok(())
}

/// None for records of which no family has a model, and for the only one of a class.
fn row(record: &Arc<Record>, all: &[Arc<Record>]) -> Option<Row> {
    let device = Device { sm_count: record.sm_count, name: record.device.clone(), ..Device::typical(record.arch)? };
    let others: Vec<_> = all.iter().filter(|other| !Arc::ptr_eq(other, record)).cloned().collect();
    if others.iter().all(|other| Class::of(&other.problem) != Class::of(&record.problem)) {
        return None;
    }
    let known = Known { shipped: others, ..Known::default() };
    let problem = &record.problem;
    let predict = |config: &Config| predicted_us(&known, problem, config, &device);
    let own_us = predict(&record.config)?;
    let ratios = |config: &Config, measured_us: f64| Some([measured_us / record.median_us, predict(config)? / own_us]);
    let runner_up = record.runner_up.as_ref().filter(|other| tile(&other.config) != tile(&record.config));
    let heuristic = family::heuristic(problem, &device);
    let default_us = record.default_us.filter(|us| *us > record.median_us && heuristic != record.config);
    let chosen = choices(&known, problem, &device).swap_remove(0).config;
    Some(Row {
        key: record.key.clone(),
        measured_us: record.median_us,
        predicted_us: own_us,
        runner_up: runner_up.and_then(|other| ratios(&other.config, other.median_us)),
        default: default_us.and_then(|us| ratios(&heuristic, us)),
        has_winners_tile: tile(&chosen) == tile(&record.config),
        group: (
            if problem.pass == Pass::Forward { "forward" } else { "backward" },
            problem.head_dim.max(problem.head_dim_v),
            if problem.right_shift().is_some() { "causal" } else { "full" },
        ),
    })
}

fn tile(config: &Config) -> (Family, Option<u32>, Option<u32>) {
    (config.family, config.get("block_m"), config.get("block_n"))
}

fn print_group(name: &str, rows: &[&Row]) {
    let time = errors(rows.iter().map(|row| row.predicted_us / row.measured_us));
    let of = |ratios: fn(&Row) -> Option<[f64; 2]>| {
        errors(rows.iter().filter_map(|row| ratios(row)).map(|[measured, predicted]| predicted / measured))
    };
    let same = rows.iter().filter(|row| row.has_winners_tile).count();
    let (runner_up, default) = (of(|row| row.runner_up), of(|row| row.default));
    println!("| {name} | {} | {time} | {runner_up} | {default} | {same} |", rows.len());
}

/// The geometric mean of predicted over measured, the typical factor (the exponential of the root
/// mean square of the logarithms) and the number.
fn errors(quotients: impl Iterator<Item = f64>) -> String {
    let logs: Vec<f64> = quotients.map(f64::ln).collect();
    if logs.is_empty() {
        return "-".to_owned();
    }
    let mean = |values: f64| values / logs.len() as f64;
    let typical = mean(logs.iter().map(|log| log * log).sum()).sqrt().exp();
    format!("{:.3}, {typical:.3} ({})", mean(logs.iter().sum()).exp(), logs.len())
}
