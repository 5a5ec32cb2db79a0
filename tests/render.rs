//! Rendering: which names a template may use, how device files are spliced in, and equal inputs
//! giving equal bytes.
//!
//! The templates are made for the tests, so a failure is the renderer's and not a kernel's.

use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family::heuristic;
use flashtune::family::spec::KernelSpec;
use flashtune::kernel::constants;
use flashtune::kernel::render::Renderer;
use flashtune::kernel::render_pass;
use flashtune::kernel::sources::{Sources, embedded, overridden};
use flashtune::problem::{
    BlockMask, Causal, Dtype, Eight, EightBits, Feature, Features, Pass, Problem, Varlen, Window,
};

const SM90: Arch = Arch::Sm(9, 0);

fn problem() -> Problem {
    Problem {
        num_heads_kv: 2,
        seqlen_k: 400,
        head_dim_v: 96,
        causal: Causal::BottomRight,
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 2, 8, 300, 128)
    }
}

fn config() -> Config {
    Config::new(Family::Sm80, [("block_m", 64), ("block_n", 32)])
}

fn spec(template: &'static str) -> KernelSpec {
    KernelSpec { template, ..KernelSpec::MAIN }
}

fn renderer(files: &[(&str, &str)]) -> Renderer {
    Renderer::new(files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect()).unwrap()
}

fn rendered(files: &[(&str, &str)]) -> String {
    renderer(files).render(&problem(), &config(), &spec("test"), SM90).unwrap()
}

/// The text after the header comment.
fn body(text: &str) -> &str {
    text.split_once("\n\n").unwrap().1
}

#[test]
fn class_constants_and_knobs_are_filled_in() {
    let text = rendered(&[(
        "test.cu.tera",
        "@{ dtype }@ @{ head_dim }@ @{ head_dim_v }@ @{ is_causal }@ @{ has_dropout }@ @{ vec }@ @{ arch }@ @{ block_m }@ @{ template }@\n",
    )]);
    assert_eq!(body(&text), "bf16 128 96 true false 8 90 64 test\n");
}

#[test]
fn braces_of_cuda_and_ptx_are_plain_text() {
    let ptx = "int a[2][2] = {{1, 2}, {3, 4}}; asm(\"{%0, %1}\" : : \"r\"(x<<2)); /* {# #} {% %} */\n";
    assert_eq!(body(&rendered(&[("test.cu.tera", ptx)])), ptx);
}

#[test]
fn condition_selects_whole_includes() {
    let template =
        "@[ if has_dropout ]@\n#include \"device/a.cuh\"\n@[ else ]@\n#include \"device/b.cuh\"\n@[ endif ]@\n";
    let text = rendered(&[("test.cu.tera", template), ("device/a.cuh", "int a;\n"), ("device/b.cuh", "int b;\n")]);
    assert!(text.contains("int b;") && !text.contains("int a;"));
}

#[test]
fn device_file_is_spliced_raw_once_at_its_first_mention() {
    let text = rendered(&[
        ("test.cu.tera", "#include \"device/b.cuh\"\n#include \"device/a.cuh\"\nkernel\n"),
        ("device/a.cuh", "int a; // @{ not_a_tag }@\n"),
        ("device/b.cuh", "#include \"device/a.cuh\"\nint b;\n"),
    ]);
    assert_eq!(body(&text), "// ---- device/b.cuh\n// ---- device/a.cuh\nint a; // @{ not_a_tag }@\nint b;\nkernel\n");
}

#[test]
fn files_that_include_each_other_are_spliced_once() {
    let text = rendered(&[
        ("test.cu.tera", "#include \"device/a.cuh\"\n"),
        ("device/a.cuh", "#include \"device/b.cuh\"\nint a;\n"),
        ("device/b.cuh", "#include \"device/a.cuh\"\nint b;\n"),
    ]);
    assert_eq!(text.matches("int a;").count(), 1);
    assert_eq!(text.matches("int b;").count(), 1);
}

#[test]
fn include_of_a_missing_file_is_an_error_that_names_it() {
    let error = renderer(&[("test.cu.tera", "#include \"device/gone.cuh\"\n")])
        .render(&problem(), &config(), &spec("test"), SM90)
        .unwrap_err();
    assert!(error.message.contains("device/gone.cuh"), "{error}");
}

#[test]
fn unknown_name_is_an_error_even_in_a_condition() {
    for template in [
        "@{ block_k }@\n",
        "@[ if block_k ]@ x @[ endif ]@\n",
        "@[ if is_causal ]@@[ else ]@@{ block_k }@@[ endif ]@\n",
    ] {
        let error =
            renderer(&[("test.cu.tera", template)]).render(&problem(), &config(), &spec("test"), SM90).unwrap_err();
        assert!(error.message.contains("block_k"), "{error}");
    }
}

#[test]
fn unknown_template_is_an_error_that_names_the_known_ones() {
    let error = renderer(&[("test.cu.tera", "")]).render(&problem(), &config(), &spec("other"), SM90).unwrap_err();
    assert!(error.message.contains("\"other\"") && error.message.contains("test"), "{error}");
}

#[test]
fn template_that_does_not_parse_is_an_error_that_names_it() {
    let sources: Sources = [("bad.cu.tera".to_owned(), "@[ if ]@\n".to_owned())].into();
    let error = Renderer::new(sources).err().unwrap();
    assert!(error.message.contains("bad.cu.tera"), "{error}");
}

#[test]
fn knob_may_not_override_a_value_of_the_problem() {
    let error = renderer(&[("test.cu.tera", "@{ head_dim }@\n")])
        .render(&problem(), &config().with("head_dim", 64), &spec("test"), SM90)
        .unwrap_err();
    assert!(error.message.contains("head_dim"), "{error}");
}

#[test]
fn fp32_renders_only_for_sm80_and_the_cpu_family_has_no_kernel() {
    let renderer = renderer(&[("test.cu.tera", "@{ dtype }@ @{ vec }@\n")]);
    let fp32 = Problem { dtype: Dtype::Fp32, ..problem() };
    assert_eq!(body(&renderer.render(&fp32, &config(), &spec("test"), SM90).unwrap()), "fp32 4\n");
    let sm90 = Config { family: Family::Sm90, ..config() };
    assert_eq!(renderer.render(&fp32, &sm90, &spec("test"), SM90).unwrap_err().status, Status::Unsupported);
    assert!(renderer.render(&problem(), &config(), &spec("test"), Arch::Cpu).is_err());
}

#[test]
fn header_names_values_files_and_the_command_and_nothing_that_varies() {
    let files = [
        ("test.cu.tera", "#include \"device/a.cuh\"\nint m = @{ block_m }@ + @{ head_dim }@;\n"),
        ("device/a.cuh", "int a;\n"),
    ];
    let text = rendered(&files);
    let header: Vec<&str> = text.split_once("\n\n").unwrap().0.lines().collect();
    assert_eq!(
        header[1..],
        [
            "// problem:  head_dim=128",
            "// config:   sm80 block_m=64",
            "// files:    test.cu.tera device/a.cuh",
            "// by hand:  nvcc -std=c++17 --expt-relaxed-constexpr -diag-suppress 177 -arch=sm_90 -cubin -o test.cubin test.cu",
        ]
    );
    assert!(header[0].contains(env!("CARGO_PKG_VERSION")));
    assert_eq!(text, rendered(&files));
}

#[test]
fn text_depends_only_on_the_values_that_its_template_uses() {
    let renderer = renderer(&[("test.cu.tera", "int d = @{ head_dim }@;\n")]);
    let text = renderer.render(&problem(), &config(), &spec("test"), SM90).unwrap();
    let other = Problem { batch_size: 7, seqlen_q: 1, causal: Causal::None, dtype: Dtype::Fp16, ..problem() };
    assert_eq!(text, renderer.render(&other, &config().with("block_m", 128), &spec("test"), SM90).unwrap());
    let wider = Problem { head_dim: 64, ..problem() };
    assert_ne!(text, renderer.render(&wider, &config(), &spec("test"), SM90).unwrap());
}

#[test]
fn both_causal_alignments_are_one_kernel() {
    let renderer = renderer(&[("test.cu.tera", "@{ is_causal }@\n")]);
    let text = |causal| renderer.render(&Problem { causal, ..problem() }, &config(), &spec("test"), SM90).unwrap();
    assert_eq!(text(Causal::TopLeft), text(Causal::BottomRight));
    assert_ne!(text(Causal::TopLeft), text(Causal::None));
}

#[test]
fn override_folder_replaces_single_files() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("device")).unwrap();
    std::fs::write(folder.path().join("device/params.cuh"), "int other;\n").unwrap();
    std::fs::write(folder.path().join("new.cu.tera"), "#include \"device/params.cuh\"\n").unwrap();
    let sources = overridden(folder.path()).unwrap();
    assert_eq!(sources["device/params.cuh"], "int other;\n");
    assert_eq!(sources.len(), embedded().len() + 1);
    let error = overridden(&folder.path().join("gone")).unwrap_err();
    assert_eq!(error.status, Status::Io);
}

#[test]
fn folder_that_never_ends_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(".", folder.path().join("again")).unwrap();
    let error = overridden(folder.path()).unwrap_err();
    assert!(error.status == Status::Io && error.message.contains("folders deep"), "{error}");
    std::fs::remove_file(folder.path().join("again")).unwrap();
    for (name, target) in [("endless.cuh", "/dev/zero"), ("silent.cuh", "pipe")] {
        let path = folder.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap().success());
        if target.starts_with('/') {
            std::fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(target, &path).unwrap();
        }
        let error = overridden(folder.path()).unwrap_err();
        assert!(error.message.contains(name) && error.message.contains("not a regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn template_that_loops_or_prints_without_end_is_an_error() {
    let long = "0123456789".repeat(1000);
    let printing = format!("@[ for i in range(end=900000) ]@{long}@[ endfor ]@");
    let looping = "@[ for i in range(end=100000) ]@@[ for j in range(end=100000) ]@@[ endfor ]@@[ endfor ]@";
    for (template, reason) in [
        (looping, "more than 1000000 steps"),
        ("@[ for i in range(end=10000000000) ]@@[ endfor ]@", "more than 1000000 steps"),
        ("@[ for i in range(end=10, step_by=0) ]@@[ endfor ]@", "no positive step"),
        (&printing, "prints more than"),
    ] {
        let renderer = renderer(&[("k.cu.tera", template)]);
        let error = renderer.render(&problem(), &config(), &spec("k"), SM90).unwrap_err();
        assert!(error.message.contains(reason), "{error}");
    }
}

#[test]
fn every_embedded_template_parses() {
    assert!(embedded().contains_key("device/params.cuh"));
    Renderer::new(embedded()).unwrap();
}

/// Code outside `device/ptx/` uses PTX by the names that this folder gives. Comments may mention
/// `asm`.
#[test]
fn ptx_stands_in_its_own_folder_alone() {
    let has_asm = |text: &str| {
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        words.into_iter().any(|word| word.trim_matches('_') == "asm")
    };
    let (ptx, others): (Vec<_>, Vec<_>) = embedded().into_iter().partition(|(name, _)| name.starts_with("device/ptx/"));
    assert!(ptx.iter().all(|(_, text)| has_asm(text)));
    let with_asm: Vec<String> = others.into_iter().filter(|(_, text)| has_asm(text)).map(|(name, _)| name).collect();
    assert!(with_asm.is_empty(), "{with_asm:?}");
}

#[test]
fn a_wgmma_is_written_from_its_shape() {
    let wgmma = embedded()["device/ptx/wgmma.tera"].clone();
    let product = |call: &str| {
        let call = format!("@{{ <wgmma element=\"bf16\" {call} /> }}@\n");
        body(&rendered(&[("device/ptx/wgmma.tera", wgmma.as_str()), ("test.cu.tera", &call)]))
            .replace("\"\n        \"", "")
    };
    let shared = product("name=\"multiply\" n={16} a=\"shared\" c=\"overwrites\" transpose_b={true}");
    assert!(shared.contains("void multiply(float (&acc)[2][4], uint64 a, uint64 b)"), "{shared}");
    assert!(shared.contains("setp.ne.b32 p, 0, 0;"), "{shared}");
    let registers = "{%0, %1, %2, %3, %4, %5, %6, %7}";
    let written = format!("m64n16k16.f32.bf16.bf16 {registers}, %8, %9, p, 1, 1, 0, 1;");
    assert!(shared.contains(&written), "{shared}");
    assert_eq!(shared.matches("\"=f\"").count(), 8);
    let held = product("name=\"multiply\" n={16} a=\"registers\" c=\"accumulates\"");
    assert!(
        held.contains("void multiply(float (&acc)[2][4], const uint32 (&a)[4], uint64 b, int accumulate)"),
        "{held}"
    );
    assert!(held.contains("setp.ne.b32 p, %13, 0;"), "{held}");
    assert!(held.contains(&format!("{registers}, {{%8, %9, %10, %11}}, %12, p, 1, 1, 0;")), "{held}");
    assert!(
        held.contains(": \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b), \"r\"(accumulate));"),
        "{held}"
    );
    let added = product("name=\"multiply\" n={16} a=\"shared\" c=\"adds\" transpose_a={true}");
    assert!(added.contains("setp.eq.b32 p, 0, 0;") && added.contains("p, 1, 1, 1, 0;"), "{added}");
    assert_eq!(added.matches("\"+f\"").count(), 8);
}

#[test]
fn steps_of_a_wgmma_share_one_statement() {
    let wgmma = embedded()["device/ptx/wgmma.tera"].clone();
    let product = |call: &str| {
        let call = format!("@{{ <wgmma_steps name=\"multiply\" element=\"bf16\" n={{16}} {call} /> }}@\n");
        body(&rendered(&[("device/ptx/wgmma.tera", wgmma.as_str()), ("test.cu.tera", &call)]))
            .replace("\"\n        \"", "")
    };
    let registers = "{%0, %1, %2, %3, %4, %5, %6, %7}";
    let shared = product("steps={3} a=\"shared\" c=\"overwrites\" transpose_b={true}");
    assert!(
        shared.contains("void multiply(float (&acc)[2][4], const uint64 (&a)[3], const uint64 (&b)[3])"),
        "{shared}"
    );
    assert_eq!((shared.matches("asm volatile").count(), shared.matches("wgmma.mma_async").count()), (1, 3), "{shared}");
    assert!(shared.contains("setp.ne.b32 first, 0, 0;"), "{shared}");
    for (step, adds) in ["first", "later", "later"].iter().enumerate() {
        let written = format!("{registers}, %{}, %{}, {adds}, 1, 1, 0, 1;", 8 + step, 11 + step);
        assert!(shared.contains(&written), "{shared}");
    }
    assert_eq!(shared.matches("\"=f\"").count(), 8);
    let held = product("steps={2} a=\"registers\" c=\"accumulates\"");
    assert!(held.contains("const uint32 (&a)[2][4], const uint64 (&b)[2], int accumulate)"), "{held}");
    assert!(held.contains("setp.ne.b32 first, %18, 0;"), "{held}");
    assert!(held.contains(&format!("{registers}, {{%8, %9, %10, %11}}, %16, first, 1, 1, 0;")), "{held}");
    assert!(held.contains(&format!("{registers}, {{%12, %13, %14, %15}}, %17, later, 1, 1, 0;")), "{held}");
    assert!(held.contains("\"l\"(b[1]), \"r\"(accumulate));"), "{held}");
    let added = product("steps={2} a=\"shared\" c=\"adds\"");
    assert!(added.contains("setp.eq.b32 first, 0, 0;"), "{added}");
    assert_eq!(added.matches("\"+f\"").count(), 8);
    let none = product("steps={0} a=\"shared\" c=\"adds\"");
    assert!(!none.contains("multiply"), "{none}");
}

#[test]
fn a_constant_of_the_class_is_declared_where_the_text_mentions_it() {
    let text = rendered(&[
        ("test.cu.tera", "#include \"device/a.cuh\"\nconstexpr bool kIsBf16 = false;\n"),
        ("device/a.cuh", "int a = kHeadDim + kIsBf16;  // not kHasSoftcap\nint kHasAlibiOf;\n"),
    ]);
    assert!(text.contains("// problem:  head_dim=128\n"), "{text}");
    assert_eq!(text.matches("\nconstexpr").count(), 2, "{text}");
    let (before, _) = text.split_once("int a").unwrap();
    assert!(before.contains("\nconstexpr int kHeadDim = 128;  // "), "{text}");
}

#[test]
fn every_constant_of_the_class_is_mentioned_by_a_kernel() {
    let sources = embedded();
    for constant in constants::class() {
        let is_used = |text: &String| constants::mentions(&constants::code(text), constant.name);
        assert!(sources.values().any(is_used), "{}", constant.name);
    }
}

/// The name that a top-level definition of CUDA defines; None for a line that begins none. The name
/// of an entry stands on its second line.
fn defined_name(line: &str) -> Option<&str> {
    if line.starts_with("flashtune_") {
        return None;
    }
    if line.starts_with("extern \"C\"") {
        return Some(ENTRY);
    }
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let head = line.split(['(', '=', '{', ';', '[']).next()?.trim_end();
    let head = if head.starts_with("struct") { head.split(':').next()?.trim_end() } else { head };
    head.rsplit(|c| !is_word(c)).next().filter(|name| !name.is_empty() && line.starts_with(is_word))
}

const ENTRY: &str = "extern \"C\"";

/// The code that a kernel's entry reaches: definitions that it names, directly or through others.
/// A device file may hold more than each kernel uses.
fn reached(text: &str) -> String {
    let code = constants::code(text);
    let mut definitions: Vec<(&str, String)> = Vec::new();
    let mut before = "";
    for line in code.lines().filter(|line| !line.starts_with("static_assert")) {
        match defined_name(line) {
            // The parameters of a template are the beginning of the next line's definition.
            Some(_) if line.starts_with("template") && line.ends_with('>') => before = line,
            Some(name) => definitions.push((name, format!("{}{line}\n", std::mem::take(&mut before)))),
            None => {
                if let Some((_, body)) = definitions.last_mut() {
                    body.push_str(line);
                    body.push('\n');
                }
            }
        }
    }
    let (entry, mut others): (Vec<_>, Vec<_>) = definitions.into_iter().partition(|(name, _)| *name == ENTRY);
    let mut reached: String = entry.into_iter().map(|(_, body)| body).collect();
    loop {
        let (named, rest): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(name, _)| constants::mentions(&reached, name));
        if named.is_empty() {
            return reached;
        }
        reached.extend(named.into_iter().map(|(_, body)| body));
        others = rest;
    }
}

#[test]
fn code_that_no_definition_of_the_kernel_names_is_not_reached() {
    let text = "constexpr bool kHasBias = true;\nconstexpr bool kHasMask = true;\n\
        template <int kN>\n__device__ int biased(int x) {\n    return kHasBias ? x : kN;\n}\n\
        __device__ int masked(int x) {\n    return kHasMask;  // biased\n}\n\
        struct Row : Base {\n    int x = biased<1>(2);\n};\n\
        static_assert(!kHasMask);\n\
        extern \"C\" __global__ void\nflashtune_test() {\n    static_assert(true);\n    Row row;  // masked\n}\n";
    let code = reached(text);
    assert!(constants::mentions(&code, "kHasBias"), "{code}");
    assert!(!constants::mentions(&code, "kHasMask"), "{code}");
}

/// A feature that one family has and another lacks would be left out of a kernel without an error.
#[test]
fn the_families_have_the_same_features() {
    let h200 = Device::typical(SM90).unwrap();
    // Not compared: the fixed order of batch_invariant, which fp32's products do not keep, and keys
    // of 8 bits and int4.
    let differ = ["kIsBatchInvariant", "kKeyFormat", "kKeysPerScale", "kKeyGroup"];
    let of_class = ["kIsCausal", "kHasDropout", "kIsDeterministic"];
    let of_features = Feature::ALL.iter().flat_map(|feature| feature.row().constants).map(|constant| constant.name);
    let of_features = of_features.filter(|name| !differ.contains(name));
    let names: Vec<&str> = of_class.into_iter().chain(of_features).collect();
    let features = |problem: &Problem, template: &str| -> Vec<&str> {
        let kernels = render_pass(problem, &heuristic(problem, &h200), SM90).unwrap();
        let (_, text) = kernels.iter().find(|(spec, _)| spec.template == template).unwrap();
        let code = reached(text);
        names.iter().copied().filter(|name| constants::mentions(&code, name)).collect()
    };
    let of_sm80 = |pass| Problem { pass, dtype: Dtype::Fp32, ..problem() };
    let of_sm90 =
        |pass, head_dim| Problem { pass, head_dim, head_dim_v: head_dim, seqlen_q: 4096, seqlen_k: 4096, ..problem() };
    let forward = features(&of_sm80(Pass::Forward), "sm80_forward");
    assert!(["kIsCausal", "kHasDropout", "kHasSinks", "kIsVarlen"].iter().all(|name| forward.contains(name)));
    assert_eq!(forward, features(&of_sm90(Pass::Forward, 128), "sm90_forward"));
    let backward = features(&of_sm80(Pass::Backward), "sm80_backward");
    for (template, head_dim) in [("sm90_backward", 64), ("sm90_backward_middle", 192), ("sm90_backward_wide", 256)] {
        assert_eq!(backward, features(&of_sm90(Pass::Backward, head_dim), template), "{template}");
    }
    let decode = features(&Problem { seqlen_q: 1, ..problem() }, "decode");
    // Only decode splits keys and reads pages; it refuses dropout and block masks.
    let differing = ["kIsBatchInvariant", "kPageSize", "kHasDropout", "kMaskBlockQ", "kMaskBlockK"];
    let shared = |features: &[&str]| -> Vec<String> {
        let shared = features.iter().filter(|name| !differing.contains(name));
        shared.map(|name| name.to_string()).collect()
    };
    assert_eq!(shared(&decode), shared(&forward));
}

#[test]
fn every_feature_changes_the_kernel() {
    let plain = Problem { causal: Causal::None, ..problem() };
    let with = |features| Problem { features, ..plain };
    let (none, window) = (Features::NONE, Window::default());
    let bias = with(Features { bias: true, ..none });
    let both_passes = [
        (plain, Problem { causal: Causal::BottomRight, ..plain }),
        (plain, Problem { dropout: true, ..plain }),
        (plain, with(Features { window: Window { left: Some(1), ..window }, ..none })),
        (plain, with(Features { window: Window { right: Some(1), ..window }, ..none })),
        (with(Features { mask: true, ..none }), with(Features { mask: true, mask_bits: true, ..none })),
        (plain, with(Features { varlen: Some(Varlen::default()), ..none })),
        (plain, with(Features { block_mask: Some(BlockMask { block_q: 128, block_k: 128 }), ..none })),
    ];
    // Features that are mere flags, in the passes that have them.
    let flags = |pass: Pass| {
        let of_pass = Feature::ALL.iter().filter(move |feature| feature.row().passes.contains(&pass));
        let switched_on = of_pass.map(|feature| {
            let mut features = none;
            features.switch_on(*feature);
            (plain, with(features))
        });
        switched_on.filter(|(_, on)| !on.features.is_none() && !on.features.dbias).collect::<Vec<_>>()
    };
    let backward =
        [(plain, Problem { deterministic: true, ..plain }), (bias, with(Features { dbias: true, ..bias.features }))];
    let texts = |problem: &Problem, pass, config: &Config| -> Vec<String> {
        let kernels = render_pass(&Problem { pass, ..*problem }, config, Arch::Sm(8, 0)).unwrap();
        kernels.into_iter().map(|(_, text)| text).collect()
    };
    for (pass, pairs) in [
        (Pass::Forward, &both_passes[..]),
        (Pass::Backward, &both_passes),
        (Pass::Backward, &backward),
        (Pass::Forward, &flags(Pass::Forward)),
        (Pass::Backward, &flags(Pass::Backward)),
    ] {
        let config = heuristic(&Problem { pass, ..plain }, &Device::typical(Arch::Sm(8, 0)).unwrap());
        for (without, with) in pairs {
            assert_ne!(texts(without, pass, &config), texts(with, pass, &config), "{pass:?} {with:?}");
        }
    }
}

#[test]
fn every_kernel_after_the_first_waits_for_its_predecessor() {
    let (h200, few_queries) = (Device::typical(SM90).unwrap(), Problem { seqlen_q: 1, seqlen_k: 100_000, ..problem() });
    let sinks = Features { sinks: true, ..Features::NONE };
    let backward = |head_dim| Problem { pass: Pass::Backward, head_dim, features: sinks, ..problem() };
    let features = Features {
        varlen: Some(Varlen { total_q: Some(4000), ..Varlen::default() }),
        paged: Some(64),
        ..Features::NONE
    };
    let mixed = Problem { features, ..problem() };
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
    let e4m3 = Problem { features: Features { eight_bits, ..Features::NONE }, ..problem() };
    let default = |problem: Problem| (problem, heuristic(&problem, &h200));
    let transposed = (e4m3, heuristic(&e4m3, &h200).with("v_stages", 0));
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 1 });
    let converted = Problem { features: Features { eight_bits, ..Features::NONE }, ..problem() };
    let widened = (converted, heuristic(&converted, &h200).with("widens", 1));
    let passes = [few_queries, mixed, backward(64), backward(256), backward(300)].map(default);
    for (problem, config) in passes.into_iter().chain([transposed, widened]) {
        let kernels = render_pass(&problem, &config, SM90).unwrap();
        assert!(kernels.len() > 1, "{problem:?}");
        for (spec, text) in &kernels[1..] {
            let (_, definition) = text.split_once("void wait_for_previous_kernel()").unwrap();
            assert!(definition.contains("wait_for_previous_kernel();"), "{}", spec.template);
        }
    }
}
