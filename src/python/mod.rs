//! The Python face: functions that the Python package calls in place of ctypes.
//!
//! It stands above the C face and uses nothing of the library but its functions. `form` describes
//! the arguments of a call, `drafts` keeps the params of the first call of each form, `repeat` runs
//! later calls of that form, and `functions` hands these to Python as built-in functions.
//!
//! CPython's C API is declared by hand in `c_api` and looked up when Python asks for the functions.
//! So the library loads without Python, and one library serves every version.

mod c_api;
mod drafts;
mod form;
pub mod functions;
mod repeat;
