//! Runs a call from the draft of its form.

use super::c_api::{Owned, Pointer, Python};
use super::drafts::{Draft, Made, Output, Params, SEED};
use super::form::{Form, Kinds, address_of};
use crate::capi::args::WORKSPACE_ALIGNMENT;
use crate::capi::last_error;
use crate::capi::status::{FLASHTUNE_STATUS_OK, of_number};
use crate::error::{Error, Result};

/// What a call has beside its form.
pub struct Call<'a> {
    pub python: &'a Python,
    pub kinds: &'a Kinds,
    pub empty_like: &'a Owned,
    pub current_stream: &'a Owned,
    /// Called after the last check of the params and before the launch.
    pub before_launch: Option<Pointer>,
    pub seed: Seed,
}

/// The seed of dropout. Its kind is part of the form, and its value is not.
pub enum Seed {
    None,
    Values([u64; 2]),
    /// The address of a seed and an offset of 8 bytes each.
    At(u64),
}

/// How a call ended.
pub enum Ended {
    Results(Owned),
    /// With an error of Python, which is set.
    Raised,
    /// The caller takes the long way.
    Refused,
}

impl Ended {
    pub fn without_results(python: &Python) -> Self {
        if python.has_error() { Ended::Raised } else { Ended::Refused }
    }
}

struct Workspace {
    /// Its address and its bytes.
    place: (u64, u64),
    _memory: Option<Owned>,
}

impl Call<'_> {
    /// The results as a tuple. An error if the launch fails after `before_launch`.
    pub fn run(&self, draft: &Draft, form: &Form) -> Result<Ended> {
        let mut params = draft.params.clone();
        for (word, tensor) in draft.words.iter().zip(&form.tensors) {
            params[*word] = tensor.address;
        }
        self.write_seed(&mut params);
        let results = self.results(draft, form, &mut params);
        let allocated = results.and_then(|results| Some((results, self.workspace(draft)?, self.stream(draft)?)));
        let Some((results, workspace, stream)) = allocated else {
            return Ok(Ended::without_results(self.python));
        };
        if let Some(before_launch) = self.before_launch {
            // SAFETY: the draft's params are of its pass and context.
            if unsafe { draft.pass.supported(draft.context, &params) } != FLASHTUNE_STATUS_OK {
                return Ok(Ended::Refused);
            }
            if self.python.call(before_launch, None).is_none() {
                return Ok(Ended::Raised);
            }
        }
        // SAFETY: as above. Tensors of the form have the devices of the first call, and the new
        // ones live until the launch is enqueued; torch's allocator keeps their memory for the
        // stream. A call on the CPU is done when it returns.
        let launch = || unsafe { draft.pass.launch(draft.context, &params, workspace.place, stream) };
        match self.python.without_gil(launch) {
            FLASHTUNE_STATUS_OK => Ok(Ended::Results(results)),
            _ if self.before_launch.is_none() => Ok(Ended::Refused),
            status => Err(Error::new(of_number(status), last_error::current())),
        }
    }

    fn write_seed(&self, params: &mut Params) {
        let (words, numbers) = match self.seed {
            Seed::None => return,
            Seed::Values(values) => (SEED.values, values),
            Seed::At(address) => (SEED.addresses, [address, address + 8]),
        };
        for (word, number) in words.into_iter().zip(numbers) {
            params[word] = number;
        }
    }

    // These return None after an error of Python, which is set, and where torch makes a tensor that
    // cannot be described.

    /// The results as a tuple. The addresses of new ones are written into the params.
    fn results(&self, draft: &Draft, form: &Form, params: &mut Params) -> Option<Owned> {
        let result = |output: &Output| match output {
            Output::Nothing => self.python.reference(self.kinds.none().pointer()),
            Output::Given(at) => self.python.reference(form.tensors[*at].object),
            Output::New(word, made) => {
                let made = self.make(made, form)?;
                params[*word] = address_of(self.python, self.kinds, made.pointer())?;
                Some(made)
            }
        };
        let results = draft.outputs.iter().map(result).collect::<Option<Vec<_>>>()?;
        self.python.tuple(results)
    }

    fn workspace(&self, draft: &Draft) -> Option<Workspace> {
        let Some((make, bytes)) = &draft.workspace else { return Some(Workspace { place: (0, 0), _memory: None }) };
        let memory = self.python.call(make.pointer(), None)?;
        let address = address_of(self.python, self.kinds, memory.pointer())?;
        Some(Workspace { place: (address.next_multiple_of(WORKSPACE_ALIGNMENT as u64), *bytes), _memory: Some(memory) })
    }

    fn stream(&self, draft: &Draft) -> Option<u64> {
        let Some(device) = &draft.device else { return Some(0) };
        let stream = self.python.call(self.current_stream.pointer(), Some(device.pointer()))?;
        self.python.unsigned(stream.pointer())
    }

    fn make(&self, made: &Made, form: &Form) -> Option<Owned> {
        match made {
            Made::Alike(at) => self.python.call(self.empty_like.pointer(), Some(form.tensors[*at].object)),
            Made::Factory(make) => self.python.call(make.pointer(), None),
        }
    }
}
