//! What a bad argument returns: from the caller's params to a checked `Call`, or a sentence that names the argument.
//!
//! It knows shapes, pointers and ranges; whether a device can do the problem is the plan layer's to say.

use super::inputs::Inputs;
use super::operand::{Access, Data, Operand};
use super::overlap::Footprint;
use super::sized::{address, flag};
use super::types::*;
use crate::call::Call;
use crate::dropout::Dropout;
use crate::error::{Error, Result, Status};
use crate::problem::{Layout, Pass, Problem};
use std::ffi::c_void;

/// Alignment of a workspace: what cudaMalloc gives, and every array inside keeps.
const WORKSPACE_ALIGNMENT: usize = 256;

/// A checked call and what its tensors touch, to check the workspace against.
pub struct Checked {
    pub call: Call,
    read: Footprints<8>,
    written: Footprints<3>,
}

/// What decides the layout class besides the head dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutBy {
    /// Strides and addresses too: kernels load vectors.
    Access,
    /// Nothing: the CPU loads unaligned, and a class that followed malloc would change from call to call.
    HeadDims,
}

pub fn forward(params: &flashtune_forward_params, data: Data, layout: LayoutBy) -> Result<Checked> {
    let inputs = Inputs::from(params);
    let mut problem = inputs.problem(Pass::Forward)?;
    let (softmax_scale, dropout) = inputs.scalars()?;
    let [q, k, v] = tensors(&problem, &inputs);
    let out = rows_of_queries("out", Access::Written, &problem, problem.head_dim_v, &params.out);
    let mut operands = [q, k, v, out];
    let (mut read, written) = check(&mut problem, &mut operands, data, layout)?;
    let mut written = written;
    written.extend(lse(&problem, params.lse, Data::Optional)?);
    read.extend(dropout_words(&dropout)?);
    refuse_overlaps(&read, &written)?;
    let [q, k, v, out] = operands.map(|operand| operand.tensor);
    let call = Call { out, lse: params.lse, ..Call::of_inputs(problem, softmax_scale, dropout, [q, k, v]) };
    Ok(Checked { call, read, written })
}

pub fn backward(params: &flashtune_backward_params, data: Data, layout: LayoutBy) -> Result<Checked> {
    let inputs = Inputs::from(params);
    let deterministic = flag(("deterministic", params.deterministic), ("reserved", params.reserved))?;
    let mut problem = Problem { deterministic, ..inputs.problem(Pass::Backward)? };
    let (softmax_scale, dropout) = inputs.scalars()?;
    let [q, k, v] = tensors(&problem, &inputs);
    let out = rows_of_queries("out", Access::Read, &problem, problem.head_dim_v, &params.out);
    let dout = rows_of_queries("dout", Access::Read, &problem, problem.head_dim_v, &params.dout);
    let dq = rows_of_queries("dq", Access::Written, &problem, problem.head_dim, &params.dq);
    let dk = rows_of_keys("dk", Access::Written, &problem, problem.head_dim, &params.dk);
    let dv = rows_of_keys("dv", Access::Written, &problem, problem.head_dim_v, &params.dv);
    let mut operands = [q, k, v, out, dout, dq, dk, dv];
    let (mut read, written) = check(&mut problem, &mut operands, data, layout)?;
    read.extend(lse(&problem, params.lse, data)?);
    read.extend(dropout_words(&dropout)?);
    refuse_overlaps(&read, &written)?;
    let [q, k, v, out, dout, dq, dk, dv] = operands.map(|operand| operand.tensor);
    let workspace = std::ptr::null_mut();
    let call =
        Call { problem, softmax_scale, dropout, q, k, v, out, lse: params.lse.cast_mut(), dout, dq, dk, dv, workspace };
    Ok(Checked { call, read, written })
}

impl Checked {
    /// Checks the workspace and puts it into the call.
    pub fn set_workspace(&mut self, workspace: *mut c_void, bytes: u64) -> Result<()> {
        let needed = self.call.problem.workspace_bytes();
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
        self.read.iter().chain(self.written.iter()).try_for_each(|tensor| refuse_overlap(&footprint, tensor))?;
        self.call.workspace = workspace;
        Ok(())
    }
}

fn tensors(problem: &Problem, inputs: &Inputs) -> [Operand; 3] {
    [
        rows_of_queries("q", Access::Read, problem, problem.head_dim, &inputs.q),
        rows_of_keys("k", Access::Read, problem, problem.head_dim, &inputs.k),
        rows_of_keys("v", Access::Read, problem, problem.head_dim_v, &inputs.v),
    ]
}

fn rows_of_queries(name: &'static str, access: Access, p: &Problem, dim: i64, tensor: &flashtune_tensor) -> Operand {
    Operand::new(name, access, tensor, [p.batch_size, p.seqlen_q, p.num_heads_q, dim], p.dtype)
}

fn rows_of_keys(name: &'static str, access: Access, p: &Problem, dim: i64, tensor: &flashtune_tensor) -> Operand {
    Operand::new(name, access, tensor, [p.batch_size, p.seqlen_k, p.num_heads_kv, dim], p.dtype)
}

/// Checks each tensor alone and judges the layout class.
fn check(
    problem: &mut Problem,
    operands: &mut [Operand],
    data: Data,
    layout: LayoutBy,
) -> Result<(Footprints<8>, Footprints<3>)> {
    let (mut read, mut written) = (Footprints::new(), Footprints::new());
    for operand in operands.iter_mut() {
        let footprint = operand.check(data)?;
        match operand.access {
            Access::Read => read.extend(footprint),
            Access::Written => written.extend(footprint),
        }
    }
    problem.layout = match layout {
        LayoutBy::HeadDims => Layout::widest([problem.head_dim, problem.head_dim_v]),
        LayoutBy::Access => Layout::widest(operands.iter().flat_map(|operand| operand.layout_quantities())),
    };
    Ok((read, written))
}

fn lse(problem: &Problem, lse: *const f32, data: Data) -> Result<Option<Footprint>> {
    let elements = problem.batch_size * problem.num_heads_q * problem.seqlen_q;
    if elements == 0 || (lse.is_null() && data == Data::Optional) {
        return Ok(None);
    }
    if lse.is_null() {
        return Err(Error::invalid(format!(
            "lse is NULL; it must point to the (batch_size, num_heads_q, seqlen_q) = ({}, {}, {}) fp32 elements that the forward pass wrote",
            problem.batch_size, problem.num_heads_q, problem.seqlen_q
        )));
    }
    aligned("lse", lse.cast(), align_of::<f32>())?;
    Ok(Some(Footprint::contiguous("lse", lse as u64, elements * size_of::<f32>() as i64)))
}

/// The seed's and the offset's words, where the work itself reads them.
fn dropout_words(dropout: &Dropout) -> Result<impl Iterator<Item = Footprint>> {
    let words = [("dropout_seed_ptr", dropout.seed_ptr), ("dropout_offset_ptr", dropout.offset_ptr)];
    for (name, pointer) in words {
        aligned(name, pointer.cast(), align_of::<u64>())?;
    }
    let given = words.into_iter().filter(|(_, pointer)| !pointer.is_null());
    Ok(given.map(|(name, pointer)| Footprint::contiguous(name, pointer as u64, size_of::<u64>() as i64)))
}

fn aligned(name: &str, pointer: *const c_void, alignment: usize) -> Result<()> {
    match (pointer as usize).is_multiple_of(alignment) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{name} is {}; it must be aligned to {alignment} bytes", address(pointer))))
        }
    }
}

fn refuse_overlaps<const R: usize, const W: usize>(read: &Footprints<R>, written: &Footprints<W>) -> Result<()> {
    for (index, output) in written.iter().enumerate() {
        read.iter().chain(written.iter().skip(index + 1)).try_for_each(|other| refuse_overlap(output, other))?;
    }
    Ok(())
}

fn refuse_overlap(output: &Footprint, other: &Footprint) -> Result<()> {
    match output.touches(other) {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "{} overlaps {}: {output} and {other} share bytes; what a call writes must share none with its other tensors",
            output.name, other.name
        ))),
    }
}

/// Up to N footprints, without the heap: a launch allocates nothing.
struct Footprints<const N: usize> {
    items: [Option<Footprint>; N],
    count: usize,
}

impl<const N: usize> Footprints<N> {
    fn new() -> Self {
        Footprints { items: [None; N], count: 0 }
    }

    fn extend(&mut self, more: impl IntoIterator<Item = Footprint>) {
        for item in more {
            self.items[self.count] = Some(item);
            self.count += 1;
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Footprint> {
        self.items.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that are never read: the checks only compute with them.
    fn tensor(address: usize, strides: [i64; 3]) -> flashtune_tensor {
        flashtune_tensor {
            data: std::ptr::without_provenance_mut(address),
            stride_batch: strides[0],
            stride_seqlen: strides[1],
            stride_head: strides[2],
        }
    }

    /// (1, 16, 2, 64) bf16 tensors, far apart.
    fn params() -> flashtune_forward_params {
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
            out: packed(0x40000),
            lse: std::ptr::null_mut(),
        }
    }

    fn call(params: &flashtune_forward_params, layout: LayoutBy) -> Call {
        forward(params, Data::Optional, layout).map(|checked| checked.call).unwrap()
    }

    #[test]
    fn layout_follows_addresses_and_strides_that_are_used() {
        let layout = |change: &dyn Fn(&mut flashtune_forward_params)| {
            let mut changed = params();
            change(&mut changed);
            call(&changed, LayoutBy::Access).problem.layout
        };
        assert_eq!(layout(&|_| ()), Layout::Vec8);
        // The batch's stride is never multiplied with anything but 0.
        assert_eq!(layout(&|p| p.k.stride_batch = 2049), Layout::Vec8);
        assert_eq!(layout(&|p| p.k.stride_seqlen = 132), Layout::Vec4);
        assert_eq!(layout(&|p| p.v.data = std::ptr::without_provenance_mut(0x30004)), Layout::Vec2);
        assert_eq!(layout(&|p| p.out.data = std::ptr::without_provenance_mut(0x40002)), Layout::Vec1);
        assert_eq!(layout(&|p| p.head_dim_v = 63), Layout::Vec1);
        // Two heads 2^40 bytes apart, farther than TMA reaches.
        assert_eq!(layout(&|p| p.k.stride_head = (1 << 39) - 8), Layout::Vec8);
        assert_eq!(layout(&|p| p.k.stride_head = 1 << 39), Layout::Vec4);
    }

    #[test]
    fn shapes_without_data_count_as_packed_and_aligned() {
        let mut shapes = params();
        for tensor in [&mut shapes.q, &mut shapes.k, &mut shapes.v, &mut shapes.out] {
            *tensor = self::tensor(0, [0, 0, 0]);
        }
        let call = call(&shapes, LayoutBy::Access);
        assert_eq!(call.problem, self::call(&params(), LayoutBy::Access).problem);
        assert_eq!((call.out.stride_batch, call.out.stride_seqlen, call.out.stride_head), (2048, 128, 64));
    }

    #[test]
    fn layout_on_the_cpu_does_not_follow_the_allocator() {
        let mut odd = params();
        odd.q = tensor(0x10002, [2048, 131, 64]);
        assert_eq!(call(&odd, LayoutBy::HeadDims).problem, call(&params(), LayoutBy::HeadDims).problem);
    }

    #[test]
    fn scale_zero_is_the_usual_one_and_others_are_kept() {
        assert_eq!(call(&params(), LayoutBy::HeadDims).softmax_scale, 0.125);
        assert_eq!(
            call(&flashtune_forward_params { softmax_scale: -2.0, ..params() }, LayoutBy::HeadDims).softmax_scale,
            -2.0
        );
    }

    #[test]
    fn seeds_of_an_undropped_call_are_not_looked_at() {
        let odd = flashtune_forward_params { dropout_seed_ptr: std::ptr::without_provenance(3), ..params() };
        assert!(call(&odd, LayoutBy::HeadDims).dropout.seed_ptr.is_null());
        let dropped = flashtune_forward_params { dropout_p: 0.1, ..odd };
        assert!(
            forward(&dropped, Data::Optional, LayoutBy::HeadDims)
                .is_err_and(|e| e.message.contains("dropout_seed_ptr is 0x3"))
        );
    }
}
