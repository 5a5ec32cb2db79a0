//! Batch-invariant mode on the CPU and, if there is one, a GPU. Each sequence of a batch gets the
//! same bits when it runs alone, also under a longer maximum length. The result of the batch itself
//! must be right.

use crate::support::case::{Case, Data, Kind};
use crate::support::check::Prepared;
use crate::support::extras::Extras;
use crate::support::lengths::Side;
use crate::support::shapes;
use crate::support::subject::{Forward, Subject};
use flashtune::config::Config;
use flashtune::family;
use flashtune::plan::key::canonical;
use flashtune::problem::Pass;
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// The config that the engine chooses.
fn config(subject: &Subject, case: &Case) -> Config {
    family::heuristic(&canonical(&case.problem(Pass::Forward)), subject.backend.device())
}

/// Whether the sequences of one side have lengths from `cu_seqlens` or `seqused`.
fn has_lengths(case: &Case, side: Side) -> bool {
    let Extras { cu_seqlens, seqused, .. } = case.extras;
    match side {
        Side::Q => cu_seqlens.q || seqused.q,
        Side::K => cu_seqlens.k || seqused.k,
    }
}

/// One sequence of the batch as a case of its own. Its maximum lengths exceed its lengths by
/// `more`.
fn alone(case: &Case, data: &Data, batch: usize, more: i64) -> (Case, Data) {
    let used = |side| case.rows(side)[batch].used as i64;
    let lengths = [used(Side::Q), used(Side::K)];
    let longest = |side, length| if has_lengths(case, side) { length + more } else { case.seqlen(side) };
    let one = Case {
        batch_size: 1,
        seqlen_q: longest(Side::Q, lengths[0]),
        seqlen_k: longest(Side::K, lengths[1]),
        seed: case.seed + 2 * batch as u64,
        extras: Extras { alone: Some(lengths), ..case.extras },
        ..case.clone()
    };
    let rows = |kind, values: &[f32]| {
        let (from, to) = (case.shape(kind), one.shape(kind));
        let (row, rows) = ((from.heads * from.dim) as usize, case.rows(Side::of(kind))[batch]);
        let first = (rows.entry * from.seqlen as usize + rows.begin) * row;
        let mut of_one = values[first..first + rows.used * row].to_vec();
        of_one.resize(to.elements(), 0.0);
        of_one
    };
    let (q, k, v) = (rows(Kind::Q, &data.q), rows(Kind::K, &data.k), rows(Kind::V, &data.v));
    (one, Data { q, k, v, ..data.clone() })
}

/// O and LSE of one sequence's used rows, as bits.
fn sequence_bits(case: &Case, result: &Forward, batch: usize) -> Vec<u32> {
    let (shape, rows) = (case.shape(Kind::Out), case.rows(Side::Q)[batch]);
    let row = (shape.heads * shape.dim) as usize;
    let first = (rows.entry * shape.seqlen as usize + rows.begin) * row;
    let out = &result.out[first..first + rows.used * row];
    let lse = (0..case.num_heads_q as usize).flat_map(|head| {
        let begin = case.lse_begin(batch, head);
        &result.lse[begin..begin + rows.used]
    });
    out.iter().chain(lse).map(|value| value.to_bits()).collect()
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    for subject in subjects() {
        shapes::batch_invariant(subject.dtypes()).par_iter().for_each(|case| {
            let prepared = Prepared::new(case);
            let config = config(&subject, case);
            let together = prepared.forward(&subject, &config);
            for batch in 0..case.batch_size as usize {
                for more in [0, 900] {
                    let (one, data) = alone(case, &prepared.data, batch, more);
                    assert_eq!(self::config(&subject, &one), config, "{one}");
                    let result = subject.forward(&one, &data, &config);
                    let is_same = sequence_bits(&one, &result, 0) == sequence_bits(case, &together, batch);
                    assert!(is_same, "sequence {batch} has other bits alone: {one}\n  batch: {case}\n  {config}");
                }
            }
        });
    }
}

/// Shows that the test above can fail: without the mode the heuristic's config depends on the
/// batch.
#[test]
fn without_batch_invariant_mode_the_config_depends_on_the_batch() {
    let cpu = Subject::cpu(64);
    let cases = shapes::batch_invariant(cpu.dtypes());
    let differs = |case: &&Case| {
        let plain = Case { extras: Extras { batch_invariant: false, ..case.extras }, ..(*case).clone() };
        let single = Case { batch_size: 1, ..plain.clone() };
        let [many, one] = [&plain, &single].map(|case| config(&cpu, case));
        many != one
    };
    assert!(cases.iter().any(|case| differs(&case)));
}
