//! A server's trace on the stand-in: after one prepared range, a sealed engine launches every call
//! and loads nothing more. Its cubins are placeholders in a cache, and there is no NVRTC.

use crate::fake_driver::{Fake, fill_cache_with, with_fake_and};
use crate::serving_trace::{LLAMA, Random, call, llama};
use flashtune::backend::Backend;
use flashtune::call::{Call, TensorRef};
use flashtune::config::Family;
use flashtune::device::{Arch, Device};
use flashtune::dropout::Dropout;
use flashtune::error::Status;
use flashtune::kernel::Gpu;
use flashtune::plan::{Engine, EngineOptions, Known, covering, shipped};
use flashtune::problem::{Features, Pass, Problem};
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

/// With the registers that kernels of the sm90 family ask for.
fn with_registers(test: &str, body: fn(&Fake)) {
    with_fake_and(test, &[("FAKE_REGISTERS", "168")], body);
}

fn engine(folder: &Path) -> Engine {
    let gpu = Gpu::new(0, None, Some(folder.to_path_buf())).unwrap();
    // No folder of records: only the cubins are on disk.
    Engine::new(Backend::Cuda(gpu), EngineOptions::default())
}

/// The device as the stand-in describes it.
fn device() -> Device {
    Gpu::new(0, None, None).unwrap().device().clone()
}

/// Fills a cache with what the range needs, and nothing else.
fn fill(folder: &Path) -> usize {
    let records = shipped::records(Arch::Sm(9, 0)).into_iter().map(Arc::new).collect();
    let known = Known { shipped: records, ..Known::default() };
    let covering = covering(&known, &llama(), &device()).unwrap();
    for (problem, config) in &covering.configs {
        fill_cache_with(folder, problem, config, if config.family == Family::Sm90 { "sm_90a" } else { "sm_90" });
    }
    covering.kernels.len()
}

fn launched(problem: Problem) -> Call {
    let page_size = problem.features.paged.unwrap();
    let of_queries = |address: usize| TensorRef::packed(address as *mut c_void, problem.seqlen_q, 32, 128);
    let of_pages = |address: usize| TensorRef::packed(address as *mut c_void, page_size, 8, 128);
    let mut call = Call {
        out: of_queries(0x40000),
        workspace: 0xa00000 as *mut c_void,
        ..Call::of_inputs(problem, 0.0, Dropout::NONE, [of_queries(0x10000), of_pages(0x20000), of_pages(0x30000)])
    };
    call.features.num_pages = 4096;
    call
}

#[test]
fn trace_of_a_server_compiles_nothing_after_one_range() {
    with_registers("trace_of_a_server_compiles_nothing_after_one_range", |fake| {
        let folder = tempfile::tempdir().unwrap();
        let kernels = fill(folder.path());
        let engine = engine(folder.path());
        let prepared = engine.prepare_range(&llama()).unwrap();
        assert!(kernels <= 12, "{kernels}");
        assert_eq!((prepared.classes, prepared.kernels, prepared.cached, prepared.compiled), (2, kernels, kernels, 0));
        assert_eq!(fake.state().modules, kernels as i64, "a text is loaded once, whatever configs share it");
        let again = engine.prepare_range(&llama()).unwrap();
        assert_eq!((again.kernels, again.cached, again.compiled), (kernels, 0, 0));
        engine.seal();
        // Nothing can come from the disk any more.
        folder.close().unwrap();
        let mut random = Random(5);
        for _ in 0..2000 {
            let problem = call(&mut random);
            let plan = engine.prepared(&problem).unwrap_or_else(|| panic!("{problem:?}"));
            plan.executable.launch(&launched(problem), std::ptr::null_mut()).unwrap();
        }
        assert_eq!(fake.state().modules, kernels as i64);
        assert!(fake.state().launches >= 2000);
    });
}

#[test]
fn range_without_a_compiler_fails_with_that_status_and_prepares_nothing() {
    with_registers("range_without_a_compiler_fails_with_that_status_and_prepares_nothing", |fake| {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine(folder.path());
        assert_eq!(engine.prepare_range(&llama()).unwrap_err().status, Status::NoCompiler);
        assert!(engine.prepared(&LLAMA).is_none());
        assert_eq!(fake.state().modules, 0);
    });
}

/// What a first call does not launch it does not build.
#[test]
fn first_call_builds_the_kernels_of_its_pass_alone() {
    with_registers("first_call_builds_the_kernels_of_its_pass_alone", |fake| {
        let folder = tempfile::tempdir().unwrap();
        let backward =
            Problem { pass: Pass::Backward, features: Features::NONE, batch_size: 2, seqlen_k: 8192, ..LLAMA };
        let config = flashtune::family::heuristic(&backward, &device());
        fill_cache_with(folder.path(), &backward, &config, "sm_90a");
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build_side_by_side(&backward, &config).unwrap();
        let modules = fake.state().modules;
        assert_eq!(modules, flashtune::family::kernels(&backward, &config).unwrap().len() as i64);
        let of_rows = |address: usize, heads| TensorRef::packed(address as *mut c_void, 8192, heads, 128);
        let inputs = [of_rows(0x10000, 32), of_rows(0x20000, 8), of_rows(0x30000, 8)];
        let call = Call {
            out: of_rows(0x40000, 32),
            dout: of_rows(0x50000, 32),
            dq: of_rows(0x60000, 32),
            dk: of_rows(0x70000, 8),
            dv: of_rows(0x80000, 8),
            lse: 0x90000 as *mut f32,
            workspace: 0xa00000 as *mut c_void,
            ..Call::of_inputs(backward, 0.0, Dropout::NONE, inputs)
        };
        executable.launch(&call, std::ptr::null_mut()).unwrap();
        assert_eq!(fake.state().launches, modules, "each of them is launched");
    });
}
