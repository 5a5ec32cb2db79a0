//! The kernels that write new keys and values into a K/V cache: what their texts are rendered from,
//! their arguments and their launches.
//!
//! The kernels only copy and rotate, so they have no config to search for.

use super::call::{KvAppend, Rotary};
use crate::call::TensorRef;
use crate::error::Result;
use crate::kernel::{FixedSpec, Value};
use crate::ops::class::{CacheFormat, EightClass, KvAppendClass, RotaryClass};
use crate::ops::op::{Launch, Op};
use crate::problem::{Dtype, Four};
use std::ffi::c_void;

const THREADS: u32 = 128;
/// CTAs for each SM, over all keys and values of a launch. Each thread has 32 bytes in flight, so
/// an SM has 32 KB. Decode's reads come within 3 % of the memory's rate with 64 KB (DESIGN.md,
/// tuning log), and half of a copy's traffic is reads.
const CTAS_PER_SM: u64 = 8;
/// Limit of a grid's y dimension. A CTA loops over further sequences.
const MAX_GRID_SEQUENCES: i64 = 65535;

/// Accesses of a sequence up to which one CTA does all of its work, where lengths advance in place:
/// eight for each thread of 16 new tokens of 8 heads of 128 columns.
const ACCESSES_OF_ONE_CTA: u64 = 4096;
/// Threads of the kernel for slots, so that one CTA hides latency better.
const SLOTS_THREADS: u32 = 256;
/// CTAs of that kernel for each SM. With four, rotations of fp32 tables would spill.
const SLOTS_CTAS_PER_SM: u64 = 3;
const SLOTS: &str = "kv_append_slots";
const EIGHT: &str = "kv_append_eight";

impl KvAppendClass {
    /// Whether the kernel for slots and rotations serves the class.
    fn has_slots(&self) -> bool {
        self.slots || self.rotary.is_some() || self.eight.is_some()
    }

    /// Elements that a stride of the kernel's argument counts.
    fn elements_of_access(&self, element_bytes: i64) -> i64 {
        if self.eight.is_some() { 1 } else { self.access_bytes / element_bytes }
    }

    /// Threads of a CTA, and CTAs for each SM.
    fn ctas(&self) -> (u32, u64) {
        if self.has_slots() { (SLOTS_THREADS, SLOTS_CTAS_PER_SM) } else { (THREADS, CTAS_PER_SM) }
    }

    /// The kernel of this class.
    pub fn kernel(&self) -> FixedSpec {
        if let Some(EightClass { dtype, keys }) = self.eight {
            let (format, group) = match keys {
                CacheFormat::Eight(eight) => (eight.number(), 0),
                CacheFormat::Four(four) => (Four::NUMBER, four.group() as u32),
            };
            return FixedSpec {
                name: EIGHT,
                threads: SLOTS_THREADS,
                class: vec![
                    ("dtype", Value::Name(dtype.name().to_owned())),
                    ("vec", Value::Integer(self.access_bytes as u32 / 2)),
                ],
                knobs: vec![("key_format", Value::Integer(format)), ("key_group", Value::Integer(group))],
            };
        }
        let access_bytes = ("access_bytes", Value::Integer(self.access_bytes as u32));
        if !self.has_slots() {
            return FixedSpec { name: KvAppend::NAME, threads: THREADS, class: Vec::new(), knobs: vec![access_bytes] };
        }
        let rotary =
            self.rotary.unwrap_or(RotaryClass { dtype: Dtype::Fp16, table_dtype: Dtype::Fp16, interleaved: false });
        FixedSpec {
            name: SLOTS,
            threads: SLOTS_THREADS,
            class: vec![("dtype", Value::Name(rotary.dtype.name().to_owned()))],
            knobs: vec![
                access_bytes,
                ("ctas_per_sm", Value::Integer(SLOTS_CTAS_PER_SM as u32)),
                ("rotates", Value::Flag(self.rotary.is_some())),
                ("is_interleaved", Value::Flag(rotary.interleaved)),
                ("tables_are_fp32", Value::Flag(rotary.table_dtype == Dtype::Fp32)),
            ],
        }
    }
}

/// The argument of the kernel that only copies, the twin of `KvAppendParams` in
/// `templates/kv_append/rows.cuh`.
#[repr(C)]
pub struct KvAppendParams {
    k_new: TensorRef,
    v_new: TensorRef,
    k_cache: TensorRef,
    v_cache: TensorRef,
    seqlens: *const i32,
    seqused: *mut i32,
    block_table: *const i32,
    block_table_stride: i64,
    batch_size: i32,
    num_heads: i32,
    seqlen_new: i32,
    seqlen_cache: i32,
    row_k: i32,
    row_v: i32,
    page_size: i32,
    num_pages: i32,
}

const _: () = assert!(size_of::<KvAppendParams>() == 4 * 32 + 4 * 8 + 8 * 4);

/// The tensor with strides in accesses of so many elements.
fn in_accesses(tensor: &TensorRef, elements: i64) -> TensorRef {
    TensorRef {
        data: tensor.data,
        stride_batch: tensor.stride_batch / elements,
        stride_seqlen: tensor.stride_seqlen / elements,
        stride_head: tensor.stride_head / elements,
    }
}

impl KvAppendParams {
    /// Each size fits an i32, since `capi` bounds them. Each stride that is used is a whole number
    /// of accesses.
    pub fn new(append: &KvAppend) -> KvAppendParams {
        let elements = append.class.elements_of_access(append.element_bytes);
        KvAppendParams {
            k_new: in_accesses(&append.k_new, elements),
            v_new: in_accesses(&append.v_new, elements),
            k_cache: in_accesses(&append.k_cache, elements),
            v_cache: in_accesses(&append.v_cache, elements),
            seqlens: append.seqlens,
            seqused: append.seqused,
            block_table: append.block_table,
            block_table_stride: append.block_table_stride,
            batch_size: append.batch_size as i32,
            num_heads: append.num_heads_kv as i32,
            seqlen_new: append.seqlen_new as i32,
            seqlen_cache: append.seqlen_cache as i32,
            row_k: (append.head_dim / elements) as i32,
            row_v: (append.head_dim_v / elements) as i32,
            page_size: append.page_size as i32,
            num_pages: append.num_pages as i32,
        }
    }
}

/// The argument of the kernel for slots, the twin of `KvAppendSlotsParams` in
/// `templates/kv_append/slots.cuh`. The kernel that only copies takes its first field.
#[repr(C)]
pub struct KvAppendSlotsParams {
    append: KvAppendParams,
    q: TensorRef,
    q_rotated: TensorRef,
    rotary_cos: *const c_void,
    rotary_sin: *const c_void,
    rotary_stride: i64,
    seqused_new: *const i32,
    cache_batch_idx: *const i32,
    num_heads_q: i32,
    seqlen_q: i32,
    half: i32,
    seqlen_rotary: i32,
    position_step_q: i32,
    writes_rows: i32,
}

const _: () = assert!(size_of::<KvAppendSlotsParams>() == size_of::<KvAppendParams>() + 2 * 32 + 5 * 8 + 6 * 4);

impl KvAppendSlotsParams {
    pub fn new(append: &KvAppend) -> KvAppendSlotsParams {
        let rotary = &append.rotary;
        let elements = append.class.elements_of_access(append.element_bytes);
        KvAppendSlotsParams {
            append: KvAppendParams::new(append),
            q: in_accesses(&rotary.q, elements),
            q_rotated: in_accesses(&rotary.q_rotated, elements),
            rotary_cos: rotary.cos,
            rotary_sin: rotary.sin,
            rotary_stride: rotary.stride,
            seqused_new: append.seqused_new,
            cache_batch_idx: append.cache_batch_idx,
            num_heads_q: rotary.num_heads_q as i32,
            seqlen_q: rotary.seqlen_q as i32,
            half: (rotary.dim / 2 / elements) as i32,
            seqlen_rotary: rotary.seqlen as i32,
            position_step_q: (!rotary.q_at_one_position).into(),
            writes_rows: 1,
        }
    }
}

/// The argument of the kernel for caches of 8 bits and int4, the twin of `KvAppendEightParams` in
/// `templates/kv_append_eight.cu.tera`. The kernel for slots takes its first field.
#[repr(C)]
pub struct KvAppendEightParams {
    slots: KvAppendSlotsParams,
    k_scales: TensorRef,
    v_scales: TensorRef,
    computes: i32,
    of_keys: i32,
    interleaved: i32,
    tables_are_fp32: i32,
}

const _: () = assert!(size_of::<KvAppendEightParams>() == size_of::<KvAppendSlotsParams>() + 2 * 32 + 4 * 4);

impl KvAppendEightParams {
    pub fn new(append: &KvAppend) -> KvAppendEightParams {
        let rotary = append.class.rotary;
        KvAppendEightParams {
            slots: KvAppendSlotsParams::new(append),
            k_scales: append.scales.k,
            v_scales: append.scales.v,
            computes: append.scales.computes.into(),
            of_keys: append.scales.of_keys.into(),
            interleaved: rotary.is_some_and(|rotary| rotary.interleaved).into(),
            tables_are_fp32: rotary.is_some_and(|rotary| rotary.table_dtype == Dtype::Fp32).into(),
        }
    }
}

/// Accesses of the longest of a sequence's parts (keys, values, queries), and those of all.
fn accesses(append: &KvAppend) -> (u64, u64) {
    let of = |rows: i64, heads: i64, dim: i64| {
        (rows * heads * (dim * append.element_bytes / append.class.access_bytes)) as u64
    };
    let (k, v) = (append.head_dim, append.head_dim_v);
    let Rotary { seqlen_q, num_heads_q, .. } = append.rotary;
    let parts = [
        of(append.seqlen_new, append.num_heads_kv, k),
        of(append.seqlen_new, append.num_heads_kv, v),
        of(seqlen_q, num_heads_q, k),
    ];
    (parts.into_iter().max().unwrap_or(0), parts.iter().sum())
}

/// x: CTAs for each sequence, y: sequences, z: keys, values and, if they are rotated, queries.
pub fn grid(append: &KvAppend, sm_count: u32) -> [u32; 3] {
    let sequences = append.batch_size.min(MAX_GRID_SEQUENCES) as u64;
    let parts = if append.rotary.seqlen_q > 0 { 3 } else { 2 };
    let (threads, ctas_per_sm) = append.class.ctas();
    let ctas_of_device = u64::from(sm_count) * ctas_per_sm;
    let ctas = accesses(append).0.div_ceil(threads.into()).min(ctas_of_device.div_ceil(parts * sequences)).max(1);
    [ctas as u32, sequences as u32, parts as u32]
}

/// The launches of a call. Lengths that advance in place are written by a launch that gives each
/// sequence one CTA. That CTA does all of a sequence's work if there is little. Otherwise a launch
/// of many CTAs, which writes no length, goes before.
pub fn launches(append: &KvAppend, sm_count: u32, launch: &mut Launch<'_, KvAppendEightParams>) -> Result<()> {
    let mut params = KvAppendEightParams::new(append);
    if !append.advances_in_place() {
        return launch(grid(append, sm_count), &params);
    }
    if accesses(append).1 > ACCESSES_OF_ONE_CTA {
        let seqused = std::mem::replace(&mut params.slots.append.seqused, std::ptr::null_mut());
        launch(grid(append, sm_count), &params)?;
        (params.slots.append.seqused, params.slots.writes_rows) = (seqused, 0);
    }
    let sequences = append.batch_size.min(MAX_GRID_SEQUENCES) as u32;
    launch([1, sequences, 1], &params)
}

#[cfg(test)]
mod tests {
    use super::super::call::AppendScales;
    use super::*;

    fn append(batch_size: i64, seqlen_new: i64) -> KvAppend {
        KvAppend {
            class: KvAppendClass { access_bytes: 16, slots: false, rotary: None, eight: None },
            element_bytes: 2,
            batch_size,
            num_heads_kv: 8,
            seqlen_new,
            seqlen_cache: 1 << 20,
            head_dim: 128,
            head_dim_v: 64,
            k_new: TensorRef::packed(std::ptr::null_mut(), seqlen_new, 8, 128),
            v_new: TensorRef::packed(std::ptr::null_mut(), seqlen_new, 8, 64),
            k_cache: TensorRef::packed(std::ptr::null_mut(), 1 << 20, 8, 128),
            v_cache: TensorRef::packed(std::ptr::null_mut(), 1 << 20, 8, 64),
            seqlens: std::ptr::null(),
            seqused: std::ptr::null_mut(),
            block_table: std::ptr::null(),
            block_table_stride: 0,
            page_size: 0,
            num_pages: 0,
            seqused_new: std::ptr::null(),
            cache_batch_idx: std::ptr::null(),
            rotary: Rotary::NONE,
            scales: AppendScales::NONE,
        }
    }

    /// The grids of a call's launches, and what each writes: (rows, lengths).
    fn launched(append: &KvAppend) -> Vec<([u32; 3], (bool, bool))> {
        let mut all = Vec::new();
        launches(append, 132, &mut |grid, params| {
            all.push((grid, (params.slots.writes_rows != 0, !params.slots.append.seqused.is_null())));
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn lengths_that_advance_in_place_are_written_by_one_cta_for_each_sequence() {
        let mut lengths = [0i32; 16];
        let slots = KvAppendClass { access_bytes: 16, slots: true, rotary: None, eight: None };
        let mut advancing = |seqlen_new| KvAppend {
            class: slots,
            seqlens: lengths.as_ptr(),
            seqused: lengths.as_mut_ptr(),
            ..append(16, seqlen_new)
        };
        let [step, prompt] = [advancing(1), advancing(512)];
        assert_eq!(launched(&step), [([1, 16, 1], (true, true))]);
        assert_eq!(launched(&prompt), [([13, 16, 2], (true, false)), ([1, 16, 1], (false, true))]);
        let apart = KvAppend { seqlens: std::ptr::null(), ..prompt };
        assert_eq!(launched(&apart), [([13, 16, 2], (true, true))]);
    }

    #[test]
    fn a_grid_has_a_thread_for_each_access_as_far_as_the_device_holds_them() {
        // 128 accesses of K a token.
        assert_eq!(grid(&append(1, 1), 132), [1, 1, 2]);
        assert_eq!(grid(&append(1, 5), 132), [5, 1, 2]);
        assert_eq!(grid(&append(1, 100_000), 132), [528, 1, 2]);
        assert_eq!(grid(&append(100, 2048), 132), [6, 100, 2]);
        // Lengths alone, and more sequences than a grid holds.
        assert_eq!(grid(&append(3, 0), 132), [1, 3, 2]);
        assert_eq!(grid(&append(1 << 20, 7), 132), [1, 65535, 2]);
    }

    #[test]
    fn strides_and_rows_are_counted_in_accesses() {
        let params = KvAppendParams::new(&append(2, 3));
        assert_eq!((params.row_k, params.row_v), (16, 8));
        let TensorRef { stride_batch, stride_seqlen, stride_head, .. } = params.v_new;
        assert_eq!((stride_batch, stride_seqlen, stride_head), (3 * 64, 64, 8));
    }
}
