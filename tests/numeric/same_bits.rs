//! The same bits everywhere: with `batch_invariant` a token's O and LSE do not depend on the call
//! that computes them. Schedules of chunks are random but seeded. Each chunk runs in a random form:
//! its keys contiguous or in pages, alone or beside other sequences. Some tokens run one by one.

use crate::support::blocks::Blocks;
use crate::support::case::{Case, Data, Kind, Random};
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides, Spread};
use crate::support::reference;
use crate::support::scores;
use crate::support::subject::{Forward, Subject};
use flashtune::config::{Config, Family};
use flashtune::device::Arch;
use flashtune::family;
use flashtune::plan::key::canonical;
use flashtune::problem::{Causal, Dtype, Pass, Window};
use rayon::prelude::*;

/// One sequence: as many queries as keys.
struct Whole {
    case: Case,
    data: Data,
}

/// Queries of a chunk and how the call presents them.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    begin: usize,
    end: usize,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// The chunk's keys alone, contiguous.
    Contiguous,
    /// In pages of so many keys, in a table for so many more of them.
    Pages(i64, i64),
    /// In pages, with as many other sequences of equally many queries.
    Beside(i64, i64),
    /// In pages, with as many other sequences of any number of queries up to 150.
    Mixed(i64, i64),
}

impl Whole {
    fn new(case: Case) -> Whole {
        let data = Data::random(&case);
        Whole { case, data }
    }

    /// The same with keys up to 16 times as large towards the first one, so that the maxima of rows
    /// rise from block to block.
    fn rising(mut self) -> Whole {
        let shape = self.case.shape(Kind::K);
        let rows = self.data.k.chunks_mut((shape.heads * shape.dim) as usize);
        for (key, row) in rows.enumerate() {
            let factor = f32::from(1u8 << (4 - 5 * key as i64 / shape.seqlen));
            row.iter_mut().for_each(|value| *value *= factor);
        }
        self
    }

    /// The rows [begin, end) of every head.
    fn rows(&self, kind: Kind, begin: usize, end: usize) -> &[f32] {
        let shape = self.case.shape(kind);
        let row = (shape.heads * shape.dim) as usize;
        let values = match kind {
            Kind::Q => &self.data.q,
            Kind::K => &self.data.k,
            _ => &self.data.v,
        };
        &values[begin * row..end * row]
    }

    /// The call of a chunk. Its first sequence is the chunk's.
    fn call(&self, Chunk { begin, end, form }: Chunk) -> (Case, Data) {
        let (queries, keys) = ((end - begin) as i64, end as i64);
        let used = Sides { q: false, k: true };
        let (others, longest, extras) = match form {
            Form::Contiguous => (0, [queries, keys], self.case.extras),
            Form::Pages(page_size, more) => {
                let extras = Extras { page_size: Some(page_size), seqused: used, ..self.case.extras };
                (0, [queries, keys + more], extras)
            }
            Form::Beside(page_size, others) => {
                let extras = Extras { page_size: Some(page_size), seqused: used, ..self.case.extras };
                (others, [queries, keys.max(1100)], extras)
            }
            Form::Mixed(page_size, others) => {
                let cu_seqlens = Sides { q: true, k: false };
                let extras = Extras { page_size: Some(page_size), seqused: used, cu_seqlens, ..self.case.extras };
                (others, [queries.max(150), keys.max(1100)], extras)
            }
        };
        let alone = (form != Form::Contiguous).then_some([queries, keys]);
        let case = Case {
            batch_size: 1 + others,
            seqlen_q: longest[0],
            seqlen_k: longest[1],
            seed: self.case.seed + 7 * end as u64 + begin as u64,
            extras: Extras { alone, among_others: true, ..extras },
            ..self.case.clone()
        };
        let mut data = Data { alibi: self.data.alibi.clone(), sinks: self.data.sinks.clone(), ..Data::random(&case) };
        for (kind, into) in [(Kind::Q, &mut data.q), (Kind::K, &mut data.k), (Kind::V, &mut data.v)] {
            let first = if kind == Kind::Q { begin } else { 0 };
            let own = self.rows(kind, first, end);
            into[..own.len()].copy_from_slice(own);
        }
        (case, data)
    }
}

/// O and LSE of the first sequence's queries, as bits: for each query all heads of O, then of LSE.
fn bits(case: &Case, result: &Forward, queries: usize) -> Vec<Vec<u32>> {
    let shape = case.shape(Kind::Out);
    let row = (shape.heads * shape.dim) as usize;
    let of_query = |query: usize| {
        let out = result.out[query * row..(query + 1) * row].iter();
        let lse = (0..case.num_heads_q as usize).map(|head| &result.lse[case.lse_begin(0, head) + query]);
        out.chain(lse).map(|value| value.to_bits()).collect()
    };
    (0..queries).map(of_query).collect()
}

fn run(subject: &Subject, case: &Case, data: &Data) -> (Family, Forward) {
    let config = family::heuristic(&canonical(&case.problem(Pass::Forward)), subject.backend.device());
    (config.family, subject.forward(case, data, &config))
}

/// Cuts into chunks of 1 to `longest` queries, each in a form.
fn schedule(length: usize, longest: i64, seed: u64) -> Vec<Chunk> {
    let mut random = Random::new(seed);
    let mut chunks = Vec::new();
    let mut begin = 0;
    while begin < length {
        let queries = match random.between(0, 3) {
            0 => random.between(1, 8),
            1 => random.between(1, 64),
            _ => random.between(64, longest),
        };
        let end = length.min(begin + queries as usize);
        let page_size = random.pick(&[1, 16, 24, 64, 128]);
        let form = match random.between(0, 3) {
            0 => Form::Contiguous,
            1 => Form::Pages(page_size, random.between(0, 900)),
            2 => Form::Beside(page_size, random.between(1, 3)),
            _ => Form::Mixed(page_size, random.between(1, 3)),
        };
        chunks.push(Chunk { begin, end, form });
        begin = end;
    }
    chunks
}

/// Single tokens: the last ones and those at borders of blocks and segments.
fn tokens(length: usize) -> Vec<Chunk> {
    let forms = [Form::Contiguous, Form::Pages(16, 300), Form::Beside(64, 3), Form::Mixed(16, 2)];
    let places = [0, 1, 63, 64, 100, 511, 1023, 1024, 1025, length - 2, length - 1];
    let of = |(index, place): (usize, usize)| Chunk { begin: place, end: place + 1, form: forms[index % forms.len()] };
    places.into_iter().filter(|place| *place < length).enumerate().map(of).collect()
}

/// Checks the schedule of a whole sequence, and returns the families that ran.
fn check(subject: &Subject, whole: &Whole, chunks: &[Chunk]) -> Vec<Family> {
    let Whole { case, data } = whole;
    let length = case.seqlen_q as usize;
    let (family, once) = run(subject, case, data);
    let expected = bits(case, &once, length);
    let exact = reference::exact(case, data);
    let far = once.lse.iter().zip(&exact.lse).map(|(got, exact)| (f64::from(*got) - exact).abs()).fold(0.0, f64::max);
    assert!(far < 1e-2, "the LSE is off by {far}: {case}");
    let families = chunks.iter().map(|chunk| {
        let (case, data) = whole.call(*chunk);
        let (family, result) = run(subject, &case, &data);
        let got = bits(&case, &result, chunk.end - chunk.begin);
        for (query, (got, expected)) in got.iter().zip(&expected[chunk.begin..]).enumerate() {
            let differ = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
            let place = format!("query {} of {chunk:?} ({family:?}): {case}", chunk.begin + query);
            assert!(differ == 0, "{differ} of {} numbers differ at {place}", got.len());
        }
        family
    });
    std::iter::once(family).chain(families.collect::<Vec<_>>()).collect()
}

fn whole(dtype: Dtype, length: i64, head_dim: i64, extras: Extras, seed: u64) -> Whole {
    Whole::new(Case {
        num_heads_q: 4,
        num_heads_kv: 2,
        causal: Causal::BottomRight,
        seed,
        extras: Extras { batch_invariant: true, ..extras },
        ..Case::plain(dtype, length, head_dim)
    })
}

fn wholes(dtypes: &[Dtype]) -> Vec<Whole> {
    let none = Extras::default();
    let window = Window { left: Some(300), ..Window::default() };
    let rich = Extras { sinks: true, softcap: 20.0, alibi: Some(Spread::of("h")), ..none };
    let forms = [
        (1300, 64, none),
        (1100, 128, none),
        (1100, 128, Extras { window, ..none }),
        (1100, 64, rich),
        (1100, 256, none),
        (600, 80, none),
    ];
    let of = |(index, (length, head_dim, extras))| {
        whole(dtypes[index % dtypes.len()], length, head_dim, extras, 900 + index as u64)
    };
    forms.into_iter().enumerate().map(of).collect()
}

#[test]
fn chunks_and_tokens_have_the_bits_of_one_prefill_on_the_cpu() {
    let subject = Subject::cpu(2);
    wholes(subject.dtypes()).par_iter().enumerate().for_each(|(index, whole)| {
        let length = whole.case.seqlen_q as usize;
        let chunks = [schedule(length, 400, index as u64), tokens(length)].concat();
        check(&subject, whole, &chunks);
    });
}

#[test]
fn chunks_and_tokens_have_the_bits_of_one_prefill_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    wholes(&[Dtype::Fp16, Dtype::Bf16, Dtype::Fp32]).par_iter().enumerate().for_each(|(index, whole)| {
        let length = whole.case.seqlen_q as usize;
        let schedules = (0..3).flat_map(|round| schedule(length, 400, 10 * round + index as u64));
        check(&subject, whole, &schedules.chain(tokens(length)).collect::<Vec<_>>());
    });
}

/// Few queries, heads and chunks, for the emulator: one segment's border, and each family.
#[test]
fn a_few_chunks_have_the_bits_of_one_prefill_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let forms = [
        (Dtype::Bf16, 64, Extras::default(), false),
        (Dtype::Bf16, 64, Extras::default(), true),
        (Dtype::Bf16, 128, Extras::default(), true),
        (Dtype::Fp16, 128, Extras { sinks: true, ..Extras::default() }, true),
    ];
    for (dtype, head_dim, extras, rises) in forms {
        let mut whole = whole(dtype, 1100, head_dim, extras, 77);
        whole.case.num_heads_q = 2;
        whole.case.num_heads_kv = 1;
        let whole = Whole::new(whole.case);
        let whole = if rises { whole.rising() } else { whole };
        let chunk = |begin, end, form| Chunk { begin, end, form };
        let chunks = [
            chunk(130, 330, Form::Pages(64, 100)),
            chunk(1000, 1100, Form::Mixed(24, 2)),
            chunk(1099, 1100, Form::Contiguous),
            chunk(1090, 1096, Form::Beside(16, 2)),
            chunk(1023, 1024, Form::Pages(64, 0)),
            chunk(1024, 1025, Form::Mixed(16, 2)),
        ];
        let families = check(&subject, &whole, &chunks);
        assert!(families.contains(&Family::Decode), "{families:?}");
        let of_prefill = if device.arch == Arch::Sm(9, 0) { Family::Sm90 } else { Family::Sm80 };
        assert_eq!(families[0], of_prefill);
    }
}

/// Three segments and more, in each form of the merged O that sm90 has and in its tiles of any
/// number of rows. With many heads a tile has fewer runs than segments.
#[test]
fn many_segments_have_the_same_bits_in_both_families_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let forms = [(Dtype::Bf16, 64), (Dtype::Fp16, 128), (Dtype::Bf16, 160), (Dtype::Fp16, 256)];
    let extras = Extras { batch_invariant: true, ..Extras::default() };
    let cases = forms.map(|(dtype, head_dim)| Case {
        causal: Causal::BottomRight,
        seqlen_k: 4200,
        seed: 43,
        extras,
        ..Case::plain(dtype, 130, head_dim)
    });
    let of_many_heads = Case { batch_size: 1, num_heads_q: 40, num_heads_kv: 4, seqlen_q: 70, ..cases[0].clone() };
    for case in cases.into_iter().chain([of_many_heads]) {
        let data = Data::random(&case);
        let results = of_each_family(&subject, &case, &data);
        assert_eq!(results.len() > 1, subject.backend.device().arch == Arch::Sm(9, 0));
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{case}");
    }
}

/// Four groups of segments in five runs for each of 26 tiles: run 0 leaves two states.
#[test]
fn runs_of_segments_have_the_same_bits_in_each_family_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    check_groups(&subject, &of_groups(Dtype::Bf16, 64, 26, 40, 12_500));
}

/// Runs of whole groups and of segments.
#[test]
fn runs_of_groups_have_the_same_bits_in_each_family_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let cases = [
        of_groups(Dtype::Fp16, 128, 44, 70, 12_500),
        of_groups(Dtype::Bf16, 128, 60, 128, 12_500),
        of_groups(Dtype::Bf16, 128, 33, 100, 17_000),
        of_groups(Dtype::Bf16, 64, 8, 300, 66_000),
        of_groups(Dtype::Bf16, 128, 32, 256, 8192),
        of_groups(Dtype::Bf16, 64, 4, 700, 9100),
        of_groups(Dtype::Fp16, 256, 16, 130, 33_000),
        of_groups(Dtype::Bf16, 80, 3, 200, 140_000),
    ];
    cases.iter().for_each(|case| check_groups(&subject, case));
}

/// With more than one group of segments.
#[test]
fn a_query_of_nan_changes_no_other_row_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let case = of_groups(Dtype::Bf16, 64, 2, 150, 4500);
    let data = Data::random(&case);
    let mut with_nan = data.clone();
    let (row, head_dim) = (2, case.head_dim as usize);
    with_nan.q[row * 2 * head_dim] = f32::NAN;
    let results = of_each_family(&subject, &case, &data).into_iter().zip(of_each_family(&subject, &case, &with_nan));
    for (expected, found) in results {
        let other_head = |bits: &[u32]| bits[head_dim..2 * head_dim].to_vec();
        assert_eq!(other_head(&found[row]), other_head(&expected[row]));
        assert!(f32::from_bits(found[row][0]).is_nan());
        for other in (0..expected.len()).filter(|other| *other != row) {
            assert!(found[other] == expected[other], "row {other}: {case}");
        }
    }
}

fn of_groups(dtype: Dtype, head_dim: i64, num_heads_q: i64, seqlen_q: i64, seqlen_k: i64) -> Case {
    let extras = Extras { batch_invariant: true, ..Extras::default() };
    let num_heads_kv = if num_heads_q % 2 == 0 { 2 } else { 1 };
    let sizes = Case { num_heads_q, num_heads_kv, seqlen_q, seqlen_k, ..Case::plain(dtype, 1, head_dim) };
    Case { causal: Causal::BottomRight, seed: 47, extras, ..sizes }
}

/// Compares all configs of all families, and the last query decoded alone, contiguous and in pages.
fn check_groups(subject: &Subject, case: &Case) {
    let data = Data::random(case);
    let results = of_each_family(subject, case, &data);
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{case}");
    let row = (case.num_heads_q * case.head_dim) as usize;
    let last = Data { q: data.q[(case.seqlen_q as usize - 1) * row..].to_vec(), ..data };
    for page_size in [None, Some(64)] {
        let seqused = Sides { q: false, k: page_size.is_some() };
        let alone = page_size.map(|_| [1, case.seqlen_k]);
        let extras = Extras { page_size, seqused, alone, among_others: page_size.is_some(), ..case.extras };
        let token = Case { seqlen_q: 1, extras, ..case.clone() };
        let (family, decoded) = run(subject, &token, &last);
        assert_eq!(family, Family::Decode);
        assert!(bits(&token, &decoded, 1).last() == results[0].last(), "{token}");
    }
}

/// Scores that rise, fall and jump by more than a reference can follow, and keys of -inf: rows are
/// right, and each family moves their references alike.
#[test]
fn adversarial_scores_have_the_same_bits_in_each_family_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let extras = Extras { batch_invariant: true, ..Extras::default() };
    let of = |dtype, head_dim| Case {
        num_heads_q: 2,
        num_heads_kv: 1,
        seqlen_k: 1100,
        causal: Causal::BottomRight,
        extras,
        ..Case::plain(dtype, 80, head_dim)
    };
    let cases: Vec<_> = [of(Dtype::Bf16, 64), of(Dtype::Fp16, 72)].iter().flat_map(scores::profiled).collect();
    for (name, case, data) in cases {
        let last = Case { seqlen_q: 1, ..case.clone() };
        let row = (case.num_heads_q * case.head_dim) as usize;
        let token =
            Data { q: data.q[79 * row..].to_vec(), k: data.k.clone(), v: data.v.clone(), ..Data::random(&last) };
        let prepared = Prepared::with(&case, data);
        let mut results: Vec<_> = configs_of_each_family(&subject, &case)
            .iter()
            .map(|config| {
                let got = subject.forward(&case, &prepared.data, config);
                prepared
                    .judge_forward(prepared.loses_bits(&subject), &got)
                    .unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}\n  {config}"));
                bits(&case, &got, 80).pop()
            })
            .collect();
        let (family, decoded) = run(&subject, &last, &token);
        assert_eq!(family, Family::Decode);
        results.push(bits(&last, &decoded, 1).pop());
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{name}: {case}");
    }
}

/// The bits of each family that serves a case.
fn of_each_family(subject: &Subject, case: &Case, data: &Data) -> Vec<Vec<Vec<u32>>> {
    configs_of_each_family(subject, case)
        .iter()
        .map(|config| bits(case, &subject.forward(case, data, config), case.seqlen_q as usize))
        .collect()
}

/// The heuristic's config of each family, and those of other tiles that a lookup may choose.
fn configs_of_each_family(subject: &Subject, case: &Case) -> Vec<Config> {
    let (problem, device) = (canonical(&case.problem(Pass::Forward)), subject.backend.device());
    let mut configs: Vec<_> = family::heuristics(&problem, device)
        .into_iter()
        .map(|config| if config.family == Family::Sm80 { config.with("block_n", 64) } else { config })
        .collect();
    for config in family::of_same_bits(&problem, device).unwrap() {
        if !configs.contains(&config) {
            configs.push(config);
        }
    }
    let rows = |config: &Config| config.get("block_m").unwrap();
    let of_sm90: Vec<_> = configs.iter().filter(|config| config.family == Family::Sm90).map(rows).collect();
    assert!(of_sm90.is_empty() || of_sm90.len() >= 2, "{of_sm90:?}");
    // With two segments and more some of them split at the segments.
    let are_split = configs.iter().any(|config| config.family == Family::Sm90 && config.get("num_splits") > Some(1));
    assert!(of_sm90.is_empty() || are_split == problem.may_split_segments(), "{case}");
    configs
}

/// Lists of a block mask lead both families through the same keys in the same order, up and down.
#[test]
fn listed_keys_have_the_same_bits_in_both_families_on_a_gpu() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    if device.arch != Arch::Sm(9, 0) {
        return;
    }
    let extras = Extras { block_mask: Some(Blocks::new(64, 64)), batch_invariant: true, ..Extras::default() };
    let case = Case { seqlen_k: 3300, seed: 41, extras, ..Case::plain(Dtype::Fp16, 64, 64) };
    let data = Data::random(&case);
    let results: Vec<_> = family::heuristics(&canonical(&case.problem(Pass::Forward)), device)
        .into_iter()
        .map(|config| if config.family == Family::Sm80 { config.with("block_n", 64) } else { config })
        .map(|config| (config.family, bits(&case, &subject.forward(&case, &data, &config), 64)))
        .collect();
    assert_eq!(results.iter().map(|(family, _)| *family).collect::<Vec<_>>(), [Family::Sm90, Family::Sm80]);
    assert!(results[0].1 == results[1].1);
}

/// Shows that the tests above can fail: with other blocks of keys the sums have another order.
#[test]
fn another_order_has_other_bits() {
    let subject = Subject::cpu(2);
    let whole = whole(Dtype::Fp32, 700, 64, Extras::default(), 5);
    let config = family::heuristic(&canonical(&whole.case.problem(Pass::Forward)), subject.backend.device());
    let [own, other] = [config.clone(), config.with("block_n", 64)]
        .map(|config| bits(&whole.case, &subject.forward(&whole.case, &whole.data, &config), 700));
    assert_eq!(own[..60], other[..60], "one block in either order");
    assert!(own.iter().zip(&other).skip(300).all(|(own, other)| own != other));
}
