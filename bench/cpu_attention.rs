//! Times the CPU backend alone and prints one line for each pass, mask and config: the median and
//! the best of several runs.
//!
//!     cargo bench --bench cpu_attention -- [threads=N] [heads=N] [seqlen=N] [head_dim=N]
//!         [dtype=fp32] [blocks=all]
//!
//! `blocks=all` times the whole space instead of the heuristic's choice; `blocks=64x128` times one
//! config.

use flashtune::backend::Backend;
use flashtune::call::{Call, FeatureArgs, TensorRef};
use flashtune::config::{Config, Family};
use flashtune::cpu::Cpu;
use flashtune::dropout::Dropout;
use flashtune::error::Result;
use flashtune::family;
use flashtune::problem::{Causal, Dtype, Features, Layout, Pass, Problem};
use flashtune::tune::candidates;
use std::collections::HashMap;
use std::time::Duration;

const RUNS: usize = 21;

fn main() -> Result<()> {
    let given: HashMap<String, String> =
        std::env::args().filter_map(|arg| arg.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()))).collect();
    let number = |name: &str, default: i64| given.get(name).map_or(default, |v| v.parse().expect("a number"));
    let dtype = match given.get("dtype").map(String::as_str) {
        Some("fp16") => Dtype::Fp16,
        Some("bf16") => Dtype::Bf16,
        _ => Dtype::Fp32,
    };
    let backend = Backend::Cpu(Cpu::new(number("threads", 0) as usize)?);
    println!("{} with {} threads", backend.device().name, backend.device().sm_count);
    for pass in [Pass::Forward, Pass::Backward] {
        for causal in [Causal::None, Causal::BottomRight] {
            let (seqlen, dim, heads) = (number("seqlen", 1024), number("head_dim", 64), number("heads", 12));
            let problem = Problem {
                pass,
                dtype,
                batch_size: number("batch", 1),
                num_heads_q: heads,
                num_heads_kv: number("heads_kv", heads),
                seqlen_q: number("seqlen_q", seqlen),
                seqlen_k: seqlen,
                head_dim: dim,
                head_dim_v: number("head_dim_v", dim),
                causal,
                dropout: number("dropout", 0) != 0,
                deterministic: false,
                batch_invariant: false,
                features: Features::NONE,
                layout: Layout::Vec8,
            };
            let configs = match given.get("blocks").map(String::as_str) {
                Some("all") => candidates::all(&problem, backend.device()),
                Some(one) => {
                    let (m, n) = one.split_once('x').expect("MxN");
                    let value = |text: &str| text.parse().expect("a number");
                    vec![Config::new(Family::Cpu, [("block_m", value(m)), ("block_n", value(n))])]
                }
                None => vec![family::heuristic(&problem, backend.device())],
            };
            for config in configs {
                let (median, best) = measure(&backend, &problem, &config)?;
                println!(
                    "{pass:?} {causal:?} {config}: median {:.2} ms, best {:.2} ms, {:.0} GFLOP/s",
                    median.as_secs_f64() * 1e3,
                    best.as_secs_f64() * 1e3,
                    problem.flops() / median.as_secs_f64() * 1e-9
                );
            }
        }
    }
    Ok(())
}

fn measure(backend: &Backend, problem: &Problem, config: &Config) -> Result<(Duration, Duration)> {
    let p = problem;
    let executable = backend.build(p, config)?;
    let mut memories = Vec::new();
    let mut tensor = |seqlen: i64, heads: i64, dim: i64| -> Result<TensorRef> {
        let elements = (p.batch_size * seqlen * heads * dim) as usize;
        // Varied values in ±1: zeros or equal values could make arithmetic faster than real data
        // does.
        let bytes: Vec<u8> = (0..elements)
            .flat_map(|i| {
                let value = ((i * 2_654_435_761) % 65521) as f32 / 32760.5 - 1.0;
                match p.dtype {
                    Dtype::Fp32 => value.to_le_bytes().to_vec(),
                    Dtype::Fp16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                    Dtype::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                }
            })
            .collect();
        let memory = backend.allocate(bytes.len())?;
        backend.upload(&memory, &bytes)?;
        let view = TensorRef::packed(memory.address(), seqlen, heads, dim);
        memories.push(memory);
        Ok(view)
    };
    let (heads, kv_heads) = (p.num_heads_q, p.num_heads_kv);
    let (q, out, dout) = (
        tensor(p.seqlen_q, heads, p.head_dim)?,
        tensor(p.seqlen_q, heads, p.head_dim_v)?,
        tensor(p.seqlen_q, heads, p.head_dim_v)?,
    );
    let (k, v) = (tensor(p.seqlen_k, kv_heads, p.head_dim)?, tensor(p.seqlen_k, kv_heads, p.head_dim_v)?);
    let (dq, dk) = (tensor(p.seqlen_q, heads, p.head_dim)?, tensor(p.seqlen_k, kv_heads, p.head_dim)?);
    let dv = tensor(p.seqlen_k, kv_heads, p.head_dim_v)?;
    let lse = backend.allocate((p.batch_size * heads * p.seqlen_q * 4) as usize)?;
    let workspace = backend.allocate(p.workspace_bytes())?;
    let mut call = Call {
        problem: Problem { pass: Pass::Forward, ..*p },
        softmax_scale: (p.head_dim as f32).powf(-0.5),
        dropout: if p.dropout { Dropout { p: 0.1, seed: 1, ..Dropout::NONE } } else { Dropout::NONE },
        q,
        k,
        v,
        out,
        lse: lse.address().cast(),
        dout,
        dq,
        dk,
        dv,
        features: FeatureArgs::NONE,
        most_splits: 0,
        workspace: workspace.address(),
    };
    // The backward pass reads the forward pass's outputs.
    let forward = Problem { pass: Pass::Forward, ..*p };
    backend.build(&forward, &family::heuristic(&forward, backend.device()))?.launch(&call, backend.stream())?;
    call.problem = *p;
    let mut times = Vec::new();
    for _ in 0..RUNS + 2 {
        times.push(backend.time(false, &mut |stream| executable.launch(&call, stream))?.time);
    }
    // The first two warm up.
    let mut times = times.split_off(2);
    times.sort();
    Ok((times[RUNS / 2], times[0]))
}
