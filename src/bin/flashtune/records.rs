//! `flashtune records`: list, export and import tuning records. `verify` judges them for shipping;
//! `model_error` and `choice_error` judge predictions and choices.

use crate::choice_error;
use crate::device::DeviceArg;
use crate::failure::{Failure, print_json};
use crate::model_error;
use crate::verify;
use clap::Subcommand;
use flashtune::device::{Arch, Device};
use flashtune::files;
use flashtune::plan::{Record, record, shipped};
use serde::Serialize;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

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
    /// Import the records of a file into this machine's; exits with 3 if none was taken
    Import {
        file: PathBuf,
        /// Also replace the records of problems that this machine has measured itself
        #[arg(long)]
        replace: bool,
    },
    /// Check whether records may ship with the library; exits with 1 if one may not [default: the
    /// shipped records]
    Verify {
        /// Files of JSON lines
        files: Vec<PathBuf>,
    },
    /// Predict each record's times from the other records and show the error, as a Markdown table
    /// [default: the shipped records]
    ModelError {
        /// Print one JSON line for each record
        #[arg(long)]
        json: bool,
        /// Files of JSON lines
        files: Vec<PathBuf>,
    },
    /// Show how much slower the chosen configs are than the fastest that a bench has timed
    ChoiceError {
        /// Choose without the shipped records
        #[arg(long)]
        no_records: bool,
        /// Architecture whose typical GPU was timed
        #[arg(long, default_value = "sm_90")]
        arch: Arch,
        /// GPU that was timed in place of the typical one, such as "NVIDIA H100 80GB HBM3"
        #[arg(long, value_name = "NAME")]
        gpu: Option<String>,
        /// Instead write the problems with the configs that the model expects to take at most so
        /// many times the least time, for bench/random_configs.py --timed
        #[arg(long, value_name = "RATIO")]
        candidates: Option<f64>,
        /// Files that bench/random_configs.py --out or --list has written
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

/// The largest file of records that is read as a whole.
pub const MAX_FILE_BYTES: u64 = 256 << 20;

/// The text of an input file, which may be a pipe of the shell (`<(...)`) and must end.
pub fn input_text(path: &Path) -> std::io::Result<String> {
    let bytes = files::read_up_to(File::open(path)?, MAX_FILE_BYTES)?;
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not UTF-8 text"))
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
        Command::Import { file, replace } => import(&file, replace),
        Command::Verify { files } => verify::run(&texts(&files)?, files.is_empty()),
        Command::ModelError { json, files } => {
            let texts = texts(&files)?;
            model_error::run(&read(&texts)?, json)
        }
        Command::ChoiceError { no_records, arch, gpu, candidates, files } => {
            let (device, wanted) = match &gpu {
                Some(name) => (Device::named(arch, name), format!("GPU {name} of {arch}")),
                None => (Device::typical(arch), format!("GPU of {arch}")),
            };
            let device = device.ok_or_else(|| Failure::Failed(format!("no {wanted} is known")))?;
            let mut timed = Vec::new();
            for (path, text) in texts(&files)? {
                let of_file: Vec<choice_error::Timed> =
                    serde_json::from_str(&text).map_err(|error| Failure::Failed(format!("{path}: {error}")))?;
                timed.extend(of_file);
            }
            let records = if no_records { Vec::new() } else { shipped::records(arch) };
            match candidates {
                Some(most) => choice_error::print_candidates(timed, records, &device, most),
                None => choice_error::run(&timed, records, &device),
            }
        }
    }
}

/// All records of these texts. A line that is none is an error: a figure without it would tell of
/// other records than those that were given.
fn read(texts: &[(String, String)]) -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    for (path, text) in texts {
        let (found, ignored) = record::read_lines(text);
        if let Some((line, reason)) = ignored.first() {
            return Err(Failure::Failed(format!("{path}: line {line}: {reason}")));
        }
        records.extend(found);
    }
    Ok(records)
}

/// Each file's name and text, or those of the shipped records.
fn texts(files: &[PathBuf]) -> Result<Vec<(String, String)>, Failure> {
    if files.is_empty() {
        return Ok(shipped::EMBEDDED.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect());
    }
    let failed = |file: &PathBuf, error| Failure::Failed(format!("{}: {error}", file.display()));
    let read = |file: &PathBuf| files::read_text(file, MAX_FILE_BYTES).map_err(|error| failed(file, error));
    files.iter().map(|file| Ok((file.display().to_string(), read(file)?))).collect()
}

fn import(file: &Path, replaces: bool) -> Result<(), Failure> {
    let engine = DeviceArg::Cpu.engine()?;
    let imported = engine.import_records(file, replaces)?;
    let mut summary = format!("{} records imported from {}", imported.taken.len(), file.display());
    if imported.own > 0 {
        summary += &format!("; this machine measured {} itself (--replace takes them)", imported.own);
    }
    if imported.not_better > 0 {
        summary += &format!("; {} are no better than those imported before", imported.not_better);
    }
    if let Some(first) = &imported.first_refusal {
        summary += &format!("; {} lines refused, the first is {first}", imported.refused);
    }
    eprintln!("{summary}");
    if imported.taken.is_empty() {
        return Err(Failure::NotKept("no record was taken".to_owned()));
    }
    let not_kept = |reason| Failure::NotKept(format!("the records could not be kept: {reason}"));
    engine.kept_records().map(drop).map_err(not_kept)
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
