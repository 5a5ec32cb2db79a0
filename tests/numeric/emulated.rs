//! The tiny problems (`tiny.rs`) on the emulator of tests/emulator, which runs the CUDA kernels on
//! the CPU. `planted_faults.rs` shows that it notices faults.
//!
//! Each test runs this program again through scripts/emulate.sh, since a process finds its driver
//! once. Without g++ the tests are skipped and say so; `FLASHTUNE_REQUIRE_GXX=1` makes that a
//! failure.

use crate::source_tree::root;
use std::process::{Command, Output};

/// A run of one test of this program on the emulated GPU. A kernel sees what the kernel before it
/// wrote once it has waited for that.
pub struct Emulated<'a> {
    pub options: &'a [&'a str],
    pub test: &'a str,
    pub case: Option<&'a str>,
}

impl Emulated<'_> {
    /// None if this machine cannot emulate, or already does.
    pub fn output(&self) -> Option<Output> {
        if std::env::var_os("FLASHTUNE_EMULATED").is_some() {
            return None;
        }
        if let Err(error) = Command::new("g++").arg("--version").output() {
            assert!(std::env::var_os("FLASHTUNE_REQUIRE_GXX").is_none(), "FLASHTUNE_REQUIRE_GXX=1, but g++: {error}");
            eprintln!("SKIPPED: no g++, so no kernel was emulated: {error}");
            return None;
        }
        let mut command = Command::new(root().join("scripts/emulate.sh"));
        command
            .arg("--overlaps")
            .args(self.options)
            .arg("--")
            .arg(std::env::current_exe().expect("this program's path"));
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

pub fn shown(output: &Output) -> String {
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
fn sm_90_kernels_with_a_buffer_for_the_output_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "output_buffer::gpu_is_right_with_a_buffer_for_the_output");
}

/// Two SMs: turns go on from tile to tile.
#[test]
fn sm_90_kernels_whose_consumers_take_turns_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "turns::gpu_is_right_where_consumers_take_turns");
    is_right(
        &["--arch", "sm_90", "--sms", "2", "--lags", "--seed", "3"],
        "turns::gpu_is_right_where_consumers_take_turns",
    );
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
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_on_tiny_problems_of_eight_bits_whose_heads_share_copies");
}

/// By TMA and by cp.async.
#[test]
fn decode_kernels_of_int4_are_right() {
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_on_tiny_problems_of_int4");
    is_right(&["--arch", "sm_80"], "tiny::gpu_is_right_on_tiny_problems_of_int4");
    is_right(&["--arch", "sm_90"], "four_bits::gpu_is_right_with_rows_of_q_of_any_size_over_int4");
    is_right(&["--arch", "sm_80"], "tiny::gpu_is_right_on_tiny_problems_of_int4_whose_heads_share_copies");
    is_right(&["--arch", "sm_90"], "tiny::gpu_is_right_on_tiny_problems_of_int4_whose_heads_share_copies");
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
fn sm_90_kernels_of_keys_that_are_widened_before_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_on_tiny_problems_whose_keys_are_widened_before");
    is_right(
        &["--arch", "sm_90", "--sms", "2"],
        "tiny::gpu_is_right_on_tiny_prompts_whose_int4_keys_are_widened_before",
    );
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

/// Lanes of one warp drift apart, too. Each seed holds back other warpgroups.
#[test]
fn lanes_may_lag_behind_the_first() {
    let of_forward = [
        "tiny::gpu_is_right_on_tiny_problems_over_pages",
        "tiny::gpu_is_right_on_tiny_problems_of_e4m3",
        "tiny::gpu_is_right_on_tiny_problems_of_eight_bits",
        "tiny::gpu_is_right_on_tiny_decoding_problems",
    ];
    for test in of_forward {
        is_right(&["--arch", "sm_90", "--sms", "2", "--lags", "--seed", "4"], test);
    }
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
fn sm_90_kernels_that_split_the_last_tiles_are_right() {
    const TEST: &str = "tiny::gpu_is_right_backward_on_tiny_problems_whose_last_tiles_are_split";
    is_right(&["--arch", "sm_90", "--sms", "4"], TEST);
}

#[test]
fn sm_90_kernels_that_split_some_tiles_over_pages_are_right() {
    is_right(&["--arch", "sm_90"], "prefill_splits::prefill_splits_of_some_tiles_agree_over_pages");
}

/// Two SMs: groups have one head each.
#[test]
fn sm_90_kernels_of_many_groups_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "tiny::gpu_is_right_backward_on_tiny_problems_of_many_groups");
}

#[test]
fn ctas_that_share_an_sm_are_right() {
    is_right(&["--arch", "sm_90", "--sms", "1"], "tiny::gpu_is_right_on_tiny_problems_whose_ctas_share_an_sm");
}

/// Few SMs: a persistent CTA takes many tiles. With 4 some launches have few enough CTAs for the
/// decode kernel that computes weights ahead. With 2 a tile whose rows are repeated comes before
/// another tile of the CTA.
#[test]
fn chunks_and_tokens_have_the_same_bits_on_sm_90() {
    for sms in ["2", "4"] {
        is_right(&["--arch", "sm_90", "--sms", sms], "same_bits::a_few_chunks_have_the_bits_of_one_prefill_on_a_gpu");
    }
}

#[test]
fn adversarial_scores_have_the_same_bits_in_each_family() {
    is_right(
        &["--arch", "sm_90", "--sms", "4"],
        "same_bits::adversarial_scores_have_the_same_bits_in_each_family_on_a_gpu",
    );
}

#[test]
fn many_segments_have_the_same_bits_in_both_families() {
    is_right(
        &["--arch", "sm_90", "--sms", "2"],
        "same_bits::many_segments_have_the_same_bits_in_both_families_on_a_gpu",
    );
}

#[test]
fn runs_of_segments_have_the_same_bits_in_each_family() {
    is_right(&["--arch", "sm_90"], "same_bits::runs_of_segments_have_the_same_bits_in_each_family_on_a_gpu");
}

#[test]
fn listed_keys_have_the_same_bits_in_both_families() {
    is_right(&["--arch", "sm_90", "--sms", "2"], "same_bits::a_query_of_nan_changes_no_other_row_on_a_gpu");
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
