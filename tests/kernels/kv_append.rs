//! The kernel that appends to a K/V cache, compiled by NVRTC without a GPU. It must compile for
//! every class without warnings and without a stack. Without NVRTC the test says so and passes.

use crate::nvrtc::nvrtc;
use flashtune::device::Arch;
use flashtune::kernel::compile::{compile, target};
use flashtune::kernel::fixed::FAMILY;
use flashtune::kernel::render::Renderer;
use flashtune::kernel::sources::embedded;
use flashtune::ops::kv_append::KvAppendClass;
use rayon::prelude::*;

const ARCHS: [Arch; 6] =
    [Arch::Sm(8, 0), Arch::Sm(8, 6), Arch::Sm(8, 9), Arch::Sm(9, 0), Arch::Sm(10, 0), Arch::Sm(12, 0)];

#[test]
fn every_class_compiles_without_a_stack() {
    let Some(nvrtc) = nvrtc() else { return };
    let renderer = Renderer::new(embedded()).unwrap();
    [16, 8, 4, 2].par_iter().for_each(|access_bytes| {
        let class = KvAppendClass { access_bytes: *access_bytes };
        for arch in ARCHS {
            let text = class.kernel().text(&renderer, arch).unwrap();
            let compiled = compile(nvrtc, "kv_append", &text, &target(arch, FAMILY, nvrtc).unwrap()).unwrap();
            let used = compiled.resources["flashtune_kv_append"];
            // The grid assumes that 8 CTAs fit an SM.
            assert!(used.registers <= 64, "{used:?}: {class} for {arch}");
            assert_eq!((used.stack_bytes, compiled.log.as_str()), (0, ""), "{class} for {arch}");
        }
    });
}
