//! Every kernel on every architecture, compiled by NVRTC without a GPU. Each must compile without a
//! warning, and the registers, shared memory and spills that ptxas reports must stay within bounds.
//!
//! Configs come from the heuristic, for a typical GPU of the architecture and every family that
//! serves there, and from the shipped records. In sm90 kernels only the producer may spill,
//! except in those of `spills`. The matrix is thinned (`is_taken`) to what two cores compile in
//! three minutes; `cargo test --test kernels -- --ignored matrix` runs all of it. Without NVRTC a
//! test says so and passes; `FLASHTUNE_REQUIRE_NVRTC=1` makes that a failure.

mod converted;
mod few_tiles;
mod pages;
mod spills;

use crate::ARCHS;
use crate::nvrtc::{compile, nvrtc};
use flashtune::config::{Config, Family};
use flashtune::cuda::nvrtc::Nvrtc;
use flashtune::device::{Arch, Device};
use flashtune::family::spec::{Arguments, Boxes, KernelSpec};
use flashtune::family::{check, heuristic, heuristics};
use flashtune::kernel::compile::target;
use flashtune::kernel::{render_pass, sass, sources};
use flashtune::plan::key::Class;
use flashtune::plan::{Record, record, shipped};
use flashtune::problem::{BlockMask, Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};
use rayon::prelude::*;
use spills::*;
use std::collections::{BTreeMap, BTreeSet};

/// Causal, dropout and deterministic: the switches of a template. A forward pass ignores
/// deterministic.
const FEATURES: [(Causal, bool, bool); 6] = [
    (Causal::None, false, false),
    (Causal::BottomRight, false, false),
    (Causal::None, true, false),
    (Causal::BottomRight, true, false),
    (Causal::BottomRight, false, true),
    (Causal::None, true, true),
];

/// Combinations of the other features, in which each feature meets others. Each is compiled at one
/// head dim, on sm_90 and on one other architecture. A forward pass leaves out what only the
/// backward pass has.
fn combined_features() -> [(Problem, Arch); 7] {
    let of = |head_dim, layout, causal, dropout, features| Problem {
        causal,
        dropout,
        features,
        ..problem(Pass::Backward, Dtype::Bf16, (head_dim, head_dim), layout)
    };
    let around = Window { left: Some(100), right: Some(100), top_left: true };
    let varlen = Some(Varlen::default());
    let (vec8, none) = (Layout::Vec8, Features::NONE);
    let capped = Features { window: SLIDING, softcap: true, varlen, ..none };
    let slopes = Features { alibi: true, varlen, sinks: true, dlse: true, ..none };
    let biased = Features { bias: true, dbias: true, sinks: true, ..none };
    let masked = Features { window: around, mask: true, mask_bits: true, dlse: true, ..none };
    let block_mask = Some(BlockMask { block_q: 128, block_k: 128 });
    let listed = Features { mask: true, dlse: true, block_mask, ..none };
    [
        (of(64, vec8, Causal::BottomRight, false, capped), Arch::Sm(8, 0)),
        (of(128, vec8, Causal::BottomRight, false, slopes), Arch::Sm(8, 6)),
        (of(128, vec8, Causal::None, true, biased), Arch::Sm(8, 9)),
        (of(256, vec8, Causal::None, false, masked), Arch::Sm(8, 0)),
        (of(64, vec8, Causal::BottomRight, false, listed), Arch::Sm(8, 0)),
        (of(96, vec8, Causal::BottomRight, true, ALL), Arch::Sm(12, 0)),
        (
            of(33, Layout::Vec1, Causal::BottomRight, true, Features { varlen, dlse: true, mask_bits: true, ..ALL }),
            Arch::Sm(10, 0),
        ),
    ]
}

const SLIDING: Window = Window { left: Some(1000), right: None, top_left: false };

/// Every feature that changes scores.
const ALL: Features = Features {
    window: SLIDING,
    softcap: true,
    alibi: true,
    bias: true,
    dbias: true,
    mask: true,
    sinks: true,
    ..Features::NONE
};

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::Fp16];

/// fp32 problems of the sm80 family. They use each list of its heuristic at least once; the last
/// list needs an architecture of little shared memory.
fn fp32_problems() -> [(Problem, Arch); 5] {
    let of = |head_dim, causal, dropout| Problem {
        causal,
        dropout,
        ..problem(Pass::Backward, Dtype::Fp32, (head_dim, head_dim), Layout::Vec4)
    };
    [
        (of(64, Causal::None, false), Arch::Sm(9, 0)),
        (Problem { features: ALL, ..of(96, Causal::BottomRight, true) }, Arch::Sm(9, 0)),
        (of(128, Causal::BottomRight, true), Arch::Sm(8, 0)),
        (of(256, Causal::None, false), Arch::Sm(8, 6)),
        (Problem { deterministic: true, ..of(512, Causal::BottomRight, false) }, Arch::Sm(8, 6)),
    ]
}

/// The bounds on spills hold for the register allocation of this compiler version only.
const JUDGED_NVRTC: (u32, u32) = (13, 0);

/// One head dim of each kind that the kernels treat differently.
const HEAD_DIMS: [((i64, i64), Layout); 15] = [
    ((32, 32), Layout::Vec8),
    // Element by element, like views with odd strides; each thread's loads need many addresses.
    ((33, 33), Layout::Vec1),
    ((36, 36), Layout::Vec4),
    ((40, 40), Layout::Vec8),
    ((50, 50), Layout::Vec2),
    ((64, 64), Layout::Vec8),
    ((72, 72), Layout::Vec8),
    ((80, 80), Layout::Vec8),
    ((96, 96), Layout::Vec8),
    ((128, 128), Layout::Vec8),
    ((160, 160), Layout::Vec8),
    ((192, 192), Layout::Vec8),
    ((192, 128), Layout::Vec8),
    ((256, 256), Layout::Vec8),
    ((512, 512), Layout::Vec8),
];

/// Lengths of many tiles and of few; for few, sm90's heuristic chooses fewer rows a tile.
const MANY: i64 = 4000;
const FEW: i64 = 200;

fn problem(pass: Pass, dtype: Dtype, (head_dim, head_dim_v): (i64, i64), layout: Layout) -> Problem {
    Problem { num_heads_kv: 2, head_dim_v, layout, ..Problem::dense(pass, dtype, 2, 8, MANY, head_dim) }
}

/// The kernels of an architecture to compile, by the indices of head dims, feature and dtype, and
/// by the family.
type Selection<'a> = &'a dyn Fn(usize, usize, usize, Family) -> bool;

/// The thinned matrix. sm90's kernels have every feature at head dim 128, every second one at 64
/// and 256, and one elsewhere. The mma.sync kernels of an architecture have one feature at every
/// second head dim. The architectures take turns, so that each head dim meets three features, and
/// outside of sm_90 in the other dtype.
fn is_taken(arch: usize, head_dims: usize, feature: usize, dtype: usize, family: Family) -> bool {
    let (one_in, turn) = match (family, HEAD_DIMS[head_dims].0) {
        (Family::Sm90, (128, 128)) => (1, 0),
        (Family::Sm90, (64, 64)) => (2, 0),
        (Family::Sm90, (256, 256)) => (2, 1),
        (Family::Sm90, _) => (FEATURES.len(), head_dims),
        _ => (FEATURES.len(), (head_dims + arch) / 2),
    };
    let has_head_dims = family == Family::Sm90 || (head_dims + arch).is_multiple_of(2);
    let has_feature = turn % one_in == feature % one_in;
    let has_dtype = (head_dims / 2 + feature + usize::from(ARCHS[arch] == Arch::Sm(9, 0))) % 2 == dtype;
    has_head_dims && has_feature && has_dtype
}

/// Whether the kernel is sm90's of 8-bit keys that its producer converts in registers.
fn converts_in_registers(problem: &Problem, spec: &KernelSpec) -> bool {
    let of_threads = Boxes { query_rows: 64, key_rows: 0 };
    let boxes = match spec.arguments {
        Arguments::ParamsMapsCounter { boxes, .. } => Some(boxes),
        _ => None,
    };
    problem.features.eight_bits.is_some() && boxes == Some(of_threads)
}

/// The demands on one text to compile.
struct Kernel {
    family: Family,
    spec: KernelSpec,
    name: String,
    registers: u32,
    shared_memory: u32,
    /// Bytes; for sm90's kernels the consumers' bytes.
    may_spill: u32,
    /// Bytes of objects that are kept in memory.
    stack: u32,
}

impl Kernel {
    /// The kernels of a pass by their text; only the main kernel may spill.
    fn of(problem: &Problem, config: &Config, device: &Device, may_spill: u32) -> Vec<(String, Kernel)> {
        let rendered = render_pass(problem, config, device.arch);
        let is_some = |knob| config.get(knob).is_some_and(|value| value > 0);
        let may_share = problem.pass == Pass::Backward && (is_some("split_waves") || is_some("splits_rest"));
        let of_split = if may_share { SHARED_WALK_MAY_SPILL } else { 0 };
        let kernel = |spec: KernelSpec| Kernel {
            family: config.family,
            name: format!("{} {} {} {config}", device.arch, spec.template, Class::of(problem)),
            registers: device.registers_per_sm / (spec.threads * spec.ctas_per_sm),
            shared_memory: device.smem_per_block - spec.smem_bytes,
            may_spill: if spec.is_main { may_spill.max(of_split) } else { 0 },
            // The source of tiles (sm90/forward/load_eight.cuh).
            stack: if converts_in_registers(problem, &spec) { 64 } else { 0 },
            spec,
        };
        let rendered = rendered.unwrap_or_else(|error| panic!("{problem:?} {config}: {error}"));
        rendered.into_iter().map(|(spec, text)| (text, kernel(spec))).collect()
    }

    /// Violated demands, one line each.
    fn complaints(&self, text: &str, nvrtc: &Nvrtc, arch: Arch) -> Vec<String> {
        let target = target(arch, self.family, nvrtc).unwrap();
        let compiled = match compile(nvrtc, self.spec.template, text, &target) {
            Ok(compiled) => compiled,
            Err(error) => return vec![format!("{}: {error}", self.name)],
        };
        let used = compiled.resources[self.spec.entry];
        let mut complaints = Vec::new();
        let mut demand = |holds: bool, complaint: String| {
            if !holds {
                complaints.push(format!("{}: {complaint}", self.name));
            }
        };
        demand(compiled.log.is_empty(), compiled.log.clone());
        demand(used.registers <= self.registers, format!("{} registers of {}", used.registers, self.registers));
        let (smem, limit) = (used.static_smem_bytes, self.shared_memory);
        demand(smem <= limit, format!("{smem} bytes of static shared memory, but only {limit} are left"));
        if nvrtc.version() == JUDGED_NVRTC {
            let of_consumers = sass::consumer_spill_bytes(&compiled.cubin);
            let (spilled, allowed) = (of_consumers.unwrap_or(used.spill_bytes), self.may_spill);
            demand(spilled <= allowed, format!("spills {spilled} bytes, at most {allowed} are allowed"));
            // An array indexed at run time lies on the stack, and ptxas does not count it as a
            // spill.
            demand(
                used.spill_bytes > 0 || used.stack_bytes <= self.stack,
                format!("{} bytes of stack", used.stack_bytes),
            );
        }
        complaints
    }
}

fn typical(arch: Arch) -> Device {
    Device::typical(arch).unwrap_or_else(|| panic!("{arch} has no typical GPU"))
}

/// The kernels of an architecture's matrix, by their text. Equal texts, which are common among
/// small kernels, are compiled once.
fn kernels(arch: Arch, is_taken: Selection) -> BTreeMap<String, Kernel> {
    let device = typical(arch);
    let mut kernels = BTreeMap::new();
    for (d, f, t) in combinations() {
        let ((dims, layout), (causal, dropout, deterministic)) = (HEAD_DIMS[d], FEATURES[f]);
        // The forward kernel does not depend on deterministic.
        let passes = if deterministic { &[Pass::Backward][..] } else { &[Pass::Forward, Pass::Backward] };
        for pass in passes.iter().copied() {
            let many = Problem { causal, dropout, deterministic, ..problem(pass, DTYPES[t], dims, layout) };
            // One feature for each head dim.
            let few = (d % FEATURES.len() == f).then_some(Problem { seqlen_q: FEW, seqlen_k: FEW, ..many });
            for problem in [many].into_iter().chain(few) {
                let taken = heuristics(&problem, &device).into_iter().filter(|config| is_taken(d, f, t, config.family));
                for config in taken {
                    let bytes = match config.family {
                        Family::Sm90 => may_spill(CONSUMERS, arch, &problem),
                        _ => may_spill(MMA_SYNC, arch, &problem) + if deterministic { ORDERED_DQ_MAY_SPILL } else { 0 },
                    };
                    kernels.extend(Kernel::of(&problem, &config, &device, bytes));
                }
            }
        }
    }
    for (backward, _) in combined_features().into_iter().filter(|(_, other)| [Arch::Sm(9, 0), *other].contains(&arch)) {
        let features = Features { dbias: false, dlse: false, ..backward.features };
        for problem in [backward, Problem { pass: Pass::Forward, features, ..backward }] {
            for config in heuristics(&problem, &device) {
                let bytes = match config.family {
                    Family::Sm80 => may_spill(COMBINED, arch, &problem),
                    Family::Sm90 => may_spill(CONSUMERS, arch, &problem),
                    _ => 0,
                };
                kernels.extend(Kernel::of(&problem, &config, &device, bytes));
            }
        }
    }
    kernels
}

/// The thinned matrix compiles the kernels of one in so many of the architecture's shipped records.
/// The tuner compiled all of them.
const RECORDS_TAKEN: usize = 120;

/// The kernels of one in `one_in` of the architecture's shipped records. They spill no more than
/// the heuristic's.
fn of_shipped_records(arch: Arch, one_in: usize) -> impl Iterator<Item = (String, Kernel)> {
    let records = shipped_records().into_iter().filter(move |record| record.arch == arch).step_by(one_in);
    records.flat_map(move |record| {
        let bytes = match record.config.family {
            Family::Sm90 => may_spill(CONSUMERS, arch, &record.problem),
            _ => 0,
        };
        Kernel::of(&record.problem, &record.config, &typical(arch), bytes)
    })
}

fn shipped_records() -> Vec<Record> {
    let mut all = Vec::new();
    for (path, text) in shipped::EMBEDDED {
        let (records, ignored) = record::read_lines(text);
        assert!(ignored.is_empty(), "{path}: {ignored:?}");
        all.extend(records.into_iter().filter(|record| record.config.family != Family::Cpu));
    }
    all
}

/// Indices of head dims, feature and dtype.
fn combinations() -> impl Iterator<Item = (usize, usize, usize)> {
    let features = (0..FEATURES.len()).flat_map(|f| (0..DTYPES.len()).map(move |t| (f, t)));
    (0..HEAD_DIMS.len()).flat_map(move |d| features.clone().map(move |(f, t)| (d, f, t)))
}

fn all_compile(kernels: &BTreeMap<String, Kernel>, nvrtc: &Nvrtc, arch: Arch) {
    assert_eq!(
        target(arch, Family::Sm80, nvrtc).unwrap(),
        arch.to_string(),
        "this NVRTC compiles for another architecture instead"
    );
    eprintln!("{arch}: {} kernels", kernels.len());
    let complaints: Vec<String> =
        kernels.par_iter().flat_map_iter(|(text, kernel)| kernel.complaints(text, nvrtc, arch)).collect();
    assert!(complaints.is_empty(), "{} of {} kernels:\n{}", complaints.len(), kernels.len(), complaints.join("\n"));
}

fn matrix_compiles(arch: Arch) {
    let Some(nvrtc) = nvrtc() else { return };
    let a = ARCHS.iter().position(|other| *other == arch).unwrap();
    let mut kernels = kernels(arch, &|d, f, t, family| is_taken(a, d, f, t, family));
    kernels.extend(of_shipped_records(arch, RECORDS_TAKEN));
    all_compile(&kernels, nvrtc, arch);
}

#[test]
fn kernels_compile_for_sm_80() {
    matrix_compiles(Arch::Sm(8, 0));
}

#[test]
fn kernels_compile_for_sm_86() {
    matrix_compiles(Arch::Sm(8, 6));
}

#[test]
fn kernels_compile_for_sm_89() {
    matrix_compiles(Arch::Sm(8, 9));
}

#[test]
fn kernels_compile_for_sm_90() {
    matrix_compiles(Arch::Sm(9, 0));
}

#[test]
fn kernels_compile_for_sm_100() {
    matrix_compiles(Arch::Sm(10, 0));
}

#[test]
fn kernels_compile_for_sm_120() {
    matrix_compiles(Arch::Sm(12, 0));
}

#[test]
fn kernels_of_fp32_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    for (backward, arch) in fp32_problems() {
        let features = Features { dbias: false, dlse: false, ..backward.features };
        let (forward, device) =
            (Problem { pass: Pass::Forward, deterministic: false, features, ..backward }, typical(arch));
        let of = |problem: Problem| {
            let ordered_dq = if problem.deterministic { ORDERED_DQ_MAY_SPILL } else { 0 };
            Kernel::of(&problem, &heuristic(&problem, &device), &device, may_spill(FP32, arch, &problem) + ordered_dq)
        };
        all_compile(&[forward, backward].into_iter().flat_map(of).collect(), nvrtc, arch);
    }
}

/// sm90's backward tiles in which a consumer holds dK and dV transposed: each number of boxes for
/// dK, dV and dQ, with few and many keys and stages.
#[test]
fn middle_backward_kernels_compile_with_any_number_of_boxes() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let of = |(dims, deterministic, keys, stages)| {
        let plain = problem(Pass::Backward, Dtype::Bf16, dims, Layout::Vec8);
        let problem = Problem { causal: Causal::BottomRight, deterministic, ..plain };
        let tile = heuristic(&problem, &device).with("block_n", keys).with("num_stages", stages);
        let config = tile.with("split_waves", 0);
        check(&problem, &config, &device).unwrap();
        Kernel::of(&problem, &config, &device, 0)
    };
    let tiles = [
        ((136, 136), false, 96, 1),
        ((192, 192), false, 64, 2),
        ((192, 192), true, 96, 1),
        ((176, 136), true, 64, 1),
        ((192, 128), false, 96, 2),
        ((128, 192), false, 96, 2),
        ((160, 64), false, 96, 2),
        ((64, 160), false, 96, 2),
        ((64, 160), true, 96, 2),
        ((40, 136), false, 96, 2),
    ];
    all_compile(&tiles.into_iter().flat_map(of).collect(), nvrtc, arch);
}

/// backward_delta with one access of V's columns or a part of it, so that its threads are more than
/// its rows.
#[test]
fn delta_compiles_for_few_columns() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let dims = [(8, Dtype::Bf16, Layout::Vec8), (1, Dtype::Bf16, Layout::Vec1), (4, Dtype::Fp32, Layout::Vec4)];
    let of = |(dim, dtype, layout)| {
        let problem = problem(Pass::Backward, dtype, (dim, dim), layout);
        let kernels = Kernel::of(&problem, &heuristic(&problem, &device), &device, 0);
        kernels.into_iter().filter(|(_, kernel)| kernel.spec.template == "backward_delta")
    };
    let kernels: BTreeMap<_, _> = dims.into_iter().flat_map(of).collect();
    assert_eq!(kernels.len(), dims.len());
    all_compile(&kernels, nvrtc, arch);
}

#[test]
#[ignore = "compiles for a quarter of an hour on two cores"]
fn kernels_compile_for_all_without_gaps() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in ARCHS {
        let mut kernels = kernels(arch, &|_, _, _, _| true);
        kernels.extend(of_shipped_records(arch, 1));
        all_compile(&kernels, nvrtc, arch);
    }
}

#[test]
fn matrix_covers_every_template_feature_and_dtype() {
    let rendered: BTreeSet<String> = kernels(Arch::Sm(9, 0), &|d, f, t, family| is_taken(0, d, f, t, family))
        .values()
        .map(|kernel| format!("{}.cu.tera", kernel.spec.template))
        .collect();
    // Other tests compile the remaining kernels: kernels_that_split_keys_compile, decode.rs,
    // fixed.rs, and instructions.rs for q in e4m3.
    let elsewhere = [
        "combine",
        "combine_rows",
        "combine_runs",
        "combine_segments",
        "decode",
        "decode_ahead",
        "kv_append",
        "kv_append_eight",
        "kv_append_slots",
        "merge",
        "quantize",
        "sm90_forward_fp8",
        "sm90_transpose_v",
        "sm90_widen_kv",
        "sm_clock",
    ];
    let elsewhere = elsewhere.map(|template| format!("{template}.cu.tera"));
    let templates = sources::embedded().into_keys().filter(|name| name.ends_with(".cu.tera"));
    let wanted: BTreeSet<String> = templates.filter(|name| !elsewhere.contains(name)).collect();
    assert!(rendered.is_superset(&wanted), "{rendered:?} lacks some of {wanted:?}");
    let any = |family, at: &dyn Fn(usize, usize) -> bool| {
        let of_arch = |arch| combinations().any(|(d, f, t)| at(d, f) && is_taken(arch, d, f, t, family));
        (0..ARCHS.len()).filter(|arch| of_arch(*arch)).count()
    };
    for (d, (dims, _)) in HEAD_DIMS.iter().enumerate() {
        assert_eq!(any(Family::Sm80, &|at, _| at == d), 3, "{dims:?} by mma.sync");
    }
    for (f, feature) in FEATURES.iter().enumerate() {
        assert!(any(Family::Sm80, &|_, at| at == f) >= 3, "{feature:?} by mma.sync");
        let of_sm90 = |dims: &[(i64, i64)]| {
            let taken = |(d, at, t): (usize, usize, usize)| {
                at == f && dims.contains(&HEAD_DIMS[d].0) && is_taken(0, d, f, t, Family::Sm90)
            };
            combinations().any(taken)
        };
        for dims in [
            &[(128, 128)][..],
            &[(64, 64), (256, 256)],
            &[(32, 32), (40, 40), (72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (192, 128)],
        ] {
            assert!(of_sm90(dims), "{feature:?} by sm90 at {dims:?}");
        }
    }
    for record in shipped_records() {
        assert!(ARCHS.contains(&record.arch), "{} has no matrix", record.arch);
    }
}
