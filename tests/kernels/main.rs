//! What becomes of the templates, without a GPU: what NVRTC makes of them, and what it says of those that it should refuse.

mod disassembly;
mod nvrtc;

mod compile;
mod decode;
mod instructions;
mod kv_append;
mod matrix;
mod merge;
