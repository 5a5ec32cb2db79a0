//! flashtune: exact attention, forward and backward, on NVIDIA GPUs and on CPUs.
//!
//! The library contains no compiled CUDA code. It renders a CUDA kernel for each problem from
//! templates, compiles the kernel in process with NVRTC, and loads it. A tuning run times variants
//! of the kernel and stores the fastest one as a record. Without a GPU, the same calls run on a CPU
//! backend.
//!
//! [`attention`] is the interface for Rust, and its page is the guide. The same crate builds the C
//! library `libflashtune`, whose header is `include/flashtune.h`. The other modules are its parts.
//! They are public for the command line, the tests and the benchmarks, and change without notice.

// The flow is `attention, xla, python -> capi -> plan -> tune -> backend -> ops -> kernel -> cuda`.
// `cpu` stands beside `kernel`, and `family`, the arithmetic of each kernel family, beside `cuda`.
// `problem`, `config`, `device`, `call`, `dropout`, `eight`, `error`, `environment`, `files`,
// `fork`, `four`, `pool` and `word_hash` are leaves. A test fails on an import that points upward.

pub mod attention;

#[doc(hidden)]
pub mod backend;
#[doc(hidden)]
pub mod call;
#[doc(hidden)]
pub mod capi;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod cpu;
#[doc(hidden)]
pub mod cuda;
#[doc(hidden)]
pub mod device;
#[doc(hidden)]
pub mod dropout;
#[doc(hidden)]
pub mod eight;
#[doc(hidden)]
pub mod environment;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod family;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod fork;
#[doc(hidden)]
pub mod four;
#[doc(hidden)]
pub mod kernel;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod plan;
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod problem;
#[doc(hidden)]
pub mod python;
#[doc(hidden)]
pub mod tune;
#[doc(hidden)]
pub mod word_hash;
#[doc(hidden)]
pub mod xla;
