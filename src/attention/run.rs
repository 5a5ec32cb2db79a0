//! The calls of an `Attention`: each turns views into the structs of the C face and asks a context.

use super::context::Context;
use super::element::Element;
use super::options::Attention;
use super::pass::sealed::Params;
use super::pass::{Backward, Forward, Gradients, Inputs, Launch, Output, Pass};
use super::tensor::{Array, ArrayMut, Place, Tensor, TensorMut};
use crate::error::{Error, Result, Status};

impl Attention<'_> {
    /// Runs a forward pass on a CPU context and returns new vectors.
    pub fn forward<T: Element>(&self, context: &Context, inputs: &Inputs<'_, T>) -> Result<Output<T>> {
        expect_host(context, "forward")?;
        let ([batch, seqlen, heads, _], dim_v) = (inputs.q.shape(), inputs.v.shape()[3]);
        let shape = [batch, seqlen, heads, dim_v];
        let (mut out, mut lse) = (zeros("out", &shape)?, zeros("lse", &shape[..3])?);
        lse.fill(f32::NEG_INFINITY);
        let mut pass =
            Forward { inputs: *inputs, out: TensorMut::new(&mut out, shape)?, lse: Some(ArrayMut::from(&mut lse)) };
        self.launch(context, &mut pass, &Launch::on_host())?;
        Ok(Output { out, lse })
    }

    /// Runs the backward pass of a forward pass on a CPU context and returns new vectors. `out` and
    /// `lse` are the forward pass's, and `dout` is the gradient of `out`.
    pub fn backward<'a, T: Element>(
        &self,
        context: &Context,
        inputs: &Inputs<'a, T>,
        out: Tensor<'a, T>,
        lse: impl Into<Array<'a, f32>>,
        dout: Tensor<'a, T>,
    ) -> Result<Gradients<T>> {
        expect_host(context, "backward")?;
        let shapes = [inputs.q.shape(), inputs.k.shape(), inputs.v.shape()];
        let (mut dq, mut dk, mut dv) = (zeros("dq", &shapes[0])?, zeros("dk", &shapes[1])?, zeros("dv", &shapes[2])?);
        let mut pass = Backward {
            inputs: *inputs,
            out,
            lse: lse.into(),
            dout,
            dq: TensorMut::new(&mut dq, shapes[0])?,
            dk: TensorMut::new(&mut dk, shapes[1])?,
            dv: TensorMut::new(&mut dv, shapes[2])?,
        };
        self.launch(context, &mut pass, &Launch::on_host())?;
        Ok(Gradients { dq, dk, dv })
    }

    /// Runs a pass into its tensors. On a CPU context it returns when the work is done, and on a
    /// GPU when the work is enqueued. Without a plan, the pass is prepared first.
    pub fn launch<P: Pass>(&self, context: &Context, pass: &mut P, launch: &Launch) -> Result<()> {
        match (context.place(), launch.place) {
            (Place::Host, Place::Device) => {
                return Err(Error::invalid("launch is on_stream and the context a CPU's; it must be on_host"));
            }
            (Place::Device, Place::Host) => {
                return Err(Error::invalid("launch is on_host and the context a GPU's; it must be on_stream"));
            }
            _ => {}
        }
        let params = self.params(context, pass)?;
        // SAFETY: the views are of the context's place. Those of slices have bounds and are
        // borrowed until this returns, when a CPU's work is done. The others have the promises of
        // `from_device`.
        unsafe { context.launch(&params, launch) }
    }

    /// Prepares a pass: chooses a config, and compiles and loads its kernels. A later launch of an
    /// equal problem only enqueues. No tensor data is touched.
    pub fn prepare<P: Pass>(&self, context: &Context, pass: &P) -> Result<()> {
        context.prepare(&self.params(context, pass)?)
    }

    /// Says whether the context can run a pass; the error has the reason. Nothing is compiled.
    pub fn supported<P: Pass>(&self, context: &Context, pass: &P) -> Result<()> {
        context.supported(&self.params(context, pass)?)
    }

    /// The bytes of workspace that a launch of a pass needs.
    pub fn workspace_bytes<P: Pass>(&self, context: &Context, pass: &P) -> Result<usize> {
        context.workspace_bytes(&self.params(context, pass)?)
    }

    fn params<P: Pass>(&self, context: &Context, pass: &P) -> Result<Params> {
        pass.params(self, context.place())
    }
}

fn expect_host(context: &Context, call: &str) -> Result<()> {
    match context.place() {
        Place::Host => Ok(()),
        Place::Device => Err(Error::unsupported(format!(
            "{call} returns vectors of the host and the context is a GPU's; use launch with device memory"
        ))),
    }
}

/// A new vector for a tensor. Its size follows from the caller's shapes, so it may be too large.
fn zeros<T: Copy + Default>(name: &str, shape: &[usize]) -> Result<Vec<T>> {
    let mut data = Vec::new();
    let len = shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    match len.map(|len| data.try_reserve_exact(len).map(|()| data.resize(len, T::default()))) {
        Some(Ok(())) => Ok(data),
        _ => Err(Error::new(
            Status::OutOfMemory,
            format!("{name} of shape {shape:?} has more elements than memory has room for"),
        )),
    }
}
