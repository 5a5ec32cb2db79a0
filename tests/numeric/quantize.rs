//! Quantising to 8 bits: `quantize`, and `kv_append` into a cache of 8 bits or int4, on the CPU and
//! a GPU, against the rounding rule applied row by row. Rotated rows are those of the rule too.

use crate::support::buffer::{download, upload};
use crate::support::case::Random;
use crate::support::subject::Subject;
use flashtune::backend::Backend;
use flashtune::call::TensorRef;
use flashtune::ops::Op;
use flashtune::ops::kv_append::{AppendScales, CacheFormat, EightClass, KvAppend, KvAppendClass, Rotary, RotaryClass};
use flashtune::ops::quantize::{Quantize, QuantizeClass, Rotation};
use flashtune::problem::{Dtype, Eight, Four, Layout};
use half::{bf16, f16};

fn subjects() -> Vec<Subject> {
    [Some(Subject::cpu(2)), Subject::gpu()].into_iter().flatten().collect()
}

fn encode(dtype: Dtype, x: f32) -> [u8; 2] {
    if dtype == Dtype::Fp16 { f16::from_f32(x).to_le_bytes() } else { bf16::from_f32(x).to_le_bytes() }
}

fn rounded(dtype: Dtype, x: f32) -> f32 {
    if dtype == Dtype::Fp16 { f16::from_f32(x).to_f32() } else { bf16::from_f32(x).to_f32() }
}

/// Normal values with zeros, an infinity, a NaN and a row of zeros among them.
fn values(dtype: Dtype, count: usize, dim: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut values: Vec<f32> = (0..count).map(|_| rounded(dtype, random.normal() * 3.0)).collect();
    values[..dim].fill(0.0);
    values[dim + 1] = f32::INFINITY;
    values[2 * dim + 3] = f32::NAN;
    values
}

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| encode(dtype, *x)).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |top, x| if x.abs() > top { x.abs() } else { top })
}

fn scale_of(eight: Eight, largest: f32) -> f32 {
    if largest == 0.0 { 1.0 } else { largest.min(f32::MAX) / eight.largest() }
}

/// Each row by itself, as src/ops/quantize/rotation.rs does it.
fn rotated(values: &[f32], seed: u64, dim: i64) -> Vec<f32> {
    let (rotation, mut turned) = (Rotation::new(seed, dim), values.to_vec());
    turned.chunks_mut(dim as usize).for_each(|row| rotation.apply(row));
    turned
}

fn run(backend: &Backend, op: &impl Op) {
    let executable = backend.build_op(op).unwrap();
    executable.launch(op, backend.stream()).and_then(|()| backend.synchronize()).unwrap();
}

#[test]
fn quantize_divides_by_scales_of_rows_blocks_and_sequences() {
    let (batch, heads) = (2, 4);
    for subject in subjects() {
        for (index, to) in Eight::ALL.into_iter().enumerate() {
            for (seqlen, rows_per_scale, heads_per_scale, dim, computes, seed) in [
                (150, 1, 1, 64, true, None),
                (150, 128, 1, 40, true, None),
                (150, 150, 2, 30, true, None),
                (150, 1, 1, 128, false, None),
                (150, 128, 1, 9, false, None),
                (150, 1, 1, 96, true, Some(3)),
                (150, 128, 2, 40, true, Some(u64::MAX - 5)),
                (150, 150, 1, 256, false, Some(1 << 40)),
                // Units of several tiles.
                (150, 150, 4, 200, true, None),
                (150, 150, 1, 256, true, Some(8)),
                // Units of one position, whose scales neighbouring lanes share.
                (1, 1, 2, 64, true, None),
                (1, 128, 4, 128, true, Some(5)),
                (1, 128, 2, 40, false, None),
                (70, 1, 2, 128, true, None),
                // One position that more than 32 lanes hold: a CTA takes it.
                (1, 1, 4, 256, true, None),
            ] {
                let dtype = [Dtype::Bf16, Dtype::Fp16][(index + dim as usize) % 2];
                let count = (batch * seqlen * heads * dim) as usize;
                let x = values(dtype, count, dim as usize, 77 + index as u64);
                let blocks = (seqlen + rows_per_scale - 1) / rows_per_scale;
                let groups = heads / heads_per_scale;
                let unit_of = |row: i64| {
                    let (position, head) = (row / heads, row % heads);
                    let block = position / seqlen * blocks + position % seqlen / rows_per_scale;
                    (block * groups + head / heads_per_scale) as usize
                };
                let turned = seed.map_or_else(|| x.clone(), |seed| rotated(&x, seed, dim));
                let mut tops = vec![0.0f32; (batch * blocks * groups) as usize];
                for (row, values) in turned.chunks(dim as usize).enumerate() {
                    let top = &mut tops[unit_of(row as i64)];
                    *top = top.max(largest(values));
                }
                let scales: Vec<f32> = match computes {
                    true => tops.iter().map(|top| scale_of(to, *top)).collect(),
                    false => (0..tops.len()).map(|unit| 0.01 + unit as f32 / 1e4).collect(),
                };
                let memory = upload(&subject.backend, &bytes_of(dtype, &x));
                let out = upload(&subject.backend, &vec![0xaa; count]);
                let given: Vec<u8> =
                    scales.iter().flat_map(|x| if computes { [0xff; 4] } else { x.to_le_bytes() }).collect();
                let place = upload(&subject.backend, &given);
                let op = Quantize {
                    class: QuantizeClass {
                        dtype,
                        to: Some(to),
                        layout: Layout::widest(dtype, [dim, if dim % 2 == 0 { dim / 2 } else { 1 }]),
                        of_rows: rows_per_scale == 1 && heads_per_scale == 1,
                        rotates: seed.is_some(),
                    },
                    batch_size: batch,
                    seqlen,
                    num_heads: heads,
                    head_dim: dim,
                    rows_per_scale,
                    heads_per_scale,
                    computes,
                    rotation_seed: seed.unwrap_or(0),
                    x: TensorRef::packed(memory.address(), seqlen, heads, dim),
                    out: TensorRef::packed(out.address(), seqlen, heads, dim),
                    scales: TensorRef::packed(place.address(), blocks, groups, 1),
                };
                run(&subject.backend, &op);
                assert_eq!(floats(&download(&subject.backend, &place)), scales, "{} {op:?}", to.name());
                let mut expected = vec![0; count];
                for (row, (values, encoded)) in
                    turned.chunks(dim as usize).zip(expected.chunks_mut(dim as usize)).enumerate()
                {
                    to.encode_row(values, scales[unit_of(row as i64)], encoded);
                }
                assert!(download(&subject.backend, &out) == expected, "{} {op:?}", to.name());
            }
        }
    }
}

/// Units of one tile and of several.
#[test]
fn zeros_and_magnitudes_too_small_to_divide_by_have_the_scale_1() {
    let (heads, dim, to) = (3, 256, Eight::Int8);
    for (subject, seqlen) in subjects().iter().flat_map(|subject| [(subject, 8), (subject, 300)]) {
        let elements = (0..seqlen * heads * dim).map(|i| [0.0, 2f32.powi(-101), 1.0][(i / dim % heads) as usize]);
        let memory = upload(&subject.backend, &bytes_of(Dtype::Bf16, &elements.collect::<Vec<_>>()));
        let out = upload(&subject.backend, &vec![0xaa; (seqlen * heads * dim) as usize]);
        let scales = upload(&subject.backend, &[0xff; 12]);
        let op = Quantize {
            class: QuantizeClass {
                dtype: Dtype::Bf16,
                to: Some(to),
                layout: Layout::Vec8,
                of_rows: false,
                rotates: false,
            },
            batch_size: 1,
            seqlen,
            num_heads: heads,
            head_dim: dim,
            rows_per_scale: seqlen,
            heads_per_scale: 1,
            computes: true,
            rotation_seed: 0,
            x: TensorRef::packed(memory.address(), seqlen, heads, dim),
            out: TensorRef::packed(out.address(), seqlen, heads, dim),
            scales: TensorRef::packed(scales.address(), 1, heads, 1),
        };
        run(&subject.backend, &op);
        assert_eq!(floats(&download(&subject.backend, &scales)), [1.0, 1.0, 1.0 / to.largest()]);
        let numbers = download(&subject.backend, &out);
        assert!(numbers.iter().enumerate().all(|(i, x)| *x == [0, 0, 127][i / dim as usize % heads as usize]));
    }
}

/// Rows in 16 bits, by each width of access, and of each number of columns that a lane, a warp's
/// access and a row may share.
#[test]
fn rotated_rows_may_stay_in_16_bits() {
    let (batch, seqlen, heads) = (2, 5, 3);
    for (subject, dtype) in subjects().iter().flat_map(|subject| [(subject, Dtype::Fp16), (subject, Dtype::Bf16)]) {
        for layout in [Layout::Vec8, Layout::Vec4, Layout::Vec2, Layout::Vec1] {
            for dim in [8, 72, 80, 96, 192, 128, 256, 512] {
                let seed = 0x0123_4567_89ab_cdef ^ dim as u64;
                let mut random = Random::new(seed);
                let count = (batch * seqlen * heads * dim) as usize;
                let x: Vec<f32> = (0..count).map(|_| rounded(dtype, random.normal())).collect();
                let memory = upload(&subject.backend, &bytes_of(dtype, &x));
                let out = upload(&subject.backend, &vec![0xaa; 2 * count]);
                let op = Quantize {
                    class: QuantizeClass { dtype, to: None, layout, of_rows: true, rotates: true },
                    batch_size: batch,
                    seqlen,
                    num_heads: heads,
                    head_dim: dim,
                    rows_per_scale: 1,
                    heads_per_scale: 1,
                    computes: false,
                    rotation_seed: seed,
                    x: TensorRef::packed(memory.address(), seqlen, heads, dim),
                    out: TensorRef::packed(out.address(), seqlen, heads, dim),
                    scales: TensorRef::NULL,
                };
                run(&subject.backend, &op);
                assert!(download(&subject.backend, &out) == bytes_of(dtype, &rotated(&x, seed, dim)), "{op:?}");
            }
        }
    }
}

/// The definition in fp64: the sign of H's element (i, j) is the parity of the bits of i & j.
#[test]
fn a_rotation_is_the_matrix_and_keeps_inner_products() {
    for dim in [8i64, 24, 64, 80, 128, 192, 256, 512] {
        let mut random = Random::new(dim as u64);
        let (rotation, n) = (Rotation::new(99, dim), dim & -dim);
        let [q, k] = [0, 1].map(|_| (0..dim).map(|_| random.normal()).collect::<Vec<f32>>());
        let [turned_q, turned_k] = [&q, &k].map(|row| rotated(row, 99, dim));
        for (column, y) in (0i64..).zip(&turned_q) {
            let term = |j: i64| {
                let of = column / n * n + j;
                let odd = ((column % n) & j).count_ones() + (rotation.signs[of as usize / 32] >> (of % 32) & 1);
                f64::from(q[of as usize]) * if odd % 2 == 1 { -1.0 } else { 1.0 }
            };
            let exact = (0..n).map(term).sum::<f64>() / (n as f64).sqrt();
            assert!((f64::from(*y) - exact).abs() < 1e-5, "column {column} of {dim}: {y} for {exact}");
        }
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let (before, after) = (product(&q, &k), product(&turned_q, &turned_k));
        assert!((before - after).abs() < 1e-5 * (dim as f64).sqrt(), "{dim}: {before} became {after}");
    }
}

/// One call with pages, computed scales, idle sequences and rotated keys and queries.
#[test]
fn kv_append_quantises_what_it_writes() {
    let (batch, heads, heads_q, dim, seqlen_new, page_size, pages) = (3, 2, 4, 128, 5, 4, 8);
    let half = 8;
    let formats: Vec<CacheFormat> =
        Eight::ALL.into_iter().map(CacheFormat::Eight).chain(Four::ALL.into_iter().map(CacheFormat::Four)).collect();
    for (subject, keys, first) in subjects()
        .iter()
        .flat_map(|subject| formats.iter().flat_map(move |keys| [(subject, *keys, true), (subject, *keys, false)]))
    {
        // Rows of int4 have computed scales in any case.
        let (computes, rotates) = (first && matches!(keys, CacheFormat::Eight(_)), !first);
        let cache_row = match keys {
            CacheFormat::Eight(_) => dim as usize,
            CacheFormat::Four(four) => four.row_bytes(dim) as usize,
        };
        // Elements one by one, and accesses of 16 bytes.
        let access_bytes = if keys == CacheFormat::Four(Four::Int4g64) { 2 } else { 16 };
        let backend = &subject.backend;
        let dtype = if rotates { Dtype::Fp16 } else { Dtype::Bf16 };
        let row = dim as usize;
        let count = (batch * seqlen_new * heads * dim) as usize;
        let [k, v] = [5, 6].map(|seed| values(dtype, count, row, seed));
        let q: Vec<f32> = values(dtype, (batch * seqlen_new * heads_q * dim) as usize, row, 7);
        let cache_bytes = (pages * page_size * heads) as usize * cache_row;
        let before = [2, 9, 0];
        let counts = [5, 0, 3];
        let table: Vec<i32> = vec![3, 1, 6, 5, 2, 7, 0, 4, -1];
        let angles: Vec<f32> = (0..12 * half).map(|i| i as f32 * 0.37).collect();
        let [cos, sin] = [angles.iter().map(|x| x.cos()).collect::<Vec<_>>(), angles.iter().map(|x| x.sin()).collect()];
        let input = |bytes: &[u8]| upload(backend, bytes);
        let ints = |values: &[i32]| input(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        let floats_in = |values: &[f32]| input(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        let new = [&k, &v].map(|values| input(&bytes_of(dtype, values)));
        let caches = [0x11, 0x22].map(|byte| input(&vec![byte; cache_bytes]));
        let given: Vec<f32> = (0..pages * page_size * heads).map(|at| 0.02 + at as f32 / 1e3).collect();
        let scales = [0, 1].map(|_| floats_in(&given));
        let (q_memory, q_rotated) = (input(&bytes_of(dtype, &q)), input(&vec![0; 2 * q.len()]));
        let (seqlens, seqused, seqused_new, table_memory) =
            (ints(&before), ints(&[-7; 3]), ints(&counts), ints(&table));
        let (cos_memory, sin_memory) = (floats_in(&cos), floats_in(&sin));
        let of =
            |memory: &flashtune::backend::Memory, rows, heads| TensorRef::packed(memory.address(), rows, heads, dim);
        let cache = |at: usize| TensorRef::packed(caches[at].address(), page_size, heads, cache_row as i64);
        let scale_view = |at: usize| TensorRef::packed(scales[at].address(), page_size, heads, 1);
        let rotary = RotaryClass { dtype, table_dtype: Dtype::Fp32, interleaved: keys.name() == "e4m3" };
        let append = KvAppend {
            class: KvAppendClass {
                access_bytes,
                slots: true,
                rotary: rotates.then_some(rotary),
                eight: Some(EightClass { dtype, keys }),
            },
            element_bytes: 2,
            batch_size: batch,
            num_heads_kv: heads,
            seqlen_new,
            seqlen_cache: 12,
            head_dim: dim,
            head_dim_v: dim,
            k_new: of(&new[0], seqlen_new, heads),
            v_new: of(&new[1], seqlen_new, heads),
            k_cache: cache(0),
            v_cache: cache(1),
            seqlens: seqlens.address().cast_const().cast(),
            seqused: seqused.address().cast(),
            block_table: table_memory.address().cast_const().cast(),
            block_table_stride: 3,
            page_size,
            num_pages: pages,
            seqused_new: seqused_new.address().cast_const().cast(),
            cache_batch_idx: std::ptr::null(),
            rotary: if !rotates {
                Rotary::NONE
            } else {
                Rotary {
                    cos: cos_memory.address(),
                    sin: sin_memory.address(),
                    stride: half,
                    seqlen: 12,
                    dim: 2 * half,
                    q: of(&q_memory, seqlen_new, heads_q),
                    q_rotated: of(&q_rotated, seqlen_new, heads_q),
                    num_heads_q: heads_q,
                    seqlen_q: seqlen_new,
                    q_at_one_position: false,
                }
            },
            scales: AppendScales { k: scale_view(0), v: scale_view(1), of_keys: true, computes },
        };
        run(backend, &append);
        assert_eq!(download(backend, &seqused), [7, 9, 3i32].map(i32::to_le_bytes).concat());
        for (side, values) in [&k, &v].into_iter().enumerate() {
            let mut expected = vec![[0x11, 0x22][side]; cache_bytes];
            let mut expected_scales = given.clone();
            let rows = (0..batch * seqlen_new * heads).zip(values.chunks(row));
            for (index, values) in rows {
                let (b, position, head) = (index / (seqlen_new * heads), index / heads % seqlen_new, index % heads);
                if position >= i64::from(counts[b as usize]) {
                    continue;
                }
                let key = i64::from(before[b as usize]) + position;
                let page = i64::from(table[(b * 3 + key / page_size) as usize]);
                let mut turned = values.to_vec();
                for i in (0..half as usize).filter(|_| rotates && side == 0) {
                    let (x, y) = if rotary.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half as usize) };
                    let (c, s) = (cos[(key * half) as usize + i], sin[(key * half) as usize + i]);
                    (turned[x], turned[y]) =
                        (rounded(dtype, values[x] * c - values[y] * s), rounded(dtype, values[x] * s + values[y] * c));
                }
                let at = ((page * page_size + key % page_size) * heads + head) as usize;
                let to = &mut expected[at * cache_row..][..cache_row];
                match keys {
                    CacheFormat::Eight(keys) => {
                        if computes {
                            expected_scales[at] = scale_of(keys, largest(&turned));
                        }
                        keys.encode_row(&turned, expected_scales[at], to);
                    }
                    CacheFormat::Four(four) => four.encode_row(&turned, to),
                }
            }
            assert_eq!(floats(&download(backend, &scales[side])), expected_scales);
            let got = download(backend, &caches[side]);
            // A GPU may fuse the products of a rotation, which moves a few numbers to a neighbour.
            let differ = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
            let allowed = if rotates && side == 0 && subject.is_gpu() { expected.len() / 50 } else { 0 };
            assert!(differ <= allowed, "{} {side} {computes}: {differ} of {}", keys.name(), expected.len());
        }
    }
}
