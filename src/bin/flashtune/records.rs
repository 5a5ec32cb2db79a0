//! `flashtune records`: list, export, import and verify tuning records.

use crate::device::DeviceArg;
use crate::failure::{Failure, print_json};
use clap::Subcommand;
use flashtune::plan::{Record, record, shipped};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List this machine's records and the shipped ones of the device's architecture
    List {
        /// cpu or the number of a GPU [default: GPU 0, or the CPU without a GPU]
        #[arg(long, value_name = "N|cpu")]
        device: Option<DeviceArg>,
        /// Print one JSON line for each record
        #[arg(long)]
        json: bool,
    },
    /// Write this machine's records of a device to a file
    Export {
        /// cpu or the number of a GPU [default: GPU 0, or the CPU without a GPU]
        #[arg(long, value_name = "N|cpu")]
        device: Option<DeviceArg>,
        file: PathBuf,
    },
    /// Import the records of a file into this machine's
    Import { file: PathBuf },
    /// Check records against this version's search space [default: the shipped records]
    Verify {
        /// Files of JSON lines
        files: Vec<PathBuf>,
    },
}

#[derive(Serialize)]
struct Listed {
    source: &'static str,
    #[serde(flatten)]
    record: Record,
}

pub fn run(args: Args) -> Result<(), Failure> {
    match args.command {
        Command::List { device, json } => list(device.unwrap_or_default(), json),
        Command::Export { device, file } => {
            let count = device.unwrap_or_default().engine()?.export_records(&file)?;
            eprintln!("{count} records written to {}", file.display());
            Ok(())
        }
        Command::Import { file } => {
            let count = DeviceArg::Cpu.engine()?.import_records(&file)?;
            eprintln!("{count} records imported from {}", file.display());
            Ok(())
        }
        Command::Verify { files } => verify(&files),
    }
}

fn list(device: DeviceArg, json: bool) -> Result<(), Failure> {
    for (source, record) in device.engine()?.records() {
        if json {
            print_json(&Listed { source: source.name(), record })?;
        } else {
            let key = record.id();
            println!("{:<11} {key}: {:.1} us, {}", source.name(), record.median_us, record.config);
        }
    }
    Ok(())
}

fn verify(files: &[PathBuf]) -> Result<(), Failure> {
    let mut texts: Vec<(String, String)> = Vec::new();
    for file in files {
        let text =
            std::fs::read_to_string(file).map_err(|error| Failure::Failed(format!("{}: {error}", file.display())))?;
        texts.push((file.display().to_string(), text));
    }
    if files.is_empty() {
        texts.extend(shipped::EMBEDDED.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())));
    }
    let cpu = DeviceArg::Cpu.open()?;
    let (mut good, mut bad) = (0, 0);
    for (name, text) in &texts {
        let (records, ignored) = record::read_lines(text);
        bad += ignored.len();
        ignored.iter().for_each(|(line, reason)| eprintln!("{name}:{line}: {reason}"));
        for record in &records {
            match record.check(cpu.device()) {
                Ok(()) => good += 1,
                Err(reason) => {
                    bad += 1;
                    eprintln!("{name}: {}: {reason}", record.id());
                }
            }
        }
        if files.is_empty() && record::write_lines(records).as_deref() != Ok(text) {
            bad += 1;
            eprintln!("{name}: its lines are not sorted or not in flashtune's own format");
        }
    }
    eprintln!("{good} records are valid, {bad} are not");
    if bad == 0 { Ok(()) } else { Err(Failure::Failed(format!("{bad} records are not valid"))) }
}
