//! Buffers on a backend's device with traps: NaN where a kernel must not read, canaries where it
//! must not write.
//!
//! Gaps, surroundings and unused rows of an input hold NaN, so a stray read shows in the results.
//! An output starts as a pattern of canaries; afterwards exactly its used rows must have changed.

use super::case::{Case, Kind, Shape};
use flashtune::backend::{Backend, Memory};
use flashtune::call::TensorRef;
use flashtune::problem::{Dtype, ElementType};
use half::{bf16, f16};

/// Guard elements after the last row: more than any vector access or tile row covers.
pub const GUARD: usize = 1024;
/// Every byte of a poisoned output. In fp16, bf16 and fp32 it makes a NaN whose payload no
/// arithmetic produces.
pub const CANARY: u8 = 0xff;

pub struct Buffer {
    memory: Memory,
    shape: Shape,
    element: ElementType,
    /// Whether each row is used, in order.
    used: Vec<bool>,
}

impl Buffer {
    pub fn input(backend: &Backend, case: &Case, kind: Kind, values: &[f32]) -> Buffer {
        let (shape, element, used) = (case.shape_in_memory(kind), case.element(kind), case.used(kind));
        let mut bytes = encode_as(element, f32::NAN).repeat(shape.span() + GUARD);
        let size = element.bytes();
        let rows = case.rows_in_memory(kind).into_iter().zip(values.chunks(shape.dim as usize));
        let rows = rows.zip(case.row_scales(kind));
        for (index, ((row, values), scale)) in rows.enumerate() {
            let Some(row) = row else { continue };
            let encoded = match element {
                ElementType::Four(four) => case.row_of_four(four, kind, index, values),
                _ => values.iter().flat_map(|value| encode_as(element, *value / scale)).collect(),
            };
            bytes[row * size..][..encoded.len()].copy_from_slice(&encoded);
        }
        Buffer { memory: upload(backend, &bytes), shape, element, used }
    }

    pub fn output(backend: &Backend, case: &Case, kind: Kind) -> Buffer {
        let (shape, element, used) = (case.shape(kind), case.element(kind), case.used(kind));
        let bytes = vec![CANARY; (shape.span() + GUARD) * element.bytes()];
        Buffer { memory: upload(backend, &bytes), shape, element, used }
    }

    pub fn bytes(&self, backend: &Backend) -> Vec<u8> {
        download(backend, &self.memory)
    }

    /// Sets every byte to the canary, as in a new output.
    pub fn poison(&self, backend: &Backend) {
        poison(backend, &self.memory);
    }

    pub fn view(&self) -> TensorRef {
        let Shape { stride_batch, stride_seqlen, stride_head, lead, .. } = self.shape;
        let data = self.memory.address().wrapping_byte_add(lead as usize * self.element.bytes());
        TensorRef { data, stride_batch, stride_seqlen, stride_head }
    }

    /// The rows in order, with 0 in unused rows. Panics if a byte outside of the used rows changed
    /// or an element of a used row was not written.
    pub fn read_output(&self, backend: &Backend, name: &str) -> Vec<f32> {
        let size = self.element.bytes();
        let mut bytes = download(backend, &self.memory);
        let row_bytes = self.shape.dim as usize * size;
        let mut values = Vec::with_capacity(self.shape.elements());
        for (row, is_used) in self.shape.rows().zip(&self.used) {
            if !is_used {
                values.extend(std::iter::repeat_n(0.0, self.shape.dim as usize));
                continue;
            }
            let row = &mut bytes[row * size..][..row_bytes];
            for element in row.chunks(size) {
                assert!(element.iter().any(|byte| *byte != CANARY), "{name}: an element was not written");
                values.push(decode_as(self.element, element));
            }
            row.fill(CANARY);
        }
        let stray = bytes.iter().position(|byte| *byte != CANARY);
        assert!(stray.is_none(), "{name}: byte {} outside of the used rows was written", stray.unwrap_or(0));
        values
    }
}

/// A contiguous array of fp32 or int32 (LSE, lengths) or of raw bytes (workspace) between two
/// guards. On the emulated GPU an input has no guard behind it but a page without access, so that
/// no read past its end passes unseen.
pub struct Array {
    memory: Memory,
    /// Bytes of the guard before.
    before: usize,
    bytes: usize,
}

/// Bytes of guard on either side. The array keeps the 256-byte alignment that the workspace needs.
const ARRAY_GUARD: usize = 4096;
/// The emulated GPU's allocations are aligned to so many bytes and end as close before a page
/// without access as that allows (tests/emulator/engine/memory.cpp).
const ALLOCATION_ALIGNMENT: usize = 256;

impl Array {
    /// A poisoned array; as fp32 every element is NaN.
    pub fn output(backend: &Backend, bytes: usize) -> Array {
        Array { memory: upload(backend, &vec![CANARY; bytes + 2 * ARRAY_GUARD]), before: ARRAY_GUARD, bytes }
    }

    pub fn input(backend: &Backend, values: &[f32]) -> Array {
        Array::of_words(backend, values.iter().map(|value| value.to_le_bytes()))
    }

    pub fn input_int32(backend: &Backend, values: &[i32]) -> Array {
        Array::of_words(backend, values.iter().map(|value| value.to_le_bytes()))
    }

    fn of_words(backend: &Backend, words: impl Iterator<Item = [u8; 4]>) -> Array {
        let encoded: Vec<u8> = words.flatten().collect();
        let (before, behind) = if std::env::var_os("FLASHTUNE_EMULATED").is_some() {
            let all = (ARRAY_GUARD + encoded.len()).next_multiple_of(ALLOCATION_ALIGNMENT);
            (all - encoded.len(), 0)
        } else {
            (ARRAY_GUARD, ARRAY_GUARD)
        };
        let bytes = [&vec![CANARY; before], &encoded, &vec![CANARY; behind]].map(Vec::as_slice).concat();
        Array { memory: upload(backend, &bytes), before, bytes: encoded.len() }
    }

    /// All bytes, guards included.
    pub fn bytes(&self, backend: &Backend) -> Vec<u8> {
        download(backend, &self.memory)
    }

    pub fn poison(&self, backend: &Backend) {
        poison(backend, &self.memory);
    }

    pub fn address(&self) -> *mut std::ffi::c_void {
        self.memory.address().wrapping_byte_add(self.before)
    }

    /// Checks the guards and returns the floats, all of which must have been written. If `used` is
    /// given, elements that are not used must be unwritten and are -inf in the result.
    pub fn read_output(&self, backend: &Backend, name: &str, used: Option<&[bool]>) -> Vec<f32> {
        let bytes = self.check_guards(backend, name);
        let elements = bytes[self.before..][..self.bytes].chunks(4).enumerate();
        let read = |(at, element): (usize, &[u8])| {
            let (is_written, is_used) = (element.iter().any(|byte| *byte != CANARY), used.is_none_or(|used| used[at]));
            assert_eq!(is_written, is_used, "{name}[{at}]: written (left), used (right)");
            if is_used { decode(Dtype::Fp32, element) } else { f32::NEG_INFINITY }
        };
        elements.map(read).collect()
    }

    pub fn check_guards(&self, backend: &Backend, name: &str) -> Vec<u8> {
        let bytes = download(backend, &self.memory);
        let (before, rest) = bytes.split_at(self.before);
        let stray = before.iter().chain(&rest[self.bytes..]).filter(|byte| **byte != CANARY).count();
        assert_eq!(stray, 0, "{name}: {stray} guard bytes were written");
        bytes
    }
}

/// One u64 on the device: a dropout seed or offset.
pub fn upload_u64(backend: &Backend, value: u64) -> Memory {
    upload(backend, &value.to_le_bytes())
}

pub fn upload(backend: &Backend, bytes: &[u8]) -> Memory {
    let memory = backend.allocate(bytes.len()).expect("memory for a test");
    backend.upload(&memory, bytes).expect("upload");
    memory
}

pub fn download(backend: &Backend, memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.bytes()];
    backend.download(memory, &mut bytes).expect("download");
    bytes
}

fn poison(backend: &Backend, memory: &Memory) {
    backend.upload(memory, &vec![CANARY; memory.bytes()]).expect("upload");
}

pub fn encode(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::Fp16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Fp32 => value.to_le_bytes().to_vec(),
    }
}

pub fn encode_as(element: ElementType, value: f32) -> Vec<u8> {
    match element {
        ElementType::Plain(dtype) => encode(dtype, value),
        ElementType::Eight(eight) => vec![eight.encode(value)],
        // A byte of a row: scales of such bytes are NaN.
        ElementType::Four(_) => vec![CANARY],
    }
}

pub fn decode_as(element: ElementType, bytes: &[u8]) -> f32 {
    match element {
        ElementType::Plain(dtype) => decode(dtype, bytes),
        ElementType::Eight(eight) => eight.decode(bytes[0]),
        ElementType::Four(_) => unreachable!("no output is int4"),
    }
}

pub fn decode(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::Fp16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::Fp32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}
