//! The XLA face: handlers for XLA's foreign function interface, which JAX calls through `jax.ffi`.
//!
//! It stands above the C face and uses nothing of the library but its functions. A handler reads a
//! call frame (`frame`), its attributes (`options`) and its buffers (`operands`). It makes the
//! params of a pass from them (`params`, with `types`, `sizes` and `features`), and launches the
//! pass on the context of XLA's device (`contexts`). `runtime` asks XLA for the stream, for scratch
//! memory and for error objects.
//!
//! XLA's C API is declared by hand in `c_api`: a call needs no XLA when the library is built.

pub mod c_api;
mod contexts;
mod failure;
mod features;
mod frame;
pub mod handlers;
mod operands;
mod options;
mod params;
mod quantize;
mod runtime;
mod sizes;
mod types;
