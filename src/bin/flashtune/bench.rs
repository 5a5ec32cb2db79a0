//! `flashtune bench`: the time of the config that a problem gets, and of the heuristic's config.

use crate::autotune::utilisation;
use crate::device::DeviceArg;
use crate::failure::{Failure, print_json};
use crate::problems::{self, ClassArgs, ShapeArgs};
use flashtune::config::Config;
use flashtune::family;
use flashtune::plan::{Engine, key};
use flashtune::problem::Problem;
use flashtune::tune::{Floor, Rig};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// The device to run on: cpu or the number of a GPU [default: GPU 0, or the CPU without a GPU]
    #[arg(long, value_name = "N|cpu", global = true)]
    device: Option<DeviceArg>,
    #[command(subcommand)]
    what: What,
    /// Number of runs with cold caches; the median is printed
    #[arg(long, default_value = "20", global = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Print one JSON line for each problem
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum What {
    /// Time one problem, given by options
    Problem {
        #[command(flatten)]
        class: ClassArgs,
        #[command(flatten)]
        shape: ShapeArgs,
    },
    /// Time the problems of presets
    Preset { names: Vec<String> },
    /// Time the problems of a file of JSON lines
    File { file: PathBuf },
}

#[derive(Serialize)]
struct Timing {
    key: String,
    config: Config,
    source: &'static str,
    reason: String,
    median_us: f64,
    spread: f64,
    tflops: f64,
    /// Share of the device's ceiling; null if the ceiling is unknown.
    utilisation: Option<f64>,
    default_us: f64,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let problems = match &args.what {
        What::Problem { class, shape } => vec![class.problem(shape, 1024)?],
        What::Preset { names } => problems::collect(names, None, None)?,
        What::File { file } => problems::collect(&[], Some(file), None)?,
    };
    let engine = args.device.unwrap_or_default().engine()?;
    for problem in &problems {
        let timing = time(&engine, problem, args.runs as usize)?;
        if args.json {
            print_json(&timing)?;
        } else {
            println!(
                "{}: {:.1} us ± {:.1} %, {:.3} TFLOP/s{}, default {:.1} us, {} ({})",
                timing.key,
                timing.median_us,
                100.0 * timing.spread,
                timing.tflops,
                utilisation(timing.utilisation),
                timing.default_us,
                timing.config,
                timing.reason
            );
        }
    }
    Ok(())
}

fn time(engine: &Engine, problem: &Problem, runs: usize) -> Result<Timing, Failure> {
    let plan = engine.prepare(problem)?;
    let default = family::heuristic(&key::canonical(problem), engine.backend().device());
    let floor = Floor::of(problem, engine.backend().device());
    let mut rig = Rig::new(engine.backend(), problem);
    let samples = rig.measure(&plan.config, runs)?;
    let default_us = match plan.config == default {
        true => samples.median_us(),
        false => rig.measure(&default, runs)?.median_us(),
    };
    Ok(Timing {
        key: key::record_key(problem),
        config: plan.config.clone(),
        source: plan.source.name(),
        reason: plan.reason.clone(),
        median_us: samples.median_us(),
        spread: samples.spread(),
        tflops: problem.flops() / samples.median_us() * 1e-6,
        utilisation: samples.utilisation(floor),
        default_us,
    })
}
