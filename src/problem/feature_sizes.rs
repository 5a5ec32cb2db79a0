//! The features that have sizes: what each one holds beside being on.

use super::Causal;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// A sliding window: query i sees keys from i + shift - left to i + shift + right. The shift is 0
/// if the window aligns to the top left, else seqlen_k - seqlen_q. With varlen, these are the
/// sequence's own lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Window {
    /// None: all keys before the diagonal.
    pub left: Option<i64>,
    /// None: all keys after the diagonal. A causal problem has None here, and its causal mask hides
    /// these keys.
    pub right: Option<i64>,
    /// Aligns the window as `Causal::TopLeft` does, else as `Causal::BottomRight`. In a causal
    /// problem the two alignments must be equal.
    pub top_left: bool,
}

impl Window {
    /// Checks that the window of a causal problem follows the causal diagonal.
    pub fn check_corner(&self, causal: Causal) -> Result<()> {
        let (of_window, of_causal) = match (self.top_left, causal) {
            (false, Causal::TopLeft) => ("bottom right", "top left"),
            (true, Causal::BottomRight) => ("top left", "bottom right"),
            _ => return Ok(()),
        };
        Err(Error::invalid(format!(
            "the window aligns to the {of_window} and causal to the {of_causal}; both must align to the same corner"
        )))
    }
}

/// Varlen: each sequence has its own length, which only the device knows. With a total, the tensor
/// is (total, heads, dim) and holds the sequences end to end. With None, the tensor is (batch,
/// seqlen, heads, dim), and each sequence uses the first rows of its batch entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Varlen {
    /// Rows of q.
    pub total_q: Option<i64>,
    /// Rows of k.
    pub total_k: Option<i64>,
    /// `seqused_q` is given. It holds the number of rows of q that each sequence uses.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub padded_q: bool,
}

/// The block size of a block mask, in queries and keys. Lists (`call::BlockLists`) name the blocks
/// of scores that queries may see; all other blocks are hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockMask {
    pub block_q: i64,
    pub block_k: i64,
}
