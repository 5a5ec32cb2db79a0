//! The buffers of a case's extras on a backend's device, and the launch arguments made from them.

use super::blocks::ListBuffers;
use super::buffer::{Array, CANARY, encode};
use super::case::{Case, Data};
use super::eight::ScaleBuffers;
use super::lengths::Side;
use super::per_score::{PerScore, PerScoreBuffer};
use flashtune::backend::Backend;
use flashtune::call::{BlockLists, FeatureArgs, ScoresRef};
use flashtune::problem::Pass;

pub struct ExtraBuffers {
    alibi: Option<Array>,
    bias: Option<PerScoreBuffer>,
    dbias: Option<PerScoreBuffer>,
    mask: Option<PerScoreBuffer>,
    sinks: Option<Array>,
    dsinks: Option<Array>,
    dlse: Option<Array>,
    /// cu_seqlens of q and of k, then seqused of q and of k.
    lengths: [Option<Array>; 4],
    block_table: Option<Array>,
    cache_batch_idx: Option<Array>,
    leftpad_k: Option<Array>,
    lists: Option<ListBuffers>,
    scales: ScaleBuffers,
}

impl ExtraBuffers {
    /// `lse` is the forward result for a backward pass, and None for a forward pass.
    pub fn new(backend: &Backend, case: &Case, data: &Data, lse: Option<&[f32]>) -> ExtraBuffers {
        let extras = &case.extras;
        let is_backward = lse.is_some();
        let bias = extras.bias.map(|spread| {
            let shape = PerScore::new(case, spread);
            let needed = shape.needed(case, data);
            let values = data.bias.iter().zip(needed).map(|(value, is_needed)| is_needed.then_some(*value));
            PerScoreBuffer::new(backend, shape, &encode(case.dtype, f32::NAN), values, |value| {
                encode(case.dtype, value)
            })
        });
        let dbias = extras.bias.filter(|_| extras.dbias && is_backward).map(|spread| {
            let before = data.dbias.iter().copied().map(Some);
            PerScoreBuffer::new(backend, PerScore::new(case, spread), &[CANARY; 4], before, |value: f32| {
                value.to_le_bytes().to_vec()
            })
        });
        let mask = extras.mask.map(|spread| {
            let (shape, of_bits) = (PerScore::new(case, spread), PerScore::of_bits(case, spread));
            let (shape, bytes) = match extras.mask_bits {
                true => (of_bits, shape.packed_bits(case, &data.mask)),
                false => (shape, data.mask.clone()),
            };
            PerScoreBuffer::new(backend, shape, &[0], bytes.into_iter().map(Some), |byte: u8| vec![byte])
        });
        let used_dlse = || -> Vec<f32> {
            // A row without keys must not read its dlse.
            let is_read = case
                .used_lse()
                .into_iter()
                .zip(lse.unwrap_or(&[]))
                .map(|(is_used, lse)| is_used && *lse > f32::NEG_INFINITY);
            let of_row = |(value, is_read): (&f32, bool)| if is_read { *value } else { f32::NAN };
            data.dlse.iter().zip(is_read).map(of_row).collect()
        };
        let lengths = [
            extras.cu_seqlens.q.then(|| case.cu_seqlens(Side::Q)),
            extras.cu_seqlens.k.then(|| case.cu_seqlens(Side::K)),
            extras.seqused.q.then(|| case.seqused(Side::Q)),
            extras.seqused.k.then(|| case.seqused(Side::K)),
        ];
        ExtraBuffers {
            alibi: extras.alibi.map(|_| Array::input(backend, &data.alibi)),
            bias,
            dbias,
            mask,
            sinks: extras.sinks.then(|| Array::input(backend, &data.sinks)),
            dsinks: (extras.sinks && is_backward).then(|| Array::output(backend, data.sinks.len() * 4)),
            dlse: (extras.dlse && is_backward).then(|| Array::input(backend, &used_dlse())),
            block_table: extras.page_size.map(|_| Array::input_int32(backend, &case.block_table())),
            cache_batch_idx: extras.key_starts.then(|| Array::input_int32(backend, &case.cache_batch_idx())),
            leftpad_k: extras.key_starts.then(|| Array::input_int32(backend, &case.leftpads())),
            lists: ListBuffers::new(backend, case, if is_backward { Pass::Backward } else { Pass::Forward }),
            scales: ScaleBuffers::new(backend, case),
            lengths: lengths.map(|lengths| lengths.map(|lengths| Array::input_int32(backend, &lengths))),
        }
    }

    pub fn args(&self, case: &Case) -> FeatureArgs {
        let address = |array: &Option<Array>| array.as_ref().map_or(std::ptr::null_mut(), Array::address);
        let view = |buffer: &Option<PerScoreBuffer>| buffer.as_ref().map_or(ScoresRef::NULL, PerScoreBuffer::view);
        let alibi_of_batch = case.extras.alibi.is_some_and(|spread| spread.batch);
        let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] =
            self.lengths.each_ref().map(|array| address(array).cast_const().cast());
        FeatureArgs {
            softcap: case.extras.softcap,
            alibi_slopes: address(&self.alibi).cast(),
            alibi_stride_batch: if alibi_of_batch { case.num_heads_q } else { 0 },
            bias: view(&self.bias),
            dbias: view(&self.dbias),
            mask: view(&self.mask),
            sinks: address(&self.sinks).cast(),
            dsinks: address(&self.dsinks).cast(),
            dlse: address(&self.dlse).cast(),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            block_table: address(&self.block_table).cast_const().cast(),
            block_table_stride: case.block_table_stride(),
            num_pages: if case.extras.key_starts { case.num_entries() } else { case.num_pages() },
            cache_batch_idx: address(&self.cache_batch_idx).cast_const().cast(),
            leftpad_k: address(&self.leftpad_k).cast_const().cast(),
            block_lists: self.lists.as_ref().map_or(BlockLists::NULL, ListBuffers::args),
            scales: self.scales.args(),
        }
    }

    /// Values before the pass plus the gradient; empty if dbias is not requested.
    pub fn read_dbias(&self, backend: &Backend) -> Vec<f32> {
        self.dbias.as_ref().map_or(Vec::new(), |dbias| dbias.read_fp32(backend, "dbias"))
    }

    /// Empty without sinks.
    pub fn read_dsinks(&self, backend: &Backend) -> Vec<f32> {
        self.dsinks.as_ref().map_or(Vec::new(), |dsinks| dsinks.read_output(backend, "dsinks", None))
    }
}
