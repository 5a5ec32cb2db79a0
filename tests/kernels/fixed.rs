//! The kernels without a config, those of the small operations and of the SM clock, compiled by
//! NVRTC without a GPU. Each must compile for every class without warnings and without a stack.
//! Without NVRTC a test says so and passes.

use crate::ARCHS;
use crate::nvrtc::{compile, nvrtc};
use flashtune::device::Arch;
use flashtune::kernel::compile::{EntryResources, target};
use flashtune::kernel::fixed::FAMILY;
use flashtune::kernel::render::Renderer;
use flashtune::kernel::sources::embedded;
use flashtune::kernel::{FixedSpec, sm_clock};
use flashtune::ops::kv_append::{CacheFormat, EightClass, KvAppendClass, RotaryClass};
use flashtune::ops::merge::MergeClass;
use flashtune::ops::quantize::QuantizeClass;
use flashtune::problem::{Dtype, Eight, Four, Layout};
use rayon::prelude::*;

/// Compiles kernels for architectures. Returns the resources of each, after a check that it has
/// neither a warning nor a stack; none without NVRTC.
fn compiled(specs: &[FixedSpec], archs: &[Arch]) -> Vec<EntryResources> {
    let Some(nvrtc) = nvrtc() else { return Vec::new() };
    let renderer = Renderer::new(embedded()).unwrap();
    let pairs: Vec<_> = specs.iter().flat_map(|spec| archs.iter().map(move |arch| (spec, *arch))).collect();
    let one = |(spec, arch): &(&FixedSpec, Arch)| {
        let text = spec.text(&renderer, *arch).unwrap();
        let compiled = compile(nvrtc, spec.name, &text, &target(*arch, FAMILY, nvrtc).unwrap()).unwrap();
        let used = compiled.resources[&format!("flashtune_{}", spec.name)];
        assert_eq!((used.stack_bytes, compiled.log.as_str()), (0, ""), "{spec:?} for {arch}");
        used
    };
    pairs.par_iter().map(one).collect()
}

#[test]
fn merge_compiles_without_a_stack_for_every_class() {
    let mut specs = Vec::new();
    for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
        for partial_dtype in [dtype, Dtype::Fp32] {
            let layouts = [Layout::Vec4, Layout::Vec2, Layout::Vec1];
            specs.extend(layouts.map(|layout| MergeClass { dtype, partial_dtype, layout }.kernel()));
        }
    }
    compiled(&specs, &[Arch::Sm(8, 0), Arch::Sm(9, 0)]);
}

#[test]
fn kv_append_compiles_without_a_stack_for_every_class() {
    let class = |access_bytes, slots| KvAppendClass { access_bytes, slots, rotary: None, eight: None };
    let specs = [16, 8, 4, 2].map(|access_bytes| class(access_bytes, false).kernel());
    for used in compiled(&specs, &ARCHS) {
        // The grid assumes that 8 CTAs fit an SM.
        assert!(used.registers <= 64, "{used:?}");
    }
    let specs = [16, 8, 4, 2].map(|access_bytes| class(access_bytes, true).kernel());
    compiled(&specs, &[Arch::Sm(8, 0), Arch::Sm(9, 0)]);
}

#[test]
fn kv_append_that_rotates_compiles_without_a_stack_for_every_class() {
    let mut specs = Vec::new();
    for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
        for (table_dtype, interleaved) in [(dtype, false), (dtype, true), (Dtype::Fp32, false), (Dtype::Fp32, true)] {
            let rotary = Some(RotaryClass { dtype, table_dtype, interleaved });
            let widths = [16, 8, 4, 2].into_iter().filter(|bytes| *bytes >= dtype.bytes() as i64);
            specs.extend(
                widths.map(|access_bytes| KvAppendClass { access_bytes, slots: true, rotary, eight: None }.kernel()),
            );
        }
    }
    let some: Vec<FixedSpec> = specs.iter().step_by(3).cloned().collect();
    for used in compiled(&specs, &[Arch::Sm(9, 0)]).into_iter().chain(compiled(&some, &[Arch::Sm(8, 0)])) {
        // The grid assumes that 3 CTAs of 256 threads fit an SM.
        assert!(used.registers <= 80, "{used:?}");
    }
}

#[test]
fn what_quantises_compiles_without_a_stack() {
    let mut specs = Vec::new();
    for (to, layout) in Eight::ALL.map(|to| (to, Layout::Vec8)).into_iter().chain([(Eight::E4m3, Layout::Vec4)]) {
        let eight = Some(EightClass { dtype: Dtype::Bf16, keys: CacheFormat::Eight(to) });
        // With narrower accesses, sm_90's append keeps two words on the stack.
        if layout == Layout::Vec8 {
            specs.push(KvAppendClass { access_bytes: 16, slots: true, rotary: None, eight }.kernel());
        }
        for (of_rows, rotates) in [(false, false), (false, true), (true, false), (true, true)] {
            specs.push(QuantizeClass { dtype: Dtype::Fp16, to: Some(to), layout, of_rows, rotates }.kernel());
        }
    }
    for (four, access_bytes) in Four::ALL.into_iter().flat_map(|four| [16, 8, 4, 2].map(|bytes| (four, bytes))) {
        let eight = Some(EightClass { dtype: Dtype::Bf16, keys: CacheFormat::Four(four) });
        specs.push(KvAppendClass { access_bytes, slots: true, rotary: None, eight }.kernel());
    }
    for layout in [Layout::Vec8, Layout::Vec4, Layout::Vec2, Layout::Vec1] {
        specs.push(QuantizeClass { dtype: Dtype::Bf16, to: None, layout, of_rows: true, rotates: true }.kernel());
    }
    compiled(&specs, &[Arch::Sm(8, 0), Arch::Sm(9, 0)]);
}

#[test]
fn sm_clock_compiles_without_a_stack() {
    compiled(&[sm_clock::spec()], &[Arch::Sm(8, 0), Arch::Sm(9, 0), Arch::Sm(12, 0)]);
}
