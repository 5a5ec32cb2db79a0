//! The form of a call: all that its params depend on except addresses.

use super::c_api::{DlDtype, DlExchange, DlTensor, EXCHANGE_NAME, Owned, Pointer, Python};
use std::ptr::{NonNull, null, null_mut};

/// The first word of each argument. It says what follows.
const NONE: u64 = 0;
const BOOL: u64 = 1;
const INTEGER: u64 = 2;
const FLOAT: u64 = 3;
const TUPLE: u64 = 4;
const TENSOR: u64 = 5;

/// The types and values that an argument is compared with.
pub struct Kinds {
    tensors: Vec<Owned>,
    tuples: Vec<Owned>,
    bool: Owned,
    integer: Owned,
    float: Owned,
    none: Owned,
    true_object: Owned,
    described: Described,
}

/// How a tensor is described.
enum Described {
    /// By the function of its library that DLPack names.
    Directly(unsafe extern "C" fn(Pointer, *mut DlTensor) -> i32),
    /// By a function of Python that returns a tuple of ints, the last of which is the address. The
    /// tuple is empty if the tensor cannot be described.
    ThroughPython(Owned),
}

impl Kinds {
    /// From what `_drafts.py` gives: types of tensors and of tuples, the types bool, int and
    /// float, None, True, DLPack's capsule or None, and a function that describes a tensor.
    pub fn of(python: &Python, given: Pointer) -> Option<Self> {
        let at = |place| python.item(given, place).and_then(|item| python.reference(item));
        let all = |tuple: Owned| python.items(tuple.pointer()).filter_map(|item| python.reference(item)).collect();
        let described = match exchange(python, at(7)?.pointer()) {
            Some(describe) => Described::Directly(describe),
            None => Described::ThroughPython(at(8)?),
        };
        Some(Kinds {
            tensors: all(at(0)?),
            tuples: all(at(1)?),
            bool: at(2)?,
            integer: at(3)?,
            float: at(4)?,
            none: at(5)?,
            true_object: at(6)?,
            described,
        })
    }

    pub fn is_none(&self, object: Pointer) -> bool {
        object == self.none.pointer()
    }

    pub fn is_integer(&self, python: &Python, object: Pointer) -> bool {
        python.type_of(object) == self.integer.pointer()
    }

    pub fn is_tuple(&self, python: &Python, object: Pointer) -> bool {
        is_among(&self.tuples, python.type_of(object))
    }

    pub fn none(&self) -> &Owned {
        &self.none
    }
}

fn is_among(kinds: &[Owned], kind: Pointer) -> bool {
    kinds.iter().any(|other| other.pointer() == kind)
}

/// The function that describes a tensor, if the tensors' library has one of DLPack's version 1.
fn exchange(python: &Python, capsule: Pointer) -> Option<unsafe extern "C" fn(Pointer, *mut DlTensor) -> i32> {
    let mut api = python.in_capsule(capsule, EXCHANGE_NAME.as_ptr())?.as_ptr().cast_const().cast::<DlExchange>();
    // SAFETY: a capsule of this name has such a struct, which lives as long as the program. Its
    // version and the pointer to an older one stand at its start in every version.
    unsafe {
        while (*api).major > 1 && !(*api).older.is_null() {
            api = (*api).older;
        }
        if (*api).major == 1 { (*api).describe } else { None }
    }
}

/// A tensor among the arguments, in their order.
pub struct Tensor {
    pub object: Pointer,
    pub address: u64,
}

/// The form as words, and the tensors whose addresses it leaves out.
pub struct Form {
    pub words: Vec<u64>,
    pub tensors: Vec<Tensor>,
}

impl Form {
    /// None if an argument is of another type than `Kinds` names: its params may depend on more
    /// than can be seen here. Also None after an error of the function that describes a tensor, and
    /// then the error stays set.
    pub fn of(python: &Python, kinds: &Kinds, arguments: impl IntoIterator<Item = Pointer>) -> Option<Self> {
        // Room for most calls.
        let mut form = Form { words: Vec::with_capacity(128), tensors: Vec::with_capacity(16) };
        arguments.into_iter().try_for_each(|argument| form.add(python, kinds, argument))?;
        Some(form)
    }

    fn add(&mut self, python: &Python, kinds: &Kinds, argument: Pointer) -> Option<()> {
        if kinds.is_none(argument) {
            self.words.push(NONE);
            return Some(());
        }
        let kind = python.type_of(argument);
        if is_among(&kinds.tensors, kind) {
            self.words.push(TENSOR);
            let address = self.describe(python, kinds, argument)?;
            self.tensors.push(Tensor { object: argument, address });
        } else if kind == kinds.bool.pointer() {
            self.words.extend([BOOL, (argument == kinds.true_object.pointer()).into()]);
        } else if kind == kinds.integer.pointer() {
            self.words.extend([INTEGER, python.integer(argument)? as u64]);
        } else if kind == kinds.float.pointer() {
            self.words.extend([FLOAT, python.float(argument)?.to_bits()]);
        } else if is_among(&kinds.tuples, kind) {
            let start = self.words.len();
            self.words.extend([TUPLE, 0]);
            for item in python.items(argument) {
                self.words[start + 1] += 1;
                self.add(python, kinds, item)?;
            }
        } else {
            return None;
        }
        Some(())
    }

    /// Adds dtype, device, shape and strides. Returns the address.
    fn describe(&mut self, python: &Python, kinds: &Kinds, tensor: Pointer) -> Option<u64> {
        match &kinds.described {
            Described::Directly(describe) => self.describe_directly(python, *describe, tensor),
            Described::ThroughPython(describe) => self.describe_by(python, describe, tensor),
        }
    }

    fn describe_directly(
        &mut self,
        python: &Python,
        describe: unsafe extern "C" fn(Pointer, *mut DlTensor) -> i32,
        tensor: Pointer,
    ) -> Option<u64> {
        let found = described(python, describe, tensor)?;
        let DlDtype { code, bits, lanes } = found.dtype;
        let dtype = u64::from(code) << 32 | u64::from(bits) << 16 | u64::from(lanes);
        let device = (found.device_type as u64) << 32 | u64::from(found.device_id as u32);
        let dims = usize::try_from(found.dims).ok()?;
        self.words.extend([dtype, device, dims as u64]);
        if dims > 0 {
            let [shape, strides] = [NonNull::new(found.shape.cast_mut())?, NonNull::new(found.strides.cast_mut())?];
            for sizes in [shape, strides] {
                // SAFETY: both have a number for each dim, and live as long as the tensor.
                let sizes = unsafe { std::slice::from_raw_parts(sizes.as_ptr(), dims) };
                self.words.extend(sizes.iter().map(|size| *size as u64));
            }
        }
        Some(address(&found))
    }

    fn describe_by(&mut self, python: &Python, describe: &Owned, tensor: Pointer) -> Option<u64> {
        let numbers = python.call(describe.pointer(), Some(tensor))?;
        let start = self.words.len();
        self.words.push(0);
        for number in python.items(numbers.pointer()) {
            self.words.push(python.integer(number)? as u64);
        }
        // Without numbers only their count is there.
        let address = self.words.pop().filter(|_| self.words.len() > start)?;
        self.words[start] = (self.words.len() - start) as u64;
        Some(address)
    }
}

/// The address of a tensor that is no argument.
pub fn address_of(python: &Python, kinds: &Kinds, tensor: Pointer) -> Option<u64> {
    match &kinds.described {
        Described::Directly(describe) => described(python, *describe, tensor).map(|found| address(&found)),
        Described::ThroughPython(_) => Form { words: Vec::new(), tensors: Vec::new() }.describe(python, kinds, tensor),
    }
}

fn described(
    python: &Python,
    describe: unsafe extern "C" fn(Pointer, *mut DlTensor) -> i32,
    tensor: Pointer,
) -> Option<DlTensor> {
    let mut found = DlTensor {
        data: null_mut(),
        device_type: 0,
        device_id: 0,
        dims: 0,
        dtype: DlDtype { code: 0, bits: 0, lanes: 0 },
        shape: null(),
        strides: null(),
        byte_offset: 0,
    };
    // SAFETY: the tensor is of the library that the function belongs to.
    if unsafe { describe(tensor, &mut found) } != 0 {
        python.clear_error();
        return None;
    }
    Some(found)
}

fn address(tensor: &DlTensor) -> u64 {
    tensor.data.addr() as u64 + tensor.byte_offset
}
