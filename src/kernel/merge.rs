//! Merger: the kernel that merges partial results, from its class to the launch. It has no config to choose: it is short, and bound
//! by the reading of the partials.

use super::cubin_cache::CubinCache;
use super::modules::{self, Loaded, Source};
use super::render::Renderer;
use crate::call::{Stream, TensorRef};
use crate::config::Family;
use crate::cuda::context::Context;
use crate::cuda::module::Function;
use crate::device::Device;
use crate::error::Result;
use crate::merge::{Merge, MergeClass};
use std::sync::Arc;

/// File under `templates/`, without `.cu.tera`.
pub const TEMPLATE: &str = "merge";
/// A row of the output for each 32 of them.
pub const THREADS: u32 = 128;
/// Its kernels have sm80's instructions, and are compiled for what those are.
pub const FAMILY: Family = Family::Decode;

pub struct Merger {
    context: Arc<Context>,
    function: Function,
    /// Keeps the module found by those who build the same text later.
    _loaded: Arc<Loaded>,
}

/// What the kernel gets by value, the twin of `MergeParams` in `templates/merge.cu.tera`.
#[repr(C)]
struct MergeParams {
    partial_out: TensorRef,
    out: TensorRef,
    partial_out_stride: i64,
    partial_lse: *const f32,
    partial_lse_stride: i64,
    lse: *mut f32,
    num_partials: i64,
    rows: i64,
    num_heads: i64,
    seqlen: i64,
    head_dim_v: i64,
}

const _: () = assert!(size_of::<MergeParams>() == 2 * 32 + 9 * 8);

impl Merger {
    pub(super) fn new(
        context: &Arc<Context>,
        device: &Device,
        cubins: &CubinCache,
        class: &MergeClass,
    ) -> Result<Merger> {
        let text = Renderer::shared()?.render_merge(class, device.arch)?;
        let source = Source { name: TEMPLATE, family: FAMILY, text: &text };
        let loaded = modules::load(context, device, cubins, &source)?;
        let function = loaded.module.function(c"flashtune_merge", 0)?;
        Ok(Merger { context: context.clone(), function, _loaded: loaded })
    }

    /// Enqueues the work on `stream`. The pointers and the stream are as `capi` has checked and documented.
    #[expect(
        clippy::not_unsafe_ptr_arg_deref,
        reason = "a stream is a handle that the caller answers for, as in an Executable's launch"
    )]
    pub fn launch(&self, merge: &Merge, stream: Stream) -> Result<()> {
        let params = MergeParams {
            partial_out: merge.partial_out,
            out: merge.out,
            partial_out_stride: merge.partial_out_stride,
            partial_lse: merge.partial_lse,
            partial_lse_stride: merge.partial_lse_stride,
            lse: merge.lse,
            num_partials: merge.num_partials,
            rows: merge.rows(),
            num_heads: merge.num_heads,
            seqlen: merge.seqlen,
            head_dim_v: merge.head_dim_v,
        };
        let blocks = (merge.rows() as u64).div_ceil(u64::from(THREADS / 32));
        let current = self.context.enter()?;
        let mut arguments = [std::ptr::from_ref(&params).cast_mut().cast()];
        // SAFETY: the template asserts the size of MergeParams, its only argument; that the pointers hold until the work is
        // done, and that the stream is of this context, is the caller's contract with the C face, which has bounded the rows.
        unsafe { self.function.launch(&current, [blocks as u32, 1, 1], THREADS, 0, stream, false, &mut arguments) }
    }
}
