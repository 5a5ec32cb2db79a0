//! What runs beside the passes is there, or made where it may be: one rule for merging and for writing into a cache.

use super::context::flashtune_context;
use crate::backend::Stream;
use crate::error::{Error, Result, Status};
use crate::plan::Built;
use std::fmt::Display;
use std::hash::Hash;
use std::sync::Arc;

/// What is there of a class, or new where it may be made: not in a sealed context, not while `stream` captures. `prepare` is the
/// call that makes it, for messages.
pub fn ready<C: Clone + Display + Eq + Hash, T>(
    context: &flashtune_context,
    built: &Built<C, T>,
    class: &C,
    stream: Option<Stream>,
    prepare: &str,
) -> Result<Arc<T>> {
    let engine = &context.engine;
    if let Some(there) = built.prepared(class) {
        return Ok(there);
    }
    let unprepared = |why: &str| {
        let message = format!("{class} is not prepared, and {why}; call {prepare} before");
        Err(Error::new(Status::NotPrepared, message))
    };
    if engine.is_sealed() {
        return unprepared("the context is sealed");
    }
    if let Some(stream) = stream
        && engine.backend().is_capturing(stream)?
    {
        return unprepared("the stream is capturing a graph");
    }
    built.prepare(engine.backend(), class)
}
