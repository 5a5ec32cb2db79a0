//! Appending keys and values to a cache, on the CPU and, if there is one, a GPU. The whole memory
//! of each tensor, with its gaps and surroundings, is compared byte for byte with the definition.

use crate::support::buffer::{Array, GUARD, download, upload};
use crate::support::case::{ALL_STRIDES, Case, Kind, Random, Shape, Strides};
use crate::support::subject::Subject;
use flashtune::backend::{Backend, Memory};
use flashtune::call::TensorRef;
use flashtune::ops::kv_append::{AppendScales, KvAppend, KvAppendClass, Rotary};
use flashtune::problem::{Dtype, Layout};
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// One append. `case` gives the dtype, batch size, heads, head dims and strides.
#[derive(Clone, Debug)]
struct AppendCase {
    case: Case,
    seqlen_new: i64,
    seqlen_cache: i64,
    page_size: Option<i64>,
    /// Length of each sequence before the append.
    seqlens: Vec<i32>,
    /// The block table: a row of `pages()` entries and a gap for each sequence.
    table: Vec<i32>,
    wants_seqused: bool,
}

/// Entries between two rows of the block table.
const GAP: i64 = 2;

impl AppendCase {
    /// Mixes three kinds of sequence: with room, without room, and without a page for the first or
    /// last new key.
    fn new(case: &Case, seqlen_new: i64, page_size: Option<i64>) -> AppendCase {
        let seqlen_cache = 2 * seqlen_new + 37;
        let mut append_case = AppendCase {
            seqlens: Vec::new(),
            table: Vec::new(),
            case: case.clone(),
            seqlen_new,
            seqlen_cache,
            page_size,
            wants_seqused: true,
        };
        let room = seqlen_cache - seqlen_new;
        let mut random = Random::new(case.seed);
        let fitting = [0, room, 1, room / 2, random.between(0, room)];
        let others = [room + 1, -1, seqlen_cache, i64::from(i32::MAX), i64::from(i32::MIN), seqlen_cache + 1];
        let length = |b: usize| if b % 3 == 2 { others[b / 3 % others.len()] } else { fitting[b % fitting.len()] };
        append_case.seqlens = (0..case.batch_size as usize).map(|b| length(b) as i32).collect();
        append_case.fill_table(&mut random);
        append_case
    }

    /// Gives each sequence shuffled pages of its own where its new keys go, and invalid entries
    /// elsewhere. The row of a sequence without room names pages of other sequences. Every fourth
    /// sequence lacks the first or the last page that it needs.
    fn fill_table(&mut self, random: &mut Random) {
        let Some(size) = self.page_size else { return };
        let mut pages: Vec<i32> = (0..self.num_pages() as i32).collect();
        for at in (1..pages.len()).rev() {
            pages.swap(at, random.between(0, at as i64) as usize);
        }
        let mut next = pages.clone().into_iter();
        let missing = [-1, i32::MIN, i32::MAX, self.num_pages() as i32];
        for (b, length) in self.seqlens.iter().map(|length| i64::from(*length)).enumerate() {
            let mut row: Vec<i32> = (0..self.pages() + GAP).map(|_| random.pick(&missing)).collect();
            if length < 0 || length > self.seqlen_cache - self.seqlen_new {
                row.fill_with(|| random.pick(&pages));
            } else if self.seqlen_new > 0 {
                let (first, last) = (length / size, (length + self.seqlen_new - 1) / size);
                (first..=last).for_each(|i| row[i as usize] = next.next().expect("a page"));
                if b % 4 == 3 {
                    row[random.pick(&[first, last]) as usize] = random.pick(&missing);
                }
            }
            self.table.extend(row);
        }
    }

    /// Pages of one sequence.
    fn pages(&self) -> i64 {
        self.page_size.map_or(0, |size| (self.seqlen_cache + size - 1) / size)
    }

    fn num_pages(&self) -> i64 {
        self.case.batch_size * self.pages() + 1
    }

    fn page(&self, b: usize, key: i64) -> i64 {
        let size = self.page_size.unwrap();
        i64::from(self.table[b * (self.pages() + GAP) as usize + (key / size) as usize])
    }

    fn fits(&self, b: usize) -> bool {
        let length = i64::from(self.seqlens[b]);
        let mut new = length..length + self.seqlen_new;
        let has_room = length >= 0 && length + self.seqlen_new <= self.seqlen_cache;
        let has_page = |key| self.page_size.is_none() || (0..self.num_pages()).contains(&self.page(b, key));
        has_room && new.all(has_page)
    }

    fn seqused(&self) -> Vec<i32> {
        let used = |b: usize| match self.fits(b) {
            true => i64::from(self.seqlens[b]) + self.seqlen_new,
            false => i64::from(self.seqlens[b]).clamp(0, self.seqlen_cache),
        };
        (0..self.seqlens.len()).map(|b| used(b) as i32).collect()
    }

    /// Shapes of the new rows and of the cache, for K or for V; each tensor has strides of its own.
    fn shapes(&self, of_v: bool) -> [Shape; 2] {
        let [new, cache] = if of_v { [Kind::V, Kind::Dv] } else { [Kind::K, Kind::Dk] };
        let batch = self.case.batch_size;
        let (entries, rows) = self.page_size.map_or((batch, self.seqlen_cache), |size| (self.num_pages(), size));
        [self.case.laid_out(new, batch, self.seqlen_new), self.case.laid_out(cache, entries, rows)]
    }

    /// The cache's bytes after the append.
    fn written(&self, new: &[u8], mut cache: Vec<u8>, [from, to]: [Shape; 2]) -> Vec<u8> {
        let size = self.case.dtype.bytes();
        for b in (0..self.seqlens.len()).filter(|b| self.fits(*b)) {
            for s in 0..self.seqlen_new {
                let key = i64::from(self.seqlens[b]) + s;
                let (entry, row) = self.page_size.map_or((b as i64, key), |size| (self.page(b, key), key % size));
                for h in 0..from.heads {
                    let [from_at, to_at] = [(from, b as i64, s), (to, entry, row)].map(|(shape, entry, row)| {
                        let at = entry * shape.stride_batch + row * shape.stride_seqlen + h * shape.stride_head;
                        (shape.lead + at) as usize * size
                    });
                    let bytes = from.dim as usize * size;
                    cache[to_at..to_at + bytes].copy_from_slice(&new[from_at..from_at + bytes]);
                }
            }
        }
        cache
    }

    fn run(&self, backend: &Backend) {
        let mut random = Random::new(self.case.seed + 1);
        let mut tensors = [false, true].map(|of_v| {
            let shapes = self.shapes(of_v);
            let bytes = shapes.map(|shape| {
                let count = (shape.span() + GUARD) * self.case.dtype.bytes();
                (0..count).map(|_| random.next() as u8).collect::<Vec<u8>>()
            });
            let memory = bytes.each_ref().map(|bytes| upload(backend, bytes));
            (shapes, bytes, memory)
        });
        let (seqlens, table) = (Array::input_int32(backend, &self.seqlens), Array::input_int32(backend, &self.table));
        let seqused = Array::output(backend, self.seqlens.len() * 4);
        let append = self.append(tensors.each_ref().map(|(_, _, memory)| memory), [&seqlens, &table, &seqused]);
        let executable = backend.build_op(&append).unwrap();
        executable.launch(&append, backend.stream()).and_then(|()| backend.synchronize()).unwrap();

        for ((shapes, [new, cache], memory), name) in tensors.iter_mut().zip(["k", "v"]) {
            let expected = self.written(new, std::mem::take(cache), *shapes);
            let got = download(backend, &memory[1]);
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            assert!(wrong.is_none(), "{name}_cache: byte {} of {}: {self:?}", wrong.unwrap(), expected.len());
            assert!(*new == download(backend, &memory[0]), "{name}_new was written: {self:?}");
        }
        let bytes = seqused.check_guards(backend, "seqused");
        let around = (bytes.len() - 4 * self.seqlens.len()) / 2;
        let words =
            bytes[around..bytes.len() - around].chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
        let expected = if self.wants_seqused { self.seqused() } else { vec![-1; self.seqlens.len()] };
        assert_eq!(words.collect::<Vec<i32>>(), expected, "{self:?}");
    }

    fn append(&self, [k, v]: [&[Memory; 2]; 2], [seqlens, table, seqused]: [&Array; 3]) -> KvAppend {
        let case = &self.case;
        let views = |of_v: bool, memory: &[Memory; 2]| {
            let shapes = self.shapes(of_v);
            [0, 1].map(|i| {
                let Shape { lead, stride_batch, stride_seqlen, stride_head, .. } = shapes[i];
                let data = memory[i].address().wrapping_byte_add(lead as usize * case.dtype.bytes());
                TensorRef { data, stride_batch, stride_seqlen, stride_head }
            })
        };
        let quantities = [false, true]
            .into_iter()
            .flat_map(|of_v| self.shapes(of_v))
            .flat_map(|shape| [shape.lead, shape.dim, shape.stride_batch, shape.stride_seqlen, shape.stride_head]);
        let element_bytes = case.dtype.bytes() as i64;
        let access_bytes = Layout::widest(case.dtype, quantities).elements() * element_bytes;
        let ([k_new, k_cache], [v_new, v_cache]) = (views(false, k), views(true, v));
        let is_paged = self.page_size.is_some();
        KvAppend {
            class: KvAppendClass { access_bytes, slots: false, rotary: None, eight: None },
            element_bytes,
            batch_size: case.batch_size,
            num_heads_kv: case.num_heads_kv,
            seqlen_new: self.seqlen_new,
            seqlen_cache: self.seqlen_cache,
            head_dim: case.head_dim,
            head_dim_v: case.head_dim_v,
            k_new,
            v_new,
            k_cache,
            v_cache,
            seqlens: seqlens.address().cast_const().cast(),
            seqused: if self.wants_seqused { seqused.address().cast() } else { std::ptr::null_mut() },
            block_table: if is_paged { table.address().cast_const().cast() } else { std::ptr::null() },
            block_table_stride: self.pages() + GAP,
            page_size: self.page_size.unwrap_or(0),
            num_pages: if is_paged { self.num_pages() } else { 0 },
            seqused_new: std::ptr::null(),
            cache_batch_idx: std::ptr::null(),
            rotary: Rotary::NONE,
            scales: AppendScales::NONE,
        }
    }
}

fn case(dtype: Dtype, batch_size: i64, heads: i64, (head_dim, head_dim_v): (i64, i64), strides: Strides) -> Case {
    let plain = Case::plain(dtype, 1, head_dim);
    Case { batch_size, num_heads_q: heads, num_heads_kv: heads, head_dim_v, strides, ..plain }
}

fn run_all(cases: Vec<AppendCase>) {
    let subjects = subjects();
    cases.par_iter().for_each(|case| subjects.iter().for_each(|subject| case.run(&subject.backend)));
}

#[test]
fn new_keys_go_where_they_belong_and_nothing_else_changes() {
    let mut cases = Vec::new();
    let mut seed = 0;
    for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
        for strides in ALL_STRIDES {
            for (heads, dims) in [(8, (128, 128)), (3, (40, 24)), (2, (33, 7)), (1, (512, 64)), (5, (6, 18))] {
                for page_size in [None, Some(1), Some(3), Some(16), Some(64)] {
                    seed += 1;
                    let case = Case { seed, ..case(dtype, 9 + seed as i64 % 12, heads, dims, strides) };
                    cases.push(AppendCase::new(&case, [1, 2, 17, 40][seed as usize % 4], page_size));
                }
            }
        }
    }
    run_all(cases);
}

#[test]
fn a_sequence_gets_all_of_its_new_keys_or_none() {
    let case = case(Dtype::Bf16, 4, 2, (64, 48), Strides::Bshd);
    run_all([None, Some(1), Some(3), Some(64)].map(|page_size| AppendCase::new(&case, 3000, page_size)).into());
}

#[test]
fn without_new_keys_only_lengths_are_written() {
    let case = case(Dtype::Fp16, 8, 2, (32, 32), Strides::Bhsd);
    let pages = [None, Some(16)].map(|page_size| AppendCase::new(&case, 0, page_size));
    assert_eq!(pages[0].seqused(), [0, 37, 37, 18, pages[0].seqlens[4], 0, 37, 1]);
    run_all(pages.into());
}

#[test]
fn seqused_may_be_null() {
    let case = case(Dtype::Fp32, 6, 2, (32, 16), Strides::Gaps);
    run_all(
        [None, Some(3)]
            .map(|page_size| AppendCase { wants_seqused: false, ..AppendCase::new(&case, 4, page_size) })
            .into(),
    );
}

#[test]
fn batch_size_may_exceed_the_limit_of_a_grid() {
    let case = case(Dtype::Bf16, 66_000, 1, (8, 2), Strides::Bshd);
    run_all([None, Some(16)].map(|page_size| AppendCase::new(&case, 1, page_size)).into());
}
