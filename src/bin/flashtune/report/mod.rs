//! `flashtune report`: one HTML page of what was tuned, which a browser shows without a network.
//!
//! The flow: this file reads records and logs, `problem` says what there is to tell of each one,
//! `chart` places bars, and `page` fills the template. The template's engine escapes every value,
//! since records may come from others.

mod chart;
mod input;
mod page;
mod problem;
mod text;

use crate::device::DeviceArg;
use crate::failure::{Failure, usage};
use crate::places;
use crate::records::MAX_FILE_BYTES;
use crate::tuning_log::{self, Entry};
use flashtune::device::Device;
use flashtune::files;
use flashtune::plan::{Engine, Record, Source, key, record};
use input::{Input, Records};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Files of records; each shows the winner, the runner-up and the default's time [default: this
    /// machine's records]
    records: Vec<PathBuf>,
    /// A file that `autotune --log` wrote, which also has all candidates; repeatable
    #[arg(long = "log", value_name = "FILE")]
    logs: Vec<PathBuf>,
    /// The page
    #[arg(long, value_name = "FILE.html")]
    output: PathBuf,
    /// The device of this machine's records: cpu or the number of a GPU [default: GPU 0, or the CPU
    /// without a GPU]
    #[arg(long, value_name = "N|cpu")]
    device: Option<DeviceArg>,
}

/// A page with more problems is of no use to people, and slow.
const MAX_PROBLEMS: usize = 5_000;

pub fn run(args: Args) -> Result<(), Failure> {
    let is_of_files = !args.records.is_empty() || !args.logs.is_empty();
    if is_of_files && args.device.is_some() {
        return Err(usage("--device names the device of this machine's records; records of files name their own"));
    }
    let inputs = args.records.iter().chain(&args.logs);
    inputs.into_iter().try_for_each(|input| {
        places::require_apart(&[("the records", Some(input)), ("--output", Some(&args.output))])
    })?;
    places::require_place(&args.output)?;
    let input = match is_of_files {
        true => of_files(&args.records, &args.logs)?,
        false => of_machine(&args.device.unwrap_or_default().engine()?)?,
    };
    write(input, &args.output)
}

/// The page of a tuning run.
pub fn of_run(engine: &Engine, entries: Vec<Entry>, output: &Path) -> Result<(), Failure> {
    write(Input { entries, known: known_of(engine), notes: Vec::new(), cpu: this_cpu()? }, output)
}

fn of_machine(engine: &Engine) -> Result<Input, Failure> {
    let device = engine.backend().device();
    let is_own = |source: Source| matches!(source, Source::Process | Source::Machine);
    let own = engine.records().into_iter().filter(|(source, _)| is_own(*source)).map(|(_, record)| record);
    let own = own.filter(|record| record.device_key() == key::device_key(device));
    let entries: Vec<Entry> = own.map(Entry::of_record).collect();
    if entries.is_empty() {
        return Err(Failure::Failed(format!(
            "this machine has no records of {}; `flashtune autotune` makes them, and `flashtune report FILE` shows those of a file",
            device.name
        )));
    }
    Ok(Input { entries, known: known_of(engine), notes: Vec::new(), cpu: this_cpu()? })
}

fn known_of(engine: &Engine) -> Records {
    let mut known = Records::default();
    for (source, record) in engine.records() {
        known.add(source, record);
    }
    known
}

/// Each problem of a device once. Where several files have it, the last log comes first, then the
/// last file of records.
fn of_files(records: &[PathBuf], logs: &[PathBuf]) -> Result<Input, Failure> {
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    let mut notes = Vec::new();
    for path in records {
        let (found, ignored) = record::read_lines(&text(path)?);
        notes.extend(checked(path, "record", found.len(), ignored)?);
        entries.extend(found.into_iter().map(Entry::of_record).map(|entry| (entry.id(), entry)));
    }
    for path in logs {
        let (found, ignored) = tuning_log::read_lines(&text(path)?);
        notes.extend(checked(path, "entry of a tuning log", found.len(), ignored)?);
        entries.extend(found.into_iter().map(|entry| (entry.id(), entry)));
    }
    let mut known = Records { are_of_files: true, ..Records::default() };
    for record in entries.values().filter_map(|entry| entry.result.as_ref().ok()) {
        known.add(Source::Machine, Record::clone(record));
    }
    Ok(Input { entries: entries.into_values().collect(), known, notes, cpu: this_cpu()? })
}

fn text(path: &Path) -> Result<String, Failure> {
    files::read_text(path, MAX_FILE_BYTES).map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
}

/// A note on the lines that were ignored, if any. An error for a file of which nothing can be used.
fn checked(path: &Path, what: &str, found: usize, ignored: Vec<(usize, String)>) -> Result<Option<String>, Failure> {
    match (found, ignored.first()) {
        (0, None) => Err(Failure::Failed(format!("{}: the file is empty", path.display()))),
        (0, Some((line, reason))) => {
            Err(Failure::Failed(format!("{}: no line is a valid {what}; line {line}: {reason}", path.display())))
        }
        (_, None) => Ok(None),
        (_, Some((line, reason))) => {
            let note = format!("{}: {} lines are ignored; line {line}: {reason}", path.display(), ignored.len());
            eprintln!("flashtune: {note}");
            Ok(Some(note))
        }
    }
}

fn this_cpu() -> Result<Device, Failure> {
    Ok(DeviceArg::Cpu.open()?.device().clone())
}

fn write(input: Input, output: &Path) -> Result<(), Failure> {
    let count = input.entries.len();
    if count > MAX_PROBLEMS {
        return Err(Failure::Failed(format!("a report shows at most {MAX_PROBLEMS} problems, and these are {count}")));
    }
    let html = page::html(&input).map_err(Failure::Failed)?;
    files::publish(output, html.as_bytes())
        .map_err(|error| Failure::Failed(format!("{}: {error}", output.display())))?;
    eprintln!("{count} problems written to {}", output.display());
    Ok(())
}
