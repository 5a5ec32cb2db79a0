//! Exact attention, forward and backward, as safe Rust.
//!
//! - [`Context`] is a device: the cores of the host or one NVIDIA GPU. It keeps what it has
//!   prepared, and any number of threads may use it at once.
//! - [`Tensor`] and [`TensorMut`] are views of memory with a shape and strides. Their constructors
//!   compare both with the length of the slice, so a safe call never reaches outside it.
//! - [`Attention`] says what to compute: causal masks, windows, soft caps, varlen batches and so
//!   on. Both passes take the same one.
//! - [`Inputs`] go in. [`Output`] and [`Gradients`] come out as vectors, or [`Forward`] and
//!   [`Backward`] write into memory of the caller.
//!
//! The element type is [`half::f16`], [`half::bf16`] or `f32`. All sums are fp32. Tensors are
//! (batch, seqlen, heads, dim). Where q has more heads than k and v, query head `h` reads K/V head
//! `h / (heads_q / heads_kv)` (GQA and MQA).
//!
//! ```
//! use flashtune::attention::{Attention, Causal, Context, Inputs, Tensor};
//!
//! # fn main() -> flashtune::attention::Result<()> {
//! let context = Context::cpu()?;
//! let attention = Attention::new().causal(Causal::BottomRight);
//!
//! // One sequence of 5 tokens, 4 query heads on 2 K/V heads, head dim 8.
//! let (q, kv) = (vec![0.5_f32; 5 * 4 * 8], vec![1.0_f32; 5 * 2 * 8]);
//! let inputs = Inputs {
//!     q: Tensor::new(&q, [1, 5, 4, 8])?,
//!     k: Tensor::new(&kv, [1, 5, 2, 8])?,
//!     v: Tensor::new(&kv, [1, 5, 2, 8])?,
//! };
//! let forward = attention.forward(&context, &inputs)?;
//! assert!(forward.out.iter().all(|x| (x - 1.0).abs() < 1e-6));
//!
//! let out = Tensor::new(&forward.out, [1, 5, 4, 8])?;
//! let gradients = attention.backward(&context, &inputs, out, &forward.lse, out)?;
//! assert_eq!(gradients.dk.len(), kv.len());
//! # Ok(())
//! # }
//! ```
//!
//! # GPUs
//!
//! [`Context::cuda`] opens a GPU. Building this crate needs no CUDA toolkit; running on a GPU needs
//! the driver and libnvrtc 12.0 or later. A GPU's memory is outside of what Rust can check, so
//! [`Tensor::from_device`] and [`Launch::on_stream`] are `unsafe` and say what the caller promises.
//! They take plain addresses and a plain `CUstream`, so they work beside any version of cudarc, and
//! on the tensors of candle and burn.
//!
//! The first call with a problem prepares it: the library chooses a config and compiles its
//! kernels. [`Attention::prepare`] does this beforehand. Later calls only enqueue.
//!
//! # Errors
//!
//! Every failure is an [`Error`]: a [`Status`] and one sentence that names the argument, its value
//! and what is allowed. After an error, no output has changed.

// This folder is a layer over the C face, as include/flashtune.hpp is. It adds types, lifetimes and
// the bounds of memory. The C face checks the rest, so that both say the same of a bad argument.
//
// `tensor` has views and `element` their types. `options` turns an `Attention` and views into the C
// structs. `pass` holds the tensors of a pass, `context` calls the C functions, `status` makes
// errors of what they return, and `run` is what an `Attention` does.

mod context;
mod element;
mod options;
mod pass;
mod run;
mod status;
mod tensor;

pub use crate::error::{Error, Result, Status};
pub use context::{Context, ContextOptions};
pub use element::Element;
pub use options::{Attention, Causal};
pub use pass::{Backward, Forward, Gradients, Inputs, Launch, Output, Pass};
pub use tensor::{Array, ArrayMut, Tensor, TensorMut};
