//! The memory that a prepared launch on a CPU context allocates: buffers for the products of a
//! tile, and nothing that grows with the problem. This test is a program of its own because its
//! allocator counts.

use flashtune::capi::backward::{flashtune_backward, flashtune_backward_workspace_size};
use flashtune::capi::context::{
    FLASHTUNE_BACKEND_CPU, flashtune_context, flashtune_context_create, flashtune_context_destroy,
    flashtune_context_options,
};
use flashtune::capi::forward::flashtune_forward;
use flashtune::capi::types::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_void;
use std::mem::{size_of, zeroed};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator and only records sizes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps GlobalAlloc's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The largest allocation of the quietest of several launches, because the harness's threads
/// allocate too.
fn largest_of(launch: impl Fn() -> i32) -> usize {
    let of_one = || {
        LARGEST.store(0, Ordering::Relaxed);
        assert_eq!(launch(), 0);
        LARGEST.load(Ordering::Relaxed)
    };
    (0..8).map(|_| of_one()).min().unwrap()
}

#[test]
fn launch_allocations_do_not_grow_with_the_blocks_of_a_block_mask() {
    // A counter for each block of a row would show in the longer sequence, and a byte for each
    // block of all rows even more.
    assert_eq!(largest_allocations(65_536), largest_allocations(1024));
}

/// The forward and the backward pass of one head, whose block mask lists the diagonal's blocks.
fn largest_allocations(seqlen: usize) -> (usize, usize) {
    const DIM: usize = 16;
    // The lists of a diagonal are their own transpose.
    let (counts, indices) = (vec![1; seqlen / 16], (0..seqlen as i32 / 16).collect::<Vec<i32>>());
    let block_mask = flashtune_block_mask {
        block_q: 16,
        block_k: 16,
        num_blocks: counts.as_ptr(),
        indices: indices.as_ptr(),
        full_num_blocks: std::ptr::null(),
        full_indices: std::ptr::null(),
        num_blocks_stride_batch: 0,
        num_blocks_stride_head: 0,
        indices_stride_batch: 0,
        indices_stride_head: 0,
        indices_stride_row: 1,
        max_blocks: 1,
    };
    let mut tensors = [(); 8].map(|()| vec![0f32; seqlen * DIM]);
    let [q, k, v, out, dout, dq, dk, dv] = tensors.each_mut().map(|tensor| flashtune_tensor {
        data: tensor.as_mut_ptr().cast(),
        stride_batch: 0,
        stride_seqlen: DIM as i64,
        stride_head: DIM as i64,
    });
    let read = |of: flashtune_tensor| flashtune_const_tensor {
        data: of.data,
        stride_batch: of.stride_batch,
        stride_seqlen: of.stride_seqlen,
        stride_head: of.stride_head,
    };
    let [q, k, v, dout] = [q, k, v, dout].map(read);
    let mut lse = vec![0f32; seqlen];
    // SAFETY: the header asks the caller to start from zeros.
    let mut forward: flashtune_forward_params = unsafe { zeroed() };
    forward.struct_size = size_of::<flashtune_forward_params>() as u64;
    forward.dtype = FLASHTUNE_DTYPE_FP32;
    (forward.batch_size, forward.num_heads_q, forward.num_heads_kv) = (1, 1, 1);
    (forward.seqlen_q, forward.seqlen_k) = (seqlen as i64, seqlen as i64);
    (forward.head_dim, forward.head_dim_v) = (DIM as i64, DIM as i64);
    (forward.q, forward.k, forward.v, forward.out, forward.lse) = (q, k, v, out, lse.as_mut_ptr());
    (forward.features, forward.block_mask) = (FLASHTUNE_FEATURE_BLOCK_MASK, block_mask);
    // SAFETY: as above.
    let mut backward: flashtune_backward_params = unsafe { zeroed() };
    backward.struct_size = size_of::<flashtune_backward_params>() as u64;
    backward.dtype = FLASHTUNE_DTYPE_FP32;
    (backward.batch_size, backward.num_heads_q, backward.num_heads_kv) = (1, 1, 1);
    (backward.seqlen_q, backward.seqlen_k) = (seqlen as i64, seqlen as i64);
    (backward.head_dim, backward.head_dim_v) = (DIM as i64, DIM as i64);
    (backward.q, backward.k, backward.v, backward.out, backward.lse) = (q, k, v, read(out), lse.as_ptr());
    (backward.dout, backward.dq, backward.dk, backward.dv) = (dout, dq, dk, dv);
    (backward.features, backward.block_mask) = (FLASHTUNE_FEATURE_BLOCK_MASK, block_mask);

    // SAFETY: as above.
    let mut options: flashtune_context_options = unsafe { zeroed() };
    options.struct_size = size_of::<flashtune_context_options>() as u64;
    (options.backend, options.num_threads, options.cache_dir) = (FLASHTUNE_BACKEND_CPU, 2, c"".as_ptr());
    let mut context: *mut flashtune_context = std::ptr::null_mut();
    // SAFETY: the structs have their declared sizes, and the tensors have these shapes and outlive
    // the calls. The same holds for the calls below.
    assert_eq!(unsafe { flashtune_context_create(&options, &mut context) }, 0);
    let mut bytes = 0;
    // SAFETY: as above.
    assert_eq!(unsafe { flashtune_backward_workspace_size(context, &backward, &mut bytes) }, 0);
    let mut workspace = vec![0u8; bytes as usize + 256];
    let at = workspace.as_ptr().align_offset(256);
    let workspace: *mut c_void = workspace[at..].as_mut_ptr().cast();
    // SAFETY: as above.
    let forward_bytes =
        largest_of(|| unsafe { flashtune_forward(context, &forward, workspace, 0, std::ptr::null_mut()) });
    // SAFETY: as above.
    let backward_bytes =
        largest_of(|| unsafe { flashtune_backward(context, &backward, workspace, bytes, std::ptr::null_mut()) });
    // SAFETY: the context is not used afterwards.
    assert_eq!(unsafe { flashtune_context_destroy(context) }, 0);
    (forward_bytes, backward_bytes)
}
