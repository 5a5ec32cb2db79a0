//! Contexts without NVRTC: a pack's kernels serve, and a pack that does not fit changes nothing.
//!
//! The packs here hold placeholder cubins, which the stand-in driver loads. They have the texts of
//! the configs that `flashtune pack` would choose for an H200.

use crate::fake_cuda;
use crate::fake_driver::{Fake, PROBLEM, with_fake, with_fake_and};
use flashtune::backend::Backend;
use flashtune::call::{Call, TensorRef};
use flashtune::capi::context::{
    FLASHTUNE_BACKEND_AUTO, FLASHTUNE_BACKEND_CUDA, flashtune_context, flashtune_context_create,
    flashtune_context_destroy, flashtune_context_device, flashtune_context_options, flashtune_device_info,
};
use flashtune::capi::pack::{
    FLASHTUNE_PACK_LOADED, FLASHTUNE_PACK_NONE, FLASHTUNE_PACK_REFUSED, flashtune_context_pack, flashtune_pack_info,
};
use flashtune::capi::status::FLASHTUNE_STATUS_OUT_OF_MEMORY;
use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::dropout::Dropout;
use flashtune::error::Status;
use flashtune::family;
use flashtune::kernel::cubin_cache::TextDigest;
use flashtune::kernel::pack::{Manifest, Origin, PackStatus, PackedGpu, PackedKernel, PackedPlan, Place, encode};
use flashtune::kernel::{Gpu, nvrtc_version, render_pass, templates_digest};
use flashtune::plan::{Engine, EngineOptions, Known, Range, Record, Sizes, Source, choices, key, shipped};
use flashtune::problem::{Causal, Features, Pass, Problem, Varlen};
use flashtune::tune::{Outcome, Timed};
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const SM90: Arch = Arch::Sm(9, 0);
/// Every kernel of sm90 may have so many registers at once.
const REGISTERS: (&str, &str) = ("FAKE_REGISTERS", "240");

const BACKWARD: Problem = Problem { pass: Pass::Backward, ..PROBLEM };
const PAGED: Problem = Problem {
    seqlen_q: 1,
    seqlen_k: 4096,
    causal: Causal::None,
    features: Features {
        paged: Some(16),
        varlen: Some(Varlen { total_q: None, total_k: None, padded_q: false }),
        ..Features::NONE
    },
    ..PROBLEM
};

fn origin() -> Origin {
    Origin {
        library_version: env!("CARGO_PKG_VERSION").to_owned(),
        templates_digest: templates_digest().unwrap(),
        nvrtc_version: (12, 8),
    }
}

/// Writes a pack of these problems, each with a config.
fn write(path: &Path, origin: Origin, planned: &[(Problem, Config)]) {
    let (mut kernels, mut plans) = (Vec::new(), Vec::new());
    for (problem, config) in planned {
        let problem = *key::canonical(problem);
        let first = kernels.len() as u32;
        for (spec, text) in render_pass(&problem, config, SM90).unwrap() {
            kernels.push(PackedKernel {
                name: spec.template.to_owned(),
                arch: SM90,
                target: format!("sm_90{}", spec.family(config).target_suffix()),
                text: TextDigest::new(&text).as_str().to_owned(),
                cubin_bytes: 0,
                packed_bytes: 0,
                log: String::new(),
                resources: Default::default(),
            });
        }
        let kernels = (first..kernels.len() as u32).collect();
        plans.push(PackedPlan { arch: SM90, gpus: vec![0], problem, config: config.clone(), kernels });
    }
    let cubins = vec![b"\x7fELF and so on".to_vec(); kernels.len()];
    let gpus = vec![PackedGpu { arch: SM90, name: "NVIDIA H200".to_owned(), sm_count: 132 }];
    let manifest = Manifest { origin, kernels, gpus, plans, operations: Vec::new(), records: Vec::new() };
    std::fs::write(path, encode(&manifest, &cubins).unwrap()).unwrap();
}

/// The config that a lookup on an H200 chooses.
fn chosen(problem: &Problem) -> (Problem, Config) {
    let known = shipped_alone();
    let device = Device::typical(SM90).unwrap();
    (*problem, choices(&known, problem, &device).swap_remove(0).config)
}

fn place(path: &Path) -> Option<Place> {
    Some(Place { path: path.to_owned(), named_by: "a test", found_beside: None })
}

fn engine(pack: Option<Place>) -> Engine {
    let gpu = Gpu::new(0, None, None).unwrap().with_pack(pack);
    Engine::new(Backend::Cuda(gpu), EngineOptions::default())
}

fn folder_with(planned: &[(Problem, Config)]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pack");
    write(&path, origin(), planned);
    (folder, path)
}

fn call(problem: Problem) -> Call {
    let of_queries = |address: usize| TensorRef::packed(address as *mut c_void, problem.seqlen_q, 8, 128);
    let seqlen_k = problem.features.paged.unwrap_or(problem.seqlen_k);
    let of_keys = |address: usize| TensorRef::packed(address as *mut c_void, seqlen_k, 2, 128);
    let inputs = [of_queries(0x10000), of_keys(0x20000), of_keys(0x30000)];
    let mut call = Call {
        out: of_queries(0x40000),
        lse: 0x50000 as *mut f32,
        dout: of_queries(0x60000),
        dq: of_queries(0x70000),
        dk: of_keys(0x80000),
        dv: of_keys(0x90000),
        workspace: 0xa00000 as *mut c_void,
        ..Call::of_inputs(problem, 0.125, Dropout::NONE, inputs)
    };
    call.features.num_pages = 1000;
    call
}

/// `with_fake_and` with a stand-in for NVRTC too, which `variables` set up.
fn with_fake_nvrtc_and(test: &str, variables: &[(&str, &str)], body: fn(&Fake)) {
    let folder = tempfile::tempdir().unwrap();
    let library = fake_cuda::nvrtc(folder.path());
    let of_nvrtc = [REGISTERS, ("FLASHTUNE_NVRTC", library.to_str().unwrap())];
    with_fake_and(test, &[&of_nvrtc, variables].concat(), body);
}

#[test]
fn a_pack_serves_forward_backward_and_paged_decoding_without_nvrtc() {
    let name = "a_pack_serves_forward_backward_and_paged_decoding_without_nvrtc";
    with_fake_and(name, &[REGISTERS], |fake| {
        let problems = [PROBLEM, BACKWARD, PAGED];
        let (_folder, path) = folder_with(&problems.map(|problem| chosen(&problem)));
        let engine = engine(place(&path));
        for problem in problems {
            let plan = engine.prepare(&problem).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
            let before = fake.state().launches;
            plan.executable.launch(&call(problem), 0x77 as *mut c_void).unwrap();
            let kernels = family::kernels(&plan.problem, &plan.config).unwrap().len() as i64;
            assert!((1..=kernels).contains(&(fake.state().launches - before)), "{}", plan.config);
        }
        // A module that is loaded serves every engine of the context.
        drop(engine);
        // The same library without the pack, and with a pack that was made for another problem.
        let (_other, backward) = folder_with(&[chosen(&BACKWARD)]);
        for pack in [None, place(&backward)] {
            let error = self::engine(pack).prepare(&PROBLEM).err().unwrap();
            assert_eq!(error.status, Status::NoCompiler);
            assert!(error.message.contains("is not in the cubin cache"), "{error}");
            assert!(error.message.contains("FLASHTUNE_NVRTC"), "{error}");
        }
    });
}

#[test]
fn what_a_pack_serves_opens_no_nvrtc() {
    with_fake_nvrtc_and("what_a_pack_serves_opens_no_nvrtc", &[], |_| {
        let is_open = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("libnvrtc");
        let (_folder, path) = folder_with(&[chosen(&PROBLEM)]);
        let engine = engine(place(&path));
        let plan = engine.prepare(&PROBLEM).unwrap();
        plan.executable.launch(&call(PROBLEM), 0x77 as *mut c_void).unwrap();
        assert!(!is_open());
        // The stand-in makes no cubins for this GPU.
        assert_eq!(engine.prepare(&BACKWARD).err().unwrap().status, Status::NoCompiler);
        assert!(is_open());
    });
}

#[test]
fn a_shape_whose_best_config_is_not_packed_takes_the_packs_best_of_its_class() {
    let name = "a_shape_whose_best_config_is_not_packed_takes_the_packs_best_of_its_class";
    with_fake_and(name, &[REGISTERS], |_| {
        let device = Device::typical(SM90).unwrap();
        let short = Problem { batch_size: 1, seqlen_q: 512, seqlen_k: 512, ..PROBLEM };
        let best = chosen(&short).1;
        // Two configs that no lookup names first: the model prefers one of them.
        let others: Vec<Config> = family::alternatives(&key::canonical(&short), &device)
            .into_iter()
            .filter(|config| *config != best && config.get("block_m") != best.get("block_m"))
            .collect();
        let [one, .., other] = &others[..] else { panic!("{others:?}") };
        let (_folder, path) = folder_with(&[(short, one.clone()), (short, other.clone())]);
        let engine = engine(place(&path));
        let plan = engine.prepare(&short).unwrap();
        assert!(plan.config == *one || plan.config == *other, "{}", plan.config);
        assert_eq!(plan.source, Source::Pack);
        assert!(plan.reason.contains("is not in the pack") && plan.reason.contains("us predicted"), "{}", plan.reason);
        let known = shipped_alone();
        let on = engine.backend().device();
        let us = |config| flashtune::plan::predicted_us(&known, &short, config, on).unwrap();
        let (taken, left) = if plan.config == *one { (one, other) } else { (other, one) };
        assert!(us(taken) <= us(left), "{} us, {} us", us(taken), us(left));
        // Another class has nothing in the pack.
        let full = Problem { causal: Causal::None, ..short };
        assert_eq!(engine.prepare(&full).err().unwrap().status, Status::NoCompiler);
        // A batch-invariant problem has one config, whatever there is.
        let invariant = Problem { batch_invariant: true, ..short };
        assert_eq!(engine.prepare(&invariant).err().unwrap().status, Status::NoCompiler);
    });
}

/// The records that ship.
fn shipped_alone() -> Known {
    Known { shipped: shipped::records(SM90).into_iter().map(Arc::new).collect(), ..Known::default() }
}

/// A problem, the lookup's choice for it, and a config with another tile whose predicted time is in
/// this range, as a multiple of the choice's.
fn with_another_tile(low: f64, high: f64) -> (Problem, Config, Config) {
    let (known, device) = (shipped_alone(), engine(None).backend().device().clone());
    let found = (5..64).map(|step| 64 * step).find_map(|seqlen| {
        let problem = Problem { batch_size: 1, seqlen_q: seqlen, seqlen_k: seqlen, ..PROBLEM };
        let us = |config: &Config| flashtune::plan::predicted_us(&known, &problem, config, &device).unwrap();
        let best = choices(&known, &problem, &device).swap_remove(0).config;
        let is_other = |config: &Config| config.get("block_m") != best.get("block_m");
        let ratio = |config: &Config| us(config) / us(&best);
        let mut others = family::alternatives(&key::canonical(&problem), &device).into_iter().filter(is_other);
        others.find(|config| low < ratio(config) && ratio(config) <= high).map(|other| (problem, best, other))
    });
    found.unwrap_or_else(|| panic!("no tile takes {low} to {high} of the choice's time"))
}

/// The lookup's choice would have to be compiled. Without NVRTC one that the model finds as fast
/// serves in its place, and so does a slower one where it must. A reason tells them apart. None
/// that is as fast replaces a config that was measured on this machine.
#[test]
fn a_packed_config_that_is_predicted_as_fast_serves_in_place_of_the_choice() {
    let name = "a_packed_config_that_is_predicted_as_fast_serves_in_place_of_the_choice";
    with_fake_and(name, &[REGISTERS], |_| {
        let (problem, best, near) = with_another_tile(1.0, 1.02);
        let (_folder, path) = folder_with(&[(problem, near.clone())]);
        let plan = engine(place(&path)).prepare(&problem).unwrap();
        assert_eq!((&plan.config, plan.source), (&near, Source::Pack));
        assert!(plan.reason.starts_with("the pack has it: ") && plan.reason.len() < 256, "{}", plan.reason);
        // The pack has both: the choice is the lookup's.
        let (_folder, both) = folder_with(&[(problem, near.clone()), (problem, best.clone())]);
        assert_eq!(engine(place(&both)).prepare(&problem).unwrap().config, best);

        let own = engine(place(&path));
        measured_here(&own, &problem, best, &path);
        assert!(own.prepare(&problem).unwrap().reason.starts_with("nothing can be compiled here"));

        let (problem, _, slow) = with_another_tile(1.05, 9.0);
        let (_folder, path) = folder_with(&[(problem, slow.clone())]);
        let plan = engine(place(&path)).prepare(&problem).unwrap();
        assert_eq!(plan.config, slow);
        assert!(plan.reason.starts_with("nothing can be compiled here"), "{}", plan.reason);
    });
}

/// With NVRTC a slower config of the pack serves nothing, and neither does any in place of a
/// measured one.
#[test]
fn with_nvrtc_a_packed_config_serves_only_where_it_is_predicted_as_fast() {
    let compiles = [("FAKE_NVRTC_VERSION", "12080"), ("FAKE_NVRTC_ARCH", "90"), ("FAKE_NVRTC_COMPILES", "1")];
    with_fake_nvrtc_and("with_nvrtc_a_packed_config_serves_only_where_it_is_predicted_as_fast", &compiles, |_| {
        let (problem, best, near) = with_another_tile(1.0, 1.02);
        let (_folder, path) = folder_with(&[(problem, near.clone())]);
        let plan = engine(place(&path)).prepare(&problem).unwrap();
        assert_eq!((&plan.config, plan.source), (&near, Source::Pack));
        assert!(plan.reason.starts_with("the pack has it: "), "{}", plan.reason);
        assert_eq!(engine(None).prepare(&problem).unwrap().config, best);

        let own = engine(place(&path));
        measured_here(&own, &problem, best.clone(), &path);
        let plan = own.prepare(&problem).unwrap();
        assert_eq!((&plan.config, plan.source), (&best, Source::Machine));

        let (problem, best, slow) = with_another_tile(1.05, 9.0);
        let (_folder, path) = folder_with(&[(problem, slow)]);
        let plan = engine(place(&path)).prepare(&problem).unwrap();
        assert_eq!(plan.config, best);
        assert_ne!(plan.source, Source::Pack);
    });
}

/// Gives an engine a record of this machine. `beside` is a file in a folder of the test.
fn measured_here(engine: &Engine, problem: &Problem, config: Config, beside: &Path) {
    let winner = Timed { config, median_us: 10.0, utilisation: None };
    let outcome = Outcome { winner, spread: 0.01, check_error: 0.001, runner_up: None, default_us: None };
    let record = Record::new(problem, engine.backend().device(), outcome).to_line().unwrap();
    let lines = beside.with_file_name("records.jsonl");
    std::fs::write(&lines, record).unwrap();
    assert_eq!(engine.import_records(&lines, false).unwrap().taken.len(), 1);
}

/// The lines that the library logged.
static LOGGED: Mutex<Vec<(log::Level, String)>> = Mutex::new(Vec::new());

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LOGGED.lock().unwrap().push((record.level(), record.args().to_string()));
    }

    fn flush(&self) {}
}

/// A wheel has its pack on every GPU, so a missing architecture is no warning there. The version of
/// a driver is one, and so is any pack that somebody named.
#[test]
fn a_refused_pack_is_a_warning_unless_it_lies_beside_the_library_for_other_architectures() {
    let name = "a_refused_pack_is_a_warning_unless_it_lies_beside_the_library_for_other_architectures";
    with_fake(name, |_| {
        log::set_logger(&Logger).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let (_folder, path) = folder_with(&[chosen(&PROBLEM)]);
        let named = place(&path).unwrap();
        let found = Place { found_beside: Some(path.clone()), ..named.clone() };
        let ampere = Device::typical(Arch::Sm(8, 0)).unwrap();
        let old_driver = Device { driver_version: 11080, ..Device::typical(SM90).unwrap() };
        let logged = |place: &Place, device: &Device| {
            assert!(PackStatus::load(Some(place.clone()), device).pack().is_none());
            let (level, line) = LOGGED.lock().unwrap().pop().unwrap();
            assert!(line.contains("a.pack (a test) is not used: "), "{line}");
            level
        };
        assert_eq!(logged(&found, &ampere), log::Level::Info);
        assert_eq!(logged(&named, &ampere), log::Level::Warn);
        assert_eq!([&found, &named].map(|place| logged(place, &old_driver)), [log::Level::Warn; 2]);
        std::fs::write(&path, "damaged").unwrap();
        assert_eq!([&found, &named].map(|place| logged(place, &ampere)), [log::Level::Warn; 2]);
        assert!(LOGGED.lock().unwrap().is_empty());
    });
}

#[test]
fn a_config_that_would_need_other_kernels_for_the_shape_is_passed_over() {
    let name = "a_config_that_would_need_other_kernels_for_the_shape_is_passed_over";
    with_fake_and(name, &[REGISTERS], |_| {
        // A large batch is not split, so the pack has no kernel that merges splits.
        let large = Problem { batch_size: 64, num_heads_q: 32, num_heads_kv: 32, ..PAGED };
        let small = Problem { batch_size: 4, ..large };
        let device = Device::typical(SM90).unwrap();
        let packed = chosen(&large).1.with("num_splits", 1);
        let carried_over = family::carried_over(&packed, &key::canonical(&large), &key::canonical(&small), &device);
        let count = |config| family::kernels(&key::canonical(&small), config).unwrap().len();
        assert!(count(&carried_over) > count(&packed), "{carried_over} and {packed}");
        let (_folder, path) = folder_with(&[(large, packed.clone())]);
        let plan = engine(place(&path)).prepare(&small).unwrap();
        assert_eq!((&plan.config, plan.source), (&packed, Source::Pack));
        // A range has shapes of both kinds.
        let engine = engine(place(&path));
        let range = Range { largest: large, least: Sizes { seqlen_k: 2048, ..Sizes::ONE } };
        engine.prepare_range(&[range]).unwrap();
        assert_eq!(engine.prepared(&small).unwrap().config, packed);
    });
}

#[test]
fn a_pack_serves_where_the_nvrtc_is_too_old_for_the_gpu() {
    with_fake_nvrtc_and("a_pack_serves_where_the_nvrtc_is_too_old_for_the_gpu", &[], |_| {
        let (_folder, path) = folder_with(&[chosen(&PROBLEM)]);
        let engine = engine(place(&path));
        assert_eq!(nvrtc_version(), (12, 0));
        assert_eq!(engine.prepare(&PROBLEM).unwrap().config, chosen(&PROBLEM).1);
        let error = engine.prepare(&BACKWARD).err().unwrap();
        assert_eq!(error.status, Status::NoCompiler);
        assert!(error.message.contains("NVRTC 12.0") && error.message.contains("does not have it"), "{error}");
    });
}

#[test]
fn a_pack_that_does_not_fit_is_refused_and_the_context_goes_on() {
    let name = "a_pack_that_does_not_fit_is_refused_and_the_context_goes_on";
    with_fake_and(name, &[REGISTERS, ("FAKE_DRIVER_VERSION", "12080")], |_| {
        let planned = [chosen(&PROBLEM)];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.pack");
        let refusal = || {
            let error = engine(place(&path)).prepare(&PROBLEM).err().unwrap();
            assert_eq!(error.status, Status::NoCompiler);
            error.message
        };
        let contains = |part: &str| assert!(refusal().contains(part), "{}", refusal());
        contains("a.pack is not used: No such file");
        write(&path, Origin { library_version: "0.0.9".to_owned(), ..origin() }, &planned);
        contains("a.pack is not used: it was made by flashtune 0.0.9; this is 0.");
        write(&path, Origin { templates_digest: "another".to_owned(), ..origin() }, &planned);
        contains("a.pack is not used: it was made from the templates another");
        write(&path, Origin { nvrtc_version: (13, 0), ..origin() }, &planned);
        contains("a.pack is not used: its kernels were compiled by NVRTC 13.0; the driver is of CUDA 12.8");
        write(&path, origin(), &planned);
        assert!(engine(place(&path)).prepare(&PROBLEM).is_ok());
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        contains("a.pack is not used: it is damaged");
        std::fs::write(&path, &bytes[..middle]).unwrap();
        contains("a.pack is not used: it is truncated");
    });
}

/// A context that these options make through the C face.
fn created(pack: Option<&Path>, backend: i32) -> *mut flashtune_context {
    let pack = pack.map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
    // SAFETY: the header asks the caller to start from zeros.
    let mut options: flashtune_context_options = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<flashtune_context_options>() as u64;
    options.backend = backend;
    options.cache_dir = c"".as_ptr();
    options.pack = pack.as_ref().map_or(std::ptr::null(), |pack| pack.as_ptr());
    let mut context = std::ptr::null_mut();
    // SAFETY: the struct has its declared size, and its strings live until the call returns.
    assert_eq!(unsafe { flashtune_context_create(&options, &mut context) }, 0);
    context
}

/// The status and the result of `flashtune_context_device`.
fn device_of(context: *mut flashtune_context) -> (i32, flashtune_device_info) {
    // SAFETY: the header asks the caller to start from zeros.
    let mut device: flashtune_device_info = unsafe { std::mem::zeroed() };
    device.struct_size = size_of_val(&device) as u64;
    // SAFETY: a live context and a struct of its declared size.
    (unsafe { flashtune_context_device(context, &mut device) }, device)
}

/// The C face's description of such a context.
fn described(pack: Option<&Path>, backend: i32) -> (flashtune_pack_info, i32) {
    let context = created(pack, backend);
    // SAFETY: the header asks the caller to start from zeros.
    let mut info: flashtune_pack_info = unsafe { std::mem::zeroed() };
    info.struct_size = size_of::<flashtune_pack_info>() as u64;
    let (status, device) = device_of(context);
    assert_eq!(status, 0);
    // SAFETY: a live context and a struct of its declared size; it is not used afterwards.
    unsafe {
        assert_eq!(flashtune_context_pack(context, &mut info), 0);
        assert_eq!(flashtune_context_destroy(context), 0);
    }
    (info, device.backend)
}

fn text(chars: &[c_char]) -> String {
    // SAFETY: the library ends every text with NUL.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_str().unwrap().to_owned()
}

#[test]
fn a_context_says_which_pack_it_uses_or_why_it_refused_one() {
    with_fake("a_context_says_which_pack_it_uses_or_why_it_refused_one", |_| {
        let (_folder, path) = folder_with(&[chosen(&PROBLEM), chosen(&BACKWARD)]);
        let (info, _) = described(Some(&path), FLASHTUNE_BACKEND_CUDA);
        assert_eq!((info.state, info.num_kernels, info.num_plans, info.num_records), (FLASHTUNE_PACK_LOADED, 4, 2, 0));
        assert_eq!((text(&info.path), text(&info.reason)), (path.display().to_string(), String::new()));
        let nowhere = Path::new("/nowhere/a.pack");
        let (info, _) = described(Some(nowhere), FLASHTUNE_BACKEND_CUDA);
        assert_eq!((info.state, text(&info.path)), (FLASHTUNE_PACK_REFUSED, nowhere.display().to_string()));
        assert!(text(&info.reason).contains("No such file"), "{}", text(&info.reason));
        let (info, _) = described(None, FLASHTUNE_BACKEND_CUDA);
        assert_eq!((info.state, text(&info.path)), (FLASHTUNE_PACK_NONE, String::new()));
        // A pack is as good as a compiler for the choice of a backend.
        let backends =
            [Some(path.as_path()), Some(nowhere), None].map(|pack| described(pack, FLASHTUNE_BACKEND_AUTO).1);
        assert_eq!(backends, [1, 2, 2], "1 is the GPU");
    });
}

/// The first description of a GPU looks for NVRTC, which takes memory.
#[test]
fn a_device_is_not_described_where_memory_is_out() {
    with_fake("a_device_is_not_described_where_memory_is_out", |_| {
        let (_folder, path) = folder_with(&[chosen(&PROBLEM)]);
        let context = created(Some(&path), FLASHTUNE_BACKEND_CUDA);
        let mut usual = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a struct that the call fills.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut usual) }, 0);
        let limit = |bytes| {
            // SAFETY: the limit of this process, which runs one test.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &libc::rlimit { rlim_cur: bytes, ..usual }) }, 0);
        };
        limit(1 << 20);
        let (status, _) = device_of(context);
        limit(usual.rlim_cur);
        assert_eq!(status, FLASHTUNE_STATUS_OUT_OF_MEMORY);
        let (status, device) = device_of(context);
        assert_eq!((status, device.nvrtc_version), (0, 0), "there is none");
        // SAFETY: a live context, which is not used afterwards.
        assert_eq!(unsafe { flashtune_context_destroy(context) }, 0);
    });
}

#[test]
fn the_environment_names_a_pack_before_the_option_but_not_before_none() {
    let name = "the_environment_names_a_pack_before_the_option_but_not_before_none";
    with_fake_and(name, &[("FLASHTUNE_PACK", "/environment/a.pack")], |_| {
        let path = |pack: Option<&str>| text(&described(pack.map(Path::new), FLASHTUNE_BACKEND_CUDA).0.path);
        assert_eq!(path(Some("/option/a.pack")), "/environment/a.pack");
        assert_eq!(path(None), "/environment/a.pack");
        assert_eq!(path(Some("")), "");
    });
}
