//! flashtune: exact attention, forward and backward, behind a small C header.
//!
//! The flow is `xla -> capi -> plan -> tune -> backend -> ops -> kernel -> cuda`. `cpu` stands
//! beside `kernel`, and `family`, the arithmetic of each kernel family, beside `cuda`. `problem`,
//! `config`, `device`, `call`, `dropout`, `error`, `environment`, `files`, `fork` and `pool` are
//! leaves. A test fails on an import that points upward.

pub mod backend;
pub mod call;
pub mod capi;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod dropout;
pub mod environment;
pub mod error;
pub mod family;
pub mod files;
pub mod fork;
pub mod kernel;
pub mod ops;
pub mod plan;
pub mod pool;
pub mod problem;
pub mod tune;
pub mod xla;
