//! The functions that the Python package calls.

// The header says what a caller must promise.
#![allow(clippy::missing_safety_doc)]

use super::c_api::{Method, Owned, Pointer, Python};
use super::drafts::{Draft, Drafts, Pass};
use super::form::{Form, Kinds, address_of};
use super::repeat::{Call, Ended, Seed};
use crate::capi::panic_boundary::enter;
use crate::error::Result;
use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

/// For flashtune's Python package: a new tuple of built-in functions (repeat, keep, alias, forget,
/// count), which share an empty set of drafts. settings is the tuple that
/// bindings/python/flashtune/_drafts.py makes. Returns NULL if the program has no CPython
/// or settings is not that tuple. The caller holds the GIL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_python_drafts(settings: *mut c_void) -> *mut c_void {
    let mut made = None;
    enter(|| {
        made = functions(settings.cast());
        Ok(())
    });
    made.map_or(null_mut(), |functions| functions.into_pointer().cast())
}

/// What the functions share. It lives as long as the program: an interpreter has no reliable order
/// of shutting down.
struct State {
    python: &'static Python,
    kinds: Kinds,
    empty_like: Owned,
    current_stream: Owned,
    /// Raises the exception of a status of the C face, which this thread's last call returned.
    check: Owned,
    drafts: Drafts,
}

fn functions(settings: Pointer) -> Option<Owned> {
    static METHODS: [Method; 5] = [
        Method::new(c"repeat", repeat),
        Method::new(c"keep", keep),
        Method::new(c"alias", alias),
        Method::new(c"forget", forget),
        Method::new(c"count", count),
    ];
    let python = Python::get()?;
    let at = |place| python.item(settings, place).and_then(|item| python.reference(item));
    let kinds = Kinds::of(python, at(0)?.pointer())?;
    let limit = python.integer(at(4)?.pointer())?.try_into().ok()?;
    let state =
        State { python, kinds, empty_like: at(1)?, current_stream: at(2)?, check: at(3)?, drafts: Drafts::new(limit) };
    let capsule = python.capsule(Box::leak(Box::new(state)))?;
    let all = METHODS.iter().map(|method| python.function(method, capsule.pointer())).collect::<Option<Vec<_>>>()?;
    python.tuple(all)
}

/// repeat(pass, before_launch or None, seed, *arguments): the results as a tuple if an earlier call
/// was of the same form. None otherwise, and then nothing is launched and before_launch is not
/// called. It raises if the launch fails after before_launch.
unsafe extern "C" fn repeat(state: Pointer, arguments: *const Pointer, count: isize) -> Pointer {
    // SAFETY: Python gives so many arguments.
    let arguments = unsafe { slice(arguments, count) };
    answer(state, |state| {
        let &[pass, before_launch, seed, ref arguments @ ..] = arguments else { return Ok(Ended::Refused) };
        let Some((form, seed)) = described(state, pass, seed, arguments) else {
            return Ok(Ended::without_results(state.python));
        };
        let Some(draft) = state.drafts.get(&form.words) else { return Ok(Ended::Refused) };
        let call = Call {
            python: state.python,
            kinds: &state.kinds,
            empty_like: &state.empty_like,
            current_stream: &state.current_stream,
            before_launch: (!state.kinds.is_none(before_launch)).then_some(before_launch),
            seed,
        };
        let ended = call.run(&draft, &form);
        if matches!(ended, Ok(Ended::Refused) | Err(_)) {
            // The checks of a first call say what is wrong, if anything is.
            state.drafts.remove(&form.words);
        }
        ended
    })
}

/// keep(the arguments of `repeat` as a tuple, context, params, words, outputs, workspace, bytes,
/// device): leaves a draft for later calls of the form, if they may use these params. `Draft::of`
/// describes the others.
unsafe extern "C" fn keep(state: Pointer, arguments: *const Pointer, count: isize) -> Pointer {
    // SAFETY: as above.
    let arguments = unsafe { slice(arguments, count) };
    answer(state, |state| {
        let Some((call, given)) = arguments.split_first() else { return Ok(Ended::Refused) };
        let Some(form) = of_tuple(state, *call) else { return Ok(Ended::without_results(state.python)) };
        let pass = state.python.item(*call, 0).and_then(|pass| state.python.unsigned(pass)).and_then(Pass::of);
        let draft = pass.and_then(|pass| Draft::of(state.python, &state.kinds, pass, &form, given));
        if let Some(draft) = draft {
            state.drafts.insert(form.words, Arc::new(draft));
        }
        Ok(Ended::Refused)
    })
}

/// alias(call, other): calls of the form of `call` use the draft of the form of `other`, if it has
/// one. Both are arguments of `repeat` as tuples, with the same tensors in the same order.
unsafe extern "C" fn alias(state: Pointer, arguments: *const Pointer, count: isize) -> Pointer {
    // SAFETY: as above.
    let arguments = unsafe { slice(arguments, count) };
    answer(state, |state| {
        let &[call, other] = arguments else { return Ok(Ended::Refused) };
        let Some((form, other)) = of_tuple(state, call).and_then(|form| Some((form, of_tuple(state, other)?))) else {
            return Ok(Ended::without_results(state.python));
        };
        let are_the_same =
            form.tensors.iter().map(|tensor| tensor.object).eq(other.tensors.iter().map(|tensor| tensor.object));
        if let (true, Some(draft)) = (are_the_same, state.drafts.get(&other.words)) {
            state.drafts.insert(form.words, draft);
        }
        Ok(Ended::Refused)
    })
}

/// The form of the arguments of `repeat` in a tuple.
fn of_tuple(state: &State, call: Pointer) -> Option<Form> {
    let call: Vec<Pointer> = state.python.items(call).collect();
    let &[pass, _, seed, ref arguments @ ..] = &call[..] else { return None };
    described(state, pass, seed, arguments).map(|(form, _)| form)
}

/// forget(): drops all drafts.
unsafe extern "C" fn forget(state: Pointer, _: *const Pointer, _: isize) -> Pointer {
    answer(state, |state| {
        state.drafts.clear();
        Ok(Ended::Refused)
    })
}

/// count(): the number of drafts.
unsafe extern "C" fn count(state: Pointer, _: *const Pointer, _: isize) -> Pointer {
    answer(state, |state| Ok(state.python.new_integer(state.drafts.len() as i32).map_or(Ended::Raised, Ended::Results)))
}

/// The form of a call, and its seed.
fn described(state: &State, pass: Pointer, seed: Pointer, arguments: &[Pointer]) -> Option<(Form, Seed)> {
    let State { python, kinds, .. } = state;
    let mut form = Form::of(python, kinds, std::iter::once(pass).chain(arguments.iter().copied()))?;
    let seed = if kinds.is_none(seed) {
        Seed::None
    } else if kinds.is_tuple(python, seed) {
        let value = |at| python.item(seed, at).and_then(|value| python.unsigned(value));
        Seed::Values([value(0)?, value(1)?])
    } else {
        Seed::At(address_of(python, kinds, seed)?)
    };
    form.words.push(match seed {
        Seed::None => 0,
        Seed::Values(_) => 1,
        Seed::At(_) => 2,
    });
    Some((form, seed))
}

/// # Safety
/// There are `count` arguments at this address.
unsafe fn slice<'a>(arguments: *const Pointer, count: isize) -> &'a [Pointer] {
    if count <= 0 {
        return &[];
    }
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts(arguments, count as usize) }
}

/// A function's result for Python: None where it was refused. An error becomes an exception.
fn answer(state: Pointer, work: impl FnOnce(&State) -> Result<Ended>) -> Pointer {
    let Some(python) = Python::get() else { return null_mut() };
    let Some(state) = python.in_capsule(state, null()).map(NonNull::cast::<State>) else { return null_mut() };
    // SAFETY: the capsule is that of `functions`, whose state lives as long as the program.
    let state = unsafe { state.as_ref() };
    let mut ended = Ended::Refused;
    let status = enter(|| {
        ended = work(state)?;
        Ok(())
    });
    let result = match (status, ended) {
        (0, Ended::Results(result)) => Some(result),
        (0, Ended::Raised) => None,
        (0, Ended::Refused) => python.reference(state.kinds.none().pointer()),
        (status, _) => {
            let status = python.new_integer(status);
            status.and_then(|status| python.call(state.check.pointer(), Some(status.pointer())))
        }
    };
    result.map_or(null_mut(), Owned::into_pointer)
}
