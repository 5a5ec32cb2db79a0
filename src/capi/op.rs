//! The two calls of a small operation, once for all operations. `merge` and `kv_append` differ only
//! in their params and checks; this file does the rest.

use super::context::flashtune_context;
use super::operand::Data;
use super::panic_boundary::enter;
use super::params::{Params, checked_with_context};
use crate::backend::{OpExecutable, Stream};
use crate::error::{Error, Result, Status};
use crate::ops::Op;
use std::sync::Arc;

/// # Safety
/// As `checked_with_context`. The same holds for `launch`.
pub unsafe fn prepare<P: Params<Checked: Op>>(context: *mut flashtune_context, params: *const P) -> i32 {
    enter(|| {
        // SAFETY: by the caller's promise.
        let (context, op) = unsafe { checked_with_context(context, params, Data::Optional)? };
        executable(context, &op, None).map(drop)
    })
}

pub unsafe fn launch<P: Params<Checked: Op>>(context: *mut flashtune_context, params: *const P, stream: Stream) -> i32 {
    enter(|| {
        // SAFETY: by the caller's promise.
        let (context, op) = unsafe { checked_with_context(context, params, Data::Required)? };
        if op.is_empty() {
            return Ok(());
        }
        executable(context, &op, Some(stream))?.launch(&op, stream)
    })
}

/// The executable of the call's class. One that is missing is built, but neither in a sealed
/// context nor while `stream` captures.
fn executable<O: Op>(context: &flashtune_context, op: &O, stream: Option<Stream>) -> Result<Arc<OpExecutable>> {
    let engine = &context.engine;
    if context.is_cpu() {
        context.require_memory("this call")?;
    }
    let class = op.class();
    if let Some(executable) = engine.ops().get(&class) {
        return Ok(executable);
    }
    let unprepared = |why: &str| {
        let message = format!("{class} is not prepared, and {why}; call flashtune_{}_prepare first", O::NAME);
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
    context.require_memory("preparing an operation")?;
    engine.ops().prepare(engine.backend(), op)
}
