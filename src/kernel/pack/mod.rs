//! Packs: compiled kernels and records in one file, made ahead of time on a machine without a GPU.
//!
//! `place` finds the file that a context uses. `format` turns a pack into bytes and back, and
//! refuses bytes that are damaged. `contents` says what a pack holds. `opened` reads a file and
//! answers lookups of cubins, and `builder` compiles the kernels of a new pack. A pack is a
//! read-only layer before the cubin cache (`kernel::cubins`). Which problems and configs it holds
//! is decided above (`plan::packing`).

mod builder;
mod contents;
mod format;
mod opened;
mod place;
#[cfg(test)]
mod tests;

pub use builder::{Builder, KernelText};
pub use contents::{Manifest, Origin, PackedGpu, PackedKernel, PackedOperation, PackedPlan};
pub use format::{MAX_PACK_BYTES, decode, encode};
pub use opened::{Pack, PackStatus, Refusal};
pub use place::{Place, Setting, place};
