//! Batch-invariant mode, on the CPU and, where there is one, on a GPU: each sequence of a batch alone, within longer longest
//! lengths too, gives the bits that it has in the batch; and what the batch gives is right.

use crate::support::case::{Case, Data, Kind};
use crate::support::check::Prepared;
use crate::support::extras::Extras;
use crate::support::lengths::Side;
use crate::support::shapes;
use crate::support::subject::{Forward, Subject};
use flashtune::config::Config;
use flashtune::plan::key::canonical;
use flashtune::problem::Pass;
use flashtune::tune::space;
use rayon::prelude::*;

/// The backends that there are.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// As the engine chooses it.
fn config(subject: &Subject, case: &Case) -> Config {
    space::heuristic(&canonical(&case.problem(Pass::Forward)), subject.backend.device())
}

/// Whether a side's sequences have their own lengths.
fn has_own(case: &Case, side: Side) -> bool {
    let Extras { cu_seqlens, seqused, .. } = case.extras;
    match side {
        Side::Q => cu_seqlens.q || seqused.q,
        Side::K => cu_seqlens.k || seqused.k,
    }
}

/// One sequence of the batch, where longest lengths are its own plus so many.
fn alone(case: &Case, data: &Data, batch: usize, more: i64) -> (Case, Data) {
    let used = |side| case.rows(side)[batch].used as i64;
    let lengths = [used(Side::Q), used(Side::K)];
    let longest = |side, length| if has_own(case, side) { length + more } else { case.seqlen(side) };
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

/// What a sequence's used rows got, as bits.
fn of_sequence(case: &Case, result: &Forward, batch: usize) -> Vec<u32> {
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
        shapes::of_any_batch(subject.dtypes(), subject.dtypes_of_pages()).par_iter().for_each(|case| {
            let prepared = Prepared::new(case);
            let config = config(&subject, case);
            let together = prepared.forward(&subject, &config);
            for batch in 0..case.batch_size as usize {
                for more in [0, 900] {
                    let (one, data) = alone(case, &prepared.data, batch, more);
                    assert_eq!(self::config(&subject, &one), config, "{one}");
                    let result = subject.forward(&one, &data, &config);
                    let is_same = of_sequence(&one, &result, 0) == of_sequence(case, &together, batch);
                    assert!(is_same, "sequence {batch} differs alone: {one}\n  of {case}\n  {config}");
                }
            }
        });
    }
}

/// Else the test above would show nothing: the heuristic of each batch gives other bits.
#[test]
fn without_the_mode_a_batch_has_another_config() {
    let cpu = Subject::cpu(64);
    let cases = shapes::of_any_batch(cpu.dtypes(), cpu.dtypes_of_pages());
    let differs = |case: &&Case| {
        let plain = Case { extras: Extras { batch_invariant: false, ..case.extras }, ..(*case).clone() };
        let single = Case { batch_size: 1, ..plain.clone() };
        let [many, one] = [&plain, &single].map(|case| config(&cpu, case));
        many != one
    };
    assert!(cases.iter().any(|case| differs(&case)));
}
