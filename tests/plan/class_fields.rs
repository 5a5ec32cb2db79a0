//! What a plan depends on: each field of a problem is where docs/serving.md says, in the class,
//! among the rounded sizes, or free.

use crate::source_tree::root;
use flashtune::plan::key::{Class, canonical};
use flashtune::problem::{
    BlockMask, Causal, Dtype, Eight, EightBits, Features, Four, Layout, Pass, Problem, Varlen, Window,
};
use std::collections::BTreeSet;

const PLAIN: Problem = Problem::dense(Pass::Forward, Dtype::Bf16, 4, 8, 4096, 64);

/// The rows of the table in docs/serving.md: a field, and the words of its second column.
fn documented() -> Vec<(String, BTreeSet<String>)> {
    let text = std::fs::read_to_string(root().join("docs/serving.md")).unwrap();
    let rows = text.lines().skip_while(|line| !line.starts_with("| Field |")).skip(2);
    let rows = rows.map_while(|line| line.strip_prefix("| "));
    rows.map(|row| {
        let mut cells = row.split('|').map(str::trim);
        let field = cells.next().unwrap().trim_matches('`').to_owned();
        (field, cells.next().unwrap().split(", ").map(str::to_owned).collect())
    })
    .collect()
}

/// The names of all fields. The patterns have no `..`: a new field must be named here, and so in
/// the document.
fn fields() -> BTreeSet<&'static str> {
    macro_rules! names {
        ($kind:ident { $($field:ident),* }) => {{
            fn _all_are_named($kind { $($field: _),* }: $kind) {}
            [$(stringify!($field)),*]
        }};
    }
    let problem = names!(Problem {
        pass,
        dtype,
        batch_size,
        num_heads_q,
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        causal,
        dropout,
        deterministic,
        batch_invariant,
        features,
        layout
    });
    let features = names!(Features {
        window,
        softcap,
        alibi,
        bias,
        dbias,
        mask,
        mask_bits,
        sinks,
        dlse,
        varlen,
        paged,
        block_mask,
        key_starts,
        eight_bits,
        four_bits
    });
    let window = names!(Window { left, right, top_left });
    let varlen = names!(Varlen { total_q, total_k, padded_q });
    let block_mask = names!(BlockMask { block_q, block_k });
    let eight_bits = names!(EightBits { keys, queries, keys_per_scale });
    let of = |prefix: &str, fields: &[&str]| -> Vec<&'static str> {
        fields.iter().map(|field| &*Box::leak(format!("{prefix}.{field}").into_boxed_str())).collect()
    };
    let parts =
        [of("window", &window), of("varlen", &varlen), of("block_mask", &block_mask), of("eight_bits", &eight_bits)]
            .concat();
    let whole = ["features", "window", "block_mask", "eight_bits"];
    problem.into_iter().chain(features).filter(|field| !whole.contains(field)).chain(parts).collect()
}

/// Two problems that differ in the field alone, and two that differ in its size, if it has one
/// beside being there.
fn changes(field: &str) -> Vec<(Problem, Problem)> {
    let with = |features| Problem { features, ..PLAIN };
    let none = Features::NONE;
    let window = |left, right, top_left| with(Features { window: Window { left, right, top_left }, ..none });
    let varlen = |varlen| with(Features { varlen: Some(varlen), ..none });
    let blocks = |block_q, block_k| with(Features { block_mask: Some(BlockMask { block_q, block_k }), ..none });
    const E4M3: EightBits = EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 };
    let eight = |eight_bits| with(Features { eight_bits: Some(eight_bits), ..none });
    let biased = Features { bias: true, ..none };
    let masked = Features { mask: true, ..none };
    let backward = |features| Problem { pass: Pass::Backward, features, ..PLAIN };
    let from_plain = |problem| vec![(PLAIN, problem)];
    match field {
        "pass" => from_plain(Problem { pass: Pass::Backward, ..PLAIN }),
        "dtype" => from_plain(Problem { dtype: Dtype::Fp16, ..PLAIN }),
        "head_dim" => from_plain(Problem { head_dim: 72, ..PLAIN }),
        "head_dim_v" => from_plain(Problem { head_dim_v: 72, ..PLAIN }),
        "causal" => from_plain(Problem { causal: Causal::BottomRight, ..PLAIN }),
        "window.left" => {
            vec![
                (PLAIN, window(Some(100), None, false)),
                (window(Some(100), None, false), window(Some(900), None, false)),
            ]
        }
        "window.right" => {
            vec![
                (PLAIN, window(None, Some(100), false)),
                (window(None, Some(100), false), window(None, Some(900), false)),
            ]
        }
        "window.top_left" => vec![(window(Some(9), None, false), window(Some(9), None, true))],
        "softcap" => from_plain(with(Features { softcap: true, ..none })),
        "dropout" => from_plain(Problem { dropout: true, ..PLAIN }),
        "deterministic" => vec![(backward(none), Problem { deterministic: true, ..backward(none) })],
        "batch_invariant" => from_plain(Problem { batch_invariant: true, ..PLAIN }),
        "alibi" => from_plain(with(Features { alibi: true, ..none })),
        "bias" => from_plain(with(biased)),
        "dbias" => vec![(backward(biased), backward(Features { dbias: true, ..biased }))],
        "mask" => from_plain(with(masked)),
        "mask_bits" => vec![(with(masked), with(Features { mask_bits: true, ..masked }))],
        "sinks" => from_plain(with(Features { sinks: true, ..none })),
        "dlse" => vec![(backward(none), backward(Features { dlse: true, ..none }))],
        "varlen" => from_plain(varlen(Varlen::default())),
        "varlen.total_q" => {
            let total = |rows| varlen(Varlen { total_q: Some(rows), ..Varlen::default() });
            vec![(total(100), total(9000)), (total(100), varlen(Varlen::default()))]
        }
        "varlen.total_k" => {
            let total = |rows| varlen(Varlen { total_k: Some(rows), ..Varlen::default() });
            vec![(total(100), total(9000)), (total(100), varlen(Varlen::default()))]
        }
        "varlen.padded_q" => {
            vec![(varlen(Varlen::default()), varlen(Varlen { padded_q: true, ..Varlen::default() }))]
        }
        "paged" => {
            let paged = |size| with(Features { paged: Some(size), ..none });
            vec![(PLAIN, paged(16)), (paged(16), paged(64))]
        }
        "block_mask.block_q" => vec![(PLAIN, blocks(64, 64)), (blocks(64, 64), blocks(128, 64))],
        "block_mask.block_k" => vec![(PLAIN, blocks(64, 64)), (blocks(64, 64), blocks(64, 128))],
        "eight_bits.keys" => vec![(PLAIN, eight(E4M3)), (eight(E4M3), eight(EightBits { keys: Eight::Int8, ..E4M3 }))],
        "eight_bits.queries" => vec![(eight(E4M3), eight(EightBits { queries: true, ..E4M3 }))],
        "eight_bits.keys_per_scale" => vec![(eight(E4M3), eight(EightBits { keys_per_scale: 1, ..E4M3 }))],
        "four_bits" => {
            let four = |four| with(Features { four_bits: Some(four), ..none });
            vec![(PLAIN, four(Four::Int4g32)), (four(Four::Int4g32), four(Four::Int4g64))]
        }
        "key_starts" => {
            let used = Features { varlen: Some(Varlen::default()), ..none };
            vec![(with(used), with(Features { key_starts: true, ..used }))]
        }
        "layout" => from_plain(Problem { layout: Layout::Vec4, ..PLAIN }),
        "batch_size" => from_plain(Problem { batch_size: 9, ..PLAIN }),
        "num_heads_q" => from_plain(Problem { num_heads_q: 16, ..PLAIN }),
        "num_heads_kv" => from_plain(Problem { num_heads_kv: 2, ..PLAIN }),
        "seqlen_q" => from_plain(Problem { seqlen_q: 2000, ..PLAIN }),
        "seqlen_k" => from_plain(Problem { seqlen_k: 2000, ..PLAIN }),
        other => panic!("{other} is in the document, and this test has no change of it"),
    }
}

#[test]
fn every_field_of_a_problem_is_where_the_serving_guide_says() {
    let documented = documented();
    let named: BTreeSet<&str> = documented.iter().map(|(field, _)| field.as_str()).collect();
    assert_eq!(named, fields());
    for (field, places) in &documented {
        let mut seen = BTreeSet::new();
        for (one, other) in changes(field) {
            assert!(one.validate().is_ok() && other.validate().is_ok(), "{field}");
            seen.insert(match (Class::of(&one) == Class::of(&other), canonical(&one) == canonical(&other)) {
                (false, _) => "class".to_owned(),
                (true, false) => "rounded".to_owned(),
                (true, true) => "free".to_owned(),
            });
        }
        assert_eq!(seen, *places, "{field}");
    }
}

#[test]
fn alignment_of_causal_and_equal_roundings_are_free() {
    let causal = |causal| Problem { causal, ..PLAIN };
    assert_eq!(canonical(&causal(Causal::BottomRight)), canonical(&causal(Causal::TopLeft)));
    // 4033 to 4096 are rounded to 4096, and as few queries or varlen from 3547 to 5016.
    let of = |seqlen_k| canonical(&Problem { seqlen_k, ..PLAIN });
    assert_eq!(of(4065), of(4096));
    assert_ne!(of(4097), of(4096));
    let varlen = Features { varlen: Some(Varlen::default()), ..Features::NONE };
    let of = |seqlen_k| canonical(&Problem { seqlen_k, features: varlen, ..PLAIN });
    assert!(of(3600) == of(4096) && of(5000) == of(4096) && of(3400) != of(4096));
}
