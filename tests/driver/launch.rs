//! Contexts, launches and lifetimes: the calls to the CUDA driver, checked and recorded by a
//! stand-in.
//!
//! Each test runs in a process of its own (`fake_driver`). Cubins come from a cache that the test
//! fills, so the tests need neither a GPU nor NVRTC.

use crate::fake_driver::{PARAMS_BYTES, PROBLEM, allocations, fill_cache_with, with_fake, with_fake_and};
use flashtune::call::{Call, FeatureArgs, TensorRef};
use flashtune::config::{Config, Family};
use flashtune::device::Arch;
use flashtune::dropout::Dropout;
use flashtune::error::Status;
use flashtune::family;
use flashtune::kernel::{Gpu, KernelParams, driver_search, nvrtc_search, nvrtc_version};
use flashtune::problem::{Features, Pass, Problem};
use std::ffi::c_void;
use std::path::Path;
use std::time::Duration;

fn problem(pass: Pass) -> Problem {
    Problem { pass, ..PROBLEM }
}

/// Some value for each knob.
fn config(pass: Pass) -> Config {
    let ones = family::knobs(Family::Sm80, pass).iter().map(|knob| (knob.name, 1));
    let tile = [("num_warps", 4), ("block_m", 64), ("block_n", 64)];
    let forward_alone = [("block_dim_v", 0), ("lazy_log2", 0)].into_iter().filter(|_| pass == Pass::Forward);
    Config::new(Family::Sm80, ones.chain(tile).chain(forward_alone))
}

fn fill_cache(folder: &Path, pass: Pass) {
    fill_cache_with(folder, &problem(pass), &config(pass), "sm_90");
}

fn call(pass: Pass) -> Call {
    let tensor = |address: usize| TensorRef::packed(address as *mut c_void, 300, 8, 128);
    Call {
        problem: problem(pass),
        softmax_scale: 0.125,
        dropout: Dropout::NONE,
        q: tensor(0x10000),
        k: tensor(0x20000),
        v: tensor(0x30000),
        out: tensor(0x40000),
        lse: 0x50000 as *mut f32,
        dout: tensor(0x60000),
        dq: tensor(0x70000),
        dk: tensor(0x80000),
        dv: tensor(0x90000),
        features: FeatureArgs::NONE,
        most_splits: 0,
        workspace: 0xa0000 as *mut c_void,
    }
}

#[test]
fn the_device_is_described_as_the_driver_says() {
    with_fake("the_device_is_described_as_the_driver_says", |_| {
        let gpu = Gpu::new(0, None, None).unwrap();
        let device = gpu.device();
        assert_eq!((device.name.as_str(), device.arch, device.sm_count), ("Fake GPU", Arch::Sm(9, 0), 132));
        assert_eq!((device.smem_per_block, device.smem_per_sm), (232448, 233472));
        assert_eq!((device.registers_per_sm, device.threads_per_sm), (65536, 2048));
        assert_eq!((device.l2_bytes, device.memory_bytes), (1 << 20, 1 << 30));
        assert_eq!((device.driver_version, nvrtc_version()), (13000, (0, 0)));
        assert_eq!(flashtune::kernel::devices().unwrap(), std::slice::from_ref(device));
        let error = Gpu::new(3, None, None).err().unwrap();
        assert_eq!(error.status, Status::NoDevice);
        assert!(error.message.contains("device_ordinal is 3"), "{error}");
    });
}

#[test]
fn a_launch_passes_grid_stream_and_params() {
    with_fake("a_launch_passes_grid_stream_and_params", |fake| {
        let folder = tempfile::tempdir().unwrap();
        for pass in [Pass::Forward, Pass::Backward] {
            fill_cache(folder.path(), pass);
            let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
            let executable = gpu.build(&problem(pass), &config(pass)).unwrap();
            let first = fake.state().launches as usize;
            executable.launch(&call(pass), 0x77 as *mut c_void).unwrap();
            let specs = family::kernels(&problem(pass), &config(pass)).unwrap();
            assert_eq!(fake.state().launches as usize, first + specs.len());
            let params = KernelParams::new(&call(pass));
            // SAFETY: KernelParams has no padding: its size is the sum of its fields' sizes, which
            // 8 divides.
            let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&params).cast::<u8>(), PARAMS_BYTES) };
            for (spec, launch) in specs.iter().zip(&fake.state().launch[first..]) {
                assert_eq!((launch.context, launch.stream), (0x1000, 0x77));
                assert_eq!(launch.grid, spec.grid(&problem(pass), 132));
                assert_eq!((launch.block, launch.smem_bytes), ([spec.threads, 1, 1], spec.smem_bytes));
                assert!(launch.params == bytes, "params of {}", spec.entry);
            }
            let resources = executable.resources();
            let main = specs.iter().find(|spec| spec.is_main).unwrap();
            assert_eq!((resources.registers, resources.threads), (96, main.threads));
            assert_eq!(executable.kernel_name(), main.entry);
        }
    });
}

#[test]
fn a_launch_allocates_nothing() {
    with_fake("a_launch_allocates_nothing", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Backward);
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build(&problem(Pass::Backward), &config(Pass::Backward)).unwrap();
        let call = call(Pass::Backward);
        // The harness's threads may allocate at the same time, but not during every one of many
        // launches.
        let quietest = (0..100).map(|_| {
            let before = allocations();
            executable.launch(&call, std::ptr::null_mut()).unwrap();
            allocations() - before
        });
        assert_eq!(quietest.min(), Some(0));
        assert!(fake.state().launches >= 100);
    });
}

#[test]
fn a_grid_with_nothing_to_do_is_not_launched() {
    with_fake("a_grid_with_nothing_to_do_is_not_launched", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Forward);
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build(&problem(Pass::Forward), &config(Pass::Forward)).unwrap();
        let mut call = call(Pass::Forward);
        call.problem.batch_size = 0;
        executable.launch(&call, std::ptr::null_mut()).unwrap();
        assert_eq!(fake.state().launches, 0);
    });
}

#[test]
fn gradients_of_sinks_are_computed_only_when_requested() {
    with_fake("gradients_of_sinks_are_computed_only_when_requested", |fake| {
        let folder = tempfile::tempdir().unwrap();
        let features = Features { sinks: true, ..Features::NONE };
        let (problem, config) = (Problem { features, ..problem(Pass::Backward) }, config(Pass::Backward));
        fill_cache_with(folder.path(), &problem, &config, "sm_90");
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build(&problem, &config).unwrap();
        let mut call = Call { problem, ..call(Pass::Backward) };
        executable.launch(&call, std::ptr::null_mut()).unwrap();
        assert_eq!(fake.state().launches, 3);
        call.features.dsinks = 0xb0000 as *mut f32;
        executable.launch(&call, std::ptr::null_mut()).unwrap();
        assert_eq!(fake.state().launches, 3 + 4);
        // One CTA for each query head.
        assert_eq!(fake.state().launch[6].grid, [8, 1, 1]);
    });
}

#[test]
fn the_callers_context_is_current_again_after_every_call() {
    with_fake("the_callers_context_is_current_again_after_every_call", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Forward);
        // No context, another context, and our own; our own is not pushed.
        for context in [0usize, 0x2000, 0x1000] {
            let context = context as *mut c_void;
            fake.push(context);
            let pushes = fake.state().pushes;
            {
                let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
                let executable = gpu.build(&problem(Pass::Forward), &config(Pass::Forward)).unwrap();
                executable.launch(&call(Pass::Forward), std::ptr::null_mut()).unwrap();
                let memory = gpu.allocate(100).unwrap();
                gpu.upload(&memory, &[7; 100]).unwrap();
                gpu.time(true, &mut |_| Ok(())).unwrap();
                gpu.allocate(1 << 40).err().unwrap();
                assert_eq!(fake.current(), context);
            }
            assert_eq!(fake.current(), context);
            assert_eq!(fake.state().pushes == pushes, context as usize == 0x1000);
        }
    });
}

#[test]
fn the_callers_own_context_is_used_and_not_released() {
    with_fake("the_callers_own_context_is_used_and_not_released", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Forward);
        let gpu = Gpu::new(0, Some(0x3000 as *mut c_void), Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build(&problem(Pass::Forward), &config(Pass::Forward)).unwrap();
        executable.launch(&call(Pass::Forward), std::ptr::null_mut()).unwrap();
        assert_eq!(fake.state().launch[0].context, 0x3000);
        drop((gpu, executable));
        assert_eq!((fake.state().retains, fake.state().modules, fake.state().streams), (0, 0, 0));
    });
}

#[test]
fn everything_is_freed_after_its_last_use() {
    with_fake("everything_is_freed_after_its_last_use", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Backward);
        let kernels = family::kernels(&problem(Pass::Backward), &config(Pass::Backward)).unwrap().len() as i64;
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let build = || gpu.build(&problem(Pass::Backward), &config(Pass::Backward)).unwrap();
        let (first, second) = (build(), build());
        assert_eq!(fake.state().modules, kernels, "a text is loaded once");
        drop(first);
        assert_eq!(fake.state().modules, kernels);
        drop(second);
        assert_eq!(fake.state().modules, 0);
        let again = build();
        assert_eq!(fake.state().modules, kernels);
        gpu.time(true, &mut |_| Ok(())).unwrap();
        let memory = gpu.allocate(10).unwrap();
        drop(gpu);
        assert_eq!(fake.state().retains, 1, "memory and executables hold the context");
        drop((again, memory));
        let state = fake.state();
        assert_eq!((state.retains, state.memory, state.modules, state.streams, state.events), (0, 0, 0, 0, 0));
    });
}

#[test]
fn memory_is_copied_within_its_bounds() {
    with_fake("memory_is_copied_within_its_bounds", |_| {
        let gpu = Gpu::new(0, None, None).unwrap();
        let memory = gpu.allocate(5).unwrap();
        gpu.upload(&memory, &[1, 2, 3, 4, 5]).unwrap();
        let mut back = [0; 3];
        gpu.download(&memory, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
        assert_eq!(gpu.upload(&memory, &[0; 6]).unwrap_err().status, Status::InvalidArgument);
        assert_eq!(gpu.download(&memory, &mut [0; 6]).unwrap_err().status, Status::InvalidArgument);
        let nothing = gpu.allocate(0).unwrap();
        assert!(nothing.address().is_null());
        gpu.upload(&nothing, &[]).unwrap();
    });
}

#[test]
fn driver_errors_have_a_status_a_name_and_the_call() {
    with_fake("driver_errors_have_a_status_a_name_and_the_call", |fake| {
        let gpu = Gpu::new(0, None, None).unwrap();
        let error = gpu.allocate(1 << 40).err().unwrap();
        assert_eq!(error.status, Status::OutOfMemory);
        assert!(
            error.message.contains("cuMemAlloc_v2 returned CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
            "{error}"
        );
        fake.fail_synchronize(12345);
        let error = gpu.synchronize().unwrap_err();
        assert_eq!(error.status, Status::Cuda);
        assert!(error.message.contains("cuStreamSynchronize") && error.message.contains("(12345)"), "{error}");
    });
}

#[test]
fn driver_without_a_gpu_is_a_status_and_its_version_is_known() {
    let no_device = [("FAKE_INIT_RESULT", "100")];
    with_fake_and("driver_without_a_gpu_is_a_status_and_its_version_is_known", &no_device, |_| {
        let error = Gpu::new(0, None, None).err().unwrap();
        assert_eq!(error.status, Status::NoDevice);
        assert!(error.message.contains("cuInit") && error.message.contains("(100)"), "{error}");
        assert_eq!(driver_search().version, Some((13, 0)));
        assert_eq!(driver_search().found, None);
    });
}

#[test]
fn nvrtc_newer_than_the_driver_is_skipped_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libnvrtc.so.13"), "").unwrap();
    let variables = [("FAKE_DRIVER_VERSION", "12040"), ("FLASHTUNE_NVRTC", folder.path().to_str().unwrap())];
    with_fake_and("nvrtc_newer_than_the_driver_is_skipped_and_reported", &variables, |_| {
        assert_eq!(nvrtc_search().attempts.len(), 1);
        assert_eq!(nvrtc_search().attempts[0].outcome, "13 is newer than the driver's CUDA 12.4");
        assert_eq!(nvrtc_version(), (0, 0));
    });
}

#[test]
fn uncached_kernel_without_nvrtc_is_a_status() {
    with_fake("uncached_kernel_without_nvrtc_is_a_status", |_| {
        let gpu = Gpu::new(0, None, None).unwrap();
        let error = gpu.build(&problem(Pass::Forward), &config(Pass::Forward)).err().unwrap();
        assert_eq!(error.status, Status::NoCompiler);
        assert!(error.message.contains("/nowhere") && error.message.contains("sm80_forward"), "{error}");
    });
}

#[test]
fn setting_up_does_not_disturb_another_streams_capture() {
    with_fake("setting_up_does_not_disturb_another_streams_capture", |fake| {
        let folder = tempfile::tempdir().unwrap();
        fill_cache(folder.path(), Pass::Forward);
        fake.begin_capture();
        let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
        let executable = gpu.build(&problem(Pass::Forward), &config(Pass::Forward)).unwrap();
        drop(gpu.allocate(10).unwrap());
        assert!(gpu.is_capturing(std::ptr::null_mut()).unwrap(), "the legacy stream would join the capture");
        assert!(gpu.is_capturing(0xca7 as *mut c_void).unwrap());
        assert!(!gpu.is_capturing(gpu.stream()).unwrap());
        drop((gpu, executable));
        let state = fake.state();
        assert_eq!((state.memory, state.modules, state.streams), (0, 0, 0));
    });
}

#[test]
fn time_is_measured_on_the_device_and_flushes_only_when_cold() {
    with_fake("time_is_measured_on_the_device_and_flushes_only_when_cold", |fake| {
        let gpu = Gpu::new(0, None, None).unwrap();
        let mut runs = 0;
        let mut work = |_| {
            runs += 1;
            Ok(())
        };
        let elapsed = gpu.time(false, &mut work).unwrap();
        assert_eq!((elapsed.time, elapsed.sm_clock_hz), (Duration::from_micros(1500), None));
        assert_eq!(fake.state().memsets, 0);
        gpu.time(true, &mut work).unwrap();
        gpu.time(true, &mut work).unwrap();
        assert_eq!((runs, fake.state().memsets, fake.state().memory), (3, 2, 1));
        let error = gpu.time(true, &mut |_| Err(flashtune::error::Error::invalid("no"))).unwrap_err();
        assert_eq!(error.message, "no");
    });
}
