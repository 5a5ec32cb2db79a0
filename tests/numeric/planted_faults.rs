//! Faults that the emulator must report: each is planted in a copy of a template, and a test that
//! passes without it must fail with a certain report.
//!
//! The emulator cannot show faults of memory order. It runs one thread at a time, so fences, the
//! scopes of arrivals, and acquire and release have no effect: it checks fences of the asynchronous
//! proxy alone. Kernels of a stream do not run at the same time. The emulator shows that no thread
//! waits for the kernel before, or that one reads what that wrote before any thread has waited. It
//! shows neither a wait that some threads leave out and others make, nor a `start_next_kernel` that
//! comes too early. It also overlooks a missing barrier where the random order of warps, or another
//! barrier, happens to order the accesses.

mod narrow_keys;
mod turns;

use crate::emulated::{Emulated, shown};
use crate::source_tree::root;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A change of a template, and a word of the report that it must lead to.
struct Fault {
    arch: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    report: &'static str,
}

/// Each fault is one that a kernel's author makes.
const FAULTS: [Fault; 9] = [
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load.cuh",
        from: "barrier_expect(shared.full_v(ring_v.slot), kBytesV)",
        to: "barrier_expect(shared.full_v(ring_v.slot), kBytesV + 16)",
        report: "DEADLOCK",
    },
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "release(shared.empty_v(ring_v.slot));\n                    ring_v.advance();\n                    pack_weights",
        to: "ring_v.advance();\n                    pack_weights",
        report: "DEADLOCK",
    },
    // The wait for V.
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "issue_qk();\n                    wait_full(shared.full_v(ring_v.slot), ring_v.parity);",
        to: "issue_qk();",
        report: "reference",
    },
    // V's slot is free before the product has read it.
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "wgmma_wait<0>();\n                    pin(acc_o);\n                    release",
        to: "pin(acc_o);\n                    release",
        report: "reference",
    },
    Fault {
        arch: "sm_90",
        file: "sm90/forward/store.cuh",
        from: "fence_async_proxy();",
        to: "",
        report: "without a fence",
    },
    Fault {
        arch: "sm_90",
        file: "device/layout/write_boxes.cuh",
        from: "swizzled(lane / 16, lane % 8)",
        to: "swizzled(lane / 16, 0)",
        report: "reference",
    },
    Fault {
        arch: "sm_90",
        file: "device/schedule/tile_slots.cuh",
        from: "return base + nth % kSlots * kTileBytes;",
        to: "return base + nth % kSlots * kTileBytes + (1 << 18);",
        report: "outside of the launch's",
    },
    // The barrier between a block's arrival and its use.
    Fault {
        arch: "sm_80",
        file: "sm80_forward.cu.tera",
        from: "cp_async_wait<kNumStages - 2>();\n            __syncthreads();",
        to: "cp_async_wait<kNumStages - 2>();",
        report: "reference",
    },
    Fault {
        arch: "sm_80",
        file: "sm80_forward.cu.tera",
        from: "cp_async_wait<kNumStages - 2>();",
        to: "",
        report: "reference",
    },
];

/// The cases of the faults below. With a scale of each key consumers read scales beside K.
const IN_REGISTERS: &str = "dtype=bf16 batch=2 heads_q=2 heads_kv=1 seqlen_q=130 seqlen_k=230 head_dim=64 head_dim_v=64 \
     causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 kv_dtype=e4m3 keys_per_scale=0";
const IN_PLACE: &str = "dtype=bf16 batch=2 heads_q=2 heads_kv=1 seqlen_q=130 seqlen_k=230 head_dim=64 head_dim_v=64 \
     causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 kv_dtype=e4m3 keys_per_scale=1";

/// Faults of a producer that converts keys in registers and of consumers that convert Q.
const FAULTS_IN_REGISTERS: [Fault; 5] = [
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load_eight.cuh",
        from: "        fence_async_proxy();\n",
        to: "",
        report: "without a fence",
    },
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load_eight.cuh",
        from: "swizzled(lane % 4 * 2, lane / 4)",
        to: "swizzled(lane % 4 * 2, 0)",
        report: "reference",
    },
    // Rows behind the last key hold NaN.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load_eight.cuh",
        from: "key + chunk.group * 32 < keys.seqlen_k",
        to: "key + chunk.group * 32 < keys.seqlen_k + 8",
        report: "reference",
    },
    // The wait until consumers have read V's slot.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load_eight.cuh",
        from: "barrier_wait(shared.empty_v(ring.slot), ring.parity ^ 1);",
        to: "",
        report: "DEADLOCK",
    },
    // Q is rewritten, and wgmma reads it.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/multiply.cuh",
        from: "fence_async_proxy();\n    warpgroup_barrier(barrier);  // Q is there",
        to: "warpgroup_barrier(barrier);  // Q is there",
        report: "without a fence",
    },
];

/// Faults of a producer that converts keys in shared memory.
const FAULTS_IN_PLACE: [Fault; 6] = [
    Fault {
        arch: "sm_90",
        file: "sm90/forward/convert_in_place.cuh",
        from: "        fence_async_proxy();\n",
        to: "",
        report: "without a fence",
    },
    // The lane's bytes lie in another chunk of the row.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/convert_in_place.cuh",
        from: "swizzled(lane % kLanes, row % 8)",
        to: "swizzled(lane % kLanes, 0)",
        report: "reference",
    },
    // A lane overwrites bytes that another has not read.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/convert_in_place.cuh",
        from: "            __syncwarp();  // bytes are read",
        to: "            // bytes are read",
        report: "reference",
    },
    // The wait for the bytes of V.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/convert_in_place.cuh",
        from: "barrier_wait(shared.bytes_v(ring_v.slot), ring_v.parity);",
        to: "",
        report: "DEADLOCK",
    },
    // The wait until consumers have read K's slot.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/convert_in_place.cuh",
        from: "barrier_wait_as_warp(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);",
        to: "",
        report: "DEADLOCK",
    },
    // One warp releases K's slot before the others have read the scales beside it.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/shared.cuh",
        from: "constexpr bool kWarpsReleaseK = kHasBlockMask || kHasSlotScales || kHasKeyFactors;",
        to: "constexpr bool kWarpsReleaseK = kHasBlockMask;",
        report: "used (right)",
    },
];

/// Queries, keys and values in e4m3. The test takes a config whose V is transposed before.
const IN_IMAGES: &str = "dtype=bf16 batch=1 heads_q=2 heads_kv=1 seqlen_q=130 seqlen_k=700 head_dim=128 head_dim_v=128 \
     causal=None scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 kv_dtype=e4m3 keys_per_scale=0 fp8_q=true";

/// Faults between the kernel that transposes V, the loads of its images and the products.
const FAULTS_OF_IMAGES: [Fault; 6] = [
    // The wait for the kernel that writes the images.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/load.cuh",
        from: "if constexpr (kReadsImages) wait_for_previous_kernel();",
        to: "",
        report: "no thread has waited for the kernel before",
    },
    // A copy brings fewer bytes than its barrier expects.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/load.cuh",
        from: "image, kImageBytes, shared.full_vt",
        to: "image, kImageBytes - 16, shared.full_vt",
        report: "16 bytes missing",
    },
    // The arrivals of warps that transpose.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/shared.cuh",
        from: "kReadsImages ? 1 : kTransposers",
        to: "kTransposers",
        report: "DEADLOCK",
    },
    // The wait until consumers have read the slot.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/load.cuh",
        from: "barrier_wait_as_warp(shared.empty_vt(ring_v.slot), ring_v.parity ^ 1);",
        to: "",
        report: "DEADLOCK",
    },
    // The wait for an image.
    Fault {
        arch: "sm_90",
        file: "sm90_forward_fp8.cu.tera",
        from: "barrier_wait(shared.full_vt(ring_v.slot), ring_v.parity);",
        to: "",
        report: "DEADLOCK",
    },
    // A split's images begin at its own first block.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/load.cuh",
        from: "int64(end) * kImageBytes",
        to: "int64(tile.blocks) * kImageBytes",
        report: "num_splits=2",
    },
];

/// Three tiles of three consumers in e4m3, which take turns. Two consumers of the last tile have no
/// rows.
const IN_TURNS: &str = "dtype=bf16 batch=1 heads_q=2 heads_kv=1 seqlen_q=450 seqlen_k=300 head_dim=128 head_dim_v=128 \
     causal=None scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 kv_dtype=e4m3 keys_per_scale=0 fp8_q=true";

/// Faults of the store of O by TMA.
const FAULTS_OF_O: [Fault; 4] = [
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/store.cuh",
        from: "    fence_async_proxy_of_all();\n",
        to: "",
        report: "without a fence",
    },
    // The wait until an earlier O has left the slot.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/store.cuh",
        from: "    if (thread == 0) bulk_wait_read();\n",
        to: "",
        report: "the reference",
    },
    // The other warps' wait for it.
    Fault {
        arch: "sm_90",
        file: "sm90/forward_fp8/store.cuh",
        from: "    warpgroup_barrier(barrier);  // the O of an earlier tile has left the slot\n",
        to: "",
        report: "without a fence",
    },
    // The wait for the last O.
    Fault {
        arch: "sm_90",
        file: "sm90_forward_fp8.cu.tera",
        from: "if (kStoresByTma && arrives) bulk_wait_read();",
        to: "",
        report: "the thread exits before TMA has read what it stores",
    },
];

/// A team of four warps shares V's columns and Q K^T. The keys have two segments.
const DECODED_SEGMENTS: &str = "dtype=bf16 batch=1 heads_q=4 heads_kv=1 seqlen_q=1 seqlen_k=1300 head_dim=128 head_dim_v=128 \
     causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 batch_invariant=true";

/// Faults of the exchange of scores between a team's warps, and of the merge of segments.
const FAULTS_OF_DECODED_SEGMENTS: [Fault; 5] = [
    // The team meets between its writes and reads of scores.
    Fault {
        arch: "sm_90",
        file: "decode/shared_scores.cuh",
        from: "sync_team<kTeamWarps>(place.team);",
        to: "",
        report: "the reference",
    },
    // The team meets before the tiles and scores of the block before are overwritten.
    Fault {
        arch: "sm_90",
        file: "decode/keys_tma.cuh",
        from: "sync_team<kTeamWarps>(place.team);\n        load",
        to: "load",
        report: "the reference",
    },
    // Warps write to one place.
    Fault {
        arch: "sm_90",
        file: "decode/shared_scores.cuh",
        from: "store_floats(at(m, first + n), own[m][n])",
        to: "store_floats(at(m, n), own[m][n])",
        report: "used (right)",
    },
    // Each warp multiplies by the first keys.
    Fault {
        arch: "sm_90",
        file: "decode/shared_scores.cuh",
        from: "TileK::part(tile_k, first * 8, 0)",
        to: "tile_k",
        report: "the reference",
    },
    // One lane alone waits for the states of segments.
    Fault {
        arch: "sm_90",
        file: "combine_segments.cu.tera",
        from: "    wait_for_previous_kernel();",
        to: "    if (threadIdx.x == 31) wait_for_previous_kernel();",
        report: "used (right)",
    },
];

/// Two consumers, each of whose merged O is in pieces. The keys have two segments.
const PIECES: &str = "dtype=bf16 batch=1 heads_q=1 heads_kv=1 seqlen_q=70 seqlen_k=1200 head_dim=192 head_dim_v=192 \
     causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 batch_invariant=true";

/// Faults of the merged O of a batch-invariant tile.
const FAULTS_OF_PIECES: [Fault; 5] = [
    // Consumers share one place.
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "shared.merged + consumer * kBytesMerged",
        to: "shared.merged",
        report: "the reference",
    },
    // A thread's piece is another thread's, too.
    Fault {
        arch: "sm_90",
        file: "device/attention/fixed_order.cuh",
        from: "kStride = 128 * 16",
        to: "kStride = 64 * 16",
        report: "the reference",
    },
    // The pieces reach into the barriers.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/shared.cuh",
        from: "scales = merged + kConsumers * kBytesMerged",
        to: "scales = merged + kBytesMerged",
        report: "has been overwritten",
    },
    // A piece is loaded from another memory than it was stored to.
    Fault {
        arch: "sm_90",
        file: "device/attention/fixed_order.cuh",
        from: "if (n < kShared) {",
        to: "if (n <= kShared) {",
        report: "is NaN, the reference",
    },
    // The first segment is forgotten.
    Fault {
        arch: "sm_90",
        file: "device/attention/fixed_order.cuh",
        from: "is_first = false;",
        to: "",
        report: "the reference",
    },
];

/// Faults of the kernel whose warps compute weights ahead of P V.
const FAULTS_OF_WEIGHTS_AHEAD: [Fault; 3] = [
    // The multiplying warps do not release a slot.
    Fault {
        arch: "sm_90",
        file: "decode/ahead/weights.cuh",
        from: "if (lane == 0) barrier_arrive(memory.empty_weights(ring.slot));",
        to: "",
        report: "DEADLOCK",
    },
    // References do not pass from block to block.
    Fault {
        arch: "sm_90",
        file: "decode_ahead.cu.tera",
        from: "if (!is_first) take_references(rows.reference, memory, before, place.lane);",
        to: "",
        report: "reference",
    },
    // The wait for a block's weights.
    Fault {
        arch: "sm_90",
        file: "decode/ahead/weights.cuh",
        from: "barrier_wait(memory.full_weights(ring.slot), ring.parity);",
        to: "",
        report: "DEADLOCK",
    },
];

/// Three tiles of keys in one CTA, the last of which has no keys for the second consumer. The last
/// block has more rows than a narrower one.
const ENDS: &str = "dtype=bf16 batch=1 heads_q=2 heads_kv=2 seqlen_q=170 seqlen_k=296 head_dim=128 head_dim_v=128 \
                    causal=None scale=0.125 dropout=0 deterministic=false strides=Bshd seed=3";
const FAULTS_OF_ENDS: [Fault; 4] = [
    Fault {
        arch: "sm_90",
        file: "sm90_backward.cu.tera",
        from: "if (lane == 0) barrier_arrive(smem.full_ds(ring_ds.slot));\n        dq_place",
        to: "dq_place",
        report: "DEADLOCK",
    },
    // The wait for dP, behind which dV is queued.
    Fault {
        arch: "sm_90",
        file: "sm90_backward.cu.tera",
        from: "wgmma_wait<kQueuesDv ? 1 : 0>",
        to: "wgmma_wait<kQueuesDv ? 2 : 0>",
        report: "reference",
    },
    // The last rows do not fit the narrower block.
    Fault {
        arch: "sm_90",
        file: "sm90/backward/query_blocks.cuh",
        from: "walk.block * kBlockM + kTailRows >=",
        to: "walk.block * kBlockM + kBlockM >=",
        report: "reference",
    },
    // K of a later tile is never loaded.
    Fault {
        arch: "sm_90",
        file: "sm90/backward/load.cuh",
        from: "kLoadsKLast && !is_first &&",
        to: "kLoadsKLast && is_first &&",
        report: "DEADLOCK",
    },
];

const ONE_PROBLEM: &str = "tiny::gpu_is_right_forward_on_one_tiny_problem";

#[test]
fn planted_faults_are_reported() {
    are_reported(&FAULTS, ONE_PROBLEM, None);
}

#[test]
fn planted_faults_of_converted_keys_are_reported() {
    are_reported(&FAULTS_IN_REGISTERS, ONE_PROBLEM, Some(IN_REGISTERS));
    // Where no lane lags, bytes are there before they are waited for.
    are_reported_with(&["--sms", "1", "--lags"], &FAULTS_IN_PLACE, ONE_PROBLEM, Some(IN_PLACE));
}

#[test]
fn planted_faults_of_images_of_v_are_reported() {
    const TEST: &str = "tiny::gpu_is_right_on_tiny_problems_whose_v_is_transposed_before";
    are_reported(&FAULTS_OF_IMAGES, TEST, Some(IN_IMAGES));
}

#[test]
fn planted_faults_of_the_store_of_o_are_reported() {
    are_reported(&FAULTS_OF_O, ONE_PROBLEM, Some(IN_TURNS));
}

#[test]
fn planted_faults_of_decoded_segments_are_reported() {
    are_reported(&FAULTS_OF_DECODED_SEGMENTS, ONE_PROBLEM, Some(DECODED_SEGMENTS));
}

#[test]
fn planted_faults_of_weights_ahead_are_reported() {
    // Each CTA has an SM, so the launch takes that kernel.
    are_reported_with(&["--sms", "8"], &FAULTS_OF_WEIGHTS_AHEAD, ONE_PROBLEM, Some(DECODED_SEGMENTS));
}

#[test]
fn planted_faults_of_a_merged_o_are_reported() {
    are_reported(&FAULTS_OF_PIECES, ONE_PROBLEM, Some(PIECES));
}

#[test]
fn planted_faults_of_last_keys_and_rows_are_reported() {
    const TEST: &str = "tiny::gpu_is_right_backward_on_tiny_problems_of_few_keys";
    are_reported(&FAULTS_OF_ENDS, TEST, Some(ENDS));
}

fn are_reported(faults: &[Fault], test: &str, case: Option<&str>) {
    are_reported_with(&["--sms", "1"], faults, test, case);
}

fn are_reported_with(emulator: &[&str], faults: &[Fault], test: &str, case: Option<&str>) {
    let folder = tempfile::tempdir().unwrap();
    let run = |arch: &str| {
        let options = [&["--arch", arch, "--templates", folder.path().to_str().unwrap()], emulator].concat();
        Emulated { options: &options, test, case }.output()
    };
    for arch in faults.iter().map(|fault| fault.arch).collect::<BTreeSet<_>>() {
        let Some(output) = run(arch) else { return };
        assert!(output.status.success(), "{arch} without a fault: {}", shown(&output));
    }
    for fault in faults {
        let file = plant(fault, folder.path());
        let output = run(fault.arch).expect("the run before had an emulator");
        let text = shown(&output);
        let is_reported = !output.status.success() && text.contains(fault.report);
        assert!(is_reported, "{}, {:?} without {:?}: {text}", fault.file, fault.from, fault.report);
        std::fs::remove_file(file).unwrap();
    }
}

/// Writes the file with the fault into `folder`.
fn plant(fault: &Fault, folder: &Path) -> PathBuf {
    let text = std::fs::read_to_string(root().join("templates").join(fault.file)).expect("a template");
    assert!(text.contains(fault.from), "{} has no {:?}", fault.file, fault.from);
    let file = folder.join(fault.file);
    std::fs::create_dir_all(file.parent().expect("a folder")).unwrap();
    std::fs::write(&file, text.replacen(fault.from, fault.to, 1)).unwrap();
    file
}
