//! Launch maps: the tensor maps through which a kernel loads its tiles by TMA, and sm90's forward
//! pass may store them.
//!
//! They follow from a call's views. The problem's layout class promises what TMA demands (addresses
//! and strides are multiples of 16 bytes, strides below its limit), so that a launch has nothing
//! left to refuse.
//!
//! Only the device knows where a varlen sequence ends. A kernel must neither load nor store the
//! rows behind that end, and only a map's bounds can prevent it. So a map holds the rows in two
//! dimensions of one stride (device/layout/tensor_map.cuh). The first has `MAX_MAP_ROWS` rows, and
//! a kernel takes its last row as the sequence's last row. The coordinate of the second is the row
//! of the tensor at which the sequence ends. Both together reach too far; a third dimension, whose
//! stride wraps around 2^64, takes the excess back. A lower address would do the same, but TMA
//! requires a map's address to lie in mapped memory. The idea comes from the ragged descriptors of
//! Triton and quack.

use crate::call::{Call, MAX_MAP_ROWS, TensorRef};
use crate::cuda::driver::Driver;
use crate::cuda::tensor_map::{Element, Fetch, MAX_RANK, Tensor, TensorMap};
use crate::error::{Error, Result};
use crate::family::BOX_COLS;
use crate::family::spec::Boxes;
use crate::problem::{Dtype, Pass, Problem, Varlen};

pub struct LaunchMaps {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    /// The map of O, in the backward pass that of dO.
    pub o: TensorMap,
}

/// The maps of a decode kernel.
pub struct KeyMaps {
    pub k: TensorMap,
    pub v: TensorMap,
}

impl KeyMaps {
    /// Boxes of `box_rows` keys. The rows of `heads` heads are one row.
    pub fn encode(driver: &Driver, call: &Call, box_rows: u32, heads: u32) -> Result<KeyMaps> {
        let [k, v] = key_tensors(&call.in_units(), box_rows)?.map(|tensor| with_heads_in_rows(tensor, heads));
        Ok(KeyMaps { k: TensorMap::encode(driver, &k)?, v: TensorMap::encode(driver, &v)? })
    }
}

impl LaunchMaps {
    pub fn encode(driver: &Driver, call: &Call, boxes: &Boxes) -> Result<LaunchMaps> {
        let [q, k, v, o] = tensors(&call.in_units(), boxes)?;
        Ok(LaunchMaps {
            q: TensorMap::encode(driver, &q)?,
            k: TensorMap::encode(driver, &k)?,
            v: TensorMap::encode(driver, &v)?,
            o: TensorMap::encode(driver, &o)?,
        })
    }
}

/// Q, K, V and O or dO as TMA sees them. `call` is in units: a row of 8-bit elements is one of
/// pairs.
fn tensors(call: &Call, boxes: &Boxes) -> Result<[Tensor; 4]> {
    let p = &call.problem;
    let (cols_q, [cols_k, cols_v]) = (p.query_type().units(p.head_dim), cols_of_keys(p));
    let element = element(p)?;
    let Varlen { total_q, total_k, .. } = p.features.varlen.unwrap_or_default();
    let of = |view: &TensorRef, shape: Shape| match p.features.varlen {
        None => of_equal_lengths(element, view, &shape),
        Some(_) => of_varlen(element, view, &shape),
    };
    let of_queries =
        |view, dim| of(view, Shape::new([p.batch_size, p.seqlen_q, p.num_heads_q, dim], total_q, boxes.query_rows));
    let of_keys = |view, dim| {
        of(view, Shape::new([call.key_entries(), p.seqlen_k, p.num_heads_kv, dim], total_k, boxes.key_rows))
    };
    let (q, o) = (of_queries(&call.q, cols_q), of_queries(o(call), p.head_dim_v));
    let [k, v] = match p.features.paged {
        // Threads copy the keys.
        _ if boxes.key_rows == 0 => [q, q],
        None => [of_keys(&call.k, cols_k), of_keys(&call.v, cols_v)],
        Some(page_size) => page_tensors(call, element, page_size, boxes.key_rows).unwrap_or([q, q]),
    };
    // A tensor without rows is not loaded and its view may hold anything, but a map has no extent
    // of 0: another tensor takes its place.
    let tensors = match (p.seqlen_q, p.seqlen_k) {
        (_, 0) => [q, q, q, o],
        (0, _) => [k, k, v, k],
        _ => [q, k, v, o],
    };
    Ok(if fetches_boxes(p) { tensors.map(|tensor| Tensor { fetch: Fetch::Bytes128, ..tensor }) } else { tensors })
}

/// Whether L2 reads no more than the 128 bytes that a box has of a row. The bytes beside them
/// belong to the next box or to another head. Fetching them with a box took up to 1.03 times as
/// long on an H200 forward (docs/tuning/sm90-forward.md), and as much with q of 8 bits, 1,024 keys
/// and head dim 256. With q of 16 bits neither pages nor packed sequences were timed.
fn fetches_boxes(p: &Problem) -> bool {
    let is_dense = p.features.varlen.is_none() && p.features.paged.is_none();
    p.query_type().bytes() == 1 || p.pass == Pass::Forward && is_dense
}

/// The columns of K and V in units.
fn cols_of_keys(p: &Problem) -> [i64; 2] {
    [p.head_dim, p.head_dim_v].map(|dim| p.key_type().units(p.key_type().elements(dim)))
}

/// K and V if they are pages; None without any page.
fn page_tensors(call: &Call, element: Element, page_size: i64, box_rows: u32) -> Option<[Tensor; 2]> {
    let (p, batch_size) = (&call.problem, call.features.num_pages);
    let of = |view: &TensorRef, dim| {
        let shape = Shape { dim, rows: page_size, heads: p.num_heads_kv, batch_size, box_rows };
        of_equal_lengths(element, view, &shape)
    };
    let [cols_k, cols_v] = cols_of_keys(p);
    (batch_size > 0).then(|| [of(&call.k, cols_k), of(&call.v, cols_v)])
}

/// K and V, fetched 128 bytes at a time since they are read once: with 256 an H200 took 1.1 times
/// as long (docs/tuning/decode.md).
fn key_tensors(call: &Call, box_rows: u32) -> Result<[Tensor; 2]> {
    let p = &call.problem;
    let element = element(p)?;
    let pages = p.features.paged.filter(|_| p.seqlen_k > 0);
    let tensors = match pages.and_then(|page_size| page_tensors(call, element, page_size, box_rows)) {
        Some(pages) => pages,
        None if p.features.paged.is_some() => {
            // Without rows, as above.
            let shape = Shape { dim: p.head_dim, rows: 1, heads: p.num_heads_q, batch_size: 1, box_rows };
            [of_equal_lengths(element, &call.q, &shape); 2]
        }
        None => {
            let [_, k, v, _] = tensors(call, &Boxes { query_rows: box_rows, key_rows: box_rows })?;
            [k, v]
        }
    };
    Ok(tensors.map(|tensor| Tensor { fetch: Fetch::Bytes128, ..tensor }))
}

/// The tensor whose rows have the columns of `heads` heads, which lie one after the other. If they
/// lie apart, kernels do not use the map.
fn with_heads_in_rows(tensor: Tensor, heads: u32) -> Tensor {
    let Tensor { mut extents, mut strides, .. } = tensor;
    // (dim, seqlen, head, batch), or (dim, row, back, end, head).
    let dimension = if tensor.rank == MAX_RANK { 4 } else { 2 };
    if heads > 1 {
        extents[0] *= u64::from(heads);
        extents[dimension] = extents[dimension].div_ceil(heads.into());
        strides[dimension - 1] = 2 * extents[0];
    }
    Tensor { extents, strides, ..tensor }
}

fn element(p: &Problem) -> Result<Element> {
    match p.dtype {
        Dtype::Fp16 => Ok(Element::Fp16),
        Dtype::Bf16 => Ok(Element::Bf16),
        Dtype::Fp32 => Err(Error::unsupported("dtype is fp32; kernels that load by TMA take fp16 and bf16")),
    }
}

/// How many rows lie between the first rows of varlen sequences that are not packed end to end: in
/// Q, K, V and O or dO. 0 where no kernel counts by them.
pub fn rows_between(call: &Call) -> [i32; 4] {
    let p = &call.problem;
    let Some(Varlen { total_q, total_k, .. }) = p.features.varlen else { return [0; 4] };
    let of = |view: &TensorRef, entries, seqlen, total: Option<i64>| match total {
        Some(_) => 0,
        None => view.rows_between(entries, seqlen).unwrap_or(0) as i32,
    };
    let of_queries = |view| of(view, p.batch_size, p.seqlen_q, total_q);
    let of_keys = |view| of(view, call.key_entries(), p.seqlen_k, total_k);
    [of_queries(&call.q), of_keys(&call.k), of_keys(&call.v), of_queries(o(call))]
}

/// O, in the backward pass dO.
fn o(call: &Call) -> &TensorRef {
    match call.problem.pass {
        Pass::Forward => &call.out,
        Pass::Backward => &call.dout,
    }
}

/// The extents of a view, and the rows of a box.
struct Shape {
    dim: i64,
    /// The most of a sequence; the sum over sequences where they are packed end to end.
    rows: i64,
    heads: i64,
    batch_size: i64,
    box_rows: u32,
}

impl Shape {
    fn new([batch_size, seqlen, heads, dim]: [i64; 4], total: Option<i64>, box_rows: u32) -> Shape {
        let batch_size = if total.is_some() { 1 } else { batch_size };
        Shape { dim, rows: total.unwrap_or(seqlen), heads, batch_size, box_rows }
    }

    /// In bytes. A dimension of one entry never takes its stride, which may be anything in the
    /// view: it gets a row's bytes.
    fn stride(&self, count: i64, given: i64) -> u64 {
        2 * if count > 1 { given } else { self.dim } as u64
    }
}

/// What L2 reads at a time for a tensor's rows: 128 bytes where rows begin or end within a sector,
/// 32 bytes, else 256. With 256 an H100 took up to 1.1 times as long on such rows
/// (docs/tuning/sm90-forward.md).
fn fetch(address: u64, dim: i64, strides: &[u64]) -> Fetch {
    const SECTOR: u64 = 32;
    let row_bytes = dim as u64 * 2;
    let cuts_sectors = strides.iter().fold(address | row_bytes, |bits, stride| bits | stride) % SECTOR != 0;
    if cuts_sectors { Fetch::Bytes128 } else { Fetch::Bytes256 }
}

/// (dim, seqlen, head, batch)
fn of_equal_lengths(element: Element, view: &TensorRef, shape: &Shape) -> Tensor {
    let row = shape.stride(shape.rows, view.stride_seqlen);
    let head = shape.stride(shape.heads, view.stride_head);
    let batch = shape.stride(shape.batch_size, view.stride_batch);
    Tensor {
        element,
        address: view.data as u64,
        rank: 4,
        extents: [shape.dim as u64, shape.rows as u64, shape.heads as u64, shape.batch_size as u64, 0],
        strides: [row, head, batch, 0],
        box_extents: [BOX_COLS, shape.box_rows, 1, 1, 0],
        fetch: fetch(view.data as u64, shape.dim, &[row, head, batch]),
    }
}

/// (dim, row, back, end, head), with the smallest extents that kernels need.
fn of_varlen(element: Element, view: &TensorRef, shape: &Shape) -> Tensor {
    /// MAX_MAP_ROWS times this many bytes is 0 modulo 2^64.
    const WHOLE_TURN: u64 = 1 << 34;
    const { assert!((MAX_MAP_ROWS as u64).wrapping_mul(WHOLE_TURN) == 0) };
    let rows_between = view.rows_between(shape.batch_size, shape.rows).unwrap_or(0);
    let rows = (shape.batch_size - 1) * rows_between + shape.rows;
    let row = shape.stride(rows, view.row_stride(shape.batch_size, shape.rows));
    let head = shape.stride(shape.heads, view.stride_head);
    Tensor {
        element,
        address: view.data as u64,
        rank: MAX_RANK,
        extents: [shape.dim as u64, MAX_MAP_ROWS as u64, MAX_MAP_ROWS as u64 + 1, rows as u64 + 1, shape.heads as u64],
        strides: [row, WHOLE_TURN - row, row, head],
        box_extents: [BOX_COLS, shape.box_rows, 1, 1, 1],
        fetch: fetch(view.data as u64, shape.dim, &[row, head]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dropout::Dropout;
    use crate::problem::Problem;
    use std::ffi::c_void;

    fn call(batch_size: i64, num_heads_kv: i64, seqlen_k: i64) -> Call {
        let at = |address: usize, heads: i64, dim: i64| TensorRef {
            stride_head: dim + 8,
            stride_seqlen: heads * (dim + 8),
            ..TensorRef::packed(address as *mut c_void, 300, heads, dim + 8)
        };
        let problem = Problem {
            num_heads_kv,
            seqlen_k,
            head_dim_v: 40,
            ..Problem::dense(Pass::Backward, Dtype::Bf16, batch_size, 8, 300, 128)
        };
        let inputs = [at(0x10000, 8, 128), at(0x20000, num_heads_kv, 128), at(0x30000, num_heads_kv, 40)];
        let (out, dout) = (at(0x40000, 8, 40), at(0x50000, 8, 40));
        Call { out, dout, ..Call::of_inputs(problem, 1.0, Dropout::NONE, inputs) }
    }

    const BOXES: Boxes = Boxes { query_rows: 80, key_rows: 176 };

    /// A view that no map takes.
    const NOWHERE: TensorRef =
        TensorRef { data: std::ptr::without_provenance_mut(3), stride_batch: 1, stride_seqlen: 1, stride_head: 1 };

    #[test]
    fn extents_and_byte_strides_are_in_the_order_of_tma() {
        let [q, k, v, dout] = tensors(&call(3, 2, 400), &BOXES).unwrap();
        assert_eq!((q.address, q.rank, q.box_extents[..4].to_vec()), (0x10000, 4, vec![64, 80, 1, 1]));
        assert_eq!((&q.extents[..4], &q.strides[..3]), (&[128, 300, 8, 3][..], &[8 * 272, 272, 300 * 8 * 272][..]));
        assert_eq!(
            (k.address, &k.extents[..4], &k.box_extents[..4]),
            (0x20000, &[128, 400, 2, 3][..], &[64, 176, 1, 1][..])
        );
        assert_eq!((v.address, &v.extents[..4], v.strides[1]), (0x30000, &[40, 400, 2, 3][..], 96));
        assert_eq!(
            (dout.address, &dout.extents[..4], dout.box_extents),
            (0x50000, &[40, 300, 8, 3][..], q.box_extents)
        );
    }

    #[test]
    fn the_forward_pass_gets_o_where_the_backward_pass_gets_its_gradient() {
        let backward = call(3, 2, 400);
        let forward = Call { problem: Problem { pass: Pass::Forward, ..backward.problem }, ..call(3, 2, 400) };
        let [.., dout] = tensors(&backward, &BOXES).unwrap();
        let [.., out] = tensors(&forward, &BOXES).unwrap();
        assert_eq!(out, Tensor { address: 0x40000, ..dout });
    }

    #[test]
    fn rows_that_cut_sectors_are_fetched_128_bytes_at_a_time() {
        let fetched = |call: &Call| tensors(call, &BOXES).unwrap().map(|tensor| tensor.fetch);
        use Fetch::{Bytes128, Bytes256};
        let mut call = call(3, 2, 400);
        call.v = call.k;
        call.problem.head_dim_v = 128;
        call.dout = call.q;
        for view in [&mut call.q, &mut call.k, &mut call.v, &mut call.dout] {
            (view.stride_head, view.stride_seqlen, view.stride_batch) = (144, 8 * 144, 400 * 8 * 144);
        }
        assert_eq!(fetched(&call), [Bytes256; 4]);
        call.q.data = call.q.data.wrapping_byte_add(16);
        call.k.stride_seqlen += 8;
        assert_eq!(fetched(&call), [Bytes128, Bytes128, Bytes256, Bytes256]);
        call.problem.head_dim_v = 120;
        call.problem.features.varlen = Some(Varlen::default());
        assert_eq!(fetched(&call), [Bytes128; 4]);
    }

    #[test]
    fn the_forward_pass_over_dense_tensors_fetches_what_a_box_has() {
        let mut call = call(3, 2, 400);
        let packed = TensorRef { stride_head: 128, stride_seqlen: 1024, stride_batch: 409_600, ..call.q };
        [call.q, call.k, call.v, call.out, call.dout] = [packed; 5];
        call.problem.head_dim_v = 128;
        for (pass, varlen, fetched) in [
            (Pass::Forward, None, Fetch::Bytes128),
            (Pass::Backward, None, Fetch::Bytes256),
            (Pass::Forward, Some(Varlen::default()), Fetch::Bytes256),
        ] {
            (call.problem.pass, call.problem.features.varlen) = (pass, varlen);
            assert_eq!(tensors(&call, &BOXES).unwrap().map(|tensor| tensor.fetch), [fetched; 4], "{pass:?} {varlen:?}");
        }
    }

    #[test]
    fn a_stride_that_is_never_taken_may_be_anything() {
        let mut call = call(1, 1, 400);
        (call.k.stride_batch, call.k.stride_head) = (7, i64::MAX / 4);
        assert_eq!(tensors(&call, &BOXES).unwrap()[1].strides[..3], [272, 256, 256]);
    }

    /// 3 sequences: 1000 rows of queries packed end to end, and up to 400 keys each in a batch.
    fn varlen_call() -> Call {
        let mut call = call(3, 2, 400);
        call.problem.features.varlen = Some(Varlen { total_q: Some(1000), ..Varlen::default() });
        call
    }

    /// The address at which TMA finds the first column of a row, given its coordinates after the
    /// column's; None outside.
    fn found(tensor: &Tensor, at: [i64; 4]) -> Option<u64> {
        let extents = &tensor.extents[1..];
        let is_inside = at.iter().zip(extents).all(|(at, extent)| (0..*extent as i64).contains(at));
        let places = at.iter().zip(tensor.strides).map(|(at, stride)| (*at as u64).wrapping_mul(stride));
        is_inside.then(|| places.fold(tensor.address, u64::wrapping_add))
    }

    #[test]
    fn rows_of_a_sequence_are_found_and_those_behind_it_lie_outside() {
        let call = varlen_call();
        let [q, k, ..] = tensors(&call, &BOXES).unwrap();
        assert_eq!((q.rank, k.rank), (5, 5));
        let rows_between = rows_between(&call);
        assert_eq!(rows_between, [0, 300, 300, 0]);
        // As device/layout/tensor_map.cuh has it.
        let at = |row: i64, length: i64, start: i64, head: i64| {
            [row + MAX_MAP_ROWS - length, MAX_MAP_ROWS, start + length, head]
        };
        for (start, length) in [(0, 300), (0, 1), (700, 300), (999, 1), (437, 80), (500, 0)] {
            for row in [0, 1, 79, 80, 255, 299, 300, 310] {
                let place = call.q.data as u64 + (start + row) as u64 * 8 * 272 + 5 * 272;
                let found = found(&q, at(row, length, start, 5));
                assert_eq!(found, (row < length).then_some(place), "queries {start}+{length}, {row}");
            }
        }
        for (batch, length) in [(0, 400), (2, 400), (2, 17), (1, 0)] {
            for row in [0, 16, 17, 399, 400, 500] {
                let start = batch * i64::from(rows_between[1]);
                let place = call.k.data as u64 + (batch * call.k.stride_batch * 2 + row * 2 * 272 + 272) as u64;
                let found = found(&k, at(row, length, start, 1));
                assert_eq!(found, (row < length).then_some(place), "keys {batch} {length}, {row}");
            }
        }
    }

    #[test]
    fn a_sequence_of_one_row_goes_on_by_the_batchs_stride() {
        let mut call = varlen_call();
        (call.problem.seqlen_k, call.k.stride_seqlen, call.k.stride_batch) = (1, 7, 2000);
        let [_, k, ..] = tensors(&call, &BOXES).unwrap();
        assert_eq!((k.strides[0], k.extents[3], rows_between(&call)[1]), (4000, 4, 1));
    }

    /// Four heads in groups of two, and five of which the last has no partner.
    #[test]
    fn heads_that_share_copies_are_one_row_of_the_map() {
        let with_heads = |call: &Call| key_tensors(call, 32).unwrap().map(|tensor| with_heads_in_rows(tensor, 2));
        for (num_heads_kv, groups) in [(4, 2), (5, 3)] {
            let mut dense = call(3, num_heads_kv, 400);
            let rows = |dim| TensorRef::packed(0x20000 as *mut c_void, 400, num_heads_kv, dim);
            (dense.k, dense.v) = (rows(128), rows(40));
            let [k, v] = with_heads(&dense);
            let row_bytes = num_heads_kv as u64 * 256;
            assert_eq!((&k.extents[..4], &k.strides[..2]), (&[256, 400, groups, 3][..], &[row_bytes, 512][..]));
            assert_eq!((v.extents[0], v.strides[1], k.box_extents[..2] == [64, 32]), (80, 160, true));
            dense.problem.features.varlen = Some(Varlen::default());
            let [k, _] = with_heads(&dense);
            assert_eq!((k.extents[0], k.extents[4], k.strides[0], k.strides[3]), (256, groups, row_bytes, 512));
        }
    }

    #[test]
    fn views_without_rows_are_not_looked_at() {
        let mut no_keys = call(2, 2, 0);
        (no_keys.k, no_keys.v) = (NOWHERE, NOWHERE);
        let [q, k, v, _] = tensors(&no_keys, &BOXES).unwrap();
        assert!(k == q && v == q && q.extents[..q.rank].iter().all(|extent| *extent > 0));
        let mut no_queries = call(2, 2, 400);
        no_queries.problem.seqlen_q = 0;
        (no_queries.q, no_queries.dout) = (NOWHERE, NOWHERE);
        let [q, k, _, dout] = tensors(&no_queries, &BOXES).unwrap();
        assert!(q == k && dout == k && k.extents[..k.rank].iter().all(|extent| *extent > 0));
    }
}
