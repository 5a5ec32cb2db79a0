//! The kernels without a GPU: NVRTC compiles the rendered templates, and reports errors for text
//! that it must refuse.

mod disassembly;
mod nvrtc;

mod compile;
mod decode;
mod fixed;
mod instructions;
mod matrix;
