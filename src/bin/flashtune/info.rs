//! `flashtune info`: devices, libraries with the places searched, the cache folder, records,
//! versions.

use crate::device::{cache_folder, pack_place};
use crate::failure::{Failure, print_json};
use flashtune::backend::Backend;
use flashtune::cpu::Cpu;
use flashtune::device::Device;
use flashtune::kernel::pack::{Pack, Place};
use flashtune::kernel::{self, Search, cache_dir};
use flashtune::plan::{Engine, EngineOptions, Source, shipped};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Info {
    version: &'static str,
    devices: Vec<Device>,
    /// Why no GPU is listed.
    no_gpu: Option<String>,
    libcuda: Search,
    libnvrtc: Search,
    /// Architectures that the NVRTC in use compiles for.
    compiler_archs: Vec<String>,
    cache_dir: Option<PathBuf>,
    /// Why records and cubins are kept only in memory.
    no_cache: Option<String>,
    pack: Option<PackInfo>,
    machine_records: usize,
    shipped_files: Vec<&'static str>,
}

/// The pack that contexts of this environment would use.
#[derive(Serialize)]
struct PackInfo {
    path: PathBuf,
    named_by: &'static str,
    archs: Vec<String>,
    kernels: usize,
    plans: usize,
    records: usize,
    /// Why no context uses it; null if those of one of its architectures do.
    refused: Option<String>,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let info = gather()?;
    if args.json {
        return print_json(&info);
    }
    println!("flashtune {}", info.version);
    println!("\ndevices");
    for device in &info.devices {
        let memory = device.memory_bytes as f64 / (1u64 << 30) as f64;
        let processors = if device.smem_per_sm == 0 { "threads" } else { "SMs" };
        println!("  {} ({}, {} {processors}, {memory:.0} GiB)", device.name, device.arch, device.sm_count);
    }
    if let Some(reason) = &info.no_gpu {
        println!("  no GPU: {reason}");
    }
    for (name, search) in [("libcuda", &info.libcuda), ("libnvrtc", &info.libnvrtc)] {
        let version = search.version.map_or(String::new(), |(major, minor)| format!(" (CUDA {major}.{minor})"));
        println!("\n{name}: {}{version}", search.found.as_deref().unwrap_or("not found"));
        for attempt in &search.attempts {
            println!("  {}: {}", attempt.place, attempt.outcome);
        }
    }
    if !info.compiler_archs.is_empty() {
        println!("  compiles for {}", info.compiler_archs.join(" "));
    }
    match (&info.cache_dir, &info.no_cache) {
        (Some(folder), None) => println!("\ncache: {}", folder.display()),
        (_, reason) => println!("\ncache: none, {}", reason.as_deref().unwrap_or("no HOME and no FLASHTUNE_CACHE_DIR")),
    }
    match &info.pack {
        None => println!("pack: none"),
        Some(PackInfo { path, named_by, refused: Some(reason), .. }) => {
            println!("pack: {} ({named_by}) is not used: {reason}", path.display());
        }
        Some(pack) => println!(
            "pack: {} ({}), {} kernels, {} plans and {} records for {}",
            pack.path.display(),
            pack.named_by,
            pack.kernels,
            pack.plans,
            pack.records,
            pack.archs.join(" ")
        ),
    }
    println!("records of this machine: {}", info.machine_records);
    println!(
        "shipped records: {}",
        if info.shipped_files.is_empty() { "none".into() } else { info.shipped_files.join(" ") }
    );
    Ok(())
}

fn gather() -> Result<Info, Failure> {
    let gpus = kernel::devices();
    let gpus_seen = gpus.as_deref().unwrap_or_default().to_vec();
    let no_gpu = gpus.as_ref().err().map(|error| error.message.clone());
    let compiler_archs = kernel::compiler_archs().unwrap_or_default().iter().map(ToString::to_string).collect();
    let cache_dir = cache_folder();
    let no_cache = cache_dir.as_deref().and_then(|folder| cache_dir::secure(folder).err()).map(String::from);
    let usable = cache_dir.clone().filter(|_| no_cache.is_none());
    let engine =
        Engine::new(Backend::Cpu(Cpu::new(0)?), EngineOptions { cache_dir: usable, ..EngineOptions::default() });
    let machine_records = engine.records().iter().filter(|(source, _)| *source == Source::Machine).count();
    let cpu = engine.backend().device().clone();
    Ok(Info {
        version: env!("CARGO_PKG_VERSION"),
        devices: gpus.unwrap_or_default().into_iter().chain([cpu]).collect(),
        no_gpu,
        libcuda: kernel::driver_search().clone(),
        libnvrtc: kernel::nvrtc_search().clone(),
        compiler_archs,
        cache_dir,
        no_cache,
        pack: pack_place().map(|place| pack_info(place, &gpus_seen)),
        machine_records,
        shipped_files: shipped::EMBEDDED.iter().map(|(path, _)| *path).collect(),
    })
}

/// Without a GPU, no device refuses the pack.
fn pack_info(place: Place, gpus: &[Device]) -> PackInfo {
    let opened = Pack::open_at(&place);
    let Place { path, named_by, .. } = place;
    let none = |refused| PackInfo {
        path: path.clone(),
        named_by,
        archs: Vec::new(),
        kernels: 0,
        plans: 0,
        records: 0,
        refused: Some(refused),
    };
    let pack = match opened {
        Ok(pack) => pack,
        Err(reason) => return none(reason),
    };
    let manifest = pack.manifest();
    let refusals: Vec<Option<String>> = gpus.iter().map(|gpu| pack.check_device(gpu).err()).collect();
    let by_devices = refusals.iter().all(Option::is_some).then(|| refusals.into_iter().flatten().next()).flatten();
    PackInfo {
        archs: manifest.archs().iter().map(ToString::to_string).collect(),
        kernels: manifest.kernels.len(),
        plans: manifest.plans.len(),
        records: manifest.records.len(),
        refused: pack.check_library().err().or(by_devices),
        ..none(String::new())
    }
}
