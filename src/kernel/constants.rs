//! Class constants: what a kernel knows of its problem at compile time, by name, value and meaning.
//!
//! The renderer writes a `constexpr` line for each one that a kernel's text mentions, so a constant that only a device
//! file reads is named in no template. Tags see the same values. Knobs are the config's and stay in the templates.

use crate::problem::{Dtype, Problem};

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

pub struct Constant {
    /// In CUDA.
    pub name: &'static str,
    /// In tags and in the header comment.
    pub tag: &'static str,
    pub meaning: &'static str,
    pub value: fn(&Problem) -> Value,
}

/// A dtype is one tag and two constants.
pub const DTYPE: &str = "dtype";
/// The architecture's tag. The target's, not the problem's, so it is no class constant.
pub const ARCH: &str = "arch";

const fn constant(
    name: &'static str,
    tag: &'static str,
    meaning: &'static str,
    value: fn(&Problem) -> Value,
) -> Constant {
    Constant { name, tag, meaning, value }
}

/// In the order in which headers and rendered texts have them.
#[rustfmt::skip]
pub const CONSTANTS: &[Constant] = &[
    constant("kIsBf16", DTYPE, "neither kIsBf16 nor kIsFp32: fp16", |p| Value::Flag(p.dtype == Dtype::Bf16)),
    constant("kIsFp32", DTYPE, "tensors are fp32", |p| Value::Flag(p.dtype == Dtype::Fp32)),
    constant("kHeadDim", "head_dim", "of Q and K, 1 to 512", |p| Value::Integer(p.head_dim as u32)),
    constant("kHeadDimV", "head_dim_v", "of V and O, 1 to 512", |p| Value::Integer(p.head_dim_v as u32)),
    constant("kIsCausal", "is_causal", "rows see keys up to a diagonal: a causal mask, or a window to the right", |p| Value::Flag(p.right_shift().is_some())),
    constant("kHasDropout", "has_dropout", "weights are dropped (device/dropout.cuh)", |p| Value::Flag(p.dropout)),
    constant("kIsDeterministic", "is_deterministic", "tiles add to dQ in turn (device/turns.cuh)", |p| Value::Flag(p.deterministic)),
    constant("kIsBatchInvariant", "is_batch_invariant", "a tile's splits follow from its own keys, whatever the grid's size", |p| Value::Flag(p.batch_invariant)),
    constant("kHasWindow", "has_window", "rows see keys from a diagonal on: a window to the left", |p| Value::Flag(p.left_shift().is_some())),
    constant("kHasSoftcap", "has_softcap", "scores s become c * tanh(s / c) (device/scores.cuh)", |p| Value::Flag(p.features.softcap)),
    constant("kHasAlibi", "has_alibi", "scores lose a multiple of the distance to the diagonal (device/scores.cuh)", |p| Value::Flag(p.features.alibi)),
    constant("kHasBias", "has_bias", "a tensor is added to scores", |p| Value::Flag(p.features.bias)),
    constant("kHasDbias", "has_dbias", "the gradient of the bias is wanted", |p| Value::Flag(p.features.dbias)),
    constant("kHasMask", "has_mask", "a tensor says which keys a row sees", |p| Value::Flag(p.features.mask)),
    constant("kMaskIsBits", "mask_is_bits", "the elements of the mask are bits, else bytes", |p| Value::Flag(p.features.mask_bits)),
    constant("kHasSinks", "has_sinks", "each query head has a score to no key (device/sink.cuh)", |p| Value::Flag(p.features.sinks)),
    constant("kHasDlse", "has_dlse", "a gradient flows into the LSE", |p| Value::Flag(p.features.dlse)),
    constant("kIsVarlen", "is_varlen", "each sequence has its own length, in device memory (device/sequence.cuh)", |p| Value::Flag(p.features.varlen.is_some())),
    constant("kPageSize", "page_size", "keys of a page of K and V (device/key_pages.cuh); 0: not paged", |p| Value::Integer(p.features.paged.unwrap_or(0) as u32)),
    constant("kMaskBlockQ", "mask_block_q", "queries of a block of the block mask (device/block_list.cuh); 0: none", |p| Value::Integer(p.features.block_mask.map_or(0, |mask| mask.block_q as u32))),
    constant("kMaskBlockK", "mask_block_k", "keys of a block of the block mask; 0: none", |p| Value::Integer(p.features.block_mask.map_or(0, |mask| mask.block_k as u32))),
    constant("kVec", "vec", "elements of the widest aligned access: 8 (not of fp32), 4, 2, 1", |p| Value::Integer(p.access_elements() as u32)),
];

/// The tags in the order of the header comment.
pub fn tags() -> Vec<&'static str> {
    let mut tags: Vec<&str> = CONSTANTS.iter().map(|constant| constant.tag).collect();
    tags.dedup();
    tags
}

/// The tags' values.
pub fn tag_values(problem: &Problem) -> impl Iterator<Item = (String, Value)> + '_ {
    let value = |constant: &Constant| match constant.tag {
        DTYPE => Value::Name(problem.dtype.name().to_owned()),
        _ => (constant.value)(problem),
    };
    CONSTANTS.iter().map(move |constant| (constant.tag.to_owned(), value(constant)))
}

/// A constant's line in a kernel's text.
pub struct Declaration {
    pub tag: &'static str,
    pub line: String,
}

/// The constants that a text mentions outside comments. A text that fixes one itself keeps its own.
pub fn declared(problem: &Problem, arch: &Value, text: &str) -> Vec<Declaration> {
    let code: String = text.lines().flat_map(|line| [line.split("//").next().unwrap_or(line), "\n"]).collect();
    let arch = ("kArch", ARCH, "80, 86, 89, 90, 100, 120", arch.clone());
    let of_class = CONSTANTS.iter().map(|c| (c.name, c.tag, c.meaning, (c.value)(problem)));
    std::iter::once(arch)
        .chain(of_class)
        .filter_map(|(name, tag, meaning, value)| {
            let kind = if matches!(value, Value::Flag(_)) { "bool" } else { "int" };
            let declaration = format!("constexpr {kind} {name} = ");
            let is_needed = mentions(&code, name) && !code.contains(&declaration);
            is_needed.then(|| Declaration { tag, line: format!("{declaration}{value};  // {meaning}\n") })
        })
        .collect()
}

/// Whether a name stands in the code as a whole word.
fn mentions(code: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    code.match_indices(name).any(|(at, _)| {
        let (before, after) = (&code[..at], &code[at + name.len()..]);
        !before.ends_with(is_word) && !after.starts_with(is_word)
    })
}
