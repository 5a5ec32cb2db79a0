//! The five calls of a pass (supported, workspace_size, prepare, launch, plan_info), written once
//! for both passes. `forward` and `backward` differ only in their params. Each call here checks the
//! params and passes the result to the engine.

use super::args::Checked;
use super::context::flashtune_context;
use super::operand::Data;
use super::params::{Params, checked_with_context};
use super::plan_info::flashtune_plan_info;
use super::{panic_boundary, sized};
use crate::backend::Stream;
use crate::error::{Error, Result, Status};
use crate::plan::Plan;
use crate::problem::{Problem, Varlen};
use std::ffi::c_void;
use std::sync::Arc;

/// # Safety
/// As `checked_with_context`. The same holds for every function below.
pub unsafe fn supported<P: Params<Checked = Checked>>(context: *mut flashtune_context, params: *const P) -> i32 {
    panic_boundary::enter(|| {
        // SAFETY: by the caller's promise.
        let (context, checked) = unsafe { checked_with_context(context, params, Data::Optional)? };
        context.engine.supported(&checked.call.problem)
    })
}

pub unsafe fn workspace_size<P: Params<Checked = Checked>>(
    context: *mut flashtune_context,
    params: *const P,
    bytes: *mut u64,
) -> i32 {
    panic_boundary::enter(|| {
        // SAFETY: by the caller's promise.
        let (_, checked) = unsafe { checked_with_context(context, params, Data::Optional)? };
        let bytes = sized::output("bytes", bytes)?;
        // SAFETY: not NULL and aligned, and the caller promises that it may be written.
        unsafe { bytes.write(checked.workspace_bytes() as u64) };
        Ok(())
    })
}

pub unsafe fn prepare<P: Params<Checked = Checked>>(context: *mut flashtune_context, params: *const P) -> i32 {
    panic_boundary::enter(|| {
        // SAFETY: by the caller's promise.
        let (context, checked) = unsafe { checked_with_context(context, params, Data::Optional)? };
        let problem = &checked.call.problem;
        if problem.is_empty() {
            return context.engine.supported(problem);
        }
        plan(context, problem, None).map(drop)
    })
}

pub unsafe fn launch<P: Params<Checked = Checked>>(
    context: *mut flashtune_context,
    params: *const P,
    workspace: *mut c_void,
    workspace_bytes: u64,
    stream: Stream,
) -> i32 {
    panic_boundary::enter(|| {
        // SAFETY: by the caller's promise.
        let (context, mut checked) = unsafe { checked_with_context(context, params, Data::Required)? };
        checked.set_workspace(workspace, workspace_bytes)?;
        let problem = &checked.call.problem;
        if problem.is_empty() {
            return context.engine.supported(problem);
        }
        plan(context, problem, Some(stream))?.executable.launch(&checked.call, stream)
    })
}

pub unsafe fn plan_info<P: Params<Checked = Checked>>(
    context: *mut flashtune_context,
    params: *const P,
    info: *mut flashtune_plan_info,
) -> i32 {
    panic_boundary::enter(|| {
        // SAFETY: by the caller's promise.
        let (context, checked) = unsafe { checked_with_context(context, params, Data::Optional)? };
        // SAFETY: by the caller's promise.
        let size = unsafe { sized::output_size("info", info)? };
        let problem = &checked.call.problem;
        refuse_empty(problem)?;
        let described = flashtune_plan_info::of(&*plan(context, problem, None)?);
        // SAFETY: `size` came from this pointer.
        unsafe { sized::write(info, size, &described) };
        Ok(())
    })
}

/// An error for a problem that writes nothing, since it has no plan.
pub fn refuse_empty(problem: &Problem) -> Result<()> {
    match problem.is_empty() {
        false => Ok(()),
        true => {
            // The check of the params set the sequence length to 0 where the total is 0, so name
            // the total.
            let Varlen { total_q, total_k, .. } = problem.features.varlen.unwrap_or_default();
            let q = if total_q == Some(0) { "total_q" } else { "seqlen_q" };
            let k = if total_k == Some(0) { "total_k" } else { "seqlen_k" };
            Err(Error::invalid(format!(
                "batch_size is {}, {q} {} and {k} {}: this pass has nothing to do and therefore no plan; neither the batch nor the output may be empty",
                problem.batch_size, problem.seqlen_q, problem.seqlen_k
            )))
        }
    }
}

/// The existing plan, or a new one. Preparing is not allowed in a sealed context and on a capturing
/// `stream`. There, a config that is loaded for another shape of the class serves if it fits. A
/// sealed engine finds it in `Engine::prepared`, and a capturing launch in `Engine::any_loaded`.
fn plan(context: &flashtune_context, problem: &Problem, stream: Option<Stream>) -> Result<Arc<Plan>> {
    let engine = &context.engine;
    if context.is_cpu() {
        context.require_memory("this call")?;
    }
    if let Some(plan) = engine.prepared(problem) {
        return Ok(plan);
    }
    let unprepared = |why: &str| {
        Err(Error::new(
            Status::NotPrepared,
            format!("this problem has no plan yet, and {why}; call the pass's prepare function first"),
        ))
    };
    if engine.is_sealed() {
        // For a problem that can never run, report that. A call to prepare would fail too.
        engine.supported(problem)?;
        return unprepared("the context is sealed");
    }
    if let Some(stream) = stream
        && engine.backend().is_capturing(stream)?
    {
        engine.supported(problem)?;
        return engine.any_loaded(problem).map_or_else(|| unprepared("the stream is capturing a graph"), Ok);
    }
    context.require_memory("making a plan")?;
    engine.prepare(problem)
}
