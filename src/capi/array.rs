//! Array: rows of numbers among a call's arguments, with the sizes that the problem gives them.
//! This file checks pointer and extent.

use super::operand::Data;
use super::overlap::{Footprint, overflows};
use super::sized::address;
use crate::error::{Error, Result};
use crate::problem::Problem;
use std::ffi::c_void;

/// Rows of numbers along up to three dimensions, for example one row for each batch entry.
pub struct Array {
    pub name: &'static str,
    type_name: &'static str,
    pub pointer: *const c_void,
    /// Elements of a row.
    pub elements: i64,
    /// Bytes of an element, and its alignment.
    bytes: i64,
    /// Along each dimension: the number of rows, and elements from one to the next.
    dims: [(i64, i64); 3],
}

/// A type that arrays hold.
pub trait Value {
    const NAME: &'static str;
}
impl Value for f32 {
    const NAME: &'static str = "fp32";
}
impl Value for i32 {
    const NAME: &'static str = "int32";
}
impl Value for u64 {
    const NAME: &'static str = "uint64";
}

/// Its array has the name of its own type.
#[repr(transparent)]
struct Bits16(u16);
impl Value for Bits16 {
    const NAME: &'static str = "16-bit";
}

impl Array {
    pub fn new<T: Value>(name: &'static str, pointer: *const T, elements: i64) -> Array {
        let bytes = size_of::<T>() as i64;
        Array { name, type_name: T::NAME, pointer: pointer.cast(), elements, bytes, dims: [(1, 0); 3] }
    }

    /// Numbers of 16 bits.
    pub fn of_16_bits(name: &'static str, pointer: *const c_void, type_name: &'static str, elements: i64) -> Array {
        Array { type_name, ..Array::new(name, pointer.cast::<Bits16>(), elements) }
    }

    /// One row for each batch entry, `stride` elements apart. With a stride of 0, all share one
    /// row.
    pub fn of_batch(self, problem: &Problem, stride: i64) -> Array {
        let rows = if stride == 0 { 1 } else { problem.batch_size };
        self.in_rows((rows.max(1), stride))
    }

    /// Rows along one dimension: their number, and elements from one to the next.
    pub fn in_rows(self, rows: (i64, i64)) -> Array {
        self.in_dims([rows, (1, 0), (1, 0)])
    }

    /// Rows along three dimensions: their number, and elements from one to the next.
    pub fn in_dims(self, dims: [(i64, i64); 3]) -> Array {
        Array { dims, ..self }
    }

    /// The sizes, for a message.
    fn shape(&self) -> String {
        let rows = self.dims.iter().map(|(count, _)| *count).filter(|count| *count != 1);
        let sizes: Vec<String> = rows.chain([self.elements]).map(|size| size.to_string()).collect();
        match &sizes[..] {
            [one] => one.clone(),
            several => format!("({})", several.join(", ")),
        }
    }

    /// As `check`, and refuses NULL if data is required. `feature` names the bit that requires it.
    pub fn check_required(&self, data: Data, feature: Option<&str>) -> Result<Option<Footprint>> {
        if self.pointer.is_null() && self.elements > 0 && data == Data::Required {
            let (name, shape, kind) = (self.name, self.shape(), self.type_name);
            let since = feature.map_or(String::new(), |feature| format!(", since features has {feature}"));
            return Err(Error::invalid(format!("{name} is NULL; it must point to {shape} {kind} values{since}")));
        }
        self.check()
    }

    /// Checks pointer and extent. Returns the array's bytes, or None without data or elements.
    pub fn check(&self) -> Result<Option<Footprint>> {
        if self.pointer.is_null() || self.elements == 0 {
            return Ok(None);
        }
        let (name, start, bytes) = (self.name, self.pointer as u64, self.bytes);
        if !start.is_multiple_of(bytes as u64) {
            let pointer = address(self.pointer);
            return Err(Error::invalid(format!("{name} is {pointer}; it must be aligned to {bytes} bytes")));
        }
        let [a, b, c] = self.dims;
        let dims = [a, b, c, (1, 0)];
        Footprint::strided(name, start, self.elements * bytes, bytes, dims).map(Some).map_err(|extent| {
            let (at, several) = (address(self.pointer), self.dims.iter().filter(|(rows, _)| *rows != 1));
            let rows: String = several.map(|(rows, apart)| format!(", {rows} rows {apart} elements apart")).collect();
            overflows(&format!("{name} at {at} with rows of {} elements{rows}", self.elements), extent)
        })
    }
}
