//! Presets: the attention of real models at their usual shapes, and the grids that flashtune is
//! measured on.
//!
//! Data only. A preset gives its problems in both passes, except shapes of one query, which have no
//! backward pass.

use flashtune::problem::{Causal, Dtype, Eight, EightBits, Features, Layout, Pass, Problem, Varlen};

struct Preset {
    name: &'static str,
    heads: (i64, i64),
    head_dim: i64,
    causal: bool,
    dtype: Dtype,
    /// Whether training this model drops attention weights.
    dropout: bool,
    /// (batch_size, seqlen_q, seqlen_k)
    shapes: &'static [(i64, i64, i64)],
}

use Dtype::{Bf16, Fp16};

#[rustfmt::skip]
const MODELS: &[Preset] = &[
    Preset { name: "gpt2", heads: (12, 12), head_dim: 64, causal: true, dtype: Bf16, dropout: true,
        shapes: &[(1, 1024, 1024), (8, 1024, 1024), (16, 512, 512), (8, 1, 1024)] },
    Preset { name: "bert-large", heads: (16, 16), head_dim: 64, causal: false, dtype: Bf16, dropout: true,
        shapes: &[(1, 512, 512), (8, 512, 512), (64, 128, 128)] },
    Preset { name: "llama-3-8b", heads: (32, 8), head_dim: 128, causal: true, dtype: Bf16, dropout: false,
        shapes: &[(1, 2048, 2048), (2, 4096, 4096), (1, 8192, 8192), (8, 1, 4096)] },
    Preset { name: "llama-3-70b", heads: (64, 8), head_dim: 128, causal: true, dtype: Bf16, dropout: false,
        shapes: &[(1, 2048, 2048), (2, 4096, 4096), (1, 8192, 8192), (8, 1, 4096)] },
    Preset { name: "mistral-7b", heads: (32, 8), head_dim: 128, causal: true, dtype: Bf16, dropout: false,
        shapes: &[(1, 4096, 4096), (4, 4096, 4096), (1, 16384, 16384)] },
    // Images of 224 and 384 pixels in patches of 16 and 14, and a class token.
    Preset { name: "vit-l", heads: (16, 16), head_dim: 64, causal: false, dtype: Bf16, dropout: false,
        shapes: &[(1, 197, 197), (64, 197, 197), (16, 577, 577)] },
    // The three levels of the U-Net at 512 x 512 pixels: each attends to itself and to 77 tokens of
    // text. Batch 2 is one image with classifier-free guidance.
    Preset { name: "stable-diffusion", heads: (8, 8), head_dim: 40, causal: false, dtype: Fp16, dropout: false,
        shapes: &[(2, 4096, 4096), (8, 4096, 4096), (2, 4096, 77)] },
    Preset { name: "stable-diffusion", heads: (8, 8), head_dim: 80, causal: false, dtype: Fp16, dropout: false,
        shapes: &[(2, 1024, 1024), (8, 1024, 1024), (2, 1024, 77)] },
    Preset { name: "stable-diffusion", heads: (8, 8), head_dim: 160, causal: false, dtype: Fp16, dropout: false,
        shapes: &[(2, 256, 256), (8, 256, 256), (2, 256, 77)] },
    // Gemma 2B has one key-value head, 7B one for each query head.
    Preset { name: "gemma", heads: (8, 1), head_dim: 256, causal: true, dtype: Bf16, dropout: false,
        shapes: &[(1, 2048, 2048), (1, 8192, 8192)] },
    Preset { name: "gemma", heads: (16, 16), head_dim: 256, causal: true, dtype: Bf16, dropout: false,
        shapes: &[(1, 2048, 2048), (4, 4096, 4096), (1, 8192, 8192)] },
];

/// The bench grid: 16k tokens in total and 2048 / head_dim heads.
const GRID: &str = "grid";
/// Head dims that other libraries pad: 4 x 16 heads x 4096.
const ODD_DIMS: &str = "odd-dims";
/// Dropout at head dims 64 and 128: 4 x 16 heads x 4096.
const DROPOUT: &str = "dropout";
/// One query against K/V caches of every size, as in bench/decode.py.
const DECODE: &str = "decode";
/// The same with varlen keys in pages of 16 and 64, as flash-attn's `flash_attn_with_kvcache` has
/// them.
const DECODE_PAGED: &str = "decode-paged";
/// A few queries against K/V caches, as in speculative decoding.
const SPECULATIVE: &str = "speculative";
/// Llama-3-8B behind a server: packed prompts, and prompts, chunks and single tokens over a cache
/// in pages of 16.
const LLAMA_SERVING: &str = "llama-3-8b-serving";
/// Llama-3-70B on one of eight GPUs behind a server whose K/V cache is e4m3, in pages of 16 and 64:
/// single tokens and chunks of prompts.
const LLAMA_FP8_SERVING: &str = "llama-3-70b-fp8-serving";
/// What a library is asked for most: training and decoding at head dims 64 and 128. `make pack`
/// compiles its kernels into the pack beside the library.
const COMMON: &str = "common";
/// The problems of all presets but "common".
const ALL: &str = "all";

pub fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = MODELS
        .iter()
        .map(|preset| preset.name)
        .chain([
            GRID,
            ODD_DIMS,
            DROPOUT,
            DECODE,
            DECODE_PAGED,
            SPECULATIVE,
            LLAMA_SERVING,
            LLAMA_FP8_SERVING,
            COMMON,
            ALL,
        ])
        .collect();
    names.dedup();
    names
}

/// The problems of a preset; None if there is no such preset.
pub fn problems(name: &str) -> Option<Vec<Problem>> {
    let forward: Vec<Problem> = match name {
        GRID => grid(),
        ODD_DIMS => [40, 72, 80, 96, 112, 160, 192].into_iter().flat_map(|dim| wide(dim, false)).collect(),
        DROPOUT => [64, 128].into_iter().flat_map(|dim| wide(dim, true)).collect(),
        DECODE => decode(&DECODE_HEADS, &[1, 4, 16, 32, 64, 128], &DECODE_LENGTHS).collect(),
        DECODE_PAGED => decode_paged(),
        // Speculative decoding and serving have no backward pass.
        SPECULATIVE => return Some(speculative()),
        LLAMA_SERVING => return Some(llama_serving()),
        LLAMA_FP8_SERVING => return Some(llama_fp8_serving()),
        COMMON => common(),
        ALL => {
            let others = names().into_iter().filter(|name| ![ALL, COMMON].contains(name));
            return Some(others.filter_map(problems).flatten().collect());
        }
        model if MODELS.iter().any(|preset| preset.name == model) => {
            MODELS.iter().filter(|preset| preset.name == model).flat_map(of_model).collect()
        }
        _ => return None,
    };
    Some(forward.into_iter().flat_map(passes).collect())
}

fn of_model(preset: &Preset) -> impl Iterator<Item = Problem> + '_ {
    let drops = if preset.dropout { &[false, true][..] } else { &[false] };
    preset.shapes.iter().flat_map(move |(batch_size, seqlen_q, seqlen_k)| {
        // Decoding has no dropout.
        drops.iter().filter(move |dropout| *seqlen_q > 1 || !**dropout).map(move |dropout| Problem {
            dtype: preset.dtype,
            num_heads_kv: preset.heads.1,
            seqlen_k: *seqlen_k,
            dropout: *dropout,
            ..square(*batch_size, preset.heads.0, *seqlen_q, preset.head_dim, preset.causal)
        })
    })
}

fn grid() -> Vec<Problem> {
    let mut problems = Vec::new();
    for head_dim in [64, 128, 256] {
        for seqlen in [512, 1024, 2048, 4096, 8192, 16384] {
            for causal in [false, true] {
                problems.push(square(16384 / seqlen, 2048 / head_dim, seqlen, head_dim, causal));
            }
        }
    }
    problems
}

/// (num_heads_q, num_heads_kv, head_dim)
const DECODE_HEADS: [(i64, i64, i64); 5] = [(32, 8, 128), (32, 32, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256)];
const DECODE_LENGTHS: [i64; 7] = [1024, 4096, 8192, 16384, 32768, 65536, 131_072];
/// The largest K/V cache in bytes. Larger problems use the record of the nearest one.
const LARGEST_CACHE: f64 = 4.0 * (1u64 << 30) as f64;

/// Up to 16, batch sizes are a factor of four apart, so that every one between is within a factor
/// of two of a preset. From 16 on the factor is two, since about there the sequences alone fill a
/// GPU.
fn decode(heads: &[(i64, i64, i64)], batches: &[i64], lengths: &[i64]) -> impl Iterator<Item = Problem> {
    let mut problems = Vec::new();
    for (num_heads_q, num_heads_kv, head_dim) in heads {
        for batch_size in batches {
            for seqlen_k in lengths {
                let query = square(*batch_size, *num_heads_q, 1, *head_dim, false);
                problems.push(Problem { num_heads_kv: *num_heads_kv, seqlen_k: *seqlen_k, ..query });
            }
        }
    }
    problems.into_iter().filter(|problem| problem.key_value_bytes() <= LARGEST_CACHE)
}

fn decode_paged() -> Vec<Problem> {
    let of_pages = |page_size| Features { paged: Some(page_size), varlen: Some(Varlen::default()), ..Features::NONE };
    let [llama, _, wide_group, narrow, wide] = DECODE_HEADS;
    let heads = [llama, wide_group, narrow, wide];
    let problems = decode(&heads, &[1, 8, 64], &[4096, 32768]);
    problems.flat_map(|problem| [16, 64].map(|size| Problem { features: of_pages(size), ..problem })).collect()
}

fn speculative() -> Vec<Problem> {
    let [llama, _, wide_group, narrow, _] = DECODE_HEADS;
    let heads = [llama, wide_group, narrow];
    let problems = decode(&heads, &[1, 16], &[4096, 32768]);
    let causal = Causal::BottomRight;
    problems.flat_map(|problem| [4, 16].map(|seqlen_q| Problem { seqlen_q, causal, ..problem })).collect()
}

/// The model's context is 8192 tokens.
fn llama_serving() -> Vec<Problem> {
    const BATCHES: [i64; 4] = [1, 8, 32, 128];
    const LENGTHS: [i64; 3] = [512, 2048, 8192];
    /// (batch_size, seqlen_q, seqlen_k) of the longest sequence. Queries are packed.
    const OVER_PAGES: [(i64, i64, i64); 7] = [
        (1, 512, 512),
        (1, 2048, 2048),
        (1, 8192, 8192),
        (1, 512, 8192),
        (8, 512, 4096),
        (64, 512, 8192),
        (32, 1, 8192),
    ];
    const PACKED: [(i64, i64); 3] = [(1, 2048), (1, 8192), (8, 1024)];
    const PAGE: Option<i64> = Some(16);
    let of = |(batch_size, seqlen_q, seqlen_k), total_q, total_k, paged| Problem {
        num_heads_kv: 8,
        seqlen_k,
        features: Features { varlen: Some(Varlen { total_q, total_k, padded_q: false }), paged, ..Features::NONE },
        ..square(batch_size, 32, seqlen_q, 128, true)
    };
    let single = BATCHES.iter().flat_map(|batch| LENGTHS.map(|keys| of((*batch, 1, keys), None, None, PAGE)));
    let over_pages =
        OVER_PAGES.map(|(batch, queries, keys)| of((batch, queries, keys), Some(batch * queries), None, PAGE));
    let packed = PACKED.map(|(batch, seqlen)| {
        let total = Some(batch * seqlen);
        of((batch, seqlen, seqlen), total, total, None)
    });
    single.chain(over_pages).chain(packed).map(Problem::without_idle_causal).collect()
}

/// 64 query heads and 8 key-value heads over eight GPUs. Scales are one for each head, as servers
/// calibrate them, and one for each token.
fn llama_fp8_serving() -> Vec<Problem> {
    const TOKENS: [(i64, i64, i64); 6] =
        [(1, 1, 8192), (8, 1, 8192), (32, 1, 8192), (128, 1, 8192), (32, 1, 32768), (128, 1, 2048)];
    const CHUNKS: [(i64, i64, i64); 3] = [(1, 512, 8192), (1, 2048, 8192), (8, 512, 8192)];
    let of = |(batch_size, seqlen_q, seqlen_k): (i64, i64, i64), page_size, keys_per_scale| {
        let total_q = (seqlen_q > 1).then_some(batch_size * seqlen_q);
        let problem = Problem {
            num_heads_kv: 1,
            seqlen_k,
            features: Features {
                varlen: Some(Varlen { total_q, total_k: None, padded_q: false }),
                paged: Some(page_size),
                eight_bits: Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale }),
                ..Features::NONE
            },
            ..square(batch_size, 8, seqlen_q, 128, true)
        };
        Problem { layout: problem.widest_layout(), ..problem }.without_idle_causal()
    };
    let shapes = TOKENS.into_iter().chain(CHUNKS);
    shapes.flat_map(|shape| [(16, 0), (16, 1), (64, 0)].map(|(page_size, keys)| of(shape, page_size, keys))).collect()
}

/// Dense passes with up to 16k tokens, in batches of few and of many tiles; one query over
/// contiguous caches, whose lengths the host or the device knows; in bf16 also over pages, and
/// packed sequences. For most other shapes a lookup chooses the config of one of these
/// (docs/packs.md).
fn common() -> Vec<Problem> {
    const HEADS: [(i64, i64, i64); 4] = [(32, 8, 128), (16, 16, 128), (16, 16, 64), (32, 8, 64)];
    const SHAPES: [(i64, i64); 16] = [
        (4, 128),
        (32, 128),
        (8, 256),
        (32, 256),
        (1, 512),
        (4, 512),
        (16, 512),
        (1, 1024),
        (2, 1024),
        (16, 1024),
        (1, 2048),
        (4, 2048),
        (8, 2048),
        (1, 4096),
        (4, 4096),
        (2, 8192),
    ];
    const PACKED: [(i64, i64); 3] = [(32, 512), (8, 1024), (1, 4096)];
    const CACHE_HEADS: [(i64, i64, i64); 6] =
        [(32, 8, 128), (32, 32, 128), (64, 8, 128), (32, 8, 64), (32, 32, 64), (16, 16, 64)];
    const CACHES: [(i64, i64); 6] = [(1, 512), (1, 32768), (4, 1024), (16, 1024), (16, 8192), (64, 2048)];
    const PAGES: [i64; 3] = [16, 64, 256];
    let on_device = Features { varlen: Some(Varlen::default()), ..Features::NONE };
    let mut problems = Vec::new();
    for dtype in [Bf16, Fp16] {
        for (num_heads_q, num_heads_kv, head_dim) in HEADS {
            let of = |(batch_size, seqlen), causal| Problem {
                dtype,
                num_heads_kv,
                ..square(batch_size, num_heads_q, seqlen, head_dim, causal)
            };
            for causal in [false, true] {
                problems.extend(SHAPES.map(|shape| of(shape, causal)));
                if dtype == Bf16 {
                    let packed = |shape: (i64, i64)| {
                        let total = Some(shape.0 * shape.1);
                        let varlen = Some(Varlen { total_q: total, total_k: total, padded_q: false });
                        Problem { features: Features { varlen, ..Features::NONE }, ..of(shape, causal) }
                    };
                    problems.extend(PACKED.map(packed));
                }
            }
        }
        for (num_heads_q, num_heads_kv, head_dim) in CACHE_HEADS {
            for (batch_size, seqlen_k) in CACHES {
                let query = square(batch_size, num_heads_q, 1, head_dim, false);
                let over = |features| Problem { dtype, num_heads_kv, seqlen_k, features, ..query };
                problems.extend([Features::NONE, on_device].map(over));
                if dtype == Bf16 {
                    problems.extend(PAGES.map(|size| over(Features { paged: Some(size), ..on_device })));
                }
            }
        }
    }
    problems
}

fn wide(head_dim: i64, dropout: bool) -> [Problem; 2] {
    [false, true].map(|causal| Problem { dropout, ..square(4, 16, 4096, head_dim, causal) })
}

fn square(batch_size: i64, heads: i64, seqlen: i64, head_dim: i64, causal: bool) -> Problem {
    Problem {
        causal: if causal { Causal::BottomRight } else { Causal::None },
        layout: Layout::widest(Dtype::Bf16, [head_dim]),
        ..Problem::dense(Pass::Forward, Bf16, batch_size, heads, seqlen, head_dim)
    }
}

fn passes(forward: Problem) -> impl Iterator<Item = Problem> {
    let backward = (forward.seqlen_q > 1).then_some(Problem { pass: Pass::Backward, ..forward });
    std::iter::once(forward).chain(backward)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::config::Config;
    use flashtune::device::{Arch, Device};
    use flashtune::kernel::render_pass;
    use flashtune::plan::key::Class;
    use flashtune::plan::{Known, choices, shipped};
    use std::collections::{HashMap, HashSet};
    use std::sync::Arc;

    /// A pack of `common` has to serve more than its own shapes. These have other heads, batches
    /// and lengths.
    #[test]
    fn most_other_shapes_choose_kernels_of_common() {
        const HEADS: [(i64, i64, i64); 4] = [(64, 8, 128), (28, 4, 128), (12, 12, 64), (32, 32, 64)];
        const SHAPES: [(i64, i64); 8] =
            [(4, 128), (2, 512), (4, 1024), (6, 1500), (2, 2048), (3, 3000), (1, 8192), (12, 577)];
        let arch = Arch::Sm(9, 0);
        let known = Known { shipped: shipped::records(arch).into_iter().map(Arc::new).collect(), ..Known::default() };
        let h200 = Device::typical(arch).unwrap();
        let gpus = [h200.clone(), Device::named(arch, "NVIDIA H100 80GB HBM3").unwrap()];
        let of_others = HEADS.into_iter().flat_map(|(num_heads_q, num_heads_kv, head_dim)| {
            SHAPES.into_iter().flat_map(move |(batch_size, seqlen)| {
                [false, true]
                    .map(|causal| Problem { num_heads_kv, ..square(batch_size, num_heads_q, seqlen, head_dim, causal) })
            })
        });
        let others: Vec<Problem> = of_others.flat_map(passes).collect();
        let classes: HashSet<Class> = others.iter().map(Class::of).collect();
        let of_classes = problems(COMMON).unwrap().into_iter().filter(|problem| classes.contains(&Class::of(problem)));
        let mut rendered: HashMap<(Class, Config), Vec<String>> = HashMap::new();
        let mut texts = |problem: &Problem, gpu: &Device| {
            let config = choices(&known, problem, gpu).swap_remove(0).config;
            let kernels = rendered.entry((Class::of(problem), config.clone())).or_insert_with(|| {
                render_pass(problem, &config, arch).unwrap().into_iter().map(|(_, text)| text).collect()
            });
            kernels.clone()
        };
        let common: HashSet<String> = of_classes
            .flat_map(|problem| gpus.iter().flat_map(|gpu| texts(&problem, gpu)).collect::<Vec<_>>())
            .collect();
        for gpu in &gpus {
            let missing = others.iter().filter(|problem| !texts(problem, gpu).iter().all(|text| common.contains(text)));
            let (missing, all) = (missing.count(), others.len());
            assert!(missing * 8 <= all, "{missing} of {all} on {}", gpu.name);
        }
    }
}
