//! The merge kernel, compiled by NVRTC without a GPU. It must compile for every class without
//! warnings and without a stack. Without NVRTC the test says so and passes.

use crate::nvrtc::nvrtc;
use flashtune::device::Arch;
use flashtune::kernel::compile::{compile, target};
use flashtune::kernel::fixed::FAMILY;
use flashtune::kernel::render::Renderer;
use flashtune::kernel::sources::embedded;
use flashtune::ops::merge::MergeClass;
use flashtune::problem::{Dtype, Layout};
use rayon::prelude::*;

#[test]
fn every_class_compiles_without_a_stack() {
    let Some(nvrtc) = nvrtc() else { return };
    let renderer = Renderer::new(embedded()).unwrap();
    let mut classes = Vec::new();
    for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
        for partial_dtype in [dtype, Dtype::Fp32] {
            let layouts = [Layout::Vec4, Layout::Vec2, Layout::Vec1];
            classes.extend(layouts.map(|layout| MergeClass { dtype, partial_dtype, layout }));
        }
    }
    classes.par_iter().for_each(|class| {
        for arch in [Arch::Sm(8, 0), Arch::Sm(9, 0)] {
            let text = class.kernel().text(&renderer, arch).unwrap();
            let compiled = compile(nvrtc, "merge", &text, &target(arch, FAMILY, nvrtc).unwrap()).unwrap();
            let stack = compiled.resources["flashtune_merge"].stack_bytes;
            assert_eq!((stack, compiled.log.as_str()), (0, ""), "{class} for {arch}");
        }
    });
}
