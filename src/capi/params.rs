//! Params: a struct of arguments of one call, copied from the C caller and checked. Passes and
//! small operations use it.

use super::context::flashtune_context;
use super::memory::Memory;
use super::operand::Data;
use super::sized::{self, SizedStruct};
use crate::error::Result;

pub trait Params: SizedStruct {
    /// The call as the plan layer takes it.
    type Checked;

    fn check(&self, data: Data, memory: Memory) -> Result<Self::Checked>;
}

/// The caller's params, copied and checked. `argument` is the parameter's name, for messages.
///
/// # Safety
/// As `sized::read`.
pub unsafe fn checked<P: Params>(
    context: &flashtune_context,
    argument: &str,
    params: *const P,
    data: Data,
) -> Result<P::Checked> {
    // SAFETY: by the caller's promise.
    let params = unsafe { sized::read(argument, params)? };
    params.check(data, Memory::of(context.engine.backend(), context.is_auto))
}

/// The caller's context, and its params copied and checked.
///
/// # Safety
/// `context` is a live context or NULL; `params` as `sized::read`.
pub unsafe fn checked_with_context<'a, P: Params>(
    context: *mut flashtune_context,
    params: *const P,
    data: Data,
) -> Result<(&'a flashtune_context, P::Checked)> {
    // SAFETY: by the caller's promise.
    let context = unsafe { flashtune_context::of(context)? };
    // SAFETY: by the caller's promise.
    let checked = unsafe { checked(context, "params", params, data)? };
    Ok((context, checked))
}
