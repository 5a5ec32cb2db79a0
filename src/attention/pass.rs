//! The tensors of a pass, and how a launch gets its stream and workspace.

use super::element::Element;
use super::options::{Attention, check_place, check_shape, input, tensor};
use super::status::checked;
use super::tensor::{Array, ArrayMut, Place, Tensor, TensorMut};
use crate::capi::backward::flashtune_backward_params_from_forward;
use crate::capi::types::flashtune_backward_params;
use crate::error::Result;
use sealed::Params;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The inputs of both passes. Where q has more heads than k and v, its heads form groups that share
/// a K/V head.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T> {
    /// (batch, seqlen_q, heads_q, head_dim).
    pub q: Tensor<'a, T>,
    /// (batch, seqlen_k, heads_kv, head_dim).
    pub k: Tensor<'a, T>,
    /// (batch, seqlen_k, heads_kv, head_dim_v).
    pub v: Tensor<'a, T>,
}

/// What [`Attention::forward`] returns.
#[derive(Clone, Debug)]
pub struct Output<T> {
    /// (batch, seqlen_q, heads_q, head_dim_v), contiguous.
    pub out: Vec<T>,
    /// (batch, heads_q, seqlen_q): the natural logarithm of the sum of the exponentials of each
    /// query's scores. With varlen it is (heads_q, total rows), and -inf in rows of no sequence.
    /// The backward pass reads it.
    pub lse: Vec<f32>,
}

/// What [`Attention::backward`] returns: contiguous, each in the shape of its input.
#[derive(Clone, Debug)]
pub struct Gradients<T> {
    /// The gradient of q.
    pub dq: Vec<T>,
    /// The gradient of k.
    pub dk: Vec<T>,
    /// The gradient of v.
    pub dv: Vec<T>,
}

/// A forward pass into memory of the caller.
#[derive(Debug)]
pub struct Forward<'a, T> {
    /// The inputs.
    pub inputs: Inputs<'a, T>,
    /// (batch, seqlen_q, heads_q, head_dim_v), written.
    pub out: TensorMut<'a, T>,
    /// See [`Output::lse`]; `None` if not wanted.
    pub lse: Option<ArrayMut<'a, f32>>,
}

/// A backward pass into memory of the caller.
#[derive(Debug)]
pub struct Backward<'a, T> {
    /// The inputs of the forward pass.
    pub inputs: Inputs<'a, T>,
    /// The result of the forward pass.
    pub out: Tensor<'a, T>,
    /// The LSE of the forward pass.
    pub lse: Array<'a, f32>,
    /// The gradient of out, in its shape.
    pub dout: Tensor<'a, T>,
    /// The gradient of q, written.
    pub dq: TensorMut<'a, T>,
    /// The gradient of k, written.
    pub dk: TensorMut<'a, T>,
    /// The gradient of v, written.
    pub dv: TensorMut<'a, T>,
}

/// [`Forward`] or [`Backward`].
pub trait Pass: sealed::Sealed {}

impl<T: Element> Pass for Forward<'_, T> {}
impl<T: Element> Pass for Backward<'_, T> {}

pub(super) mod sealed {
    use super::{Attention, Place, Result};
    use crate::capi::types::{flashtune_backward_params, flashtune_forward_params};

    /// The struct of a pass for the C face.
    pub enum Params {
        Forward(flashtune_forward_params),
        Backward(flashtune_backward_params),
    }

    pub trait Sealed {
        fn params(&self, attention: &Attention<'_>, place: Place) -> Result<Params>;
    }
}

impl<T: Element> sealed::Sealed for Forward<'_, T> {
    fn params(&self, attention: &Attention<'_>, place: Place) -> Result<Params> {
        let lse = self.lse.as_ref().map(|lse| check_place("lse", lse.place, place).map(|()| (lse.data, lse.len)));
        let lse = lse.transpose()?;
        let (data, len) = (lse.map_or(null_mut(), |(data, _)| data), lse.map(|(_, len)| len));
        let Inputs { q, k, v } = &self.inputs;
        attention.forward_params([q, k, v], &self.out.view, (data, len), place).map(Params::Forward)
    }
}

impl<T: Element> sealed::Sealed for Backward<'_, T> {
    fn params(&self, attention: &Attention<'_>, place: Place) -> Result<Params> {
        let Inputs { q, k, v } = &self.inputs;
        let lse = (self.lse.data.cast_mut(), Some(self.lse.len));
        check_place("lse", self.lse.place, place)?;
        let forward = attention.forward_params([q, k, v], &self.out.view, lse, place)?;
        // SAFETY: integers, floats and raw pointers; zero is a value of each.
        let mut params: flashtune_backward_params = unsafe { std::mem::zeroed() };
        params.struct_size = size_of::<flashtune_backward_params>() as u64;
        // SAFETY: two structs of the sizes that they say.
        checked(unsafe { flashtune_backward_params_from_forward(&forward, &mut params) })?;
        let others = [
            ("dout", &self.dout.view, self.out.view.shape),
            ("dq", &self.dq.view, q.view.shape),
            ("dk", &self.dk.view, k.view.shape),
            ("dv", &self.dv.view, v.view.shape),
        ];
        for (name, view, shape) in others {
            check_shape(name, view, shape)?;
            check_place(name, view.place, place)?;
        }
        params.dout = input(&self.dout.view)?;
        params.dq = tensor(&self.dq.view)?;
        params.dk = tensor(&self.dk.view)?;
        params.dv = tensor(&self.dv.view)?;
        params.deterministic = attention.deterministic.into();
        Ok(Params::Backward(params))
    }
}

/// How a launch gets its workspace and, on a GPU, its stream.
#[derive(Debug)]
pub struct Launch {
    pub(super) stream: *mut c_void,
    pub(super) workspace: *mut c_void,
    pub(super) workspace_bytes: usize,
    pub(super) place: Place,
}

impl Launch {
    /// On a CPU context: the call allocates its workspace and returns when the work is done.
    pub const fn on_host() -> Launch {
        Launch { stream: null_mut(), workspace: null_mut(), workspace_bytes: 0, place: Place::Host }
    }

    /// On a GPU: the call enqueues the work on a `CUstream` (NULL is the default stream) with a
    /// workspace of [`Attention::workspace_bytes`], aligned to 256 bytes.
    ///
    /// # Safety
    /// The stream belongs to the context's GPU. The workspace is memory of that GPU with as many
    /// bytes, and nothing else uses it until the work is done. The context is dropped after that.
    pub unsafe fn on_stream(stream: *mut c_void, workspace: u64, workspace_bytes: usize) -> Launch {
        let workspace = std::ptr::with_exposed_provenance_mut(workspace as usize);
        Launch { stream, workspace, workspace_bytes, place: Place::Device }
    }
}
