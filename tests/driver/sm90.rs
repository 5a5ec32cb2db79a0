//! The tensor maps and the tile counter that an sm90 launch passes beside the params, in the
//! forward pass; `sm90_backward` has the backward pass. The stand-in driver refuses the maps that
//! the real one refuses, and records every launch.

use crate::fake_driver::{Fake, FakeLaunch, PROBLEM, allocations, fill_cache_with, with_fake};
use flashtune::call::{Call, TensorRef};
use flashtune::config::{Config, Family};
use flashtune::dropout::Dropout;
use flashtune::error::{Result, Status};
use flashtune::kernel::{Executable, Gpu, KernelParams};
use flashtune::problem::{Causal, Eight, EightBits, Features, Problem, Varlen};
use std::ffi::c_void;
use std::mem::offset_of;

pub const FULL: Causal = Causal::None;
pub const CAUSAL: Causal = Causal::BottomRight;
/// A stream that the stand-in reports as capturing.
const CAPTURING: usize = 0xca7;

fn config(block_m: u32) -> Config {
    let tile = [("block_m", block_m), ("block_n", 80), ("k_stages", 2), ("v_stages", 2), ("q_stages", 1)];
    let others = [("stale_max", 0), ("group_mb", 16), ("tma_store", 0), ("num_splits", 1), ("decode_rows", 0)];
    let more = [("decode_splits", 0), ("ctas_per_sm", 1), ("widens", 0), ("splits_rest", 0)];
    Config::new(Family::Sm90, tile.into_iter().chain(others).chain(more))
}

pub fn call() -> Call {
    let tensor = |address: usize, heads| TensorRef::packed(address as *mut c_void, 300, heads, 128);
    let inputs = [tensor(0x10000, 8), tensor(0x20000, 2), tensor(0x30000, 2)];
    Call { out: tensor(0x40000, 8), ..Call::of_inputs(PROBLEM, 0.125, Dropout::NONE, inputs) }
}

/// Builds without a compiler, from a cache filled before.
pub fn build_from_cache(problem: &Problem, config: &Config) -> (Gpu, Result<Executable>) {
    let folder = tempfile::tempdir().unwrap();
    fill_cache_with(folder.path(), problem, config, "sm_90a");
    let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
    let executable = gpu.build(problem, config);
    (gpu, executable)
}

fn try_build(causal: Causal, block_m: u32) -> (Gpu, Result<Executable>) {
    build_from_cache(&Problem { causal, ..PROBLEM }, &config(block_m))
}

/// The stand-in's functions have 96 registers, the number that five warpgroups share.
fn build(causal: Causal) -> (Gpu, Executable) {
    let (gpu, executable) = try_build(causal, 256);
    (gpu, executable.unwrap())
}

fn launch(fake: &Fake, executable: &Executable, call: &Call, stream: usize) -> FakeLaunch {
    executable.launch(call, stream as *mut c_void).unwrap();
    let state = fake.state();
    state.launch[(state.launches as usize - 1) % state.launch.len()]
}

#[test]
fn a_forward_launch_passes_the_maps_of_its_inputs_and_of_o() {
    with_fake("a_forward_launch_passes_the_maps_of_its_inputs_and_of_o", |fake| {
        let (_gpu, executable) = build(FULL);
        let launched = launch(fake, &executable, &call(), 0x77);
        // Two tiles of 256 rows for each of 16 heads.
        assert_eq!((launched.grid, launched.block, launched.stream), ([32, 1, 1], [640, 1, 1], 0x77));
        let [q, k, v, out] = launched.maps;
        // Address, bf16, extents, byte strides, box.
        assert_eq!(q[..11], [0x10000, 9, 128, 300, 8, 2, 2048, 256, 300 * 2048, 64, 64]);
        assert_eq!(k[..11], [0x20000, 9, 128, 400, 2, 2, 512, 256, 300 * 512, 64, 80]);
        assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
        assert_eq!((out[0], &out[1..]), (0x40000, &q[1..]));
    });
}

#[test]
fn boxes_of_pages_divide_a_block_and_a_page() {
    with_fake("boxes_of_pages_divide_a_block_and_a_page", |fake| {
        // Pages that are rows of one tensor with K and V in turn: a page's stride is no whole
        // number of its 512-byte rows.
        let of_pages = |address: usize, page_size: i64| TensorRef {
            stride_batch: 2 * page_size * 256 + 8,
            ..TensorRef::packed(address as *mut c_void, page_size, 2, 128)
        };
        let launch = |page_size: i64, num_pages| {
            let features = Features { paged: Some(page_size), varlen: Some(Varlen::default()), ..Features::NONE };
            let problem = Problem { features, ..PROBLEM };
            let (_gpu, executable) = build_from_cache(&problem, &config(256));
            let (k, v) = (of_pages(0x20000, page_size), of_pages(0x30000, page_size));
            let mut call = Call { problem, k, v, ..call() };
            call.features.num_pages = num_pages;
            crate::sm90::launch(fake, &executable.unwrap(), &call, 0).maps
        };
        // Blocks have 80 keys.
        for (page_size, box_rows) in [(8, 8), (16, 16), (64, 16), (40, 40), (120, 40), (80, 80), (800, 80)] {
            let [q, k, v, _] = launch(page_size, 9);
            let rows = page_size as u64;
            assert_eq!(k[..11], [0x20000, 9, 128, rows, 2, 9, 512, 256, rows * 1024 + 16, 64, box_rows]);
            assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
            // Queries keep the rank of varlen rows.
            assert_eq!((q[0], q[3]), (0x10000, 1 << 30));
        }
        // Threads copy pages that share no whole eights of keys with a block, and with 0 pages
        // nothing is loaded: Q's map stands in.
        for (page_size, num_pages) in [(12, 9), (1, 9), (100, 9), (80, 0)] {
            let [q, k, v, _] = launch(page_size, num_pages);
            assert!(k == q && v == q, "{page_size}");
        }
        // Threads convert keys of 8 bits in pages and small blocks. Boxes of others have pairs of
        // bytes for columns.
        for (paged, block_n, has_boxes) in [(Some(64), 64, false), (None, 64, false), (None, 80, true)] {
            let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 });
            let varlen = paged.map(|_| Varlen::default());
            let problem = Problem { features: Features { eight_bits, paged, varlen, ..Features::NONE }, ..PROBLEM };
            let (_gpu, executable) = build_from_cache(&problem, &config(256).with("block_n", block_n));
            let of_keys = |address: usize| TensorRef::packed(address as *mut c_void, 400, 2, 128);
            let mut call = Call { problem, k: of_keys(0x20000), v: of_keys(0x30000), ..call() };
            call.features.num_pages = 9;
            let [q, k, v, _] = crate::sm90::launch(fake, &executable.unwrap(), &call, 0).maps;
            assert_eq!((q[0], k == q, v == q), (0x10000, !has_boxes, !has_boxes), "{paged:?} {block_n}");
            if has_boxes {
                assert_eq!(k[..11], [0x20000, 9, 64, 400, 2, 2, 256, 128, 400 * 256, 64, 80]);
            }
        }
    });
}

#[test]
fn a_split_launch_has_a_tile_for_each_split_and_combines_many_rows_in_a_cta() {
    with_fake("a_split_launch_has_a_tile_for_each_split_and_combines_many_rows_in_a_cta", |fake| {
        let long = Problem { batch_size: 1, num_heads_q: 2, num_heads_kv: 2, seqlen_k: 1100, ..PROBLEM };
        let (_gpu, executable) = build_from_cache(&long, &config(256).with("num_splits", 8));
        let executable = executable.unwrap();
        let launch = |seqlen_k| {
            let workspace = 0xa00000 as *mut c_void;
            let before = fake.state().launches as usize;
            let problem = Problem { seqlen_k, ..long };
            executable.launch(&Call { problem, workspace, ..call() }, std::ptr::null_mut()).unwrap();
            let launched = &fake.state().launch[before..fake.state().launches as usize];
            let word = |offset: usize| u64::from_le_bytes(launched[0].params[offset..offset + 8].try_into().unwrap());
            let splits = word(offset_of!(KernelParams, num_splits)) as u32;
            let lse = word(offset_of!(KernelParams, partial_lse));
            (launched.iter().map(|launch| launch.grid).collect::<Vec<_>>(), splits, lse)
        };
        // Two tiles of 256 rows for each of two heads, four times. At head dim 128 a CTA combines
        // four of the 300 rows of each head.
        let end = 0xa00000 + 4 * 600 * 128 * 4;
        assert_eq!(launch(1100), (vec![[16, 1, 1], [150, 1, 1]], 4, end));
        assert_eq!(end + 4 * 600 * 4, 0xa00000 + long.workspace_bytes() as u64);
        assert_eq!(launch(500), (vec![[4, 1, 1]], 1, 0));
    });
}

#[test]
fn a_launch_that_splits_some_tiles_combines_their_rows_alone() {
    with_fake("a_launch_that_splits_some_tiles_combines_their_rows_alone", |fake| {
        // 70 tiles of 256 rows for each of two heads: eight past a wave of 132, four of each head.
        let long = Problem {
            batch_size: 1,
            num_heads_q: 2,
            num_heads_kv: 2,
            seqlen_q: 70 * 256,
            seqlen_k: 1100,
            causal: FULL,
            ..PROBLEM
        };
        let some = config(256).with("num_splits", 2).with("splits_rest", 1).with("group_mb", 1);
        let (_gpu, executable) = build_from_cache(&long, &some);
        let executable = executable.unwrap();
        let launch = |seqlen_q| {
            let before = fake.state().launches as usize;
            let (problem, workspace) = (Problem { seqlen_q, ..long }, 0xa00000 as *mut c_void);
            executable.launch(&Call { problem, workspace, ..call() }, std::ptr::null_mut()).unwrap();
            let launched = &fake.state().launch[before..fake.state().launches as usize];
            let word = |offset: usize| u64::from_le_bytes(launched[0].params[offset..offset + 8].try_into().unwrap());
            let splits = word(offset_of!(KernelParams, num_splits)) as u32;
            let rows = word(offset_of!(KernelParams, workspace_rows)) as u32;
            let lse = word(offset_of!(KernelParams, partial_lse));
            (launched.iter().map(|launch| launch.grid).collect::<Vec<_>>(), splits, rows, lse)
        };
        let rows = 4 * 256;
        let lse = 0xa00000 + 2 * 2 * u64::from(rows) * 128 * 4;
        assert_eq!(launch(70 * 256), (vec![[132, 1, 1], [2 * rows / 4, 1, 1]], 2, rows, lse));
        assert!(lse + 2 * 2 * u64::from(rows) * 4 <= 0xa00000 + long.workspace_bytes() as u64);
        // A launch of whole waves splits nothing, and so does one of few tiles.
        let (grids, splits, _, _) = launch(66 * 256);
        assert_eq!((grids, splits), (vec![[132, 1, 1]], 1));
        let (grids, splits, _, _) = launch(300);
        assert_eq!((grids, splits), (vec![[4, 1, 1]], 1));
    });
}

#[test]
fn a_batch_invariant_launch_splits_at_segments_where_the_workspace_has_room_for_all() {
    let name = "a_batch_invariant_launch_splits_at_segments_where_the_workspace_has_room_for_all";
    with_fake(name, |fake| {
        let few = Problem { batch_size: 1, seqlen_q: 300, seqlen_k: 4000, batch_invariant: true, ..PROBLEM };
        let (_gpu, executable) = build_from_cache(&few, &config(256).with("num_splits", 32).with("block_n", 64));
        let executable = executable.unwrap();
        let launch = |batch_size, seqlen_k| {
            let before = fake.state().launches as usize;
            let problem = Problem { batch_size, seqlen_k, ..few };
            let workspace = 0xa00000 as *mut c_void;
            executable.launch(&Call { problem, workspace, ..call() }, std::ptr::null_mut()).unwrap();
            let launched = &fake.state().launch[before..fake.state().launches as usize];
            let word = |offset: usize| u64::from_le_bytes(launched[0].params[offset..offset + 8].try_into().unwrap());
            let splits = word(offset_of!(KernelParams, num_splits)) as u32;
            // A reference and a sum for each row.
            let end = word(offset_of!(KernelParams, partial_lse)) + u64::from(splits) * problem.query_rows() as u64 * 8;
            assert!(splits == 1 || end == 0xa00000 + problem.workspace_bytes() as u64);
            let runs = if splits > 1 { word(offset_of!(KernelParams, workspace_rows)) as u32 } else { 0 };
            (launched.iter().map(|launch| launch.grid).collect::<Vec<_>>(), splits, runs)
        };
        // Two tiles of 256 rows for each of eight heads, in four segments; a CTA merges four rows.
        assert_eq!(launch(1, 4000), (vec![[64, 1, 1], [600, 1, 1]], 4, 4));
        // 21 groups of 81 segments, in eight runs.
        assert_eq!(launch(1, 100_000), (vec![[132, 1, 1], [600, 1, 1]], 21, 8));
        // One segment; too many states; tiles that fill the GPU.
        assert_eq!(launch(1, 1024), (vec![[16, 1, 1]], 1, 0));
        assert_eq!(launch(1, 1 << 21), (vec![[16, 1, 1]], 1, 0));
        assert_eq!(launch(9, 4000), (vec![[132, 1, 1]], 1, 0));
    });
}

/// Short sequences of seven over pages: 16 packed rows for each of two K/V heads.
#[test]
fn the_decode_kernel_of_few_sequences_splits_keys_and_its_states_have_rows_of_its_own() {
    let name = "the_decode_kernel_of_few_sequences_splits_keys_and_its_states_have_rows_of_its_own";
    with_fake(name, |fake| {
        let varlen = Some(Varlen { total_q: Some(2100), ..Varlen::default() });
        let features = Features { varlen, paged: Some(80), ..Features::NONE };
        let few = Problem { batch_size: 7, seqlen_q: 2048, seqlen_k: 4096, features, ..PROBLEM };
        let splitting = config(256).with("decode_rows", 16).with("decode_splits", 1);
        let (_gpu, executable) = build_from_cache(&few, &splitting);
        let executable = executable.unwrap();
        let launch = |executable: &Executable, problem: Problem, most_splits| {
            let before = fake.state().launches as usize;
            let of_pages = |address: usize| TensorRef::packed(address as *mut c_void, 80, 2, 128);
            let (k, v, workspace) = (of_pages(0x20000), of_pages(0x30000), 0xa00000 as *mut c_void);
            let mut call = Call { problem, k, v, workspace, most_splits, ..call() };
            call.features.num_pages = 9;
            executable.launch(&call, std::ptr::null_mut()).unwrap();
            let state = fake.state();
            let at = |launch: usize| state.launch[launch % state.launch.len()];
            let launched: Vec<_> = (before..state.launches as usize).map(at).collect();
            let word = |offset: usize| u64::from_le_bytes(launched[0].params[offset..offset + 8].try_into().unwrap());
            let splits = word(offset_of!(KernelParams, num_splits)) as u32;
            let lse = word(offset_of!(KernelParams, partial_lse));
            let of_launch = |launch: &FakeLaunch| (launch.grid, launch.overlaps);
            (launched.iter().map(of_launch).collect::<Vec<_>>(), splits, lse)
        };
        // 18 splits of 14 tiles are 252 CTAs; 16 give each 256 of the 4,096 keys. The kernels after
        // that of short sequences may start before the one ahead of them ends.
        let main = ([132, 1, 1], 1);
        let lse = |splits: u64| 0xa00000 + splits * 14 * 16 * 128 * 4;
        let split = |splits| vec![([14, splits, 1], 0), main, ([14 * 16, 1, 1], 1)];
        assert_eq!(launch(&executable, few, 0), (split(16), 16, lse(16)));
        assert_eq!(lse(16) + 16 * 14 * 16 * 4, 0xa00000 + few.workspace_bytes() as u64);
        assert_eq!(launch(&executable, few, 3), (split(3), 3, lse(3)));
        let unsplit = (vec![([14, 1, 1], 0), main], 1, 0);
        assert_eq!(launch(&executable, few, 1), unsplit);
        assert_eq!(launch(&executable, Problem { seqlen_k: 500, ..few }, 0), unsplit, "too few keys");
        let many = Problem { batch_size: 70, ..few };
        assert_eq!(launch(&executable, many, 0).0, vec![([140, 1, 1], 0), main], "enough CTAs");
        // No sequence is short, so no kernel has any to take.
        let varlen = Some(Varlen::default());
        let long = Problem { features: Features { varlen, ..features }, ..few };
        assert_eq!(launch(&executable, long, 0), (vec![([132, 1, 1], 0)], 1, 0));
        assert_eq!(long.max_short_splits(16), 1);
        // A config of a larger group has more rows, so that the workspace holds fewer splits.
        let (_gpu, of_larger_group) = build_from_cache(&few, &splitting.clone().with("decode_rows", 64));
        assert_eq!(launch(&of_larger_group.unwrap(), few, 0).1, 4);
        let (_gpu, of_one_split) = build_from_cache(&few, &splitting.with("decode_splits", 0));
        assert_eq!(launch(&of_one_split.unwrap(), few, 0), unsplit);
    });
}

/// A field of the params that a kernel got.
fn word(launch: &FakeLaunch, offset: usize) -> u64 {
    u64::from_le_bytes(launch.params[offset..offset + 8].try_into().unwrap())
}

fn launches(fake: &Fake, executable: &Executable, call: &Call) -> Vec<FakeLaunch> {
    let before = fake.state().launches as usize;
    executable.launch(call, std::ptr::null_mut()).unwrap();
    let state = fake.state();
    (before..state.launches as usize).map(|launch| state.launch[launch % state.launch.len()]).collect()
}

const EIGHT_BITS: Features =
    Features { eight_bits: Some(EightBits { keys: Eight::Int8, queries: false, keys_per_scale: 0 }), ..Features::NONE };

#[test]
fn the_main_kernel_reads_the_keys_that_a_kernel_before_has_widened() {
    with_fake("the_main_kernel_reads_the_keys_that_a_kernel_before_has_widened", |fake| {
        let problem = Problem { features: EIGHT_BITS, causal: FULL, ..PROBLEM };
        let (_gpu, executable) = build_from_cache(&problem, &config(256).with("widens", 1));
        let call = Call { problem, workspace: 0xa00000 as *mut c_void, ..call() };
        let launched = launches(fake, &executable.unwrap(), &call);
        let [widen, main] = launched[..] else { panic!("{} launches", launched.len()) };
        // Four tiles of 128 keys for each of four heads, of K and of V.
        assert_eq!((widen.grid, widen.block, widen.overlaps, main.overlaps), ([16, 2, 1], [256, 1, 1], 0, 1));
        // 400 rows for each of two sequences in each of two heads.
        let (head, sequence) = (2 * 400 * 256, 400 * 256);
        let [q, k, v, _] = main.maps;
        assert_eq!((q[0], k[..9].to_vec()), (0x10000, vec![0xa00000, 9, 128, 400, 2, 2, 256, head, sequence]));
        assert_eq!((v[0], &v[1..]), (0xa00000 + 2 * head, &k[1..]));
        assert_eq!(problem.workspace_bytes() as u64, 4 * head + 2 * 4, "K, V and two lengths");
        let places = [offset_of!(KernelParams, k), offset_of!(KernelParams, dout)];
        assert_eq!(places.map(|offset| word(&widen, offset)), [0x20000, 0xa00000]);
        assert_eq!(word(&main, places[0]), 0xa00000);
    });
}

/// The decode kernel reads pages, and the main kernel neither them nor the caller's lengths of
/// keys.
#[test]
fn a_mixed_batch_starts_when_its_keys_are_widened() {
    with_fake("a_mixed_batch_starts_when_its_keys_are_widened", |fake| {
        let varlen = Some(Varlen { total_q: Some(2100), ..Varlen::default() });
        let features = Features { varlen, paged: Some(16), ..EIGHT_BITS };
        let mixed = Problem { batch_size: 7, seqlen_q: 2048, seqlen_k: 4096, features, ..PROBLEM };
        let (_gpu, executable) = build_from_cache(&mixed, &config(256).with("widens", 1).with("decode_rows", 16));
        let executable = executable.unwrap();
        let of_pages = |address: usize| TensorRef::packed(address as *mut c_void, 16, 2, 128);
        let (k, v, workspace) = (of_pages(0x20000), of_pages(0x30000), 0xa00000 as *mut c_void);
        let mut call = Call { problem: mixed, k, v, workspace, ..call() };
        (call.features.num_pages, call.features.block_table) = (9, 0x5000 as *const i32);
        call.features.seqused_k = 0x6000 as *const i32;
        let launched = launches(fake, &executable, &call);
        // The decode kernel starts at the end of the first, so that tiles find widened keys when
        // they start beside it.
        assert_eq!(launched.iter().map(|launch| launch.overlaps).collect::<Vec<_>>(), [0, 0, 1]);
        let fields = [offset_of!(KernelParams, block_table), offset_of!(KernelParams, seqused_k)];
        let of = |launch: &FakeLaunch| fields.map(|offset| word(launch, offset));
        let lengths = 0xa00000 + mixed.places_of_widened().lengths as u64;
        assert_eq!(
            [0, 1, 2].map(|index: usize| of(&launched[index])),
            [[0x5000, 0x6000], [0x5000, 0x6000], [0, lengths]]
        );
        call.problem.features.varlen = Some(Varlen::default());
        let overlaps: Vec<_> = launches(fake, &executable, &call).iter().map(|launch| launch.overlaps).collect();
        assert_eq!(overlaps, [0, 0], "no sequence is short, so the main kernel comes second");
    });
}

#[test]
fn a_kernel_with_too_few_registers_for_its_warpgroups_is_not_launched() {
    with_fake("a_kernel_with_too_few_registers_for_its_warpgroups_is_not_launched", |_| {
        let error = try_build(FULL, 128).1.err().unwrap();
        assert_eq!(error.status, Status::CompileFailed);
        assert!(error.message.contains("504 registers") && error.message.contains("288"), "{}", error.message);
    });
}

#[test]
fn persistent_grid_has_at_most_the_resident_ctas() {
    with_fake("persistent_grid_has_at_most_the_resident_ctas", |fake| {
        let (_gpu, executable) = build(FULL);
        let mut many = call();
        many.problem.batch_size = 100;
        assert_eq!(launch(fake, &executable, &many, 0).grid, [132, 1, 1]);
    });
}

#[test]
fn launches_that_may_overlap_never_share_a_tile_counter() {
    with_fake("launches_that_may_overlap_never_share_a_tile_counter", |fake| {
        let (_gpu, executable) = build(CAUSAL);
        let counter = |stream| launch(fake, &executable, &call(), stream).counter;
        let of_streams = [0, 1, 2, 0x77, 0x78].map(&counter);
        assert_eq!([0, 1, 2, 0x77, 0x78].map(&counter), of_streams, "a stream keeps its own");
        let of_captures = [(); 4].map(|()| counter(CAPTURING));
        let all = of_streams.into_iter().chain(of_captures);
        let distinct: std::collections::BTreeSet<u64> = all.filter(|address| *address != 0).collect();
        assert_eq!(distinct.len(), 9);
        // SAFETY: the stand-in's device memory is host memory, and each launch finds its two words
        // zeroed.
        assert!(distinct.iter().all(|address| unsafe { (*address as *const u64).read() } == 0));
        assert_eq!(fake.state().memory, 1);
    });
}

#[test]
fn a_fixed_schedule_has_no_counter() {
    with_fake("a_fixed_schedule_has_no_counter", |fake| {
        let features = Features { paged: Some(16), ..Features::NONE };
        let problem = Problem { causal: FULL, features, ..PROBLEM };
        let (_gpu, executable) = build_from_cache(&problem, &config(256));
        let mut paged = Call { problem, ..call() };
        paged.features.num_pages = 9;
        assert_eq!(launch(fake, &executable.unwrap(), &paged, 0x77).counter, 0);
        assert_eq!(fake.state().memory, 0, "and no memory for one");
    });
}

#[test]
fn counters_live_as_long_as_the_executables_that_use_them() {
    with_fake("counters_live_as_long_as_the_executables_that_use_them", |fake| {
        let (gpu, executable) = build(CAUSAL);
        drop(gpu);
        assert_ne!(launch(fake, &executable, &call(), 0x77).counter, 0);
        drop(executable);
        assert_eq!((fake.state().memory, fake.state().retains), (0, 0));
    });
}

#[test]
fn a_launch_with_maps_and_counter_allocates_nothing() {
    with_fake("a_launch_with_maps_and_counter_allocates_nothing", |fake| {
        let (_gpu, executable) = build(CAUSAL);
        let call = call();
        for stream in [0x77, CAPTURING] {
            // The harness's threads may allocate at the same time, but not during every one of many
            // launches.
            let quietest = (0..100).map(|_| {
                let before = allocations();
                executable.launch(&call, stream as *mut c_void).unwrap();
                allocations() - before
            });
            assert_eq!(quietest.min(), Some(0));
        }
        assert_eq!(fake.state().launches, 200);
    });
}

#[test]
fn no_keys_and_unused_strides_give_maps_that_the_driver_accepts() {
    with_fake("no_keys_and_unused_strides_give_maps_that_the_driver_accepts", |fake| {
        let (_gpu, executable) = build(FULL);
        let mut no_keys = call();
        no_keys.problem.seqlen_k = 0;
        let nowhere = TensorRef { data: std::ptr::null_mut(), stride_batch: 1, stride_seqlen: 1, stride_head: 1 };
        (no_keys.k, no_keys.v) = (nowhere, nowhere);
        launch(fake, &executable, &no_keys, 0x77);
        let mut one = call();
        (one.problem.batch_size, one.problem.num_heads_kv) = (1, 1);
        (one.k.stride_batch, one.k.stride_head) = (3, 1 << 50);
        launch(fake, &executable, &one, 0x77);
    });
}

#[test]
fn making_counters_does_not_disturb_another_streams_capture() {
    with_fake("making_counters_does_not_disturb_another_streams_capture", |fake| {
        fake.begin_capture();
        let (gpu, executable) = build(CAUSAL);
        assert_eq!((fake.state().memory, fake.state().memsets), (1, 1));
        drop((gpu, executable));
        assert_eq!(fake.state().memory, 0);
    });
}

#[test]
fn without_memory_for_counters_the_schedule_is_fixed_until_memory_is_free() {
    with_fake("without_memory_for_counters_the_schedule_is_fixed_until_memory_is_free", |fake| {
        fake.set_full(true);
        let (gpu, executable) = build(CAUSAL);
        assert_eq!(launch(fake, &executable, &call(), 0x77).counter, 0);
        fake.set_full(false);
        // The kernel stays loaded while its first executable lives, so the cache, which is gone, is
        // not read.
        let later = gpu.build(&PROBLEM, &config(256)).unwrap();
        assert_ne!(launch(fake, &later, &call(), 0x77).counter, 0);
    });
}

#[test]
fn lost_device_is_an_error_rather_than_a_fixed_schedule() {
    with_fake("lost_device_is_an_error_rather_than_a_fixed_schedule", |fake| {
        fake.fail_synchronize(700);
        let (_gpu, executable) = try_build(CAUSAL, 256);
        assert_eq!(executable.err().unwrap().status, Status::Cuda);
    });
}
