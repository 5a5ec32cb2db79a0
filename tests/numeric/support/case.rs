//! A `Case` is one attention problem of the tests with all that its data depends on. It prints as
//! one line.
//!
//! A failing test prints the line, and `FLASHTUNE_TEST_CASE="…line…"` runs that case alone (see
//! `shapes`). A case holds no values. `Data` makes them from the seed and rounds them to the dtype,
//! so the reference sees the kernel's inputs.

use super::eight::quantised;
use super::extras::Extras;
use super::lengths::Side;
use super::per_score::PerScore;
use flashtune::dropout::{Dropout, DropoutMask};
use flashtune::problem::{Causal, Dtype, Layout, Pass, Problem};
use half::{bf16, f16};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// How the tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strides {
    /// (batch, seqlen, heads, dim), packed.
    Bshd,
    /// (batch, heads, seqlen, dim), packed.
    Bhsd,
    /// Each tensor is a view into one packed (batch, seqlen, heads_q + 2 heads_kv, dim) tensor, so
    /// the other heads are gaps.
    PackedQkv,
    /// Gaps in every dimension, different for each tensor, that keep 16-byte alignment.
    Gaps,
    /// Gaps in every dimension that keep no alignment, and odd start addresses.
    OddGaps,
}

pub const ALL_STRIDES: [Strides; 5] =
    [Strides::Bshd, Strides::Bhsd, Strides::PackedQkv, Strides::Gaps, Strides::OddGaps];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Q,
    K,
    V,
    Out,
    Dout,
    Dq,
    Dk,
    Dv,
}

/// Shape and memory layout of one (batch, seqlen, heads, dim) tensor of a case.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub batch: i64,
    pub seqlen: i64,
    pub heads: i64,
    pub dim: i64,
    /// Elements of the buffer before the tensor's first element.
    pub lead: i64,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

impl Shape {
    pub fn elements(&self) -> usize {
        (self.batch * self.seqlen * self.heads * self.dim) as usize
    }

    /// Buffer index of each row (batch, position, head) in order.
    pub fn rows(self) -> impl Iterator<Item = usize> {
        let places = move |b| (0..self.seqlen).flat_map(move |s| (0..self.heads).map(move |h| (b, s, h)));
        (0..self.batch).flat_map(places).map(move |(b, s, h)| {
            (self.lead + b * self.stride_batch + s * self.stride_seqlen + h * self.stride_head) as usize
        })
    }

    /// Elements from the buffer's start to the end of the last row.
    pub fn span(&self) -> usize {
        self.rows().max().map_or(self.lead as usize, |row| row + self.dim as usize)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    pub dtype: Dtype,
    pub batch_size: i64,
    pub num_heads_q: i64,
    pub num_heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub causal: Causal,
    pub softmax_scale: f32,
    pub dropout_p: f32,
    /// For the backward pass.
    pub deterministic: bool,
    pub strides: Strides,
    pub extras: Extras,
    /// Seed of the values and of the dropout mask.
    pub seed: u64,
}

impl Case {
    /// One head of self-attention without any feature; the laws start from it.
    pub fn plain(dtype: Dtype, seqlen: i64, head_dim: i64) -> Case {
        Case {
            dtype,
            batch_size: 1,
            num_heads_q: 1,
            num_heads_kv: 1,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            head_dim,
            head_dim_v: head_dim,
            causal: Causal::None,
            softmax_scale: (head_dim as f32).powf(-0.5),
            dropout_p: 0.0,
            deterministic: false,
            strides: Strides::Bshd,
            extras: Extras::default(),
            seed: 1,
        }
    }

    pub fn problem(&self, pass: Pass) -> Problem {
        let window = &self.extras.window;
        let is_windowed = (window.left, window.right) != (None, None);
        let has_one_diagonal = self.causal == Causal::None || window.top_left == (self.causal == Causal::TopLeft);
        assert!(
            !is_windowed || has_one_diagonal,
            "the C face refuses a window and a causal mask with different alignments: {self}"
        );
        let kinds: &[Kind] = match pass {
            Pass::Forward => &[Kind::Q, Kind::K, Kind::V, Kind::Out],
            Pass::Backward => &[Kind::Q, Kind::K, Kind::V, Kind::Out, Kind::Dout, Kind::Dq, Kind::Dk, Kind::Dv],
        };
        let quantities = |kind: &Kind| {
            let (of, element) = (self.shape_in_memory(*kind), self.element(*kind));
            let row = element.elements(of.dim);
            [row, of.lead, of.stride_batch, of.stride_seqlen, of.stride_head].map(|size| element.units(size))
        };
        let widest = Layout::widest(self.dtype, kinds.iter().flat_map(quantities));
        // The rule of the C face for varlen.
        let is_uneven = |of: Shape| of.batch > 1 && of.seqlen > 1 && of.stride_batch % of.stride_seqlen != 0;
        // Pages may lie anywhere.
        let in_rows = kinds.iter().filter(|kind| self.extras.page_size.is_none() || Side::of(**kind) == Side::Q);
        // Entries by index may be more than sequences.
        let rows_of = |kind: &Kind| match self.extras.key_starts {
            true => self.shape_in_memory(*kind),
            false => self.shape(*kind),
        };
        let layout = match self.extras.is_varlen() && in_rows.map(rows_of).any(is_uneven) {
            true => widest.max(Layout::Vec4),
            false => widest,
        };
        Problem {
            pass,
            dtype: self.dtype,
            batch_size: self.batch_size,
            num_heads_q: self.num_heads_q,
            num_heads_kv: self.num_heads_kv,
            seqlen_q: self.seqlen_q,
            seqlen_k: self.seqlen_k,
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
            causal: self.causal,
            dropout: self.dropout_p > 0.0,
            deterministic: self.deterministic && pass == Pass::Backward,
            batch_invariant: self.extras.batch_invariant && pass == Pass::Forward,
            features: self.extras.features(pass, self.totals()),
            layout,
        }
    }

    pub fn dropout(&self) -> Dropout {
        // The offset has bits above 32, which enter the mask through another word.
        Dropout { p: self.dropout_p, seed: self.seed, offset: self.seed << 20, ..Dropout::NONE }
    }

    pub fn dropout_mask(&self, batch: usize, head: usize) -> DropoutMask {
        let dropout = self.dropout();
        let head = batch as u32 * self.num_heads_q as u32 + head as u32;
        DropoutMask::new(dropout.seed, dropout.offset, head, dropout.threshold())
    }

    /// Whether causal and window let the row see the key, in a sequence of these lengths. It
    /// follows the definition in the documentation and shares no code with the library.
    pub fn sees(&self, [seqlen_q, seqlen_k]: [usize; 2], row: usize, key: usize) -> bool {
        let (row, key, ends) = (row as i64, key as i64, seqlen_k as i64 - seqlen_q as i64);
        let window = &self.extras.window;
        let diagonal = row + if window.top_left { 0 } else { ends };
        let by_causal = match self.causal {
            Causal::None => true,
            Causal::TopLeft => key <= row,
            Causal::BottomRight => key <= row + ends,
        };
        by_causal
            && window.left.is_none_or(|left| key >= diagonal - left)
            && window.right.is_none_or(|right| key <= diagonal + right)
    }

    pub fn shape(&self, kind: Kind) -> Shape {
        let side = Side::of(kind);
        let (batch, seqlen) = match self.is_packed(side) {
            true => (1, self.total(side)),
            false => (self.batch_size, self.seqlen(side)),
        };
        self.laid_out(kind, batch, seqlen)
    }

    /// Layout of a tensor of this kind with the given batch and sequence extents.
    pub fn laid_out(&self, kind: Kind, batch: i64, seqlen: i64) -> Shape {
        let (heads, dim) = match kind {
            Kind::Q | Kind::Dq => (self.num_heads_q, self.head_dim),
            Kind::K | Kind::Dk => (self.num_heads_kv, self.head_dim),
            Kind::V | Kind::Dv => (self.num_heads_kv, self.head_dim_v),
            Kind::Out | Kind::Dout => (self.num_heads_q, self.head_dim_v),
        };
        let gap = kind as i64 % 3 + 1;
        // Elements of a row.
        let row_of = self.element(kind).elements(dim);
        let (lead, stride_head, stride_seqlen, stride_batch) = match self.strides {
            Strides::Bshd => (0, row_of, heads * row_of, seqlen * heads * row_of),
            Strides::Bhsd => (0, seqlen * row_of, row_of, heads * seqlen * row_of),
            Strides::PackedQkv => {
                let pitch = (self.num_heads_q + 2 * self.num_heads_kv) * dim;
                (0, dim, pitch, seqlen * pitch)
            }
            Strides::Gaps | Strides::OddGaps => {
                let unit = if self.strides == Strides::Gaps { 8 } else { 1 };
                let head = (row_of + unit * gap + unit - 1) / unit * unit;
                let row = heads * head + 3 * unit;
                (unit * (2 * gap - 1), head, row, seqlen * row + unit * gap)
            }
        };
        Shape { batch, seqlen, heads, dim, lead, stride_batch, stride_seqlen, stride_head }
    }
}

/// Input values, packed in the order of their dimensions and rounded to the dtype. Tensors of
/// features that the case does not use are empty.
#[derive(Clone)]
pub struct Data {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
    /// (batch, heads_q) or (heads_q)
    pub alibi: Vec<f32>,
    /// Laid out as `PerScore` says.
    pub bias: Vec<f32>,
    /// Values before the backward pass adds to them.
    pub dbias: Vec<f32>,
    pub mask: Vec<u8>,
    pub sinks: Vec<f32>,
    pub dlse: Vec<f32>,
}

impl Data {
    pub fn random(case: &Case) -> Data {
        let mut random = Random::new(case.seed);
        let mut tensor =
            |kind| (0..case.shape(kind).elements()).map(|_| round_to(case.dtype, random.normal())).collect();
        let (mut q, mut k, mut v, dout): (Vec<f32>, Vec<f32>, Vec<f32>, _) =
            (tensor(Kind::Q), tensor(Kind::K), tensor(Kind::V), tensor(Kind::Dout));
        for (kind, values) in [(Kind::Q, &mut q), (Kind::K, &mut k), (Kind::V, &mut v)] {
            let dim = case.shape(kind).dim.max(1) as usize;
            quantised(case.element(kind), values, &case.row_scales(kind), dim);
            case.hold_in_four(kind, values);
        }
        let extras = &case.extras;
        let batches_of_slopes = extras.alibi.map_or(0, |spread| if spread.batch { case.batch_size } else { 1 });
        let alibi = (0..batches_of_slopes * case.num_heads_q).map(|_| random.pick(&[0.5, 0.25, 0.1, 0.03, 0.004]));
        let alibi = alibi.collect();
        let bias_shape = extras.bias.map(|spread| PerScore::new(case, spread));
        let mut bias = vec![0.0; bias_shape.map_or(0, |shape| shape.len())];
        for row in bias.chunks_mut(bias_shape.map_or(1, |shape| shape.extents[3].max(1))) {
            // Some rows hide all of their keys.
            let hides_all = random.between(0, 15) == 0;
            for bias in row {
                let (is_hidden, value) = (random.between(0, 31) == 0, random.normal());
                *bias = if hides_all || is_hidden { f32::NEG_INFINITY } else { round_to(case.dtype, value) };
            }
        }
        // Values are small, so that adding to them rounds no more than the sums themselves.
        let dbias = if extras.dbias { bias.iter().map(|_| random.normal() / 64.0).collect() } else { Vec::new() };
        let mask_shape = extras.mask.map(|spread| PerScore::new(case, spread));
        let mut mask = vec![0; mask_shape.map_or(0, |shape| shape.len())];
        for row in mask.chunks_mut(mask_shape.map_or(1, |shape| shape.extents[3].max(1))) {
            let hides_all = random.between(0, 15) == 0;
            row.iter_mut().for_each(|byte| *byte = random.pick(&[0, 1, 2, 255]));
            if hides_all {
                row.fill(0);
            }
        }
        let heads_of_sinks = if extras.sinks { case.num_heads_q } else { 0 };
        // Some sinks are -inf and take no weight.
        let mut sink = || match random.between(0, 5) {
            0 => f32::NEG_INFINITY,
            _ => 2.0 * random.normal(),
        };
        let sinks = (0..heads_of_sinks).map(|_| sink()).collect();
        let dlse = (0..if extras.dlse { case.lse_len() } else { 0 }).map(|_| random.normal()).collect();
        Data { q, k, v, dout, alibi, bias, dbias, mask, sinks, dlse }
    }
}

pub fn round_to(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::Fp16 => f16::from_f32(value).to_f32(),
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::Fp32 => value,
    }
}

/// SplitMix64: small, seeded, the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn between(&mut self, low: i64, high: i64) -> i64 {
        low + (self.next() % (high - low + 1) as u64) as i64
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[(self.next() % of.len() as u64) as usize].clone()
    }

    /// Mean 0, variance 1 (Box-Muller).
    pub fn normal(&mut self) -> f32 {
        let uniform = |bits: u64| ((bits >> 11) as f64 + 1.0) * 2f64.powi(-53);
        let (radius, angle) = (uniform(self.next()), uniform(self.next()));
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "dtype={} batch={} heads_q={} heads_kv={} seqlen_q={} seqlen_k={} head_dim={} head_dim_v={} \
             causal={:?} scale={} dropout={} deterministic={} strides={:?} seed={}{}",
            self.dtype.name(),
            self.batch_size,
            self.num_heads_q,
            self.num_heads_kv,
            self.seqlen_q,
            self.seqlen_k,
            self.head_dim,
            self.head_dim_v,
            self.causal,
            self.softmax_scale,
            self.dropout_p,
            self.deterministic,
            self.strides,
            self.seed,
            self.extras
        )
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(line: &str) -> Result<Case, String> {
        let fields: HashMap<&str, &str> = line.split_whitespace().filter_map(|field| field.split_once('=')).collect();
        let text = |name: &str| fields.get(name).copied().ok_or(format!("the case has no {name}"));
        let parsed = |name: &str| text(name)?.parse().map_err(|error| format!("{name}: {error}"));
        let real = |name: &str| text(name)?.parse().map_err(|error| format!("{name}: {error}"));
        let named = |name: &str, of: &[String]| {
            let value = text(name)?;
            of.iter().position(|known| known == value).ok_or(format!("{name}={value} is not one of {of:?}"))
        };
        let dtypes = [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32];
        let masks = [Causal::None, Causal::BottomRight, Causal::TopLeft];
        Ok(Case {
            dtype: dtypes[named("dtype", &dtypes.map(|dtype| dtype.name().to_owned()))?],
            batch_size: parsed("batch")?,
            num_heads_q: parsed("heads_q")?,
            num_heads_kv: parsed("heads_kv")?,
            seqlen_q: parsed("seqlen_q")?,
            seqlen_k: parsed("seqlen_k")?,
            head_dim: parsed("head_dim")?,
            head_dim_v: parsed("head_dim_v")?,
            causal: masks[named("causal", &masks.map(|mask| format!("{mask:?}")))?],
            softmax_scale: real("scale")?,
            dropout_p: real("dropout")?,
            deterministic: text("deterministic")?.parse().map_err(|error| format!("deterministic: {error}"))?,
            strides: ALL_STRIDES[named("strides", &ALL_STRIDES.map(|strides| format!("{strides:?}")))?],
            extras: Extras::parse(&fields)?,
            seed: text("seed")?.parse().map_err(|error| format!("seed: {error}"))?,
        })
    }
}
