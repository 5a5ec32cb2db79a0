//! The C face: the header, the exports of the shared library, and C programs that use both.

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../source_tree/mod.rs"]
mod source_tree;

mod library;

mod exports;
mod header;
mod programs;
mod stand_in;
