//! `flashtune render` prints the kernels of a problem, or compiles them and prints their resources.
//! `render-merge` and `render-kv-append` print the kernels that merge partial results and append to
//! a K/V cache. None needs a GPU.

use crate::failure::{Failure, print_json, usage};
use crate::names::by_name;
use crate::problems::{ClassArgs, ShapeArgs};
use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::files;
use flashtune::kernel;
use flashtune::ops::kv_append::{KvAppendClass, RotaryClass};
use flashtune::ops::merge::MergeClass;
use flashtune::problem::{Dtype, Layout, Problem};
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// Architecture of the kernels: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, …
    #[arg(long)]
    arch: Arch,
    #[command(flatten)]
    class: ClassArgs,
    /// The heuristic chooses family and config by the shape; the text depends only on those.
    #[command(flatten)]
    shape: ShapeArgs,
    /// Widest access that the tensors allow: vec8, vec4, vec2 or vec1 [default: the widest that the
    /// head dims allow]
    #[arg(long, value_parser = by_name::<Layout>)]
    layout: Option<Layout>,
    /// Kernel family, if several serve the problem: sm90 or sm80 on sm_90, and decode for few
    /// queries [default: the preferred family]
    #[arg(long)]
    family: Option<String>,
    /// Knobs that replace those of the heuristic's config
    #[arg(long, value_name = "NAME=VALUE", num_args = 1..)]
    config: Vec<String>,
    /// Compile with NVRTC, write the main kernel's cubin to FILE and the others beside it, and
    /// print the resources of each
    #[arg(long, value_name = "FILE")]
    cubin: Option<PathBuf>,
    /// With --cubin: print the resources as JSON lines
    #[arg(long, requires = "cubin")]
    json: bool,
}

#[derive(clap::Args)]
pub struct MergeArgs {
    /// Architecture of the kernel, such as sm_90
    #[arg(long)]
    arch: Arch,
    /// Dtype of the output: fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>, default_value = "bf16")]
    dtype: Dtype,
    /// The partial outputs are fp32 instead of --dtype
    #[arg(long)]
    partials_are_fp32: bool,
    /// Widest access that the tensors allow: vec4, vec2 or vec1; vec8 counts as vec4
    #[arg(long, value_parser = by_name::<Layout>, default_value = "vec4")]
    layout: Layout,
}

#[derive(clap::Args)]
pub struct KvAppendArgs {
    /// Architecture of the kernel, such as sm_90
    #[arg(long)]
    arch: Arch,
    /// Bytes of the widest access that all addresses, strides and rows allow: 16, 8, 4 or 2
    #[arg(long, default_value = "16", value_parser = access_bytes)]
    access_bytes: i64,
    /// The kernel for slots: idle sequences, entries by index, lengths that advance in place
    #[arg(long)]
    slots: bool,
    /// Rotates new keys and queries, columns i and i + half together
    #[arg(long)]
    rotary: bool,
    /// Rotates them, columns 2i and 2i + 1 together
    #[arg(long)]
    interleaved: bool,
    /// With a rotation: dtype of the rotated rows: fp16, bf16 or fp32
    #[arg(long, value_parser = by_name::<Dtype>, default_value = "bf16")]
    dtype: Dtype,
    /// With a rotation: cosines and sines are fp32
    #[arg(long)]
    tables_are_fp32: bool,
}

#[derive(Serialize)]
struct Used {
    kernel: &'static str,
    config: Config,
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    smem_bytes: u32,
    threads: u32,
    cubin: PathBuf,
}

pub fn run(args: Args) -> Result<(), Failure> {
    let plain = args.class.problem(&args.shape, 4096)?;
    let layout = args.layout.map_or(plain.layout, |layout| plain.layout.max(layout));
    let problem = Problem { layout, ..plain };
    let device = typical(args.arch)?;
    family::supported(&problem, &device).map_err(usage)?;
    let config = config(heuristic(&problem, &device, args.family.as_deref())?, &problem, &device, &args.config)?;
    match &args.cubin {
        None => {
            for (_, text) in kernel::render_pass(&problem, &config, args.arch)? {
                print!("{text}");
            }
            Ok(())
        }
        Some(path) => compile(&problem, &config, args.arch, path, args.json),
    }
}

/// The architecture's typical GPU; an error if no kernel is for it.
fn typical(arch: Arch) -> Result<Device, Failure> {
    Device::typical(arch).ok_or_else(|| usage(format_args!("--arch is {arch}; kernels are for sm_80 and later")))
}

pub fn run_merge(args: MergeArgs) -> Result<(), Failure> {
    typical(args.arch)?;
    let partial_dtype = if args.partials_are_fp32 { Dtype::Fp32 } else { args.dtype };
    // A lane loads at most four elements.
    let layout = args.layout.max(Layout::Vec4);
    let class = MergeClass { dtype: args.dtype, partial_dtype, layout };
    print!("{}", kernel::render_fixed(&class.kernel(), args.arch).map_err(usage)?);
    Ok(())
}

pub fn run_kv_append(args: KvAppendArgs) -> Result<(), Failure> {
    typical(args.arch)?;
    let rotary = RotaryClass {
        dtype: args.dtype,
        table_dtype: if args.tables_are_fp32 { Dtype::Fp32 } else { args.dtype },
        interleaved: args.interleaved,
    };
    let rotary = (args.rotary || args.interleaved).then_some(rotary);
    let class = KvAppendClass { access_bytes: args.access_bytes, slots: args.slots, rotary, eight: None };
    print!("{}", kernel::render_fixed(&class.kernel(), args.arch).map_err(usage)?);
    Ok(())
}

fn access_bytes(text: &str) -> Result<i64, String> {
    let bytes = text.parse().ok().filter(|bytes| [16, 8, 4, 2].contains(bytes));
    bytes.ok_or_else(|| "it must be 16, 8, 4 or 2".to_owned())
}

/// The heuristic's config of this family, or of the preferred one.
fn heuristic(problem: &Problem, device: &Device, family: Option<&str>) -> Result<Config, Failure> {
    let all = family::heuristics(problem, device);
    let names: Vec<&str> = all.iter().map(|config| config.family.name()).collect();
    let at = family.map_or(Some(0), |family| names.iter().position(|name| *name == family));
    at.map(|at| all[at].clone()).ok_or_else(|| {
        usage(format_args!("--family is {:?}; this problem is served by {}", family.unwrap_or(""), names.join(", ")))
    })
}

/// Puts the given knobs into the config and checks the result against the constraints.
fn config(mut config: Config, problem: &Problem, device: &Device, given: &[String]) -> Result<Config, Failure> {
    for text in given {
        let parsed = text.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?)));
        let (name, value) = parsed.ok_or_else(|| usage(format_args!("--config is {text:?}; write NAME=VALUE")))?;
        config = config.with(name, value);
    }
    family::check(problem, &config, device).map_err(usage)?;
    Ok(config)
}

fn compile(problem: &Problem, config: &Config, arch: Arch, path: &Path, json: bool) -> Result<(), Failure> {
    for (spec, _, compiled) in kernel::compile_only(problem, config, arch)? {
        let target = match spec.is_main {
            true => path.to_owned(),
            false => path.with_file_name(format!("{}.cubin", spec.template)),
        };
        files::publish(&target, &compiled.cubin)
            .map_err(|error| Failure::Failed(format!("{}: {error}", target.display())))?;
        let resources = compiled.resources.get(spec.entry).copied().unwrap_or_default();
        let used = Used {
            kernel: spec.entry,
            config: config.clone(),
            registers: resources.registers,
            spill_bytes: resources.spill_bytes,
            stack_bytes: resources.stack_bytes,
            smem_bytes: spec.smem_bytes + resources.static_smem_bytes,
            threads: spec.threads,
            cubin: target,
        };
        if json {
            print_json(&used)?;
        } else {
            println!(
                "{}: {} registers, {} bytes spilled, {} bytes of shared memory, {} threads, {}",
                used.kernel,
                used.registers,
                used.spill_bytes,
                used.smem_bytes,
                used.threads,
                used.cubin.display()
            );
        }
        if !compiled.log.is_empty() {
            eprint!("{}", compiled.log);
        }
    }
    Ok(())
}
