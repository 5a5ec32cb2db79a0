//! Class constants: what a kernel knows of its problem at compile time, by name, value and meaning.
//! Those of features are in the table of features.
//!
//! The renderer writes a `constexpr` line for each one that a kernel's text mentions, so a constant
//! that only a device file reads is named in no template. Tags see the same values. Knobs are the
//! config's and stay in the templates.

use crate::problem::features::{Constant, ConstantValue};
use crate::problem::{Dtype, Feature, Problem};
use std::collections::HashMap;

/// What a tag or a constant may hold: integers, booleans, and names from a fixed list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Integer(u32),
    Flag(bool),
    Name(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Integer(value) => value.fmt(f),
            Value::Flag(value) => value.fmt(f),
            Value::Name(value) => value.fmt(f),
        }
    }
}

/// The tag of the dtype, which two constants share.
const DTYPE: &str = "dtype";
/// The tag of the architecture. The architecture belongs to the target, not to the problem, so it
/// is no class constant.
pub const ARCH: &str = "arch";

/// In the order in which headers and rendered texts have them.
pub fn class() -> impl Iterator<Item = &'static Constant> {
    BEFORE_FEATURES.iter().chain(Feature::ALL.iter().flat_map(|feature| feature.row().constants)).chain(AFTER_FEATURES)
}

const BEFORE_FEATURES: &[Constant] = &[
    flag("kIsBf16", DTYPE, "neither kIsBf16 nor kIsFp32: fp16", |p| p.dtype == Dtype::Bf16),
    flag("kIsFp32", DTYPE, "tensors are fp32", |p| p.dtype == Dtype::Fp32),
    integer("kHeadDim", "head_dim", "of Q and K, 1 to 512", |p| p.head_dim as u32),
    integer("kHeadDimV", "head_dim_v", "of V and O, 1 to 512", |p| p.head_dim_v as u32),
    flag("kIsCausal", "is_causal", "rows see keys up to a diagonal: causal, or a window to the right", |p| {
        p.right_shift().is_some()
    }),
    flag("kHasDropout", "has_dropout", "weights are dropped (device/attention/dropout.cuh)", |p| p.dropout),
    flag("kIsDeterministic", "is_deterministic", "tiles add to dQ in turn (device/schedule/dq_turns.cuh)", |p| {
        p.deterministic
    }),
    flag("kIsBatchInvariant", "is_batch_invariant", "a sequence's own keys decide its splits, not the grid", |p| {
        p.batch_invariant
    }),
];

const AFTER_FEATURES: &[Constant] =
    &[integer("kVec", "vec", "elements of the widest aligned access: 8 (16-bit types only), 4, 2, 1", |p| {
        p.access_elements() as u32
    })];

const fn flag(name: &'static str, tag: &'static str, meaning: &'static str, value: fn(&Problem) -> bool) -> Constant {
    Constant { name, tag, meaning, value: ConstantValue::Flag(value) }
}

const fn integer(name: &'static str, tag: &'static str, meaning: &'static str, value: fn(&Problem) -> u32) -> Constant {
    Constant { name, tag, meaning, value: ConstantValue::Integer(value) }
}

fn value(constant: &Constant, problem: &Problem) -> Value {
    match constant.value {
        ConstantValue::Integer(value) => Value::Integer(value(problem)),
        ConstantValue::Flag(value) => Value::Flag(value(problem)),
    }
}

/// The tags in the order of the header comment.
pub fn tags() -> Vec<&'static str> {
    let mut tags: Vec<&str> = class().map(|constant| constant.tag).collect();
    tags.dedup();
    tags
}

/// The tags' values.
pub fn tag_values(problem: &Problem) -> impl Iterator<Item = (String, Value)> + '_ {
    let of_tag = |constant: &Constant| match constant.tag {
        DTYPE => Value::Name(problem.dtype.name().to_owned()),
        _ => value(constant, problem),
    };
    class().map(move |constant| (constant.tag.to_owned(), of_tag(constant)))
}

/// A constant's line in a kernel's text.
pub struct Declaration {
    pub tag: &'static str,
    pub line: String,
}

/// The constants that a text mentions outside comments. A text that fixes one itself keeps its own.
pub fn declared(problem: &Problem, arch: &Value, text: &str) -> Vec<Declaration> {
    let code = code(text);
    // One walk over the code for all names. The search for each of them took longer than the rest
    // of the rendering.
    let mut mentions: HashMap<&str, Vec<usize>> = HashMap::new();
    for (at, word) in words_from(&code, FIRST_LETTER) {
        mentions.entry(word).or_default().push(at);
    }
    let arch = ("kArch", ARCH, "80, 86, 89, 90, 100, 120", arch.clone());
    let of_class = class().map(|c| (c.name, c.tag, c.meaning, value(c, problem)));
    std::iter::once(arch)
        .chain(of_class)
        .filter_map(|(name, tag, meaning, value)| {
            debug_assert!(name.starts_with(FIRST_LETTER));
            let kind = if matches!(value, Value::Flag(_)) { "constexpr bool " } else { "constexpr int " };
            let is_declared = |at: &usize| code[..*at].ends_with(kind) && code[at + name.len()..].starts_with(" = ");
            let is_needed = !mentions.get(name)?.iter().any(is_declared);
            is_needed.then(|| Declaration { tag, line: format!("{kind}{name} = {value};  // {meaning}\n") })
        })
        .collect()
}

/// Names of class constants begin so.
const FIRST_LETTER: char = 'k';

/// A text without its comments.
pub fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('/') {
        let is_comment = rest[at + 1..].starts_with('/');
        code.push_str(&rest[..at + usize::from(!is_comment)]);
        rest = &rest[at + 1..];
        if is_comment {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        }
    }
    code + rest
}

/// Whether a name stands in the code as a whole word.
pub fn mentions(code: &str, name: &str) -> bool {
    name.chars().next().is_some_and(|first| words_from(code, first).any(|(_, word)| word == name))
}

/// The words of a text that begin with a letter, and where they begin.
fn words_from(code: &str, first: char) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = code.match_indices(first).filter(move |(at, _)| !code[..*at].ends_with(is_word));
    begins.map(move |(at, _)| {
        let word = &code[at..];
        (at, &word[..word.find(|c| !is_word(c)).unwrap_or(word.len())])
    })
}
