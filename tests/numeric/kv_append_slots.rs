//! Appending to the slots of a server, on the CPU and, if there is one, a GPU: rotations against an
//! fp64 reference, idle sequences, entries by index, and lengths that advance in place.

use crate::support::buffer::{Array, decode, download, encode, upload};
use crate::support::case::Random;
use crate::support::subject::Subject;
use flashtune::backend::{Backend, Memory};
use flashtune::call::TensorRef;
use flashtune::ops::kv_append::{AppendScales, KvAppend, KvAppendClass, Rotary, RotaryClass};
use flashtune::problem::{Dtype, Layout};
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// One append on packed tensors. The seed gives values, lengths, entries and pages.
#[derive(Clone, Debug)]
struct SlotsCase {
    dtype: Dtype,
    batch_size: i64,
    heads: i64,
    heads_q: i64,
    dim: i64,
    dim_v: i64,
    seqlen_new: i64,
    seqlen_q: i64,
    seqlen_cache: i64,
    page_size: i64,
    /// Sequences have numbers of new keys and, without pages, entries of their own.
    slots: bool,
    in_place: bool,
    rotary: Option<RotaryClass>,
    rotary_dim: i64,
    q_at_one_position: bool,
    q_in_place: bool,
    seed: u64,
}

/// Entries of the cache that no sequence has.
const SPARE: i64 = 2;

struct Numbers {
    seqlens: Vec<i32>,
    seqused_new: Vec<i32>,
    entries: Vec<i32>,
    table: Vec<i32>,
}

impl SlotsCase {
    fn pages(&self) -> i64 {
        if self.page_size == 0 { 1 } else { (self.seqlen_cache + self.page_size - 1) / self.page_size }
    }

    /// Entries of the cache, and the rows of each.
    fn cache(&self) -> (i64, i64) {
        match self.page_size {
            0 => (self.batch_size + if self.slots { SPARE } else { 0 }, self.seqlen_cache),
            size => (self.batch_size * self.pages() + SPARE, size),
        }
    }

    fn numbers(&self) -> Numbers {
        let mut random = Random::new(self.seed);
        let (entries, room) = (self.cache().0, self.seqlen_cache - self.seqlen_new);
        let mut shuffled: Vec<i32> = (0..entries as i32).collect();
        for at in (1..shuffled.len()).rev() {
            shuffled.swap(at, random.between(0, at as i64) as usize);
        }
        let mut seqlens: Vec<i32> = (0..self.batch_size).map(|_| random.between(0, room) as i32).collect();
        // One sequence has no room for all of its new keys.
        seqlens[0] = room as i32 + 1;
        let counts = [-3, 0, 1, self.seqlen_new as i32, self.seqlen_new as i32 + 1];
        let mut own = shuffled.clone();
        own.truncate(self.batch_size as usize);
        if self.slots {
            // The last sequence's entry does not exist.
            *own.last_mut().unwrap() = random.pick(&[-1, entries as i32, i32::MAX]);
        }
        Numbers {
            seqlens,
            seqused_new: (0..self.batch_size).map(|_| random.pick(&counts)).collect(),
            entries: own,
            table: shuffled,
        }
    }

    /// New keys of sequence b, and its length afterwards.
    fn after(&self, numbers: &Numbers, b: usize) -> (i64, i64) {
        let before = i64::from(numbers.seqlens[b]);
        let count = match self.slots {
            true => i64::from(numbers.seqused_new[b]).clamp(0, self.seqlen_new),
            false => self.seqlen_new,
        };
        let has_entry = !self.names_entries() || (0..self.cache().0).contains(&i64::from(numbers.entries[b]));
        match before + count <= self.seqlen_cache && has_entry {
            true => (count, before + count),
            false => (0, before.clamp(0, self.seqlen_cache)),
        }
    }

    fn names_entries(&self) -> bool {
        self.slots && self.page_size == 0
    }

    /// The row of the cache at which sequence b's key lies.
    fn row(&self, numbers: &Numbers, b: usize, key: i64) -> i64 {
        match self.page_size {
            0 if self.slots => i64::from(numbers.entries[b]) * self.seqlen_cache + key,
            0 => b as i64 * self.seqlen_cache + key,
            size => {
                let page = numbers.table[(b as i64 * self.pages() + key / size) as usize];
                i64::from(page) * size + key % size
            }
        }
    }

    /// Random values of the dtype.
    fn values(&self, count: i64, seed: u64) -> Vec<f32> {
        let mut random = Random::new(self.seed * 31 + seed);
        (0..count).map(|_| decode(self.dtype, &encode(self.dtype, random.normal()))).collect()
    }

    /// Cosines and sines of the rows of the tables, rounded to their type.
    fn tables(&self) -> [Vec<f32>; 2] {
        let (half, dtype) = (self.rotary_dim / 2, self.rotary.map_or(Dtype::Fp32, |class| class.table_dtype));
        let angle = |at: i64| (at / half) as f64 * 10_000f64.powf(-((at % half) as f64) / half as f64);
        let of = |f: fn(f64) -> f64| {
            (0..self.seqlen_cache * half).map(|at| decode(dtype, &encode(dtype, f(angle(at)) as f32))).collect()
        };
        [of(f64::cos), of(f64::sin)]
    }

    /// The row rotated in fp64, and for each element the magnitude of the terms that it sums.
    fn rotated(&self, row: &[f32], position: i64, [cos, sin]: &[Vec<f32>; 2]) -> Vec<(f64, f64)> {
        let mut out: Vec<(f64, f64)> = row.iter().map(|x| (f64::from(*x), 0.0)).collect();
        let Some(class) = self.rotary else { return out };
        let half = self.rotary_dim as usize / 2;
        let at = position.clamp(0, self.seqlen_cache - 1) as usize * half;
        for i in 0..half {
            let (x, y) = if class.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let [of_x, of_y, cos, sin] = [row[x], row[y], cos[at + i], sin[at + i]].map(f64::from);
            let terms = of_x.abs() + of_y.abs();
            (out[x], out[y]) = ((of_x * cos - of_y * sin, terms), (of_x * sin + of_y * cos, terms));
        }
        out
    }

    /// Whether an element of the dtype is the exact one, rounded once after fp32 arithmetic.
    fn is_right(&self, got: f32, (exact, terms): (f64, f64)) -> bool {
        let (bits, least) = match self.dtype {
            Dtype::Bf16 => (-8, 0.0),
            Dtype::Fp16 => (-11, 2f64.powi(-25)),
            Dtype::Fp32 => (-24, 0.0),
        };
        let allowed = exact.abs() * 2f64.powi(bits) + least + terms * 2f64.powi(-22);
        if terms == 0.0 { f64::from(got) == exact } else { (f64::from(got) - exact).abs() <= allowed }
    }

    fn encoded(&self, dtype: Dtype, values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| encode(dtype, *value)).collect()
    }

    fn decoded(&self, backend: &Backend, memory: &Memory) -> Vec<f32> {
        download(backend, memory).chunks(self.dtype.bytes()).map(|bytes| decode(self.dtype, bytes)).collect()
    }

    fn run(&self, backend: &Backend) {
        let numbers = self.numbers();
        let (entries, rows) = self.cache();
        let sizes = [
            self.batch_size * self.seqlen_new * self.heads * self.dim,
            self.batch_size * self.seqlen_new * self.heads * self.dim_v,
            entries * rows * self.heads * self.dim,
            entries * rows * self.heads * self.dim_v,
            self.batch_size * self.seqlen_q * self.heads_q * self.dim,
        ];
        let values: Vec<Vec<f32>> = sizes.iter().zip(1..).map(|(count, seed)| self.values(*count, seed)).collect();
        let tables = self.tables();
        let table_dtype = self.rotary.map_or(Dtype::Fp32, |class| class.table_dtype);
        let memory: Vec<Memory> = values.iter().map(|of| upload(backend, &self.encoded(self.dtype, of))).collect();
        let table_memory = tables.each_ref().map(|of| upload(backend, &self.encoded(table_dtype, of)));
        let q_rotated = upload(backend, &self.encoded(self.dtype, &self.values(sizes[4].max(1), 9)));
        let q_out = if self.q_in_place { &memory[4] } else { &q_rotated };
        let of_int32 = |values: &[i32]| Array::input_int32(backend, values);
        let [seqlens, seqused_new, own, table] =
            [&numbers.seqlens, &numbers.seqused_new, &numbers.entries, &numbers.table].map(|of| of_int32(of));
        let apart = Array::output(backend, 4 * self.batch_size as usize);
        let seqused = if self.in_place { &seqlens } else { &apart };

        let address = |memory: &Memory, rows, heads, dim| TensorRef::packed(memory.address(), rows, heads, dim);
        let input = |array: &Array, is_given: bool| match is_given {
            true => array.address().cast_const().cast::<i32>(),
            false => std::ptr::null(),
        };
        let half = self.rotary_dim / 2;
        let has_rotary = self.rotary.is_some();
        let quantities = [self.dim, self.dim_v].into_iter().chain(has_rotary.then_some(half));
        let append = KvAppend {
            class: KvAppendClass {
                access_bytes: Layout::widest(self.dtype, quantities).elements() * self.dtype.bytes() as i64,
                slots: self.slots || self.in_place,
                rotary: self.rotary,
                eight: None,
            },
            element_bytes: self.dtype.bytes() as i64,
            batch_size: self.batch_size,
            num_heads_kv: self.heads,
            seqlen_new: self.seqlen_new,
            seqlen_cache: self.seqlen_cache,
            head_dim: self.dim,
            head_dim_v: self.dim_v,
            k_new: address(&memory[0], self.seqlen_new, self.heads, self.dim),
            v_new: address(&memory[1], self.seqlen_new, self.heads, self.dim_v),
            k_cache: address(&memory[2], rows, self.heads, self.dim),
            v_cache: address(&memory[3], rows, self.heads, self.dim_v),
            seqlens: input(&seqlens, true),
            seqused: seqused.address().cast(),
            block_table: input(&table, self.page_size > 0),
            block_table_stride: self.pages(),
            page_size: self.page_size,
            num_pages: if self.page_size > 0 || self.slots { entries } else { 0 },
            seqused_new: input(&seqused_new, self.slots),
            cache_batch_idx: input(&own, self.names_entries()),
            rotary: if !has_rotary {
                Rotary::NONE
            } else {
                Rotary {
                    cos: table_memory[0].address(),
                    sin: table_memory[1].address(),
                    stride: half,
                    seqlen: self.seqlen_cache,
                    dim: self.rotary_dim,
                    q: address(&memory[4], self.seqlen_q, self.heads_q, self.dim),
                    q_rotated: address(q_out, self.seqlen_q, self.heads_q, self.dim),
                    num_heads_q: self.heads_q,
                    seqlen_q: self.seqlen_q,
                    q_at_one_position: self.q_at_one_position,
                }
            },
            scales: AppendScales::NONE,
        };
        let executable = backend.build_op(&append).unwrap();
        executable.launch(&append, backend.stream()).and_then(|()| backend.synchronize()).unwrap();

        for (of_v, dim) in [(0, self.dim), (1, self.dim_v)] {
            let plain = SlotsCase { rotary: self.rotary.filter(|_| of_v == 0), ..self.clone() };
            let mut expected: Vec<(f64, f64)> = values[2 + of_v].iter().map(|x| (f64::from(*x), 0.0)).collect();
            for b in 0..self.batch_size as usize {
                for s in 0..self.after(&numbers, b).0 {
                    let position = i64::from(numbers.seqlens[b]) + s;
                    let to = self.row(&numbers, b, position);
                    for h in 0..self.heads {
                        let from = ((b as i64 * self.seqlen_new + s) * self.heads + h) * dim;
                        let row = &values[of_v][from as usize..][..dim as usize];
                        let at = ((to * self.heads + h) * dim) as usize;
                        expected[at..at + dim as usize].copy_from_slice(&plain.rotated(row, position, &tables));
                    }
                }
            }
            self.compare(["k_cache", "v_cache"][of_v], &self.decoded(backend, &memory[2 + of_v]), &expected);
        }
        if has_rotary && self.seqlen_q > 0 {
            let rows = values[4].chunks(self.dim as usize).zip(0..);
            let expected = rows.flat_map(|(row, at)| {
                let (b, i) = (at / self.heads_q / self.seqlen_q, at / self.heads_q % self.seqlen_q);
                let step = if self.q_at_one_position { 0 } else { i };
                self.rotated(row, i64::from(numbers.seqlens[b as usize]) + step, &tables)
            });
            self.compare("q_rotated", &self.decoded(backend, q_out), &expected.collect::<Vec<_>>());
        }
        let after: Vec<i32> = (0..self.batch_size as usize).map(|b| self.after(&numbers, b).1 as i32).collect();
        let bytes = seqused.check_guards(backend, "seqused");
        let around = (bytes.len() - 4 * after.len()) / 2;
        let words = bytes[around..][..4 * after.len()].chunks(4);
        let words: Vec<i32> = words.map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, after, "{self:?}");
    }

    fn compare(&self, name: &str, got: &[f32], expected: &[(f64, f64)]) {
        let wrong = got.iter().zip(expected).position(|(got, expected)| !self.is_right(*got, *expected));
        assert_eq!(got.len(), expected.len(), "{name}: {self:?}");
        assert!(
            wrong.is_none(),
            "{name}: element {wrong:?}: {} for {:?}: {self:?}",
            got[wrong.unwrap()],
            expected[wrong.unwrap()]
        );
    }
}

/// Seeded cases of every class that has a rotation or slots.
fn cases() -> Vec<SlotsCase> {
    let mut random = Random::new(4);
    let mut cases = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32] {
        let of = |table_dtype, interleaved| Some(RotaryClass { dtype, table_dtype, interleaved });
        for rotary in [None, of(dtype, false), of(dtype, true), of(Dtype::Fp32, false), of(Dtype::Fp32, true)] {
            for (dim, rotary_dim) in [(128, 128), (64, 32), (40, 24), (33, 10), (6, 6), (80, 2)] {
                let seqlen_new = random.pick(&[1, 2, 17]);
                cases.push(SlotsCase {
                    dtype,
                    batch_size: random.between(1, 6),
                    heads: random.pick(&[1, 2, 8]),
                    heads_q: random.pick(&[2, 8]),
                    dim,
                    dim_v: random.pick(&[dim, 24, 7]),
                    seqlen_new,
                    seqlen_q: random.pick(&[0, 1, 5]),
                    seqlen_cache: seqlen_new + random.between(1, 90),
                    page_size: random.pick(&[0, 0, 1, 16]),
                    slots: random.pick(&[false, true]),
                    in_place: random.pick(&[false, true]),
                    rotary,
                    rotary_dim,
                    q_at_one_position: random.pick(&[false, true]),
                    q_in_place: random.pick(&[false, true]),
                    seed: cases.len() as u64 + 1,
                });
            }
        }
    }
    cases
}

#[test]
fn new_keys_and_queries_turn_by_their_positions_in_every_class() {
    let subjects = subjects();
    cases().par_iter().for_each(|case| subjects.iter().for_each(|subject| case.run(&subject.backend)));
}

/// More than one CTA does in one launch.
#[test]
fn long_prompts_advance_lengths_in_place_too() {
    let rotary = Some(RotaryClass { dtype: Dtype::Bf16, table_dtype: Dtype::Fp32, interleaved: false });
    let prompt = SlotsCase {
        batch_size: 3,
        heads: 8,
        heads_q: 8,
        dim: 128,
        dim_v: 128,
        seqlen_new: 300,
        seqlen_q: 300,
        seqlen_cache: 700,
        slots: true,
        in_place: true,
        rotary,
        rotary_dim: 128,
        ..cases()[0].clone()
    };
    for subject in subjects() {
        for page_size in [0, 64] {
            SlotsCase { page_size, ..prompt.clone() }.run(&subject.backend);
            SlotsCase { page_size, rotary: None, ..prompt.clone() }.run(&subject.backend);
        }
    }
}
