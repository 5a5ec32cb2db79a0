//! What the main kernels come down to: the instructions of their cubins, for every architecture, by nvdisasm.
//!
//! A kernel that fell back from tensor cores, asynchronous copies or vector additions would still be right, so nothing
//! else would tell. Without NVRTC or nvdisasm a test says so and passes; `FLASHTUNE_REQUIRE_NVRTC=1` and
//! `FLASHTUNE_REQUIRE_NVDISASM=1` make that a failure.

mod nvrtc;

use flashtune::cuda::nvrtc::Nvrtc;
use flashtune::device::{Arch, Device};
use flashtune::kernel::compile::compile;
use flashtune::kernel::render_pass;
use flashtune::plan::key::Class;
use flashtune::problem::{Causal, Dtype, Layout, Pass, Problem};
use flashtune::tune::space::heuristic;
use nvrtc::nvrtc;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const ARCHS: [Arch; 6] =
    [Arch::Sm(8, 0), Arch::Sm(8, 6), Arch::Sm(8, 9), Arch::Sm(9, 0), Arch::Sm(10, 0), Arch::Sm(12, 0)];

/// The heuristic's main kernel of a pass, disassembled.
struct Kernel {
    name: String,
    arch: Arch,
    pass: Pass,
    /// With their modifiers: `HMMA.16816.F32.BF16`.
    instructions: BTreeSet<String>,
}

impl Kernel {
    fn new(nvrtc: &Nvrtc, nvdisasm: &Path, problem: &Problem, arch: Arch) -> Kernel {
        let config = heuristic(problem, &Device::typical(arch).unwrap());
        let kernels = render_pass(problem, &config, arch).unwrap();
        let (spec, text) = kernels.iter().find(|(spec, _)| spec.is_main).unwrap();
        let compiled = compile(nvrtc, spec.template, text, &arch.to_string()).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), compiled.cubin).unwrap();
        let output = Command::new(nvdisasm).arg(file.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // `/*2db0*/  @P0 HMMA.16816.F32.BF16 R212, R44, R168, RZ ;`, and data, whose words begin with a dot.
        let instructions = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("/*")?.split_once("*/"))
            .filter_map(|(_, code)| code.split_whitespace().find(|word| !word.starts_with('@')))
            .filter(|word| word.starts_with(|first: char| first.is_ascii_uppercase()))
            .map(str::to_owned)
            .collect();
        Kernel { name: format!("{arch} {}", Class::of(problem)), arch, pass: problem.pass, instructions }
    }

    /// Demands that there is, or is not, an instruction of one of the `opcodes` with all `modifiers`.
    fn demand(&self, is_there: bool, opcodes: &[&str], modifiers: &[&str]) {
        let found = self.instructions.iter().any(|name| {
            let parts: Vec<&str> = name.split('.').collect();
            opcodes.contains(&parts[0]) && modifiers.iter().all(|modifier| parts.contains(modifier))
        });
        assert_eq!(found, is_there, "{}: {opcodes:?} with {modifiers:?} in {:?}", self.name, self.instructions);
    }
}

/// Judges the kernels of both passes on the given architectures.
fn judge(archs: &[Arch], dtype: Dtype, head_dim: i64, layout: Layout, judgement: impl Fn(&Kernel) + Sync) {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let problem = |pass| Problem {
        pass,
        dtype,
        batch_size: 2,
        num_heads_q: 8,
        num_heads_kv: 2,
        seqlen_q: 1000,
        seqlen_k: 1000,
        head_dim,
        head_dim_v: head_dim,
        causal: Causal::None,
        dropout: false,
        layout,
    };
    archs.par_iter().for_each(|arch| {
        for pass in [Pass::Forward, Pass::Backward] {
            judgement(&Kernel::new(nvrtc, &nvdisasm, &problem(pass), *arch));
        }
    });
}

/// nvdisasm beside the NVRTC in use, as in a toolkit and in NVIDIA's Python packages, or on the path.
fn nvdisasm(nvrtc: &Nvrtc) -> Option<PathBuf> {
    let beside = nvrtc.path().parent().map(|folder| folder.join("../bin/nvdisasm"));
    let found = beside
        .into_iter()
        .chain([PathBuf::from("nvdisasm")])
        .find(|program| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()));
    if found.is_none() {
        let required = std::env::var("FLASHTUNE_REQUIRE_NVDISASM").is_ok_and(|value| value == "1");
        assert!(!required, "FLASHTUNE_REQUIRE_NVDISASM=1, but there is none near {}", nvrtc.path().display());
        eprintln!("SKIPPED, no nvdisasm near {} or on the path", nvrtc.path().display());
    }
    found
}

#[test]
fn bf16_is_multiplied_by_tensor_cores_out_of_asynchronous_copies() {
    judge(&ARCHS, Dtype::Bf16, 64, Layout::Vec8, |kernel| {
        kernel.demand(true, &["HMMA"], &["16816", "F32", "BF16"]);
        kernel.demand(false, &["HMMA"], &["1688"]);
        kernel.demand(true, &["LDSM"], &["M88", "4"]);
        kernel.demand(true, &["LDSM"], &["MT88", "4"]);
        kernel.demand(true, &["LDGSTS"], &["BYPASS", "128"]);
        kernel.demand(true, &["MUFU"], &["EX2"]);
        // No spills, no double precision.
        kernel.demand(false, &["STL", "LDL", "DADD", "DMUL", "DFMA"], &[]);
    });
}

#[test]
fn fp16_is_multiplied_as_such_and_half_a_step_costs_half() {
    judge(&ARCHS, Dtype::Fp16, 40, Layout::Vec8, |kernel| {
        kernel.demand(true, &["HMMA"], &["16816", "F32"]);
        kernel.demand(true, &["HMMA"], &["1688", "F32"]);
        kernel.demand(false, &["HMMA"], &["BF16"]);
    });
}

#[test]
fn dq_is_added_to_memory_four_floats_at_a_time_where_that_exists() {
    judge(&ARCHS, Dtype::Bf16, 72, Layout::Vec8, |kernel| {
        let adds = ["RED", "REDG"];
        let (is_backward, has_vectors) = (kernel.pass == Pass::Backward, kernel.arch >= Arch::Sm(9, 0));
        kernel.demand(is_backward && has_vectors, &adds, &["ADD", "F32x4"]);
        kernel.demand(is_backward && !has_vectors, &adds, &["ADD", "F32"]);
        // An addition whose result nobody reads must not wait for it.
        kernel.demand(false, &["ATOM", "ATOMG"], &[]);
    });
}

#[test]
fn copies_are_as_wide_as_the_layout_allows() {
    for (head_dim, layout, width) in [(36, Layout::Vec4, &["64"][..]), (34, Layout::Vec2, &[])] {
        judge(&[Arch::Sm(8, 0), Arch::Sm(9, 0)], Dtype::Bf16, head_dim, layout, |kernel| {
            kernel.demand(true, &["LDGSTS"], width);
            kernel.demand(false, &["LDG"], &["U16"]);
        });
    }
}
