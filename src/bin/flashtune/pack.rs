//! `flashtune pack`: compiles the kernels of problems ahead of time, without a GPU, or lists what a
//! pack holds.

use crate::device::cache_folder;
use crate::failure::{Failure, print_json, usage};
use crate::names::by_name;
use crate::places;
use crate::problems;
use crate::records::input_text;
use flashtune::device::{Arch, Device};
use flashtune::files;
use flashtune::kernel::pack::{Manifest, Pack};
use flashtune::plan::packing::{Packed, Wanted, pack};
use flashtune::plan::{Record, key, record};
use flashtune::problem::Dtype;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Architectures of the kernels, such as sm_80,sm_86,sm_90a. A GPU runs only the kernels of its
    /// own architecture
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required_unless_present = "list")]
    arch: Vec<Arch>,
    /// Pack the problems of a model or a grid; repeatable
    #[arg(long = "preset", value_name = "NAME")]
    presets: Vec<String>,
    /// Pack the problems of a file of JSON lines, as for autotune
    #[arg(long, value_name = "FILE")]
    problems: Option<PathBuf>,
    /// Replace the dtype of all problems: fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>)]
    dtype: Option<Dtype>,
    /// Records of tuned GPUs, as `records export` writes them; repeatable. They choose configs, and
    /// go into the pack
    #[arg(long, value_name = "FILE")]
    records: Vec<PathBuf>,
    /// Numbers of SMs of more GPUs that configs are chosen for. They are always chosen for a
    /// well-known GPU of each architecture and for the GPUs that have records
    #[arg(long = "sm-count", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    sm_counts: Vec<u32>,
    /// The pack to write
    #[arg(long, value_name = "FILE", required_unless_present = "list")]
    output: Option<PathBuf>,
    /// Show what a pack holds, and write none
    #[arg(long, value_name = "FILE", conflicts_with_all = ["arch", "presets", "problems", "dtype"])]
    #[arg(conflicts_with_all = ["records", "sm_counts", "output"])]
    list: Option<PathBuf>,
    /// With --list: print one JSON object
    #[arg(long, requires = "list")]
    json: bool,
}

#[derive(Serialize)]
struct Listed<'a> {
    file: &'a Path,
    bytes: usize,
    /// Why this library refuses it; null if it does not.
    refused: Option<String>,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

pub fn run(args: Args) -> Result<(), Failure> {
    match (&args.list, &args.output) {
        (Some(file), _) => list(file, args.json),
        (None, Some(output)) => write(&args, output),
        (None, None) => Err(usage("--output is missing")),
    }
}

fn write(args: &Args, output: &Path) -> Result<(), Failure> {
    if args.presets.is_empty() && args.problems.is_none() {
        return Err(usage("a pack is made for problems; give --preset or --problems"));
    }
    for arch in &args.arch {
        if Device::typical(*arch).is_none() {
            return Err(usage(format_args!("--arch is {arch}; kernels are for sm_80 and later")));
        }
    }
    let inputs = args
        .records
        .iter()
        .map(|file| ("--records", file))
        .chain(args.problems.iter().map(|file| ("--problems", file)));
    for (name, file) in inputs {
        places::require_apart(&[(name, Some(file)), ("--output", Some(output))])?;
    }
    places::require_place(output)?;
    let mut archs = args.arch.clone();
    archs.sort_unstable();
    archs.dedup();
    let problems = problems::collect(&args.presets, args.problems.as_deref(), args.dtype)?;
    let records = records(&args.records)?;
    let cache_dir = cache_folder();
    let wanted = Wanted {
        archs: &archs,
        sm_counts: &args.sm_counts,
        problems: &problems,
        records: &records,
        cache_dir: cache_dir.as_deref(),
    };
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{pos}/{len} kernels {wide_bar} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let Packed { bytes, left_out } = pack(&wanted, &|count| match count {
        0 => bar.inc(1),
        count => bar.inc_length(count as u64),
    })?;
    bar.finish_and_clear();
    left_out.iter().for_each(|(problem, reason)| eprintln!("{problem} is left out: {reason}"));
    let made = Pack::from_bytes(output, bytes).map_err(Failure::Failed)?;
    let manifest = made.manifest();
    // An existing pack is kept.
    if manifest.plans.is_empty() {
        return Err(Failure::Failed("no problem has a place in the pack, and none was written".to_owned()));
    }
    publish(output, made.as_bytes())?;
    eprintln!(
        "{}: {} bytes, {} plans and {} operations with {} kernels, {} records; {} problems are left out",
        output.display(),
        made.bytes(),
        manifest.plans.len(),
        manifest.operations.len(),
        manifest.kernels.len(),
        manifest.records.len(),
        left_out.len()
    );
    Ok(())
}

fn records(files: &[PathBuf]) -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    for file in files {
        let failed = |error: &dyn std::fmt::Display| Failure::Failed(format!("{}: {error}", file.display()));
        let text = input_text(file).map_err(|error| failed(&error))?;
        let (read, ignored) = record::read_lines(&text);
        if let Some((line, reason)) = ignored.first() {
            return Err(failed(&format_args!("line {line}: {reason}")));
        }
        records.extend(read);
    }
    Ok(records)
}

/// Replaces the file as a whole, so that no context reads half a pack. Everybody may read a new
/// one.
fn publish(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let is_new = path.symlink_metadata().is_err();
    let readable = || std::fs::set_permissions(path, PermissionsExt::from_mode(0o644));
    let written = files::publish(path, bytes).and_then(|()| if is_new { readable() } else { Ok(()) });
    written.map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
}

fn list(file: &Path, json: bool) -> Result<(), Failure> {
    let pack = Pack::open(file).map_err(|reason| Failure::Failed(format!("{}: {reason}", file.display())))?;
    let (manifest, refused) = (pack.manifest(), pack.check_library().err());
    if json {
        return print_json(&Listed { file, bytes: pack.bytes(), refused, manifest });
    }
    let origin = &manifest.origin;
    println!("{}: {} bytes", file.display(), pack.bytes());
    println!(
        "made by flashtune {} from the templates {}, compiled by NVRTC {}.{}",
        origin.library_version, origin.templates_digest, origin.nvrtc_version.0, origin.nvrtc_version.1
    );
    match &refused {
        None => println!("this library uses it"),
        Some(reason) => println!("this library refuses it: {reason}"),
    }
    manifest.archs().into_iter().for_each(|arch| list_arch(&pack, arch));
    println!("\nrecords: {}", manifest.records.len());
    let (records, _) = record::read_lines(&manifest.records.join("\n"));
    records.iter().for_each(|record| println!("  {}: {:.1} us, {}", record.id(), record.median_us, record.config));
    Ok(())
}

fn list_arch(pack: &Pack, arch: Arch) {
    let manifest = pack.manifest();
    let of_arch = || pack.kernels(arch);
    let (inflated, packed) = of_arch().fold((0, 0), |(inflated, packed), kernel| {
        (inflated + u64::from(kernel.cubin_bytes), packed + u64::from(kernel.packed_bytes))
    });
    println!("\n{arch}: {} kernels, {inflated} bytes, {packed} compressed", of_arch().count());
    let gpus: Vec<u32> =
        (0..).zip(&manifest.gpus).filter(|(_, gpu)| gpu.arch == arch).map(|(index, _)| index).collect();
    let named = |indices: &[u32]| {
        let names: Vec<String> = indices.iter().map(|index| manifest.gpus[*index as usize].to_string()).collect();
        names.join(", ")
    };
    println!("  configs are for {}", named(&gpus));
    for plan in pack.plans(arch) {
        let kernels: Vec<&str> =
            plan.kernels.iter().map(|index| manifest.kernels[*index as usize].name.as_str()).collect();
        let on = if plan.gpus == gpus { String::new() } else { format!(" on {}", named(&plan.gpus)) };
        println!("  {}{on}: {}: {}", key::record_key(&plan.problem), plan.config, kernels.join(" "));
    }
    for operation in manifest.operations.iter().filter(|operation| operation.arch == arch) {
        println!("  {}", operation.class);
    }
}
