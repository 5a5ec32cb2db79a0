//! Planted faults of kernels over 8 bits and int4: between the widening kernel and sm90's, and
//! among heads that share copies in decode.

use super::{Fault, ONE_PROBLEM, are_reported};

/// Keys of 8 bits with scales of their own, which a kernel widens.
const WIDENED: &str = "dtype=bf16 batch=1 heads_q=2 heads_kv=1 seqlen_q=200 seqlen_k=1100 head_dim=64 head_dim_v=64 \
     causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9 kv_dtype=e4m3 keys_per_scale=1";

const NO_WAIT_FOR_WIDENED: Fault = Fault {
    arch: "sm_90",
    file: "sm90_forward.cu.tera",
    from: "if constexpr (kReadsWidened && kDecodeRows == 0) wait_for_previous_kernel();",
    to: "",
    report: "no thread has waited for the kernel before",
};

/// Faults between the widening kernel and sm90's.
const FAULTS_OF_WIDENED_KEYS: [Fault; 2] = [
    NO_WAIT_FOR_WIDENED,
    // Consumers read the factors of another block.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/load.cuh",
        from: "factors + block * kBlockN",
        to: "factors",
        report: "the reference",
    },
];

/// The same of int4, whose groups of columns have scales of their own.
const WIDENED_INT4: &str = "dtype=bf16 batch=1 heads_q=4 heads_kv=1 seqlen_q=130 seqlen_k=1100 head_dim=64 \
     head_dim_v=64 causal=BottomRight scale=0.125 dropout=0 deterministic=false strides=Bshd seed=17 kv_dtype=int4g32";
const FAULTS_OF_WIDENED_INT4: [Fault; 2] = [
    NO_WAIT_FOR_WIDENED,
    // All columns have the first group's scale and zero.
    Fault {
        arch: "sm_90",
        file: "sm90_widen_kv.cu.tera",
        from: "row + kCols / 4 + chunk * 8 / kGroup * 2",
        to: "row + kCols / 4",
        report: "the reference",
    },
];

/// Eight heads of int4, whose keys TMA copies together: more blocks than warps take turns in
/// loading.
const SHARED_HEADS: &str = "dtype=bf16 batch=1 heads_q=8 heads_kv=8 seqlen_q=1 seqlen_k=700 head_dim=64 head_dim_v=64 \
     causal=None scale=0.125 dropout=0 deterministic=false strides=Bshd seed=7 kv_dtype=int4g32";
const FAULTS_OF_SHARED_HEADS: [Fault; 3] = [
    // The wait for the warps that still read the slot's block.
    Fault {
        arch: "sm_90",
        file: "decode/keys_heads_tma.cuh",
        from: "if constexpr (kWaits) barrier_wait(empty(slot), parity_of_empty);",
        to: "",
        report: "reference",
    },
    // The wait for the block. Warps then run ahead of the copies that they start.
    Fault {
        arch: "sm_90",
        file: "decode/keys_heads_tma.cuh",
        from: "        barrier_wait(full(stage), parity);\n",
        to: "",
        report: "DEADLOCK",
    },
    // The arrival of a warp that has read its head's keys.
    Fault {
        arch: "sm_90",
        file: "decode/keys_heads_tma.cuh",
        from: "if (place.lane == 0) barrier_arrive(empty(stage));",
        to: "",
        report: "DEADLOCK",
    },
];

/// The same wait where a ring has more than two stages, as that test has them.
const FAULT_OF_LATE_REFILLS: Fault = Fault {
    arch: "sm_90",
    file: "decode/keys_heads_tma.cuh",
    from: "barrier_wait(empty(slot), parity ^ (stage == 0 ? 1 : 0));",
    to: "",
    report: "reference",
};

#[test]
fn planted_faults_of_shared_heads_are_reported() {
    are_reported(&FAULTS_OF_SHARED_HEADS, ONE_PROBLEM, Some(SHARED_HEADS));
    const OF_STAGES: &str = "tiny::gpu_is_right_on_tiny_problems_of_int4_whose_heads_share_copies";
    are_reported(&[FAULT_OF_LATE_REFILLS], OF_STAGES, Some(SHARED_HEADS));
}

#[test]
fn planted_faults_of_widened_keys_are_reported() {
    const TEST: &str = "tiny::gpu_is_right_on_tiny_problems_whose_keys_are_widened_before";
    are_reported(&FAULTS_OF_WIDENED_KEYS, TEST, Some(WIDENED));
}

#[test]
fn planted_faults_of_widened_int4_are_reported() {
    const TEST: &str = "tiny::gpu_is_right_on_tiny_prompts_whose_int4_keys_are_widened_before";
    are_reported(&FAULTS_OF_WIDENED_INT4, TEST, Some(WIDENED_INT4));
}
