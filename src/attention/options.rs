//! What to compute. `Attention` holds the options of both passes, and turns them and the views of a
//! pass into the structs of the C face.

use super::element::Element;
use super::tensor::{Array, Place, Tensor, View};
use crate::capi::types::*;
use crate::error::{Error, Result};

/// The keys that query i sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Causal {
    /// All keys.
    #[default]
    None = FLASHTUNE_CAUSAL_NONE,
    /// Key j if j <= i + seqlen_k - seqlen_q: the last query sees the last key.
    BottomRight = FLASHTUNE_CAUSAL_BOTTOM_RIGHT,
    /// Key j if j <= i: the first query sees the first key.
    TopLeft = FLASHTUNE_CAUSAL_TOP_LEFT,
}

/// What to compute: out = dropout(softmax(mask(softcap(scale * q k^T) + alibi))) v.
///
/// Each method sets one option. Both passes of a computation take the same `Attention`.
#[derive(Clone, Debug)]
pub struct Attention<'a> {
    pub(super) causal: Causal,
    pub(super) scale: f32,
    softcap: f32,
    window: Option<(i64, i64)>,
    dropout: (f32, u64, u64),
    alibi: Option<Array<'a, f32>>,
    sinks: Option<Array<'a, f32>>,
    varlen: Option<Varlen<'a>>,
    pub(super) deterministic: bool,
}

#[derive(Clone, Copy, Debug)]
struct Varlen<'a> {
    cu_seqlens_q: Array<'a, i32>,
    max_seqlen_q: usize,
    cu_seqlens_k: Array<'a, i32>,
    max_seqlen_k: usize,
}

impl Default for Attention<'_> {
    fn default() -> Self {
        Attention::new()
    }
}

impl<'a> Attention<'a> {
    /// Attention of every query over every key, with the scale 1/sqrt(head_dim).
    pub const fn new() -> Self {
        Attention {
            causal: Causal::None,
            scale: 0.0,
            softcap: 0.0,
            window: None,
            dropout: (0.0, 0, 0),
            alibi: None,
            sinks: None,
            varlen: None,
            deterministic: false,
        }
    }

    /// The causal mask.
    pub const fn causal(mut self, causal: Causal) -> Self {
        self.causal = causal;
        self
    }

    /// The factor of the scores. 0 stands for 1/sqrt(head_dim).
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Scores s become `softcap` * tanh(s / `softcap`). 0 stands for no soft cap.
    pub const fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = softcap;
        self
    }

    /// A sliding window: the most keys before and after its diagonal that a query sees; `None` is
    /// all. The diagonal is that of the causal mask, and of [`Causal::BottomRight`] without one.
    pub fn window(mut self, left: Option<u32>, right: Option<u32>) -> Self {
        let side = |keys: Option<u32>| keys.map_or(-1, i64::from);
        self.window = Some((side(left), side(right)));
        self
    }

    /// Drops each weight with the probability `p`. The mask is a function of `seed`, `offset` and
    /// the position of the score, so both passes must have the same three.
    pub const fn dropout(mut self, p: f32, seed: u64, offset: u64) -> Self {
        self.dropout = (p, seed, offset);
        self
    }

    /// ALiBi: -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key j.
    /// There is one slope for each query head, or one for each batch entry and query head.
    pub fn alibi(mut self, slopes: impl Into<Array<'a, f32>>) -> Self {
        self.alibi = Some(slopes.into());
        self
    }

    /// Attention sinks: a score for each query head that belongs to no key. It takes its share of
    /// the softmax.
    pub fn sinks(mut self, sinks: impl Into<Array<'a, f32>>) -> Self {
        self.sinks = Some(sinks.into());
        self
    }

    /// Packed sequences. The tensors are then (1, total rows, heads, dim), and sequence b is rows
    /// `cu_seqlens[b]` to `cu_seqlens[b + 1]`. No sequence may be longer than `max_seqlen`.
    pub fn varlen(
        mut self,
        (cu_seqlens_q, max_seqlen_q): (impl Into<Array<'a, i32>>, usize),
        (cu_seqlens_k, max_seqlen_k): (impl Into<Array<'a, i32>>, usize),
    ) -> Self {
        let (cu_seqlens_q, cu_seqlens_k) = (cu_seqlens_q.into(), cu_seqlens_k.into());
        self.varlen = Some(Varlen { cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k });
        self
    }

    /// Backward on a GPU: gradients have the same bits at every run, which costs time.
    pub const fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// The C struct of a forward pass. The views have bounds already; this function compares their
    /// shapes with each other and with the options.
    pub(super) fn forward_params<T: Element>(
        &self,
        [q, k, v]: [&Tensor<'_, T>; 3],
        out: &View,
        lse: (*mut f32, Option<usize>),
        place: Place,
    ) -> Result<flashtune_forward_params> {
        let [q, k, v] = [&q.view, &k.view, &v.view];
        let [entries, rows_q, heads_q, dim] = q.shape;
        let [_, rows_k, heads_kv, _] = k.shape;
        let dim_v = v.shape[3];
        if self.varlen.is_some() && entries != 1 {
            let shape = q.shape;
            return Err(Error::invalid(format!(
                "q has the shape {shape:?}; with varlen it must be (1, total rows, heads, dim)"
            )));
        }
        check_shape("k", k, [entries, rows_k, heads_kv, dim])?;
        check_shape("v", v, [entries, rows_k, heads_kv, dim_v])?;
        check_shape("out", out, [entries, rows_q, heads_q, dim_v])?;
        for (name, view) in [("q", q), ("k", k), ("v", v), ("out", out)] {
            check_place(name, view.place, place)?;
        }
        check_lse("lse", lse.1, [entries, rows_q, heads_q])?;
        // SAFETY: integers, floats and raw pointers; zero is a value of each.
        let mut params: flashtune_forward_params = unsafe { std::mem::zeroed() };
        params.struct_size = size_of::<flashtune_forward_params>() as u64;
        params.dtype = T::DTYPE as i32;
        params.causal = self.causal as i32;
        params.batch_size = integer("q's batch", entries)?;
        params.num_heads_q = integer("q's heads", heads_q)?;
        params.num_heads_kv = integer("k's heads", heads_kv)?;
        params.seqlen_q = integer("q's seqlen", rows_q)?;
        params.seqlen_k = integer("k's seqlen", rows_k)?;
        params.head_dim = integer("q's dim", dim)?;
        params.head_dim_v = integer("v's dim", dim_v)?;
        params.softmax_scale = self.scale;
        (params.dropout_p, params.dropout_seed, params.dropout_offset) = self.dropout;
        params.softcap = self.softcap;
        [params.q, params.k, params.v] = [input(q)?, input(k)?, input(v)?];
        params.out = tensor(out)?;
        params.lse = lse.0;
        if let Some((left, right)) = self.window {
            let is_top_left = self.causal == Causal::TopLeft;
            params.window = if is_top_left { FLASHTUNE_WINDOW_TOP_LEFT } else { FLASHTUNE_WINDOW_BOTTOM_RIGHT };
            (params.window_left, params.window_right) = (left, right);
        }
        self.add_varlen(&mut params, place)?;
        if let Some(slopes) = self.alibi {
            check_place("alibi", slopes.place, place)?;
            let batch = usize::try_from(params.batch_size).unwrap_or(0);
            params.alibi_stride_batch = match slopes.len {
                len if len == heads_q => 0,
                len if Some(len) == heads_q.checked_mul(batch) => params.num_heads_q,
                len => {
                    return Err(Error::invalid(format!(
                        "alibi has {len} slopes; it must have {heads_q}, or {heads_q} for each of {batch} batch entries"
                    )));
                }
            };
            (params.alibi_slopes, params.features) = (slopes.data, params.features | FLASHTUNE_FEATURE_ALIBI);
        }
        if let Some(sinks) = self.sinks {
            check_place("sinks", sinks.place, place)?;
            if sinks.len != heads_q {
                let len = sinks.len;
                return Err(Error::invalid(format!(
                    "sinks has {len} elements; it must have {heads_q}, one for each query head"
                )));
            }
            (params.sinks, params.features) = (sinks.data, params.features | FLASHTUNE_FEATURE_SINKS);
        }
        Ok(params)
    }

    /// Packed sequences: the rows become totals, and the longest lengths take their place.
    fn add_varlen(&self, params: &mut flashtune_forward_params, place: Place) -> Result<()> {
        let Some(Varlen { cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k }) = self.varlen else {
            return Ok(());
        };
        for (name, offsets) in [("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)] {
            check_place(name, offsets.place, place)?;
            if offsets.len == 0 || offsets.len != cu_seqlens_q.len {
                return Err(Error::invalid(format!(
                    "{name} has {} offsets; cu_seqlens_q and cu_seqlens_k must have equally many, one more than there are sequences",
                    offsets.len
                )));
            }
        }
        (params.total_q, params.total_k) = (params.seqlen_q, params.seqlen_k);
        params.batch_size = integer("the number of sequences", cu_seqlens_q.len - 1)?;
        params.seqlen_q = integer("max_seqlen_q", max_seqlen_q)?;
        params.seqlen_k = integer("max_seqlen_k", max_seqlen_k)?;
        (params.cu_seqlens_q, params.cu_seqlens_k) = (cu_seqlens_q.data, cu_seqlens_k.data);
        params.features |= FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;
        Ok(())
    }
}

pub(super) fn check_shape(name: &str, view: &View, shape: [usize; 4]) -> Result<()> {
    match view.shape == shape {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{name} has the shape (batch, seqlen, heads, dim) = {:?}; by the other tensors it must be {shape:?}",
            view.shape
        ))),
    }
}

pub(super) fn check_place(name: &str, of_view: Place, of_context: Place) -> Result<()> {
    match (of_view, of_context) {
        (Place::Host, Place::Device) => {
            Err(Error::invalid(format!("{name} is a slice of the host and the context a GPU; make it from_device")))
        }
        (Place::Device, Place::Host) => Err(Error::invalid(format!(
            "{name} is in a GPU's memory and the context the host's CPU; make it from a slice"
        ))),
        _ => Ok(()),
    }
}

/// Checks the length of an LSE, or of its gradient, against the first dimensions of q.
fn check_lse(name: &str, len: Option<usize>, shape: [usize; 3]) -> Result<()> {
    let needed = shape.into_iter().try_fold(1_usize, usize::checked_mul);
    match (len, needed) {
        (None, _) => Ok(()),
        (Some(len), Some(needed)) if len == needed => Ok(()),
        (Some(len), _) => Err(Error::invalid(format!(
            "{name} has {len} elements; it must have one for each query and head of q, whose (batch, seqlen, heads) is {shape:?}"
        ))),
    }
}

pub(super) fn tensor(view: &View) -> Result<flashtune_tensor> {
    let [batch, seqlen, head] = view.strides;
    // The stride of a dimension of size 1 is not used, and may be any number.
    let stride = |name, count, stride| if count <= 1 { Ok(0) } else { integer(name, stride) };
    Ok(flashtune_tensor {
        data: view.data,
        stride_batch: stride("a batch stride", view.shape[0], batch)?,
        stride_seqlen: stride("a seqlen stride", view.shape[1], seqlen)?,
        stride_head: stride("a head stride", view.shape[2], head)?,
    })
}

/// The same for a tensor that is read.
pub(super) fn input(view: &View) -> Result<flashtune_const_tensor> {
    let flashtune_tensor { data, stride_batch, stride_seqlen, stride_head } = tensor(view)?;
    Ok(flashtune_const_tensor { data, stride_batch, stride_seqlen, stride_head })
}

fn integer(name: &str, value: usize) -> Result<i64> {
    i64::try_from(value).map_err(|_| Error::invalid(format!("{name} is {value}; it must be below 2^63")))
}
