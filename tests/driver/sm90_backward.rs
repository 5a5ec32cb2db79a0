//! The same of sm90's backward pass as `sm90` shows of the forward one: the maps and the counter of
//! a launch, and the arrays in its workspace.

use crate::fake_driver::{PROBLEM, with_fake_and};
use crate::sm90::{CAUSAL, FULL, build_from_cache, call};
use flashtune::call::{Call, TensorRef};
use flashtune::config::{Config, Family};
use flashtune::kernel::{Executable, Gpu, KernelParams};
use flashtune::problem::{Pass, Problem};
use std::ffi::c_void;

const BACKWARD: Problem = Problem { pass: Pass::Backward, causal: FULL, ..PROBLEM };
/// The registers of a launch with three warpgroups, two of which compute.
const THREE_WARPGROUPS: (&str, &str) = ("FAKE_REGISTERS", "168");

fn build_backward(problem: &Problem) -> (Gpu, Executable) {
    build_split_backward(problem, 0)
}

fn build_split_backward(problem: &Problem, split_waves: u32) -> (Gpu, Executable) {
    let (block_m, block_n, num_stages) = match problem.head_dim.max(problem.head_dim_v) {
        ..=128 => (80, 128, 2),
        129..=192 => (64, 96, 2),
        _ => (48, 128, 1),
    };
    let tile = [("block_m", block_m), ("block_n", block_n), ("num_stages", num_stages)];
    let flow = [
        ("kv_stages", 1),
        ("group_mb", 16),
        ("sink_softmax", 0),
        ("v_regs", 0),
        ("split_waves", split_waves),
        ("splits_rest", 0),
        ("direct_dq", 0),
    ];
    let (gpu, executable) = build_from_cache(problem, &Config::new(Family::Sm90, tile.into_iter().chain(flow)));
    (gpu, executable.unwrap())
}

fn backward_call() -> Call {
    let of_queries = |address: usize| TensorRef::packed(address as *mut c_void, 300, 8, 128);
    let of_keys = |address: usize| TensorRef::packed(address as *mut c_void, 400, 2, 128);
    Call {
        problem: BACKWARD,
        k: of_keys(0x20000),
        v: of_keys(0x30000),
        dout: of_queries(0x60000),
        dq: of_queries(0x70000),
        dk: of_keys(0x80000),
        dv: of_keys(0x90000),
        ..call()
    }
}

#[test]
fn a_backward_launch_passes_four_maps_between_the_kernels_that_take_none() {
    let name = "a_backward_launch_passes_four_maps_between_the_kernels_that_take_none";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let (_gpu, executable) = build_backward(&BACKWARD);
        assert_eq!(executable.kernel_name(), "flashtune_sm90_backward");
        executable.launch(&backward_call(), 0x77 as *mut c_void).unwrap();
        let [delta, main, convert] = [0, 1, 2].map(|index| fake.state().launch[index]);
        assert_eq!((fake.state().launches, delta.maps, convert.maps), (3, [[0; 16]; 4], [[0; 16]; 4]));
        // The first launch waits for all earlier work of the stream.
        assert_eq!([delta, main, convert].map(|launch| launch.overlaps), [0, 1, 1]);
        // Delta and convert have 64 and 32 query rows a CTA for each of 16 heads; main has tiles of
        // 128 keys for each of 4.
        assert_eq!((delta.grid, delta.block), ([80, 1, 1], [128, 1, 1]));
        assert_eq!((main.grid, main.block), ([16, 1, 1], [384, 1, 1]));
        // A head's last tile has 16 keys and costs less, so tiles are drawn.
        assert_ne!(main.counter, 0);
        assert_eq!((convert.grid, convert.block), ([160, 1, 1], [64, 1, 1]));
        // K and V, two stages of Q, dO and their statistics, two buffers of dS; alignment and
        // barriers.
        assert_eq!(main.smem_bytes, 2 * 32768 + 2 * (2 * 20480 + 640) + 2 * 20480 + 2048);
        let [q, k, v, dout] = main.maps;
        assert_eq!(q[..11], [0x10000, 9, 128, 300, 8, 2, 2048, 256, 300 * 2048, 64, 80]);
        assert_eq!(k[..11], [0x20000, 9, 128, 400, 2, 2, 512, 256, 400 * 512, 64, 128]);
        assert_eq!((v[0], &v[1..]), (0x30000, &k[1..]));
        assert_eq!((dout[0], &dout[1..]), (0x60000, &q[1..]));
    });
}

#[test]
fn kernels_do_not_overlap_with_drivers_that_cannot_capture_it() {
    let name = "kernels_do_not_overlap_with_drivers_that_cannot_capture_it";
    with_fake_and(name, &[THREE_WARPGROUPS, ("FAKE_DRIVER_VERSION", "12020")], |fake| {
        let (_gpu, executable) = build_backward(&BACKWARD);
        executable.launch(&backward_call(), std::ptr::null_mut()).unwrap();
        assert_eq!([0, 1, 2].map(|index| fake.state().launch[index].overlaps), [0; 3]);
    });
}

#[test]
fn backward_launch_has_a_persistent_grid_and_a_counter_if_tiles_differ() {
    let name = "backward_launch_has_a_persistent_grid_and_a_counter_if_tiles_differ";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let (_gpu, executable) = build_backward(&Problem { causal: CAUSAL, ..BACKWARD });
        let mut many = backward_call();
        (many.problem.causal, many.problem.batch_size) = (CAUSAL, 100);
        executable.launch(&many, 0x77 as *mut c_void).unwrap();
        let main = fake.state().launch[1];
        assert_eq!(main.grid, [132, 1, 1]);
        assert_ne!(main.counter, 0);
    });
}

#[test]
fn tiles_that_share_a_walk_leave_partial_gradients_behind_dq() {
    let name = "tiles_that_share_a_walk_leave_partial_gradients_behind_dq";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let (_gpu, executable) = build_split_backward(&BACKWARD, 1);
        let launch = |problem: Problem| {
            executable
                .launch(&Call { problem, workspace: 0x1000000 as *mut c_void, ..backward_call() }, std::ptr::null_mut())
                .unwrap();
            let [main, convert] = [2, 1].map(|back| fake.state().launch[fake.state().launches as usize - back]);
            let (partial, splits) =
                (std::mem::offset_of!(KernelParams, partial_o), std::mem::offset_of!(KernelParams, num_splits));
            let partial = u64::from_ne_bytes(main.params[partial..partial + 8].try_into().unwrap());
            let splits = u32::from_ne_bytes(main.params[splits..splits + 4].try_into().unwrap());
            (main.grid[0], splits, partial, convert.grid[0])
        };
        // One wave of 132 SMs over 16 tiles. The conversion does 32 rows of Q of 16 heads, and of
        // each of 4 K/V heads 32 keys and 32 of 128 columns, of dK and of dV.
        let behind = 0x1000000 + BACKWARD.partials_offset() as u64;
        assert_eq!(launch(BACKWARD), (8 * 16, 8, behind, 10 * 16 + 13 * 4 * 8));
        // Tiles for more than a wave are not split, whatever the config says.
        let (grid, splits, partial, _) = launch(Problem { batch_size: 100, ..BACKWARD });
        assert_eq!((grid, splits, partial), (132, 1, 0));
    });
}

#[test]
fn deterministic_launch_keeps_its_counters_behind_dq() {
    let name = "deterministic_launch_keeps_its_counters_behind_dq";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let dq_order_and_counter = |deterministic| {
            let problem = Problem { causal: CAUSAL, deterministic, ..BACKWARD };
            let (_gpu, executable) = build_backward(&problem);
            let call = Call { problem, workspace: 0x1000000 as *mut c_void, ..backward_call() };
            let main = {
                executable.launch(&call, 0x77 as *mut c_void).unwrap();
                fake.state().launch[fake.state().launches as usize - 2]
            };
            let turns = std::mem::offset_of!(KernelParams, turns);
            (u64::from_ne_bytes(main.params[turns..turns + 8].try_into().unwrap()), main.counter)
        };
        let end = 0x1000000 + Problem { deterministic: true, ..BACKWARD }.partials_offset() as u64;
        // The tickets, and for each of 16 heads the tiles of 8 of 416 rows, in whole 16 bytes. The
        // stream's tile counter is not used.
        assert_eq!(dq_order_and_counter(true), (end - 16 * (1u64 + 16 * 52).div_ceil(4), 0));
        let (turns, counter) = dq_order_and_counter(false);
        assert_eq!(turns, 0);
        assert_ne!(counter, 0);
    });
}

#[test]
fn wide_backward_launches_pairs_of_ctas_that_load_half_the_keys_each() {
    let name = "wide_backward_launches_pairs_of_ctas_that_load_half_the_keys_each";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let wide = Problem { head_dim: 256, head_dim_v: 192, ..BACKWARD };
        let (_gpu, executable) = build_backward(&wide);
        let call = |batch_size| Call { problem: Problem { batch_size, ..wide }, ..backward_call() };
        executable.launch(&call(2), 0x77 as *mut c_void).unwrap();
        let main = fake.state().launch[1];
        assert_eq!((main.grid, main.block), ([32, 1, 1], [512, 1, 1]));
        // K and V of 64 keys, half of the other CTA's K, two stages of Q, one of dO, P or dS and
        // the other CTA's dS twice, statistics; alignment and barriers.
        assert_eq!(main.smem_bytes, 32768 + 24576 + 16384 + 2 * 24576 + 18432 + 4 * 6144 + 3 * 192 + 2048);
        assert_eq!([0, 1, 2, 3].map(|map| main.maps[map][10]), [48, 64, 64, 48]);
        executable.launch(&call(100), 0x77 as *mut c_void).unwrap();
        assert_eq!(fake.state().launch[4].grid, [132, 1, 1]);
    });
}

#[test]
fn backward_launch_with_three_64_column_boxes_loads_96_keys_a_tile() {
    let name = "backward_launch_with_three_64_column_boxes_loads_96_keys_a_tile";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let middle = Problem { head_dim: 192, head_dim_v: 128, ..BACKWARD };
        let (_gpu, executable) = build_backward(&middle);
        executable.launch(&Call { problem: middle, ..backward_call() }, 0x77 as *mut c_void).unwrap();
        let main = fake.state().launch[1];
        assert_eq!((main.grid, main.block), ([20, 1, 1], [384, 1, 1]));
        // K and V, two stages of Q and of dO, one P and two dS for both consumers, their dQ before
        // its store, statistics; alignment and barriers.
        assert_eq!(main.smem_bytes, 36864 + 24576 + 2 * 24576 + 2 * 16384 + 3 * 16384 + 32768 + 4 * 256 + 2048);
        assert_eq!([0, 1, 2, 3].map(|map| main.maps[map][10]), [64, 96, 96, 64]);
    });
}

#[test]
fn backward_launch_without_queries_or_keys_gives_maps_that_the_driver_accepts() {
    let name = "backward_launch_without_queries_or_keys_gives_maps_that_the_driver_accepts";
    with_fake_and(name, &[THREE_WARPGROUPS], |fake| {
        let (_gpu, executable) = build_backward(&BACKWARD);
        let nowhere = TensorRef { data: std::ptr::null_mut(), stride_batch: 1, stride_seqlen: 1, stride_head: 1 };
        let mut no_queries = backward_call();
        no_queries.problem.seqlen_q = 0;
        (no_queries.q, no_queries.dout) = (nowhere, nowhere);
        executable.launch(&no_queries, 0x77 as *mut c_void).unwrap();
        // The kernel still has to zero dK and dV, and dQ has no rows.
        assert_eq!((fake.state().launches, fake.state().launch[0].block), (1, [384, 1, 1]));
        let mut no_keys = backward_call();
        no_keys.problem.seqlen_k = 0;
        (no_keys.k, no_keys.v) = (nowhere, nowhere);
        executable.launch(&no_keys, 0x77 as *mut c_void).unwrap();
        assert_eq!((fake.state().launches, fake.state().launch[2].block), (3, [64, 1, 1]));
    });
}
