//! Checks of the two passes' arguments: from the caller's params to a checked `Call`, or a sentence
//! that names the bad argument.
//!
//! This file knows shapes, pointers and ranges. The plan layer decides whether a device can run the
//! problem.

use super::accesses::Accesses;
use super::array::Array;
use super::inputs::Inputs;
use super::memory::{Memory, refuse_foreign_memory};
use super::operand::{Access, Data, Operand, Rows};
use super::overlap::Footprint;
use super::sized::flag;
use super::types::*;
use crate::call::{Call, TensorRef};
use crate::dropout::Dropout;
use crate::error::{Error, Result, Status};
use crate::problem::{ElementType, Layout, Pass, Problem, check_range};
use std::ffi::c_void;

/// Alignment of a workspace. cudaMalloc gives it, and every array inside keeps it.
pub(crate) const WORKSPACE_ALIGNMENT: usize = 256;

/// A checked call, and the bytes of its tensors to check the workspace against.
pub struct Checked {
    pub call: Call,
    memory: Memory,
    accesses: Accesses,
}

pub fn forward(params: &flashtune_forward_params, data: Data, memory: Memory) -> Result<Checked> {
    let inputs = Inputs::from(params);
    let batch_invariant = flag(("batch_invariant", params.batch_invariant), ("reserved", params.reserved))?;
    let problem = inputs.problem(Pass::Forward, false, batch_invariant)?;
    let [q, k, v] = tensors(&problem, &inputs);
    let out = rows_of_queries("out", Access::Written, &problem, problem.head_dim_v, params.out);
    let mut operands = [q, k, v, out];
    let (call, mut accesses) = check(problem, &inputs, &mut operands, data, memory)?;
    accesses.add(Access::Written, lse(&call.problem, params.lse, Data::Optional)?);
    check_together(&call.problem, &inputs, &accesses, data, memory)?;
    let [q, k, v, out] = operands.map(|operand| operand.tensor);
    let most_splits = most_splits(params, batch_invariant)?;
    Ok(Checked { call: Call { q, k, v, out, lse: params.lse, most_splits, ..call }, memory, accesses })
}

/// The most splits of the keys; 0 leaves them to the config.
fn most_splits(params: &flashtune_forward_params, batch_invariant: bool) -> Result<u32> {
    let num_splits = params.num_splits;
    check_range("num_splits", num_splits, 0, i32::MAX.into())?;
    match batch_invariant && num_splits != 0 {
        false => Ok(num_splits as u32),
        true => Err(Error::invalid(format!(
            "num_splits is {num_splits} and batch_invariant 1; each sequence's own length then decides, so num_splits must be 0"
        ))),
    }
}

pub fn backward(params: &flashtune_backward_params, data: Data, memory: Memory) -> Result<Checked> {
    let inputs = Inputs::from(params);
    let deterministic = flag(("deterministic", params.deterministic), ("reserved", params.reserved))?;
    let problem = inputs.problem(Pass::Backward, deterministic, false)?;
    let [q, k, v] = tensors(&problem, &inputs);
    let out = rows_of_queries("out", Access::Read, &problem, problem.head_dim_v, params.out);
    let dout = rows_of_queries("dout", Access::Read, &problem, problem.head_dim_v, params.dout);
    let dq = rows_of_queries("dq", Access::Written, &problem, problem.head_dim, params.dq);
    let dk = rows_of_keys("dk", Access::Written, &problem, problem.head_dim, params.dk);
    let dv = rows_of_keys("dv", Access::Written, &problem, problem.head_dim_v, params.dv);
    let mut operands = [q, k, v, out, dout, dq, dk, dv];
    let (call, mut accesses) = check(problem, &inputs, &mut operands, data, memory)?;
    accesses.add(Access::Read, lse(&call.problem, params.lse, data)?);
    check_together(&call.problem, &inputs, &accesses, data, memory)?;
    let [q, k, v, out, dout, dq, dk, dv] = operands.map(|operand| operand.tensor);
    Ok(Checked { call: Call { q, k, v, out, lse: params.lse.cast_mut(), dout, dq, dk, dv, ..call }, memory, accesses })
}

impl Checked {
    /// The workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.memory.workspace_bytes(&self.call.problem)
    }

    /// Checks the workspace and puts it into the call.
    pub fn set_workspace(&mut self, workspace: *mut c_void, bytes: u64) -> Result<()> {
        let needed = self.workspace_bytes();
        if needed == 0 {
            return Ok(());
        }
        if workspace.is_null() {
            return Err(Error::invalid(format!("workspace is NULL; this call needs {needed} bytes")));
        }
        if !(workspace as usize).is_multiple_of(WORKSPACE_ALIGNMENT) {
            return Err(Error::invalid(format!(
                "workspace is {workspace:p}; it must be aligned to {WORKSPACE_ALIGNMENT} bytes"
            )));
        }
        if bytes < needed as u64 {
            let message = format!("workspace_bytes is {bytes}; this call needs at least {needed}");
            return Err(Error::new(Status::WorkspaceTooSmall, message));
        }
        let footprint = Footprint::contiguous("workspace", workspace as u64, needed as i64);
        self.accesses.refuse_overlap_with(&footprint)?;
        if self.memory == Memory::Fallback {
            refuse_foreign_memory([&footprint])?;
        }
        self.call.workspace = workspace;
        Ok(())
    }
}

fn tensors(problem: &Problem, inputs: &Inputs) -> [Operand; 3] {
    let keys = |name, dim, tensor| match problem.features.paged {
        None if problem.features.key_starts => {
            let sizes = [inputs.features.pass.key_starts.entries(problem), problem.seqlen_k, problem.num_heads_kv, dim];
            Operand::new(name, Access::Read, tensor, sizes, problem.dtype).of_type(problem.key_type())
        }
        None => rows_of_keys(name, Access::Read, problem, dim, tensor),
        Some(page_size) => {
            let pages = [inputs.features.pass.pages.num_pages, page_size, problem.num_heads_kv, dim];
            Operand::new(name, Access::Read, tensor, pages, problem.dtype)
                .of_type(problem.key_type())
                .with_rows(Rows::InPages)
        }
    };
    [
        rows_of_queries("q", Access::Read, problem, problem.head_dim, inputs.q).of_type(problem.query_type()),
        keys("k", problem.head_dim, inputs.k),
        keys("v", problem.head_dim_v, inputs.v),
    ]
}

fn rows_of_queries(name: &'static str, access: Access, p: &Problem, dim: i64, tensor: impl Into<TensorRef>) -> Operand {
    let total = p.features.varlen.and_then(|varlen| varlen.total_q);
    operand(name, access, tensor, p, (p.seqlen_q, total), [p.num_heads_q, dim], p.dtype.into())
}

fn rows_of_keys(name: &'static str, access: Access, p: &Problem, dim: i64, tensor: impl Into<TensorRef>) -> Operand {
    let total = p.features.varlen.and_then(|varlen| varlen.total_k);
    operand(name, access, tensor, p, (p.seqlen_k, total), [p.num_heads_kv, dim], p.dtype.into()).of_type(p.key_type())
}

/// An operand of sizes (batch_size, seqlen, heads, dim). With a total it has (total, heads, dim):
/// one batch entry, or none if there is no sequence.
fn operand(
    name: &'static str,
    access: Access,
    tensor: impl Into<TensorRef>,
    p: &Problem,
    (seqlen, total): (i64, Option<i64>),
    [heads, dim]: [i64; 2],
    element: ElementType,
) -> Operand {
    match total {
        None => Operand::new(name, access, tensor, [p.batch_size, seqlen, heads, dim], element),
        Some(total) => {
            let sizes = [p.batch_size.min(1), total, heads, dim];
            Operand::new(name, access, tensor, sizes, element).with_rows(Rows::Packed)
        }
    }
}

/// The checks of both passes: each tensor and feature by itself, and the layout class. The returned
/// call still lacks its tensors.
fn check(
    mut problem: Problem,
    inputs: &Inputs,
    operands: &mut [Operand],
    data: Data,
    memory: Memory,
) -> Result<(Call, Accesses)> {
    let (softmax_scale, dropout) = inputs.scalars()?;
    let mut accesses = Accesses::default();
    for operand in operands.iter_mut() {
        let footprint = operand.check(data)?;
        accesses.add(operand.access, footprint);
    }
    for word in dropout_words(&dropout) {
        accesses.add(Access::Read, word.check()?);
    }
    inputs.features.check(&problem, data, &mut |access, footprint| accesses.add(access, [footprint]))?;
    let widest = || Layout::widest(problem.dtype, operands.iter().flat_map(Operand::layout_quantities));
    problem.layout = match memory {
        Memory::Host | Memory::Fallback => Layout::widest(problem.dtype, [problem.head_dim, problem.head_dim_v]),
        // A tensor that no TMA map can describe counts as narrower than TMA's access.
        Memory::Device { .. } if problem.features.varlen.is_some() && !operands.iter().all(Operand::counts_by_rows) => {
            widest().max(Layout::Vec4)
        }
        Memory::Device { .. } => widest(),
    };
    let call = Call::of_inputs(problem, softmax_scale, dropout, [TensorRef::NULL; 3]);
    Ok((Call { features: inputs.features.args(), ..call }, accesses))
}

/// The checks across tensors, after each tensor has been checked by itself.
fn check_together(problem: &Problem, inputs: &Inputs, accesses: &Accesses, data: Data, memory: Memory) -> Result<()> {
    accesses.check(data, memory)?;
    match (memory, data) {
        // SAFETY: a launch on a CPU context, of checked pointers; the C caller promises what the
        // header says.
        (Memory::Host | Memory::Fallback, Data::Required) => unsafe { inputs.features.check_lengths(problem) },
        _ => Ok(()),
    }
}

fn lse(problem: &Problem, lse: *const f32, data: Data) -> Result<Option<Footprint>> {
    let lse = Array::new("lse", lse, problem.lse_elements());
    if lse.pointer.is_null() && lse.elements > 0 && data == Data::Required {
        return Err(Error::invalid(format!(
            "lse is NULL; it must point to the {} fp32 elements that the forward pass wrote, one for each query and head",
            lse.elements
        )));
    }
    lse.check()
}

/// The words of the seed and of the offset, if the work itself reads them.
fn dropout_words(dropout: &Dropout) -> [Array; 2] {
    let word = |name, pointer: *const u64| Array::new(name, pointer, 1);
    [word("dropout_seed_ptr", dropout.seed_ptr), word("dropout_offset_ptr", dropout.offset_ptr)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Varlen, Window};

    /// Addresses that are never read: the checks only compute with them.
    fn tensor(address: usize, strides: [i64; 3]) -> flashtune_const_tensor {
        flashtune_const_tensor {
            data: std::ptr::without_provenance(address),
            stride_batch: strides[0],
            stride_seqlen: strides[1],
            stride_head: strides[2],
        }
    }

    fn output(address: usize, strides: [i64; 3]) -> flashtune_tensor {
        flashtune_tensor {
            data: std::ptr::without_provenance_mut(address),
            stride_batch: strides[0],
            stride_seqlen: strides[1],
            stride_head: strides[2],
        }
    }

    /// (1, 16, 2, 64) bf16 tensors, far apart.
    fn params() -> flashtune_forward_params {
        // SAFETY: zero is a value of every field.
        let zeros: flashtune_forward_params = unsafe { std::mem::zeroed() };
        let packed = |address| tensor(address, [2048, 128, 64]);
        flashtune_forward_params {
            struct_size: size_of::<flashtune_forward_params>() as u64,
            dtype: FLASHTUNE_DTYPE_BF16,
            causal: FLASHTUNE_CAUSAL_NONE,
            batch_size: 1,
            num_heads_q: 2,
            num_heads_kv: 2,
            seqlen_q: 16,
            seqlen_k: 16,
            head_dim: 64,
            head_dim_v: 64,
            softmax_scale: 0.0,
            dropout_p: 0.0,
            dropout_seed: 0,
            dropout_offset: 0,
            dropout_seed_ptr: std::ptr::null(),
            dropout_offset_ptr: std::ptr::null(),
            q: packed(0x10000),
            k: packed(0x20000),
            v: packed(0x30000),
            out: output(0x40000, [2048, 128, 64]),
            lse: std::ptr::null_mut(),
            ..zeros
        }
    }

    const DEVICE: Memory = Memory::Device { widens: true };

    fn call(params: &flashtune_forward_params, memory: Memory) -> Call {
        forward(params, Data::Optional, memory).map(|checked| checked.call).unwrap()
    }

    #[test]
    fn layout_follows_addresses_and_strides_that_are_used() {
        let layout = |change: &dyn Fn(&mut flashtune_forward_params)| {
            let mut changed = params();
            change(&mut changed);
            call(&changed, DEVICE).problem.layout
        };
        assert_eq!(layout(&|_| ()), Layout::Vec8);
        // With one batch entry, the batch stride is only multiplied by 0.
        assert_eq!(layout(&|p| p.k.stride_batch = 2049), Layout::Vec8);
        assert_eq!(layout(&|p| p.k.stride_seqlen = 132), Layout::Vec4);
        assert_eq!(layout(&|p| p.v.data = std::ptr::without_provenance(0x30004)), Layout::Vec2);
        assert_eq!(layout(&|p| p.out.data = std::ptr::without_provenance_mut(0x40002)), Layout::Vec1);
        assert_eq!(layout(&|p| p.head_dim_v = 63), Layout::Vec1);
        // 16 bytes are four of fp32.
        assert_eq!(layout(&|p| p.dtype = FLASHTUNE_DTYPE_FP32), Layout::Vec4);
        // Two heads 2^40 bytes apart, farther than TMA reaches.
        assert_eq!(layout(&|p| p.k.stride_head = (1 << 39) - 8), Layout::Vec8);
        assert_eq!(layout(&|p| p.k.stride_head = 1 << 39), Layout::Vec4);
    }

    #[test]
    fn packed_sequences_are_one_batch_entry_of_all_rows() {
        let null = tensor(0, [0, 0, 0]);
        let packed = flashtune_forward_params {
            batch_size: 3,
            features: FLASHTUNE_FEATURE_CU_SEQLENS_Q,
            total_q: 40,
            q: null,
            // Overlaps itself as (3, 16, 2, 64), and its batch stride is narrow; (40, 2, 64) has
            // none.
            out: output(0x40000, [1, 128, 64]),
            ..params()
        };
        let call = call(&packed, DEVICE);
        assert_eq!((call.q.stride_batch, call.q.stride_seqlen), (40 * 128, 128));
        assert_eq!(call.problem.layout, Layout::Vec8);
        assert_eq!(call.problem.lse_elements(), 2 * 40);
        assert_eq!(call.problem.features.varlen, Some(Varlen { total_q: Some(40), ..Varlen::default() }));
        let none = flashtune_forward_params { total_q: 0, ..packed };
        assert!(self::call(&none, DEVICE).problem.is_empty());
    }

    #[test]
    fn a_window_keeps_only_the_sides_that_hide_something_beyond_causal() {
        let of = |causal, window, window_left, window_right| {
            let params = flashtune_forward_params { causal, window, window_left, window_right, ..params() };
            call(&params, DEVICE).problem.features.window
        };
        let (bottom_right, top_left) = (FLASHTUNE_WINDOW_BOTTOM_RIGHT, FLASHTUNE_WINDOW_TOP_LEFT);
        assert_eq!(of(0, 0, 0, -1), Window::default());
        assert_eq!(of(0, top_left, -1, -1), Window::default());
        assert_eq!(of(0, bottom_right, 0, -1), Window { left: Some(0), right: None, top_left: false });
        assert_eq!(of(0, top_left, -1, 5), Window { left: None, right: Some(5), top_left: true });
        assert_eq!(of(1, bottom_right, 3, 0), Window { left: Some(3), right: None, top_left: false });
        assert_eq!(of(2, top_left, 3, -1), Window { left: Some(3), right: None, top_left: true });
        assert_eq!(of(2, top_left, -1, 0), Window::default());
        assert_eq!(of(2, 0, 0, 0), Window::default());
    }

    #[test]
    fn shapes_without_data_count_as_packed_and_aligned() {
        let mut shapes = params();
        for tensor in [&mut shapes.q, &mut shapes.k, &mut shapes.v] {
            *tensor = self::tensor(0, [0, 0, 0]);
        }
        shapes.out = output(0, [0, 0, 0]);
        let call = call(&shapes, DEVICE);
        assert_eq!(call.problem, self::call(&params(), DEVICE).problem);
        assert_eq!((call.out.stride_batch, call.out.stride_seqlen, call.out.stride_head), (2048, 128, 64));
    }

    #[test]
    fn few_queries_over_many_keys_need_a_workspace_on_a_gpu_alone() {
        let decode = flashtune_forward_params { seqlen_q: 1, seqlen_k: 256, ..params() };
        let checked = |memory| forward(&decode, Data::Optional, memory).unwrap();
        let mut checked_call = checked(DEVICE);
        let needed = checked_call.workspace_bytes() as u64;
        assert!(needed > 0);
        let workspace = std::ptr::without_provenance_mut(0x90000);
        let missing = checked_call.set_workspace(std::ptr::null_mut(), needed).unwrap_err();
        assert_eq!(missing.status, Status::InvalidArgument);
        let short = checked_call.set_workspace(workspace, needed - 1).unwrap_err();
        assert_eq!(short.status, Status::WorkspaceTooSmall);
        checked_call.set_workspace(workspace, needed).unwrap();
        assert_eq!(checked_call.call.workspace, workspace);
        assert_eq!(checked(Memory::Host).workspace_bytes(), 0);
        checked(Memory::Host).set_workspace(std::ptr::null_mut(), 0).unwrap();
    }

    #[test]
    fn rows_of_no_sequence_need_neither_an_lse_nor_a_workspace() {
        // SAFETY: zero is a value of every field.
        let zeros: flashtune_backward_params = unsafe { std::mem::zeroed() };
        let forward = params();
        let none = flashtune_backward_params {
            struct_size: size_of::<flashtune_backward_params>() as u64,
            dtype: forward.dtype,
            num_heads_q: 2,
            num_heads_kv: 2,
            seqlen_q: 16,
            seqlen_k: 16,
            head_dim: 64,
            head_dim_v: 64,
            features: FLASHTUNE_FEATURE_CU_SEQLENS_Q,
            total_q: 40,
            ..zeros
        };
        let mut checked = backward(&none, Data::Required, DEVICE).unwrap();
        assert!(checked.call.problem.is_empty());
        assert_eq!((checked.call.problem.lse_elements(), checked.workspace_bytes()), (0, 0));
        checked.set_workspace(std::ptr::null_mut(), 0).unwrap();
    }

    #[test]
    fn layout_on_the_cpu_does_not_follow_the_allocator() {
        let mut odd = params();
        odd.q = tensor(0x10002, [2048, 131, 64]);
        assert_eq!(call(&odd, Memory::Host).problem, call(&params(), Memory::Host).problem);
    }

    #[test]
    fn scale_zero_means_the_default_and_others_are_kept() {
        assert_eq!(call(&params(), Memory::Host).softmax_scale, 0.125);
        assert_eq!(
            call(&flashtune_forward_params { softmax_scale: -2.0, ..params() }, Memory::Host).softmax_scale,
            -2.0
        );
    }

    #[test]
    fn seeds_are_ignored_without_dropout() {
        let odd = flashtune_forward_params { dropout_seed_ptr: std::ptr::without_provenance(3), ..params() };
        assert!(call(&odd, Memory::Host).dropout.seed_ptr.is_null());
        let dropped = flashtune_forward_params { dropout_p: 0.1, ..odd };
        assert!(
            forward(&dropped, Data::Optional, Memory::Host)
                .is_err_and(|e| e.message.contains("dropout_seed_ptr is 0x3"))
        );
    }
}
