//! The kernels without a GPU: NVRTC compiles the rendered templates, and reports errors for text
//! that it must refuse.

mod disassembly;
mod nvrtc;

mod compile;
mod decode;
mod fixed;
mod instructions;
mod matrix;

use flashtune::device::Arch;

/// The architectures that kernels are compiled for.
const ARCHS: [Arch; 6] =
    [Arch::Sm(8, 0), Arch::Sm(8, 6), Arch::Sm(8, 9), Arch::Sm(9, 0), Arch::Sm(10, 0), Arch::Sm(12, 0)];
