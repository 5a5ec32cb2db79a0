//! A stand-in for the CUDA driver, which checks what the real driver checks and records every
//! launch.
//!
//! `fake_cuda` compiles it from libcuda.c. It is found as libcuda.so.1 through LD_LIBRARY_PATH, so
//! each test runs in a process of its own.

use crate::fake_cuda;
use flashtune::config::Config;
use flashtune::device::Arch;
use flashtune::kernel::compile::{Compiled, options};
use flashtune::kernel::cubin_cache::{CubinCache, Key, TextDigest};
use flashtune::kernel::{KernelParams, render_pass};
use flashtune::problem::{Causal, Dtype, Pass, Problem};
use libloading::os::unix::Library;
use std::alloc::{GlobalAlloc, System};
use std::ffi::c_void;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts this process's allocations, for tests that a launch makes none.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: std::alloc::Layout) {
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

pub fn allocations() -> usize {
    ALLOCATIONS.load(Ordering::Relaxed)
}

pub const PARAMS_BYTES: usize = size_of::<KernelParams>();

#[repr(C)]
#[derive(Clone, Copy)]
pub struct FakeLaunch {
    pub function: u64,
    pub stream: u64,
    pub context: u64,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub smem_bytes: u32,
    /// 1 if the launch may start while the previous one ends.
    pub overlaps: u32,
    pub params: [u8; PARAMS_BYTES],
    /// The maps of kernels of the sm90 family, and of decode kernels with FAKE_KEY_MAPS=1; zeros
    /// for others. A map's words are the arguments that it was encoded from.
    pub maps: [[u64; 16]; 4],
    pub counter: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct FakeState {
    pub retains: i64,
    pub memory: i64,
    pub modules: i64,
    pub streams: i64,
    pub events: i64,
    pub memsets: i64,
    pub pushes: i64,
    pub capturing: i64,
    pub sync_result: i64,
    pub is_full: i64,
    pub launches: i64,
    pub launch: [FakeLaunch; 16],
}

/// The stand-in, loaded as this process's libcuda.
pub struct Fake(Library);

impl Fake {
    fn place(&self) -> *mut FakeState {
        // SAFETY: the symbol is a variable of this layout.
        unsafe { self.0.get::<*mut FakeState>("fake_state") }.unwrap().into_raw().cast()
    }

    /// The records up to now.
    pub fn state(&self) -> FakeState {
        // A volatile read would be a load for each of thousands of fields.
        // SAFETY: plain numbers, written by calls that have returned.
        unsafe { self.place().read() }
    }

    /// From now on another stream of the process is being captured, in the default mode.
    pub fn begin_capture(&self) {
        // SAFETY: as in `state`; the test writes from one thread.
        unsafe { (&raw mut (*self.place()).capturing).write_volatile(1) };
    }

    pub fn fail_synchronize(&self, code: i64) {
        // SAFETY: as in `begin_capture`.
        unsafe { (&raw mut (*self.place()).sync_result).write_volatile(code) };
    }

    pub fn set_full(&self, is_full: bool) {
        // SAFETY: as in `begin_capture`.
        unsafe { (&raw mut (*self.place()).is_full).write_volatile(i64::from(is_full)) };
    }

    pub fn current(&self) -> *mut c_void {
        let mut current = std::ptr::null_mut();
        // SAFETY: this is the function's signature, and it writes one pointer.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut *mut c_void) -> i32>("cuCtxGetCurrent").unwrap()(&mut current)
        };
        current
    }

    pub fn push(&self, context: *mut c_void) {
        // SAFETY: this is the function's signature.
        unsafe { self.0.get::<unsafe extern "C" fn(*mut c_void) -> i32>("cuCtxPushCurrent_v2").unwrap()(context) };
    }
}

/// The problem that the tests launch: GQA, a causal mask, lengths that no tile divides.
pub const PROBLEM: Problem = Problem {
    num_heads_kv: 2,
    seqlen_k: 400,
    causal: Causal::BottomRight,
    ..Problem::dense(Pass::Forward, Dtype::Bf16, 2, 8, 300, 128)
};

/// Runs `body` in a process whose libcuda is the stand-in. The process runs the same test with a
/// variable set.
pub fn with_fake(test: &str, body: fn(&Fake)) {
    with_fake_and(test, &[], body);
}

/// `with_fake` with more environment variables.
pub fn with_fake_and(test: &str, variables: &[(&str, &str)], body: fn(&Fake)) {
    if std::env::var_os("FLASHTUNE_TEST_FAKE_DRIVER").is_some() {
        // SAFETY: the stand-in has no initialisers.
        return body(&Fake(unsafe { Library::new("libcuda.so.1") }.unwrap()));
    }
    let folder = tempfile::tempdir().unwrap();
    fake_cuda::driver(folder.path());
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("::{test}"), "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("FLASHTUNE_TEST_FAKE_DRIVER", "1")
        .env("FLASHTUNE_NVRTC", "/nowhere")
        .env_remove("FLASHTUNE_PACK")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// Fills a cache with a placeholder cubin for each kernel of the pass, as if NVRTC 12.8 had
/// compiled them.
pub fn fill_cache_with(folder: &Path, problem: &Problem, config: &Config, target: &str) {
    let cache = CubinCache::new(Some(folder));
    let compiled = Compiled { cubin: b"\x7fELF and so on".to_vec(), log: String::new(), resources: Default::default() };
    for (spec, text) in render_pass(problem, config, Arch::Sm(9, 0)).unwrap() {
        // Another family's kernel is one of the decode family, whose targets have no suffix.
        let target = if spec.lent.is_some() { "sm_90" } else { target };
        cache.put(&Key::new(&TextDigest::new(&text), &options(target, (12, 8)), (12, 8)), &text, &compiled);
    }
}
