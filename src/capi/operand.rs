//! Operand: one tensor of a call, with the sizes that the problem gives it. This file checks
//! pointer, strides and extent.

use super::overlap::{Footprint, overflows};
use super::sized::address;
use super::types::{flashtune_const_tensor, flashtune_tensor};
use crate::call::TensorRef;
use crate::cuda::tensor_map::STRIDE_LIMIT;
use crate::error::{Error, Result};
use crate::problem::{ElementType, Layout};

/// Whether data pointers may be NULL. A launch needs them; all other calls need shapes only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    Required,
    Optional,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Written,
}

/// The meaning of a tensor's first two dimensions, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// (batch, seqlen)
    OfBatch,
    /// (total): the rows of all sequences. The batch stride is not read.
    Packed,
    /// (pages, page size)
    InPages,
}

#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub name: &'static str,
    pub tensor: TensorRef,
    pub access: Access,
    rows: Rows,
    batch_size: i64,
    seqlen: i64,
    heads: i64,
    dim: i64,
    element: ElementType,
    /// Number of such tensors, and elements from one to the next.
    copies: (i64, i64),
}

impl From<flashtune_tensor> for TensorRef {
    fn from(tensor: flashtune_tensor) -> TensorRef {
        TensorRef {
            data: tensor.data,
            stride_batch: tensor.stride_batch,
            stride_seqlen: tensor.stride_seqlen,
            stride_head: tensor.stride_head,
        }
    }
}

// The layers below mark an access, not a pointer, as read or written.
impl From<flashtune_const_tensor> for TensorRef {
    fn from(tensor: flashtune_const_tensor) -> TensorRef {
        TensorRef {
            data: tensor.data.cast_mut(),
            stride_batch: tensor.stride_batch,
            stride_seqlen: tensor.stride_seqlen,
            stride_head: tensor.stride_head,
        }
    }
}

impl Operand {
    /// A tensor of already validated sizes (batch_size, seqlen, heads, dim).
    pub fn new(
        name: &'static str,
        access: Access,
        tensor: impl Into<TensorRef>,
        [batch_size, seqlen, heads, dim]: [i64; 4],
        element: impl Into<ElementType>,
    ) -> Self {
        let (tensor, element, rows, copies) = (tensor.into(), element.into(), Rows::OfBatch, (1, 0));
        Operand { name, tensor, access, rows, batch_size, seqlen, heads, dim, element, copies }
    }

    /// The same tensor with another meaning of its first two dimensions.
    pub fn with_rows(self, rows: Rows) -> Self {
        Operand { rows, ..self }
    }

    /// The same tensor, which was made with a plain type, with elements of another type. Rows then
    /// have so many of these.
    pub fn of_type(self, element: ElementType) -> Self {
        Operand { element, dim: element.elements(self.dim), ..self }
    }

    /// Several such tensors: their number, and elements from one to the next.
    pub fn repeated(self, copies: (i64, i64)) -> Self {
        Operand { copies, ..self }
    }

    /// Checks pointer and strides. Returns the tensor's bytes, or None without data or elements.
    pub fn check(&mut self, data: Data) -> Result<Option<Footprint>> {
        let t = &self.tensor;
        let strides = [("batch", t.stride_batch), ("seqlen", t.stride_seqlen), ("head", t.stride_head)];
        if let Some((dim, stride)) = strides.iter().find(|(_, stride)| *stride < 0) {
            return Err(self.invalid(format!(".stride_{dim} is {stride}; a stride must be 0 or more elements")));
        }
        if self.is_empty() {
            return Ok(None);
        }
        if t.data.is_null() {
            if data == Data::Required {
                return Err(self.invalid(format!(
                    ".data is NULL; it must point to {} {} elements",
                    self.sizes(),
                    self.element.name()
                )));
            }
            if strides.iter().all(|(_, stride)| *stride == 0) {
                self.tensor = TensorRef::packed(t.data, self.seqlen, self.heads, self.dim);
            }
        }
        let footprint = self.footprint()?;
        let element = self.element.bytes() as u64;
        if !footprint.start.is_multiple_of(element) {
            return Err(self.invalid(format!(
                ".data is {}; it must be aligned to the {element} bytes of one {} element",
                address(self.tensor.data),
                self.element.name()
            )));
        }
        if self.access == Access::Written && footprint.overlaps_itself() {
            return Err(self.invalid(format!(
                " is written, but its strides {} put several of its {} elements in one place; sorted by size, each stride of a dimension longer than 1 must reach past all below it",
                self.strides(),
                self.sizes()
            )));
        }
        Ok((!self.tensor.data.is_null()).then_some(footprint))
    }

    /// The quantities, in `ElementType::units`, that limit vector access: address, head dim, and
    /// the strides that are used.
    pub fn layout_quantities(&self) -> impl Iterator<Item = i64> {
        let dims = if self.is_empty() { [(1, 0); 3] } else { self.dims() };
        let dims = dims.into_iter().chain([self.copies]);
        let element = self.element.bytes() as i64;
        let strides = dims.filter(|(count, _)| *count > 1).map(move |(_, stride)| {
            // A stride beyond TMA's limit counts as narrower than TMA's access.
            if stride < STRIDE_LIMIT as i64 / element { stride } else { stride | Layout::Vec4.elements() }
        });
        let first = if self.is_empty() { 0 } else { self.tensor.data as i64 / element };
        strides.chain([first, self.dim]).map(|elements| self.element.units(elements))
    }

    /// Whether the rows of all sequences form one dimension, as tensor maps of varlen problems
    /// need. Maps of pages have a dimension of pages instead.
    pub fn counts_by_rows(&self) -> bool {
        self.is_empty()
            || self.rows == Rows::InPages
            || self.tensor.rows_between(self.batch_size, self.seqlen).is_some()
    }

    fn is_empty(&self) -> bool {
        self.batch_size == 0 || self.seqlen == 0
    }

    fn dims(&self) -> [(i64, i64); 3] {
        [
            (self.batch_size, self.tensor.stride_batch),
            (self.seqlen, self.tensor.stride_seqlen),
            (self.heads, self.tensor.stride_head),
        ]
    }

    fn footprint(&self) -> Result<Footprint> {
        let element = self.element.bytes() as i64;
        let [batch, seqlen, head] = self.dims();
        let start = self.tensor.data as u64;
        Footprint::strided(self.name, start, self.dim * element, element, [batch, seqlen, head, self.copies]).map_err(
            |extent| {
                let (name, at, strides, sizes) = (self.name, address(self.tensor.data), self.strides(), self.sizes());
                overflows(&format!("{name} at {at} with strides {strides} and sizes {sizes}"), extent)
            },
        )
    }

    fn sizes(&self) -> String {
        let Operand { batch_size, seqlen, heads, dim, .. } = self;
        match self.rows {
            Rows::OfBatch => format!("(batch, seqlen, heads, dim) = ({batch_size}, {seqlen}, {heads}, {dim})"),
            Rows::Packed => format!("(total, heads, dim) = ({seqlen}, {heads}, {dim})"),
            Rows::InPages => format!("(pages, page_size, heads, dim) = ({batch_size}, {seqlen}, {heads}, {dim})"),
        }
    }

    fn strides(&self) -> String {
        let TensorRef { stride_batch, stride_seqlen, stride_head, .. } = self.tensor;
        match self.rows {
            Rows::Packed => format!("(seqlen {stride_seqlen}, head {stride_head})"),
            _ => format!("(batch {stride_batch}, seqlen {stride_seqlen}, head {stride_head})"),
        }
    }

    fn invalid(&self, what: String) -> Error {
        Error::invalid(format!("{}{what}", self.name))
    }
}
