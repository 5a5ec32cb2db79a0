//! Kernels of many queries over paged keys: each way in which a kernel copies keys from pages, at
//! each width of a head, with few features and with many.

use super::*;

/// Sizes of pages: threads copy the keys one by one (1, 12), TMA copies boxes of 8, 16, 32 and 64
/// rows, and a page holds several blocks.
const PAGE_SIZES: [i64; 7] = [1, 8, 12, 16, 48, 64, 256];

/// Consumers of sm90 that keep three numbers of a tile on the stack. They read them at a tile's
/// beginning and end, and never between two blocks.
const PAGED: &MaySpill = &[(Arch::Sm(9, 0), Pass::Forward, (64, 64), 72)];

fn paged(page_size: i64, dtype: Dtype, dims: (i64, i64), layout: Layout, index: usize) -> Problem {
    let varlen = Some(Varlen::default());
    let of_scores = Features {
        window: Window { left: Some(100), ..Window::default() },
        softcap: true,
        alibi: true,
        sinks: true,
        ..Features::NONE
    };
    let features = match index % 3 {
        0 => Features::NONE,
        1 => Features { varlen, ..Features::NONE },
        _ => Features { varlen, ..of_scores },
    };
    let causal = if index.is_multiple_of(2) { Causal::BottomRight } else { Causal::None };
    let features = Features { paged: Some(page_size), ..features };
    Problem { causal, features, ..problem(Pass::Forward, dtype, dims, layout) }
}

fn kernels_with_pages(arch: Arch, one_in: usize) -> BTreeMap<String, Kernel> {
    let device = typical(arch);
    let of = |(index, (dims, page_size)): (usize, ((i64, i64), i64))| {
        let dtype = DTYPES[index % 2];
        let problem = paged(page_size, dtype, dims, Layout::widest(dtype, [dims.0, dims.1]), index);
        let configs = heuristics(&problem, &device).into_iter().filter(|config| config.family != Family::Decode);
        let kernels = configs.filter(|config| config.family != Family::Sm80 || index % one_in == 0);
        let kernels = kernels.flat_map(|config| match config.get("decode_splits") {
            Some(1) => vec![config.clone().with("decode_splits", 0), config],
            _ => vec![config],
        });
        kernels
            .flat_map(|config| Kernel::of(&problem, &config, &device, may_spill(PAGED, arch, &problem)))
            .collect::<Vec<_>>()
    };
    // Each size at one of two head dims.
    let of_any_size = PAGE_SIZES.into_iter().zip([(64, 64), (128, 128)].into_iter().cycle());
    let of_any_size = of_any_size.map(|(page_size, dims)| (dims, page_size));
    let of_two_sizes = [(256, 256), (192, 128), (72, 72), (96, 96)].map(|dims| [(dims, 16), (dims, 12)]);
    let pairs = of_any_size.chain(of_two_sizes.into_iter().flatten());
    pairs.enumerate().flat_map(of).collect()
}

#[test]
fn kernels_that_read_pages_compile_for_sm_90() {
    let Some(nvrtc) = nvrtc() else { return };
    let kernels = kernels_with_pages(Arch::Sm(9, 0), 4);
    // The decode kernel of short sequences with and without splits.
    for line in ["constexpr bool kMaySplit = true;", "constexpr bool kMaySplit = false;"] {
        let of_short = kernels.keys().filter(|text| text.contains("kMostRows = 16;") && text.contains(line));
        assert!(of_short.count() > 0, "{line}");
    }
    all_compile(&kernels, nvrtc, Arch::Sm(9, 0));
}

#[test]
fn kernels_that_read_pages_compile_for_other_architectures() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in [Arch::Sm(8, 0), Arch::Sm(12, 0)] {
        all_compile(&kernels_with_pages(arch, 3), nvrtc, arch);
    }
}

#[test]
fn kernels_that_read_pages_of_fp32_or_of_odd_strides_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(8, 0);
    let device = typical(arch);
    let of = |(index, (dtype, dim, layout)): (usize, (Dtype, i64, Layout))| {
        let problem = paged([16, 5][index % 2], dtype, (dim, dim), layout, index);
        Kernel::of(&problem, &heuristic(&problem, &device), &device, may_spill(PAGED, arch, &problem))
    };
    let problems = [
        (Dtype::Fp32, 64, Layout::Vec4),
        (Dtype::Fp32, 128, Layout::Vec4),
        (Dtype::Fp32, 33, Layout::Vec1),
        (Dtype::Bf16, 33, Layout::Vec1),
        (Dtype::Fp16, 64, Layout::Vec2),
        (Dtype::Bf16, 512, Layout::Vec8),
    ];
    all_compile(&problems.into_iter().enumerate().flat_map(of).collect(), nvrtc, arch);
}
