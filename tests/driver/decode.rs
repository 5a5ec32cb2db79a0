//! The arguments that a launch of the decode family hands to the driver, recorded by `fake_driver`.

use crate::fake_driver::{PARAMS_BYTES, PROBLEM, fill_cache_with, with_fake, with_fake_and};
use flashtune::call::{Call, TensorRef};
use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::dropout::Dropout;
use flashtune::family::heuristic;
use flashtune::kernel::{Executable, Gpu, KernelParams};
use flashtune::plan::key::canonical;
use flashtune::problem::{Features, Problem, Varlen};
use std::ffi::c_void;
use std::mem::offset_of;

/// 2 positions of 4 query heads make 8 rows for each of 2 x 2 K/V heads.
const DECODE: Problem = Problem { seqlen_q: 2, seqlen_k: 4096, ..PROBLEM };
const WORKSPACE: usize = 0xa00000;

fn config(num_splits: u32) -> Config {
    let config = heuristic(&DECODE, &Device::typical(Arch::Sm(9, 0)).unwrap());
    assert_eq!(config.family, Family::Decode);
    config.with("num_splits", num_splits)
}

fn build(config: &Config) -> (Gpu, Executable) {
    build_for(&DECODE, config)
}

fn build_for(problem: &Problem, config: &Config) -> (Gpu, Executable) {
    let folder = tempfile::tempdir().unwrap();
    fill_cache_with(folder.path(), problem, config, "sm_90");
    let gpu = Gpu::new(0, None, Some(folder.path().to_path_buf())).unwrap();
    let executable = gpu.build(problem, config).unwrap();
    (gpu, executable)
}

fn call(problem: Problem) -> Call {
    let of_queries = |address: usize| TensorRef::packed(address as *mut c_void, problem.seqlen_q, 8, 128);
    let of_keys = |address: usize| TensorRef::packed(address as *mut c_void, problem.seqlen_k, 2, 128);
    let inputs = [of_queries(0x10000), of_keys(0x20000), of_keys(0x30000)];
    Call {
        out: of_queries(0x40000),
        workspace: WORKSPACE as *mut c_void,
        ..Call::of_inputs(problem, 0.125, Dropout::NONE, inputs)
    }
}

fn word(params: &[u8; PARAMS_BYTES], offset: usize) -> u64 {
    u64::from_le_bytes(params[offset..offset + 8].try_into().unwrap())
}

#[test]
fn split_keys_leave_partial_states_in_the_workspace_and_a_second_kernel_merges_them() {
    let name = "split_keys_leave_partial_states_in_the_workspace_and_a_second_kernel_merges_them";
    with_fake(name, |fake| {
        let (_gpu, executable) = build(&config(5));
        assert_eq!(executable.kernel_name(), "flashtune_decode");
        executable.launch(&call(DECODE), std::ptr::null_mut()).unwrap();
        let [main, combine] = [0, 1].map(|index| fake.state().launch[index]);
        assert_eq!(fake.state().launches, 2);
        // One tile for each K/V head, with splits across; then one CTA for each of 2 x 8 x 2 query
        // rows.
        assert_eq!((main.grid, combine.grid), ([4, 5, 1], [32, 1, 1]));
        assert!(main.params == combine.params);
        assert_eq!(word(&main.params, offset_of!(KernelParams, partial_o)), WORKSPACE as u64);
        let lse = word(&main.params, offset_of!(KernelParams, partial_lse));
        assert_eq!(lse, (WORKSPACE + 5 * 32 * 128 * 4) as u64);
        assert!(lse + 5 * 32 * 4 <= (WORKSPACE + DECODE.workspace_bytes()) as u64);
        assert_eq!(word(&main.params, offset_of!(KernelParams, num_splits)), 5);
    });
}

#[test]
fn one_split_is_one_kernel_without_a_workspace() {
    with_fake("one_split_is_one_kernel_without_a_workspace", |fake| {
        let (_gpu, executable) = build(&config(1));
        executable.launch(&Call { workspace: std::ptr::null_mut(), ..call(DECODE) }, std::ptr::null_mut()).unwrap();
        let main = fake.state().launch[0];
        assert_eq!((fake.state().launches, main.grid), (1, [4, 1, 1]));
        assert_eq!(word(&main.params, offset_of!(KernelParams, partial_o)), 0);
    });
}

#[test]
fn a_kernel_that_may_split_is_launched_alone_with_one_split() {
    with_fake("a_kernel_that_may_split_is_launched_alone_with_one_split", |fake| {
        let (_gpu, executable) = build(&config(1).with("splittable", 1));
        executable.launch(&call(DECODE), std::ptr::null_mut()).unwrap();
        let main = fake.state().launch[0];
        assert_eq!((fake.state().launches, main.grid), (1, [4, 1, 1]));
        assert_eq!(word(&main.params, offset_of!(KernelParams, num_splits)), 1);
    });
}

#[test]
fn the_callers_limit_of_splits_holds_whatever_the_config_says() {
    with_fake("the_callers_limit_of_splits_holds_whatever_the_config_says", |fake| {
        let (_gpu, executable) = build(&config(5));
        for (most_splits, expected) in [(0, 5), (9, 5), (3, 3)] {
            let before = fake.state().launches as usize;
            executable.launch(&Call { most_splits, ..call(DECODE) }, std::ptr::null_mut()).unwrap();
            let main = fake.state().launch[before];
            assert_eq!((fake.state().launches as usize - before, main.grid), (2, [4, expected, 1]));
            assert_eq!(word(&main.params, offset_of!(KernelParams, num_splits)) as u32, expected);
        }
        // One split stores its result without a second kernel.
        let before = fake.state().launches as usize;
        executable.launch(&Call { most_splits: 1, ..call(DECODE) }, std::ptr::null_mut()).unwrap();
        assert_eq!((fake.state().launches as usize - before, fake.state().launch[before].grid), (1, [4, 1, 1]));
    });
}

#[test]
fn key_map_boxes_are_a_teams_block_or_a_page() {
    let name = "key_map_boxes_are_a_teams_block_or_a_page";
    with_fake_and(name, &[("FAKE_KEY_MAPS", "1")], |fake| {
        let one_split = config(1);
        assert_eq!((one_split.get("tma"), one_split.get("block_n")), (Some(1), Some(16)));
        let launch = |problem: &Problem, call: Call| {
            let (_gpu, executable) = build_for(problem, &one_split);
            let before = fake.state().launches as usize;
            executable.launch(&call, std::ptr::null_mut()).unwrap();
            let [k, v, others @ ..] = fake.state().launch[before].maps;
            assert_eq!(others, [[0; 16]; 2]);
            [k, v]
        };
        // A box of 64 columns and 16 keys. The tensor has 4096 keys, 2 heads and 2 sequences, read
        // in pieces of 128 bytes.
        let [k, v] = launch(&DECODE, call(DECODE));
        assert_eq!(k[..12], [0x20000, 9, 128, 4096, 2, 2, 512, 256, 4096 * 512, 64, 16, 2]);
        assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
        // 9 pages of 64 keys, then pages of 8 keys, of which a block has two.
        for (page_size, box_rows) in [(64, 16), (8, 8)] {
            let paged = Problem { features: Features { paged: Some(page_size), ..Features::NONE }, ..DECODE };
            let of_pages = |address: usize| TensorRef::packed(address as *mut c_void, page_size, 2, 128);
            let mut call = Call { k: of_pages(0x20000), v: of_pages(0x30000), ..call(paged) };
            call.features.num_pages = 9;
            let [k, v] = launch(&paged, call);
            let rows = page_size as u64;
            assert_eq!(k[..12], [0x20000, 9, 128, rows, 2, 9, 512, 256, rows * 512, 64, box_rows, 2]);
            assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
        }
        // Varlen rows are found from their ends, so the map spans 2^30 rows on either side.
        let own = Problem { features: Features { varlen: Some(Varlen::default()), ..Features::NONE }, ..DECODE };
        let [k, v] = launch(&own, call(own));
        assert_eq!(k[..6], [0x20000, 9, 128, 1 << 30, (1 << 30) + 1, 2 * 4096 + 1]);
        assert_eq!(k[6..15], [512, (1 << 34) - 512, 512, 64, 16, 2, 5, 2, 256]);
        assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
        // With 0 pages nothing is loaded, but the driver refuses a map with an extent of 0.
        let paged = Problem { features: Features { paged: Some(64), ..Features::NONE }, ..DECODE };
        let nowhere = TensorRef::packed(3 as *mut c_void, 64, 2, 128);
        assert_eq!(launch(&paged, Call { k: nowhere, v: nowhere, ..call(paged) }).map(|map| map[0]), [0x10000; 2]);
    });
}

#[test]
fn short_problem_gets_fewer_splits_than_the_config_has() {
    let name = "short_problem_gets_fewer_splits_than_the_config_has";
    with_fake(name, |fake| {
        let (_gpu, executable) = build(&config(5));
        // A split has at least 64 keys, and a head gets its share of the splits that all heads may
        // have.
        let short = Problem { seqlen_k: 200, ..DECODE };
        let single = Problem { seqlen_k: 100, ..DECODE };
        assert_eq!((short.max_splits(), single.max_splits(), single.workspace_bytes()), (3, 1, 0));
        executable.launch(&call(short), std::ptr::null_mut()).unwrap();
        executable.launch(&Call { workspace: std::ptr::null_mut(), ..call(single) }, std::ptr::null_mut()).unwrap();
        let grids = [0, 1, 2].map(|index| fake.state().launch[index].grid);
        assert_eq!((fake.state().launches, grids), (3, [[4, 3, 1], [32, 1, 1], [4, 1, 1]]));
        assert_eq!(word(&fake.state().launch[0].params, offset_of!(KernelParams, num_splits)), 3);
    });
}

#[test]
fn batch_invariant_launch_splits_for_the_longest_sequence_and_always_merges() {
    let name = "batch_invariant_launch_splits_for_the_longest_sequence_and_always_merges";
    with_fake(name, |fake| {
        let invariant = Problem { batch_invariant: true, ..DECODE };
        let config = heuristic(&canonical(&invariant), &Device::typical(Arch::Sm(9, 0)).unwrap());
        assert_eq!(config.get("num_splits"), Some(128));
        let (_gpu, executable) = build_for(&invariant, &config);
        // Segments for every batch size: of 1,024 keys up to 2^16, and longer ones beyond.
        let of = |batch_size, seqlen_k| Problem { batch_size, seqlen_k, ..invariant };
        for (index, (problem, splits)) in
            [(of(2, 8192), 8), (of(200, 8192), 8), (of(2, 3071), 3), (of(2, 5), 2), (of(1, 1 << 20), 192)]
                .into_iter()
                .enumerate()
        {
            executable.launch(&call(problem), std::ptr::null_mut()).unwrap();
            let [main, combine] = [0, 1].map(|kernel| fake.state().launch[2 * index + kernel]);
            let (rows, tiles) = (16 * problem.batch_size as u32, 2 * problem.batch_size as u32);
            // The kernel that computes weights ahead takes the launches whose CTAs have an SM each,
            // two for each tile.
            let is_few = 2 * tiles * splits <= 132;
            assert_eq!(is_few, [0, 2, 3].contains(&index));
            let (ctas, threads) = if is_few { (2 * tiles, 256) } else { (tiles, 128) };
            assert_eq!((main.grid, main.block[0], combine.grid), ([ctas, splits, 1], threads, [rows, 1, 1]));
            let lse = word(&main.params, offset_of!(KernelParams, partial_lse));
            // A reference and a sum for each row.
            assert!(lse + u64::from(splits * rows) * 8 <= (WORKSPACE + problem.workspace_bytes()) as u64);
        }
    });
}
