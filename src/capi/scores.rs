//! ScoresOperand: a tensor with one element for each score, with the sizes that the problem gives
//! it. This file checks pointer, strides and extent.

use super::operand::{Access, Data};
use super::overlap::{Footprint, overflows};
use super::sized::address;
use super::types::{flashtune_const_scores_tensor, flashtune_scores_tensor};
use crate::call::ScoresRef;
use crate::error::{Error, Result};
use crate::problem::Problem;

/// The endings of the strides' names.
const DIMS: [&str; 4] = ["batch", "head", "seqlen_q", "seqlen_k"];

#[derive(Clone, Copy, Debug)]
pub struct ScoresOperand {
    name: &'static str,
    view: ScoresRef,
    pub access: Access,
    /// (batch_size, num_heads_q, seqlen_q, seqlen_k). With bits, the last is the bytes of a row.
    sizes: [i64; 4],
    is_bits: bool,
    element: i64,
    /// The element's name in messages.
    element_name: &'static str,
}

impl From<flashtune_scores_tensor> for ScoresRef {
    fn from(tensor: flashtune_scores_tensor) -> ScoresRef {
        ScoresRef {
            data: tensor.data,
            stride_batch: tensor.stride_batch,
            stride_head: tensor.stride_head,
            stride_seqlen_q: tensor.stride_seqlen_q,
            stride_seqlen_k: tensor.stride_seqlen_k,
        }
    }
}

impl From<flashtune_const_scores_tensor> for ScoresRef {
    fn from(tensor: flashtune_const_scores_tensor) -> ScoresRef {
        ScoresRef {
            data: tensor.data.cast_mut(),
            stride_batch: tensor.stride_batch,
            stride_head: tensor.stride_head,
            stride_seqlen_q: tensor.stride_seqlen_q,
            stride_seqlen_k: tensor.stride_seqlen_k,
        }
    }
}

impl ScoresOperand {
    /// A tensor of an already validated problem. The element is given as (bytes, name).
    pub fn new(
        name: &'static str,
        access: Access,
        tensor: impl Into<ScoresRef>,
        problem: &Problem,
        (element, element_name): (usize, &'static str),
    ) -> Self {
        let sizes = [problem.batch_size, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k];
        let (view, element) = (tensor.into(), element as i64);
        ScoresOperand { name, view, access, sizes, is_bits: false, element, element_name }
    }

    /// A read tensor whose elements are bits, eight keys to a byte.
    pub fn bits(name: &'static str, tensor: impl Into<ScoresRef>, problem: &Problem) -> Self {
        let bytes = ScoresOperand::new(name, Access::Read, tensor, problem, (1, "one-byte"));
        let [batch, head, seqlen_q, seqlen_k] = bytes.sizes;
        ScoresOperand { sizes: [batch, head, seqlen_q, (seqlen_k + 7) / 8], is_bits: true, ..bytes }
    }

    /// Checks pointer and strides. Returns the tensor's bytes, or None without data or elements.
    pub fn check(&self, data: Data) -> Result<Option<Footprint>> {
        if let Some((dim, stride)) = DIMS.iter().zip(self.strides()).find(|(_, stride)| *stride < 0) {
            return Err(self.invalid(format!(".stride_{dim} is {stride}; a stride must be 0 or more elements")));
        }
        if self.sizes.contains(&0) {
            return Ok(None);
        }
        if self.view.data.is_null() && data == Data::Required {
            return Err(self.invalid(format!(
                ".data is NULL; it must point to (batch, heads_q, seqlen_q, {}) = {} {} elements, since features asks for it",
                if self.is_bits { "ceil(seqlen_k / 8)" } else { "seqlen_k" },
                tuple(self.sizes),
                self.element_name
            )));
        }
        if self.is_bits && self.sizes[3] > 1 && self.view.stride_seqlen_k != 1 && !self.is_unplaced() {
            return Err(self.invalid(format!(
                ".stride_seqlen_k is {}; it must be 1 for a mask of bits, whose rows are contiguous bytes",
                self.view.stride_seqlen_k
            )));
        }
        let footprint = self.footprint()?;
        if !footprint.start.is_multiple_of(self.element as u64) {
            return Err(self.invalid(format!(
                ".data is {}; it must be aligned to the {} bytes of one {} element",
                address(self.view.data),
                self.element,
                self.element_name
            )));
        }
        if self.access == Access::Written && !self.is_unplaced() && footprint.overlaps_itself() {
            return Err(self.invalid(format!(
                " is written, but its strides (batch, head, seqlen_q, seqlen_k) = {} put several of its {} elements in one place; sorted by size, each stride that is not 0 must reach past all below it",
                tuple(self.strides()),
                tuple(self.sizes)
            )));
        }
        Ok((!self.view.data.is_null()).then_some(footprint))
    }

    /// The first dimension whose scores share one element, so that a gradient is summed along it.
    /// A tensor without elements has none.
    pub fn summed_dim(&self) -> Option<&'static str> {
        if self.sizes.contains(&0) {
            return None;
        }
        let mut dims = DIMS.into_iter().zip(self.sizes).zip(self.strides());
        dims.find(|((_, count), stride)| *count > 1 && *stride == 0 && !self.is_unplaced()).map(|((name, _), _)| name)
    }

    /// Whether the tensor is NULL with all strides 0, which stands for any layout.
    fn is_unplaced(&self) -> bool {
        self.view.data.is_null() && self.strides() == [0; 4]
    }

    fn strides(&self) -> [i64; 4] {
        let view = &self.view;
        [view.stride_batch, view.stride_head, view.stride_seqlen_q, view.stride_seqlen_k]
    }

    fn footprint(&self) -> Result<Footprint> {
        // A dimension of stride 0 touches nothing new.
        let entries = |(count, stride)| if stride == 0 { (1, 0) } else { (count, stride) };
        let [batch, head, seqlen_q, seqlen_k] = std::array::from_fn(|i| entries((self.sizes[i], self.strides()[i])));
        // Contiguous keys form a row, which leaves fewer dimensions to search.
        let (row, seqlen_k) = if seqlen_k.1 == 1 { (seqlen_k.0, (1, 0)) } else { (1, seqlen_k) };
        let dims = [batch, head, seqlen_q, seqlen_k];
        Footprint::strided(self.name, self.view.data as u64, row * self.element, self.element, dims).map_err(|extent| {
            let (name, at) = (self.name, address(self.view.data));
            let (strides, sizes) = (tuple(self.strides()), tuple(self.sizes));
            overflows(
                &format!("{name} at {at} with strides (batch, head, seqlen_q, seqlen_k) = {strides} and sizes {sizes}"),
                extent,
            )
        })
    }

    fn invalid(&self, what: String) -> Error {
        Error::invalid(format!("{}{what}", self.name))
    }
}

fn tuple([a, b, c, d]: [i64; 4]) -> String {
    format!("({a}, {b}, {c}, {d})")
}
