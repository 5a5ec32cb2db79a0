//! The tiny problems (`tiny.rs`) on the emulator of tests/emulator, which runs the CUDA kernels on
//! the CPU. Templates with a planted fault show that the emulator notices one.
//!
//! Each test runs this program again through scripts/emulate.sh, since a process finds its driver
//! once. Without g++ the tests are skipped and say so; `FLASHTUNE_REQUIRE_GXX=1` makes that a
//! failure.

use crate::source_tree::root;
use std::path::Path;
use std::process::{Command, Output};

/// A run of one test of this program on the emulated GPU.
struct Emulated<'a> {
    options: &'a [&'a str],
    test: &'a str,
    case: Option<&'a str>,
}

impl Emulated<'_> {
    /// None if this machine cannot emulate, or already does.
    fn output(&self) -> Option<Output> {
        if std::env::var_os("FLASHTUNE_EMULATED").is_some() {
            return None;
        }
        if let Err(error) = Command::new("g++").arg("--version").output() {
            assert!(std::env::var_os("FLASHTUNE_REQUIRE_GXX").is_none(), "FLASHTUNE_REQUIRE_GXX=1, but g++: {error}");
            eprintln!("SKIPPED: no g++, so no kernel was emulated: {error}");
            return None;
        }
        let mut command = Command::new(root().join("scripts/emulate.sh"));
        command.args(self.options).arg("--").arg(std::env::current_exe().expect("this program's path"));
        command.args(["--exact", self.test, "--nocapture"]).env("RUST_BACKTRACE", "0");
        match self.case {
            Some(case) => command.env("FLASHTUNE_TEST_CASE", case),
            None => command.env_remove("FLASHTUNE_TEST_CASE"),
        };
        Some(command.output().expect("scripts/emulate.sh runs"))
    }

    fn is_right(&self) {
        let Some(output) = self.output() else { return };
        let text = shown(&output);
        assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", self.test);
    }
}

fn shown(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn is_right(options: &[&str], test: &str) {
    Emulated { options, test, case: None }.is_right();
}

/// Two SMs: a persistent CTA takes many tiles.
#[test]
fn sm_90_kernels_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems");
}

#[test]
fn sm_90_decode_kernels_are_right() {
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_on_tiny_decoding_problems");
}

#[test]
fn decode_kernels_that_may_split_have_the_bits_of_those_that_do_not() {
    is_right(&["--arch", "sm_90"], "tiny::gpu_has_the_same_bits_unsplit_with_a_kernel_that_may_split");
}

/// By instructions for fp8 and TMA, and by integer operations and cp.async.
#[test]
fn decode_kernels_of_eight_bits_are_right() {
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_on_tiny_decoding_problems_of_eight_bits");
    is_right(&["--arch", "sm_80"], "tiny::gpu_is_right_on_tiny_decoding_problems_of_eight_bits");
}

#[test]
fn sm_80_kernels_of_eight_bits_are_right() {
    is_right(&["--arch", "sm_80", "--seed", "4"], "tiny::gpu_is_right_on_tiny_problems_of_eight_bits");
}

/// Two SMs: a producer that converts keys goes on from tile to tile.
#[test]
fn sm_90_kernels_that_convert_keys_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems_of_eight_bits");
    is_right(&["--arch", "sm_90", "--sms", "3"], "tiny::gpu_is_right_on_tiny_problems_of_converted_keys");
}

#[test]
fn rows_of_a_stale_maximum_over_8_bits_are_right() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_survives_adversarial_scores_over_eight_bits");
}

#[test]
fn rows_of_e4m3_may_have_any_scores() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_survives_adversarial_scores_of_e4m3");
}

#[test]
fn rows_of_q_may_have_any_size_over_8_bits() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_is_right_with_rows_of_q_of_any_size_over_eight_bits");
}

#[test]
fn tiny_rows_of_q_leave_no_nan_over_8_bits() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_is_finite_with_tiny_rows_of_q_over_eight_bits");
}

#[test]
fn scales_of_v_may_be_tiny_or_0() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_is_right_with_tiny_scales_of_v_and_with_0");
}

#[test]
fn scales_of_v_may_grow_and_shrink() {
    is_right(&["--arch", "sm_90"], "eight_bits::gpu_is_right_with_scales_of_v_that_grow_and_shrink");
}

/// Two SMs: a CTA does more tiles than there are slots for them.
#[test]
fn sm_90_kernels_of_e4m3_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems_of_e4m3");
}

#[test]
fn sm_90_kernels_of_e4m3_that_read_v_transposed_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems_whose_v_is_transposed_before");
}

#[test]
fn sm_90_kernels_that_read_pages_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems_over_pages");
}

#[test]
fn sm_80_kernels_that_read_pages_are_right() {
    is_right(&["--arch", "sm_80", "--seed", "3"], "tiny::gpu_is_right_on_tiny_problems_over_pages");
}

#[test]
fn sm_90_kernels_that_split_keys_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "4"], "tiny::gpu_is_right_on_tiny_problems_with_split_keys");
}

/// Four SMs: the sm90 kernel's CTAs walk past short sequences between their tiles.
#[test]
fn sm_90_kernels_that_split_the_keys_of_short_sequences_are_right() {
    const TEST: &str = "tiny::gpu_is_right_on_tiny_mixed_batches_with_split_keys";
    is_right(&["--arch", "sm_90", "--sms", "4"], TEST);
    is_right(&["--arch", "sm_90", "--seed", "6"], TEST);
}

/// With all SMs few tiles share their walk through the queries.
#[test]
fn sm_90_kernels_that_split_queries_are_right() {
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_backward_on_tiny_problems_of_few_tiles");
}

/// Two SMs: a CTA does all tiles of several heads.
#[test]
fn sm_90_kernels_that_write_dq_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_backward_on_tiny_problems_of_few_keys");
}

#[test]
fn ctas_that_share_an_sm_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "1"], "tiny::gpu_is_right_on_tiny_problems_whose_ctas_share_an_sm");
}

/// Few SMs: a persistent CTA takes many tiles.
#[test]
fn chunks_and_tokens_have_the_same_bits_on_sm_90() {
    is_right(&["--arch", "sm_90", "--sms", "4"], "same_bits::a_few_chunks_have_the_bits_of_one_prefill_on_a_gpu");
}

#[test]
fn many_segments_have_the_same_bits_in_both_families() {
    is_right(
        &["--arch", "sm_90", "--sms", "2"],
        "same_bits::many_segments_have_the_same_bits_in_both_families_on_a_gpu",
    );
}

#[test]
fn listed_keys_have_the_same_bits_in_both_families() {
    is_right(&["--arch", "sm_90"], "same_bits::listed_keys_have_the_same_bits_in_both_families_on_a_gpu");
}

#[test]
fn chunks_and_tokens_have_the_same_bits_on_sm_80() {
    is_right(&["--arch", "sm_80"], "same_bits::a_few_chunks_have_the_bits_of_one_prefill_on_a_gpu");
}

#[test]
fn sm_80_kernels_are_right() {
    is_right(&["--arch", "sm_80", "--seed", "2"], "tiny::gpu_is_right_on_tiny_problems");
}

#[test]
fn sm_120_decode_kernels_are_right() {
    is_right(&["--arch", "sm_120"], "tiny::gpu_is_right_on_tiny_decoding_problems");
}

#[test]
fn keys_are_appended_and_partials_are_merged_on_an_emulated_gpu() {
    is_right(&[], "kv_append::seqused_may_be_null");
    is_right(&[], "merge::rows_that_no_partial_sees_are_zero");
    is_right(&["--arch", "sm_80"], "quantize::quantize_divides_by_scales_of_rows_blocks_and_sequences");
    is_right(&[], "quantize::rotated_rows_may_stay_in_16_bits");
    is_right(&[], "quantize::kv_append_quantises_what_it_writes");
}

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
        from: "barrier_wait(shared.empty_k(ring_k.slot), ring_k.parity ^ 1);",
        to: "",
        report: "DEADLOCK",
    },
    // One warp releases K's slot before the others have read the scales beside it.
    Fault {
        arch: "sm_90",
        file: "sm90/forward/shared.cuh",
        from: "constexpr bool kWarpsReleaseK = kHasBlockMask || kHasSlotScales;",
        to: "constexpr bool kWarpsReleaseK = kHasBlockMask;",
        report: "used (right)",
    },
];

fn write_fault(fault: &Fault, folder: &Path) {
    let text = std::fs::read_to_string(root().join("templates").join(fault.file)).expect("a template");
    assert!(text.contains(fault.from), "{} has no {:?}", fault.file, fault.from);
    let place = folder.join(fault.file);
    std::fs::create_dir_all(place.parent().expect("a folder")).unwrap();
    std::fs::write(place, text.replacen(fault.from, fault.to, 1)).unwrap();
}

#[test]
fn planted_faults_are_reported() {
    are_reported(&FAULTS, None);
}

#[test]
fn planted_faults_of_converted_keys_are_reported() {
    are_reported(&FAULTS_IN_REGISTERS, Some(IN_REGISTERS));
    are_reported(&FAULTS_IN_PLACE, Some(IN_PLACE));
}

fn are_reported(faults: &[Fault], case: Option<&str>) {
    for fault in faults {
        let folder = tempfile::tempdir().unwrap();
        write_fault(fault, folder.path());
        let options = ["--arch", fault.arch, "--sms", "1", "--templates", folder.path().to_str().unwrap()];
        let run = Emulated { options: &options, test: "tiny::gpu_is_right_forward_on_one_tiny_problem", case };
        let Some(output) = run.output() else { return };
        let text = shown(&output);
        let is_reported = !output.status.success() && text.contains(fault.report);
        assert!(is_reported, "{}, {:?} without {:?}: {text}", fault.file, fault.from, fault.report);
    }
}
