//! The cache folder, the variables and the records. Kernels run without them, but a user wants
//! them.

use super::check::{Check, quoted};
use flashtune::backend::Backend;
use flashtune::cpu::Cpu;
use flashtune::device::{Arch, Device};
use flashtune::environment::variable;
use flashtune::error::Result;
use flashtune::files;
use flashtune::kernel::cache_dir::{self, Refusal, Rule};
use flashtune::kernel::{nvrtc_search, templates_digest};
use flashtune::plan::{Engine, EngineOptions, Record, Source, key, record, shipped};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The folder, if it may be used, and the check of it.
pub fn cache(folder: Option<PathBuf>) -> (Option<PathBuf>, Check) {
    const NAME: &str = "cache";
    let elsewhere = || "export FLASHTUNE_CACHE_DIR=/var/tmp/flashtune-$(id -u)".to_owned();
    let Some(folder) = folder else {
        let fact = "HOME and FLASHTUNE_CACHE_DIR name no folder; records and kernels end with the process";
        return (None, Check::missing(NAME, fact, Some(elsewhere())));
    };
    if let Err(refusal) = cache_dir::secure(&folder) {
        let mend = mend(&refusal, &folder).unwrap_or_else(elsewhere);
        return (None, Check::wrong(NAME, refusal, Some(mend)));
    }
    let probe = folder.join(format!("{}doctor.{}", files::TEMPORARY_PREFIX, std::process::id()));
    match files::publish(&probe, b"").and_then(|()| std::fs::remove_file(&probe)) {
        Ok(()) => {
            let check = Check::ok(NAME, format_args!("{} can be written to", folder.display()));
            (Some(folder), check)
        }
        Err(error) => {
            let fact = format!("{} cannot be written to: {error}", folder.display());
            let is_denied = error.kind() == std::io::ErrorKind::PermissionDenied;
            let mend = if is_denied { format!("chmod u+rwx {}", quoted(folder.display())) } else { elsewhere() };
            (None, Check::wrong(NAME, fact, Some(mend)))
        }
    }
}

/// Root takes no folder from a user, and changes none above the cache folder. Another folder then
/// mends the refusal.
fn mend(refusal: &Refusal, folder: &Path) -> Option<String> {
    // SAFETY: geteuid takes no arguments and cannot fail.
    let is_root = unsafe { libc::geteuid() } == 0;
    let place = quoted(refusal.place.display());
    let is_the_folder = std::path::absolute(folder).is_ok_and(|folder| folder == refusal.place);
    match refusal.rule {
        Rule::Mode if is_the_folder => Some(format!("chmod go-w {place}")),
        Rule::Owner if is_the_folder && !is_root => Some(format!("sudo chown -R \"$(id -u)\" {place}")),
        Rule::Mode | Rule::Owner | Rule::Usable => None,
    }
}

/// The variables that name what does not exist, or one check for all if each is right.
pub fn variables() -> Vec<Check> {
    const NAME: &str = "variable";
    let is_set = |name: &&str| variable(name).is_some_and(|value| !value.is_empty());
    let set: Vec<&str> = VARIABLES.map(|(name, _)| name).into_iter().filter(is_set).collect();
    let wrong: Vec<Check> = VARIABLES
        .into_iter()
        .filter(|(name, _)| set.contains(name))
        .filter_map(|(name, fault)| {
            let value = variable(name)?;
            let fact = format!("{name} is {}; {}", quoted(value.to_string_lossy()), fault(&value)?);
            Some(Check::wrong(NAME, fact, Some(format!("unset {name}"))))
        })
        .collect();
    match (wrong.is_empty(), set.is_empty()) {
        (false, _) => wrong,
        (true, true) => vec![Check::ok(NAME, "none of the variables that name files is set")],
        (true, false) => vec![Check::ok(NAME, format_args!("{} can be used", set.join(", ")))],
    }
}

/// The fault of a value; None if it is right.
type Fault = fn(&OsStr) -> Option<String>;

/// `FLASHTUNE_CACHE_DIR` and `FLASHTUNE_PACK` have checks of their own.
const VARIABLES: [(&str, Fault); 5] = [
    // A bare name is one that the loader searches for.
    ("FLASHTUNE_NVRTC", |value| if nvrtc_search().found.is_some() { None } else { exists(value) }),
    ("FLASHTUNE_TUNING_DB", |value| (!Path::new(value).is_dir()).then(|| "there is no such folder".to_owned())),
    ("FLASHTUNE_TEMPLATES", |value| exists(value).or_else(|| templates_digest().err().map(|error| error.message))),
    ("FLASHTUNE_LIBRARY", exists),
    ("FLASHTUNE_CACHE_LIMIT_MB", |value| {
        let is_number = value.to_str().is_some_and(|text| text.parse::<u64>().is_ok());
        (!is_number).then(|| "it must be a whole number".to_owned())
    }),
];

fn exists(value: &OsStr) -> Option<String> {
    Path::new(value).metadata().err().map(|error| error.to_string())
}

/// The records that serve each GPU, or the CPU if there is none. `packed` are a pack's lines.
pub fn records(gpus: &[Device], cache: Option<PathBuf>, packed: &[String]) -> Result<Vec<Check>> {
    let backend = Backend::Cpu(Cpu::new(0)?);
    let engine = Engine::new(backend, EngineOptions { cache_dir: cache, ..EngineOptions::default() });
    let known = engine.records().into_iter();
    let own: Vec<Record> = known.filter(|(source, _)| *source == Source::Machine).map(|(_, record)| record).collect();
    let (packed, _) = record::read_lines(&packed.join("\n"));
    let cpu = std::slice::from_ref(engine.backend().device());
    let devices = if gpus.is_empty() { cpu } else { gpus };
    Ok(devices.iter().enumerate().map(|(ordinal, device)| of_device(ordinal, device, &own, &packed)).collect())
}

fn of_device(ordinal: usize, device: &Device, own: &[Record], packed: &[Record]) -> Check {
    const NAME: &str = "records";
    let shipped = shipped::records(device.arch);
    let of = |records: &[Record]| records.iter().filter(|r| r.device_key() == key::device_key(device)).count();
    let (own, others) = (of(own), of(&shipped) + of(packed));
    let name = format!("{} ({})", device.name, device.arch);
    if own + others > 0 {
        return Check::ok(NAME, format_args!("{name} has {own} of this machine and {others} that were shipped"));
    }
    let (device, preset) = match (device.arch, ordinal) {
        (Arch::Cpu, _) => (" --device cpu".to_owned(), "gpt2"),
        (Arch::Sm(..), 0) => (String::new(), "llama-3-8b"),
        (Arch::Sm(..), ordinal) => (format!(" --device {ordinal}"), "llama-3-8b"),
    };
    let fact = format!("{name} has none; configs come from a model of time, a similar GPU or a heuristic");
    Check::missing(NAME, fact, Some(format!("flashtune autotune{device} --preset {preset}")))
}
