//! Drafts: the params that the first call of a form leaves for later ones. They hold numbers and
//! functions, so they keep no tensor alive.

use super::c_api::{Owned, Pointer, Python};
use super::form::{Form, Kinds};
use crate::capi::backward::{flashtune_backward, flashtune_backward_supported};
use crate::capi::context::flashtune_context;
use crate::capi::forward::{flashtune_forward, flashtune_forward_supported};
use crate::capi::types::{flashtune_backward_params, flashtune_forward_params};
use crate::word_hash::BuildWordHasher;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::{Arc, Mutex, PoisonError};

/// Params as words. Their structs consist of words, and each address is one.
pub type Params = Vec<u64>;

#[derive(Clone, Copy, PartialEq)]
pub enum Pass {
    Forward,
    Backward,
}

impl Pass {
    pub fn of(number: u64) -> Option<Self> {
        [Pass::Forward, Pass::Backward].get(number as usize).copied()
    }

    fn params_bytes(self) -> usize {
        match self {
            Pass::Forward => size_of::<flashtune_forward_params>(),
            Pass::Backward => size_of::<flashtune_backward_params>(),
        }
    }

    /// # Safety
    /// `params` are of this pass and of a context that is alive.
    pub unsafe fn supported(self, context: *mut flashtune_context, params: &Params) -> i32 {
        // SAFETY: by the caller's promise.
        unsafe {
            match self {
                Pass::Forward => flashtune_forward_supported(context, params.as_ptr().cast()),
                Pass::Backward => flashtune_backward_supported(context, params.as_ptr().cast()),
            }
        }
    }

    /// # Safety
    /// As for `supported`. The params name memory of the context's device, and so does `workspace`.
    pub unsafe fn launch(
        self,
        context: *mut flashtune_context,
        params: &Params,
        workspace: (u64, u64),
        stream: u64,
    ) -> i32 {
        let (address, bytes) = workspace;
        let [memory, stream] = [address, stream].map(|address| address as usize as *mut c_void);
        // SAFETY: by the caller's promise.
        unsafe {
            match self {
                Pass::Forward => flashtune_forward(context, params.as_ptr().cast(), memory, bytes, stream),
                Pass::Backward => flashtune_backward(context, params.as_ptr().cast(), memory, bytes, stream),
            }
        }
    }
}

/// The words of the params that a seed is written to, the same in both passes.
pub struct SeedWords {
    pub values: [usize; 2],
    pub addresses: [usize; 2],
}

const _: () = assert!(
    offset_of!(flashtune_forward_params, dropout_seed) == offset_of!(flashtune_backward_params, dropout_seed)
        && offset_of!(flashtune_forward_params, dropout_seed_ptr)
            == offset_of!(flashtune_backward_params, dropout_seed_ptr)
);

pub const SEED: SeedWords = SeedWords {
    values: [
        offset_of!(flashtune_forward_params, dropout_seed) / 8,
        offset_of!(flashtune_forward_params, dropout_offset) / 8,
    ],
    addresses: [
        offset_of!(flashtune_forward_params, dropout_seed_ptr) / 8,
        offset_of!(flashtune_forward_params, dropout_offset_ptr) / 8,
    ],
};

/// How a tensor of a call is made.
pub enum Made {
    /// By torch.empty_like, from this tensor of the form.
    Alike(usize),
    /// By a function of Python without arguments.
    Factory(Owned),
}

/// One result of a call.
pub enum Output {
    Nothing,
    /// A tensor of the form, which the caller gave.
    Given(usize),
    /// A new tensor, and the word that its address is written to.
    New(usize, Made),
}

pub struct Draft {
    pub pass: Pass,
    pub context: *mut flashtune_context,
    pub params: Params,
    /// For each tensor of the form, the word that its address is written to.
    pub words: Vec<usize>,
    pub outputs: Vec<Output>,
    /// What makes the workspace, and the bytes that the pass uses of it.
    pub workspace: Option<(Owned, u64)>,
    /// The CUDA device, whose current stream is asked for; None on the CPU.
    pub device: Option<Owned>,
}

// SAFETY: a context may be used from any thread, and outlives the drafts.
unsafe impl Send for Draft {}
// SAFETY: as above.
unsafe impl Sync for Draft {}

impl Draft {
    /// From the form of a call and what `_torch_drafts.py` gives: the context, the params, a word
    /// for each tensor, the outputs, what makes the workspace or None, its bytes, and the device or
    /// None.
    ///
    /// None if the params have another address than a tensor of the form: the call has read a copy,
    /// and later calls of the form would need copies too.
    pub fn of(python: &Python, kinds: &Kinds, pass: Pass, form: &Form, given: &[Pointer]) -> Option<Self> {
        let &[context, params, words, outputs, workspace, bytes, device] = given else { return None };
        let some = |object| if kinds.is_none(object) { Some(None) } else { python.reference(object).map(Some) };
        let context = python.unsigned(context)? as usize as *mut flashtune_context;
        let params = python.bytes(params)?;
        if params.len() != pass.params_bytes() {
            return None;
        }
        let params: Params = params.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let word = |object| python.unsigned(object).map(|word| word as usize).filter(|word| *word < params.len());
        let words = python.items(words).map(word).collect::<Option<Vec<_>>>()?;
        let is_read = |(tensor, word): (&super::form::Tensor, &usize)| params[*word] == tensor.address;
        if words.len() != form.tensors.len() || !form.tensors.iter().zip(&words).all(is_read) {
            return None;
        }
        let tensor = |object| python.unsigned(object).map(|at| at as usize).filter(|at| *at < words.len());
        let output = |object| {
            if kinds.is_none(object) {
                return Some(Output::Nothing);
            }
            if kinds.is_integer(python, object) {
                return tensor(object).map(Output::Given);
            }
            let made = python.item(object, 1)?;
            let made = match kinds.is_integer(python, made) {
                true => Made::Alike(tensor(made)?),
                false => Made::Factory(python.reference(made)?),
            };
            Some(Output::New(word(python.item(object, 0)?)?, made))
        };
        let outputs = python.items(outputs).map(output).collect::<Option<Vec<_>>>()?;
        let bytes = python.unsigned(bytes)?;
        let workspace = some(workspace)?.map(|made| (made, bytes));
        Some(Draft { pass, context, params, words, outputs, workspace, device: some(device)? })
    }
}

type ByForm = HashMap<Vec<u64>, Arc<Draft>, BuildWordHasher>;

/// The drafts of a process, by their forms.
pub struct Drafts {
    limit: usize,
    by_form: Mutex<ByForm>,
}

impl Drafts {
    /// Keeps at most `limit`; one more clears them.
    pub fn new(limit: usize) -> Self {
        Drafts { limit, by_form: Mutex::default() }
    }

    fn locked<T>(&self, work: impl FnOnce(&mut ByForm) -> T) -> T {
        work(&mut self.by_form.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn get(&self, form: &[u64]) -> Option<Arc<Draft>> {
        self.locked(|drafts| drafts.get(form).cloned())
    }

    /// Two forms may share a draft if they have the same tensors in the same order.
    pub fn insert(&self, form: Vec<u64>, draft: Arc<Draft>) {
        let _replaced = self.locked(|drafts| {
            let cleared = if drafts.len() >= self.limit { std::mem::take(drafts) } else { ByForm::default() };
            (cleared, drafts.insert(form, draft))
        });
    }

    pub fn remove(&self, form: &[u64]) {
        let _removed = self.locked(|drafts| drafts.remove(form));
    }

    pub fn clear(&self) {
        let _cleared = self.locked(std::mem::take);
    }

    pub fn len(&self) -> usize {
        self.locked(|drafts| drafts.len())
    }
}
