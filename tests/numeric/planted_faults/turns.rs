//! Planted faults of the turns in which consumer warpgroups issue products.

use super::{Fault, IN_TURNS, ONE_PROBLEM, are_reported};

/// Faults of the turns of e4m3.
const FAULTS_OF_E4M3: [Fault; 3] = [
    // The first turn of all.
    Fault {
        arch: "sm_90",
        file: "sm90/consumer_turns.cuh",
        from: "if (consumer == kConsumers - 1) pass();",
        to: "",
        report: "DEADLOCK",
    },
    // The turns of blocks that a consumer skips.
    Fault {
        arch: "sm_90",
        file: "sm90_forward_fp8.cu.tera",
        from: "turns.take(), turns.pass();",
        to: "",
        report: "DEADLOCK",
    },
    // The turn of a tile's last P V.
    Fault {
        arch: "sm_90",
        file: "sm90_forward_fp8.cu.tera",
        from: "wgmma_wait<1>();\n                    turns.pass();",
        to: "wgmma_wait<1>();",
        report: "DEADLOCK",
    },
];

/// Two tiles of four consumers of 16 bits, which take turns. One consumer of the last tile has no
/// rows.
const OF_16_BITS: &str = "dtype=bf16 batch=1 heads_q=2 heads_kv=1 seqlen_q=440 seqlen_k=512 head_dim=64 head_dim_v=64 \
     causal=None scale=0.125 dropout=0 deterministic=false strides=Bshd seed=9";

const FAULTS_OF_16_BITS: [Fault; 3] = [
    // The turns of blocks that a consumer skips.
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "turns.take(), turns.pass();",
        to: "",
        report: "DEADLOCK",
    },
    // The next consumer's turn never begins.
    Fault {
        arch: "sm_90",
        file: "sm90_forward.cu.tera",
        from: "if constexpr (kTakesTurns && !masked.value) turns.pass();",
        to: "",
        report: "DEADLOCK",
    },
    // Consumers disagree about which blocks are done in turns.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/turns.cuh",
        from: "min(share.full_end, share.end - 1)",
        to: "share.full_end",
        report: "DEADLOCK",
    },
];

#[test]
fn planted_faults_of_turns_are_reported() {
    are_reported(&FAULTS_OF_E4M3, ONE_PROBLEM, Some(IN_TURNS));
    are_reported(&FAULTS_OF_16_BITS, ONE_PROBLEM, Some(OF_16_BITS));
}
