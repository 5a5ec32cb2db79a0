//! The instructions in the main kernels' cubins on every architecture, listed by nvdisasm.
//!
//! A kernel without tensor cores, asynchronous copies or vector additions is slower but still
//! right, so no other test notices. Without NVRTC or nvdisasm a test says so and passes;
//! `FLASHTUNE_REQUIRE_NVRTC=1` and `FLASHTUNE_REQUIRE_NVDISASM=1` make that a failure.

use crate::ARCHS;
use crate::disassembly::{consumer_spill_bytes, instructions, nvdisasm};
use crate::nvrtc::{compile, nvrtc};
use flashtune::config::{Config, Family};
use flashtune::cuda::nvrtc::Nvrtc;
use flashtune::device::{Arch, Device};
use flashtune::family::{alternatives, heuristic, heuristics};
use flashtune::kernel::compile::target;
use flashtune::kernel::{render_pass, sass};
use flashtune::plan::key::Class;
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Features, Four, Layout, Pass, Problem, Varlen};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::Path;

/// One architecture of each set of instructions: Ampere's, Hopper's, and Blackwell's.
const GENERATIONS: [Arch; 3] = [Arch::Sm(8, 0), Arch::Sm(9, 0), Arch::Sm(12, 0)];

/// So many tiles that none share a walk through the queries.
const PLAIN: Problem = Problem { num_heads_kv: 2, ..Problem::dense(Pass::Forward, Dtype::Bf16, 64, 8, 1000, 64) };

/// The main kernel of a pass with a heuristic's config, disassembled.
struct Kernel {
    name: String,
    arch: Arch,
    pass: Pass,
    family: Family,
    instructions: BTreeSet<String>,
    /// 0 for a family without consumers.
    consumer_spills: u32,
}

impl Kernel {
    fn new(nvrtc: &Nvrtc, nvdisasm: &Path, problem: &Problem, config: &Config, arch: Arch) -> Kernel {
        let kernels = render_pass(problem, config, arch).unwrap();
        let (spec, text) = kernels.iter().find(|(spec, _)| spec.is_main).unwrap();
        let compiled = compile(nvrtc, spec.template, text, &target(arch, config.family, nvrtc).unwrap()).unwrap();
        let ordered = instructions(nvdisasm, &compiled.cubin);
        let has_consumers = matches!(config.family, Family::Sm90 | Family::Sm90Fp8);
        let consumer_spills = if has_consumers { consumer_spill_bytes(&ordered) } else { 0 };
        let instructions = ordered.into_iter().collect();
        let name = format!("{arch} {} {}", config.family.name(), Class::of(problem));
        Kernel { name, arch, pass: problem.pass, family: config.family, instructions, consumer_spills }
    }

    /// Asserts that the kernel has, or does not have, an instruction of one of the `opcodes` with
    /// all `modifiers`.
    fn demand(&self, is_there: bool, opcodes: &[&str], modifiers: &[&str]) {
        let found = self.instructions.iter().any(|name| {
            let parts: Vec<&str> = name.split('.').collect();
            opcodes.contains(&parts[0]) && modifiers.iter().all(|modifier| parts.contains(modifier))
        });
        assert_eq!(found, is_there, "{}: {opcodes:?} with {modifiers:?} in {:?}", self.name, self.instructions);
    }
}

/// Judges the kernels of both passes on these architectures, for every family that serves there.
fn judge(archs: &[Arch], dtype: Dtype, head_dim: i64, layout: Layout, judgement: impl Fn(&Kernel) + Sync) {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let problem = |pass| Problem { pass, dtype, head_dim, head_dim_v: head_dim, layout, ..PLAIN };
    archs.par_iter().for_each(|arch| {
        for pass in [Pass::Forward, Pass::Backward] {
            for config in heuristics(&problem(pass), &Device::typical(*arch).unwrap()) {
                judgement(&Kernel::new(nvrtc, &nvdisasm, &problem(pass), &config, *arch));
            }
        }
    });
}

#[test]
fn bf16_uses_tensor_cores_and_asynchronous_copies() {
    judge(&ARCHS, Dtype::Bf16, 64, Layout::Vec8, |kernel| {
        let is_sm90 = kernel.family == Family::Sm90;
        kernel.demand(!is_sm90, &["HMMA"], &["16816", "F32", "BF16"]);
        // sm90's forward kernel uses m16n8k8 for rows that a stale maximum cannot serve, eight keys
        // at a time.
        kernel.demand(is_sm90 && kernel.pass == Pass::Forward, &["HMMA"], &["1688"]);
        // Its O goes through shared memory to the TMA store.
        kernel.demand(is_sm90 && kernel.pass == Pass::Forward, &["STSM"], &["M88", "4"]);
        kernel.demand(is_sm90 && kernel.pass == Pass::Forward, &["UTMASTG"], &["4D"]);
        // Its backward kernel hands dS to the other warpgroup through shared memory, transposed.
        kernel.demand(is_sm90 && kernel.pass == Pass::Backward, &["STSM"], &["MT88", "4"]);
        kernel.demand(!is_sm90, &["LDSM"], &["M88", "4"]);
        kernel.demand(!is_sm90, &["LDSM"], &["MT88", "4"]);
        kernel.demand(!is_sm90, &["LDGSTS"], &["BYPASS", "128"]);
        kernel.demand(is_sm90, &["HGMMA"], &["F32", "BF16"]);
        kernel.demand(is_sm90, &["UTMALDG"], &["4D"]);
        // An elected lane starts the forward kernel's copies, so no loop over lanes surrounds them.
        if is_sm90 && kernel.pass == Pass::Forward {
            kernel.demand(false, &["BRA"], &["U", "ANY"]);
        }
        kernel.demand(is_sm90, &["USETMAXREG"], &["TRY_ALLOC"]);
        kernel.demand(true, &["MUFU"], &["EX2"]);
        // Only the sm90 producer may spill, and no kernel uses double precision.
        assert_eq!(kernel.consumer_spills, 0, "{}", kernel.name);
        kernel.demand(false, if is_sm90 { &[] } else { &["STL", "LDL"] }, &[]);
        kernel.demand(false, &["DADD", "DMUL", "DFMA"], &[]);
    });
}

/// Q, K and V in e4m3, with scales of heads.
fn of_e4m3((dim, causal): (i64, Causal)) -> Problem {
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
    let features = Features { eight_bits, ..Features::NONE };
    Problem { head_dim: dim, head_dim_v: dim, causal, features, ..PLAIN }
}

/// V is transposed in shared memory, and nothing else is moved for the products.
#[test]
fn e4m3_uses_tensor_cores_of_8_bits() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let arch = Arch::Sm(9, 0);
    let problems = [(64, Causal::None), (128, Causal::BottomRight), (256, Causal::None)].map(of_e4m3);
    problems.par_iter().for_each(|problem| {
        let config = heuristic(problem, &Device::typical(arch).unwrap());
        let kernel = Kernel::new(nvrtc, &nvdisasm, problem, &config, arch);
        kernel.demand(true, &["QGMMA"], &["F32", "E4M3"]);
        kernel.demand(false, &["HGMMA", "HMMA"], &[]);
        kernel.demand(true, &["LDSM"], &["MT88", "4"]);
        kernel.demand(true, &["PRMT"], &[]);
        kernel.demand(true, &["STSM"], &["M88", "4"]);
        kernel.demand(true, &["F2FP"], &["SATFINITE", "E4M3"]);
        kernel.demand(true, &["UTMALDG"], &["4D"]);
        // At head dim 256 shared memory has no room for a slot of O.
        kernel.demand(problem.head_dim < 256, &["UTMASTG"], &["4D"]);
        kernel.demand(true, &["USETMAXREG"], &["TRY_ALLOC"]);
        assert_eq!(kernel.consumer_spills, 0, "{}", kernel.name);
    });
}

/// A kernel of its own transposes V in registers, and the main kernel copies it whole.
#[test]
fn e4m3_may_read_v_transposed() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let arch = Arch::Sm(9, 0);
    let config = |problem: &Problem| alternatives(problem, &Device::typical(arch).unwrap()).swap_remove(0);
    let problems = [
        (128, Causal::None),
        (128, Causal::BottomRight),
        (160, Causal::None),
        (192, Causal::BottomRight),
        (256, Causal::BottomRight),
    ]
    .map(of_e4m3);
    problems.par_iter().for_each(|problem| {
        let kernel = Kernel::new(nvrtc, &nvdisasm, problem, &config(problem), arch);
        // One copy brings an image, and nothing reads before the first kernel has ended.
        kernel.demand(true, &["UBLKCP"], &[]);
        kernel.demand(true, &["ACQBULK"], &[]);
        kernel.demand(false, &["LDSM"], &[]);
        // stmatrix writes O to its slot, where there is one.
        kernel.demand(problem.head_dim <= 160, &["STSM"], &[]);
        assert_eq!(kernel.consumer_spills, 0, "{}", kernel.name);
    });
    let problem = of_e4m3((256, Causal::None));
    let config = config(&problem);
    let (spec, text) = render_pass(&problem, &config, arch).unwrap().swap_remove(0);
    let compiled = compile(nvrtc, spec.template, &text, &target(arch, config.family, nvrtc).unwrap()).unwrap();
    let instructions: BTreeSet<String> = instructions(&nvdisasm, &compiled.cubin).into_iter().collect();
    let has = |opcode: &str| instructions.iter().any(|name| name.split('.').next() == Some(opcode));
    assert!(has("PRMT") && has("STG") && !has("LDS") && !has("STL"), "{instructions:?}");
}

/// A kernel of its own widens keys in registers. The main kernel waits for it, and copies and
/// multiplies as over keys of 16 bits. Factors of keys come by a bulk copy.
#[test]
fn keys_of_eight_bits_and_int4_may_be_widened_before() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let arch = Arch::Sm(9, 0);
    let of = |(keys, head_dim, keys_per_scale, paged): (Eight, i64, i64, Option<i64>)| {
        let eight_bits = Some(EightBits { keys, queries: false, keys_per_scale });
        let varlen = paged.map(|_| Varlen::default());
        let features = Features { eight_bits, paged, varlen, ..Features::NONE };
        let prompt = Problem { num_heads_q: 16, num_heads_kv: 4, seqlen_q: 2048, seqlen_k: 16_384, ..PLAIN };
        Problem { batch_size: 1, features, head_dim, head_dim_v: head_dim, causal: Causal::BottomRight, ..prompt }
    };
    let problems = [
        (Eight::E4m3, 128, 0, Some(16)),
        (Eight::Int8, 128, 1, None),
        (Eight::E5m2, 64, 128, Some(1)),
        (Eight::E4m3, 256, 0, None),
    ];
    let prompt = of(problems[1]);
    let of_int4 = Features { eight_bits: None, four_bits: Some(Four::Int4g32), ..prompt.features };
    let prompts: Vec<Problem> = problems.into_iter().map(of).chain([Problem { features: of_int4, ..prompt }]).collect();
    prompts.par_iter().for_each(|problem| {
        let config = heuristic(problem, &Device::typical(arch).unwrap());
        assert_eq!(config.get("widens"), Some(1), "{problem:?}");
        let has_factors = problem.features.has_key_scales();
        let kernel = Kernel::new(nvrtc, &nvdisasm, problem, &config, arch);
        kernel.demand(true, &["HGMMA"], &["F32", "BF16"]);
        kernel.demand(true, &["UTMALDG"], &[if problem.features.varlen.is_some() { "5D" } else { "4D" }]);
        kernel.demand(has_factors, &["UBLKCP"], &[]);
        kernel.demand(true, &["ACQBULK"], &[]);
        assert!(kernel.consumer_spills <= 8, "{}: {}", kernel.name, kernel.consumer_spills);
        let (spec, text) = render_pass(problem, &config, arch).unwrap().swap_remove(0);
        let compiled = compile(nvrtc, spec.template, &text, &target(arch, config.family, nvrtc).unwrap()).unwrap();
        let instructions: BTreeSet<String> = instructions(&nvdisasm, &compiled.cubin).into_iter().collect();
        let has = |opcode: &str| instructions.iter().any(|name| name.split('.').next() == Some(opcode));
        assert!(has("STG") && has("PREEXIT") && !has("LDS") && !has("STL"), "{instructions:?}");
        assert!(instructions.contains("STG.E.128"), "{instructions:?}");
    });
}

/// sm90's producer converts keys beside a 16-bit q to fp16. At head dim 128 TMA brings bytes to
/// shared memory, except from pages. Nothing multiplies by mma.sync but the rows of a stale
/// maximum.
#[test]
fn keys_of_eight_bits_use_wgmma_of_16_bits() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let arch = Arch::Sm(9, 0);
    let of = |(keys, dtype, keys_per_scale, paged): (Eight, Dtype, i64, Option<i64>)| {
        let eight_bits = Some(EightBits { keys, queries: false, keys_per_scale });
        let features = Features { eight_bits, paged, ..Features::NONE };
        // More keys than a workspace holds in 16 bits.
        Problem { batch_size: 10_000, dtype, features, head_dim: 128, head_dim_v: 128, ..PLAIN }
    };
    let problems = [
        (Eight::E4m3, Dtype::Bf16, 0, None),
        (Eight::E5m2, Dtype::Bf16, 1, Some(16)),
        (Eight::Int8, Dtype::Bf16, 128, Some(12)),
        (Eight::E4m3, Dtype::Fp16, 1, None),
    ];
    problems.map(of).par_iter().for_each(|problem| {
        let mut configs = heuristics(problem, &Device::typical(arch).unwrap()).into_iter();
        let config = configs.find(|config| config.family == Family::Sm90).expect("sm90 serves it");
        let kernel = Kernel::new(nvrtc, &nvdisasm, problem, &config, arch);
        let eight_bits = problem.features.eight_bits.unwrap();
        kernel.demand(true, &["HGMMA"], &["F32"]);
        kernel.demand(false, &["HGMMA"], &["BF16"]);
        kernel.demand(false, &["HMMA"], &["16816"]);
        kernel.demand(config.get("stale_max") == Some(1), &["HMMA"], &["1688"]);
        let by_tma = problem.features.paged.is_none();
        kernel.demand(!by_tma, &["LDG"], &["128", "CONSTANT"]);
        kernel.demand(true, &["STS"], &["128"]);
        kernel.demand(eight_bits.keys == Eight::E4m3, &["F2FP"], &["E4M3"]);
        kernel.demand(true, &["FENCE"], &["ASYNC"]);
        // Scales alone come by cp.async.
        kernel.demand(by_tma, &["LDGSTS"], &[]);
        kernel.demand(false, &["LDGSTS"], &["128"]);
    });
}

/// Contiguous keys, pages of half a block of keys, and pages that no TMA box fits.
#[test]
fn decode_copies_keys_by_tma_where_the_gpu_and_the_layout_allow_it() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let paged = |paged| Problem { features: Features { paged, ..Features::NONE }, ..PLAIN };
    let problems = [(None, true), (Some(16), true), (Some(3), false)]
        .map(|(page_size, fits)| (Problem { seqlen_q: 1, seqlen_k: 8000, ..paged(page_size) }, fits));
    ARCHS.par_iter().for_each(|arch| {
        for (problem, fits) in problems {
            let config = heuristic(&problem, &Device::typical(*arch).unwrap());
            assert_eq!((config.family, config.get("block_n")), (Family::Decode, Some(32)));
            let kernel = Kernel::new(nvrtc, &nvdisasm, &problem, &config, *arch);
            kernel.demand(fits && *arch >= Arch::Sm(9, 0), &["UTMALDG"], &["4D"]);
            kernel.demand(true, &["LDSM"], &["M88", "4"]);
            kernel.demand(true, &["HMMA"], &["16816", "F32", "BF16"]);
            // A copy that may go to another CTA becomes a function call on sm_120, which uses the
            // stack.
            kernel.demand(false, &["STL", "LDL"], &[]);
        }
    });
}

#[test]
fn fp16_stays_fp16_and_half_a_k_step_takes_half_the_instructions() {
    judge(&GENERATIONS, Dtype::Fp16, 40, Layout::Vec8, |kernel| {
        let is_sm90 = kernel.family == Family::Sm90;
        kernel.demand(!is_sm90, &["HMMA"], &["16816", "F32"]);
        kernel.demand(!is_sm90, &["HMMA"], &["1688", "F32"]);
        kernel.demand(is_sm90, &["HGMMA"], &["F32"]);
        kernel.demand(false, &["HMMA", "HGMMA"], &["BF16"]);
    });
}

#[test]
fn dq_additions_are_four_floats_wide_where_the_gpu_has_them() {
    judge(&GENERATIONS, Dtype::Bf16, 72, Layout::Vec8, |kernel| {
        let adds = ["RED", "REDG"];
        let (is_backward, has_vectors) = (kernel.pass == Pass::Backward, kernel.arch >= Arch::Sm(9, 0));
        kernel.demand(is_backward && has_vectors, &adds, &["ADD", "F32x4"]);
        kernel.demand(is_backward && !has_vectors, &adds, &["ADD", "F32"]);
        // An addition whose result is not used must not wait for it. Kernels of sm90 draw their
        // tiles by additions of integers, whose results they use.
        for of_floats in ["F32", "F32x4"] {
            kernel.demand(false, &["ATOM", "ATOMG"], &[of_floats]);
        }
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

/// A machine without nvdisasm counts spills from the cubin itself. The count is compared with
/// nvdisasm's for values that a tile's end reads, a window's bounds, producer spills only, and no
/// spills.
#[test]
fn consumer_spills_are_counted_like_nvdisasms() {
    let Some(nvrtc) = nvrtc() else { return };
    let Some(nvdisasm) = nvdisasm(nvrtc) else { return };
    let arch = Arch::Sm(9, 0);
    let of = |pass, head_dim, causal, knobs: &[(&str, u32)]| {
        let many = Problem { num_heads_q: 16, seqlen_q: 4096, seqlen_k: 4096, ..PLAIN };
        let problem = Problem { pass, head_dim, head_dim_v: head_dim, causal, ..many };
        let heuristic = heuristics(&problem, &Device::typical(arch).unwrap()).swap_remove(0);
        let config = knobs.iter().fold(heuristic, |config, (knob, value)| config.with(knob, *value));
        let kernels = render_pass(&problem, &config, arch).unwrap();
        let (spec, text) = kernels.iter().find(|(spec, _)| spec.is_main).unwrap();
        let compiled = compile(nvrtc, spec.template, text, &target(arch, config.family, nvrtc).unwrap()).unwrap();
        let read = sass::consumer_spill_bytes(&compiled.cubin);
        assert_eq!(read, Some(consumer_spill_bytes(&instructions(&nvdisasm, &compiled.cubin))), "{problem:?} {config}");
        (read.unwrap() > 0, compiled.resources[spec.entry].spill_bytes > 0)
    };
    assert_eq!(of(Pass::Forward, 64, Causal::BottomRight, &[("block_m", 64)]), (false, false));
    assert_eq!(of(Pass::Forward, 160, Causal::BottomRight, &[]), (true, true));
    assert_eq!(of(Pass::Backward, 128, Causal::None, &[]), (false, true));
    assert_eq!(of(Pass::Backward, 128, Causal::None, &[("block_m", 80), ("v_regs", 0)]), (true, true));
}
