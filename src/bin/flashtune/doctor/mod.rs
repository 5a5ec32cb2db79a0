//! `flashtune doctor`: finds what attention lacks on this machine, and the command that mends it.
//!
//! Each check is one line. `info` shows the same machine in full and judges nothing.

mod check;
mod compiler;
mod driver;
mod gpus;
mod machine;

use crate::device::{cache_folder, pack_place};
use crate::failure::{Failure, print_json};
use check::{Check, Status};
use driver::Host;
use flashtune::device::Device;
use flashtune::kernel;
use gpus::PackFound;

#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object for each check
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<(), Failure> {
    // A check says in its line what the library would log.
    if std::env::var_os("RUST_LOG").is_none() {
        log::set_max_level(log::LevelFilter::Off);
    }
    let report = Report::of_this_machine()?;
    for check in &report.checks {
        match args.json {
            true => print_json(check)?,
            false => println!("{check}"),
        }
    }
    report.verdict().map_or(Ok(()), |reason| Err(Failure::Failed(reason)))
}

struct Report {
    checks: Vec<Check>,
    has_gpu: bool,
}

impl Report {
    fn of_this_machine() -> Result<Report, Failure> {
        let host = Host::this();
        let all = kernel::devices().unwrap_or_default();
        let gpus: Vec<Device> = all.iter().filter(|gpu| gpus::is_served(gpu)).cloned().collect();
        let place = pack_place();
        let pack = PackFound::at(place.clone(), &gpus);
        let compiler = compiler::check(&gpus, &|gpu| pack.serves(gpu));
        let (cache, of_cache) = machine::cache(cache_folder());

        let mut checks = vec![
            Check::ok("library", format_args!("flashtune {}", env!("CARGO_PKG_VERSION"))),
            driver::check(kernel::driver_search(), all.len(), &host),
        ];
        checks.extend((0..all.len()).map(|ordinal| gpus::check(ordinal, &all, (&pack, place.clone()), &compiler)));
        checks.extend([compiler, pack.check.clone(), of_cache]);
        checks.extend(machine::variables());
        checks.extend(machine::records(&gpus, cache, pack.records())?);
        Ok(Report { checks, has_gpu: !all.is_empty() || host.has_gpu() })
    }

    /// Why this machine is not ready; None if a GPU runs kernels, or the CPU without one, and
    /// nothing is wrong.
    fn verdict(&self) -> Option<String> {
        let count = |wanted: Status| self.checks.iter().filter(|check| check.status == wanted).count();
        let runs = self.checks.iter().any(|check| check.check == "gpu" && check.status == Status::Ok);
        match (count(Status::Wrong), self.has_gpu && !runs) {
            (0, false) => None,
            (0, true) => Some("this machine has a GPU, and no kernel can run on it".to_owned()),
            (1, _) => Some("one check is wrong".to_owned()),
            (wrong, _) => Some(format!("{wrong} checks are wrong")),
        }
    }
}
