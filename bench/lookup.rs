//! Times the lookup of shapes without a record, on the CPU: an H200's choices among the shipped
//! records, without compiling. Prints one line for each kind of problem and pass: the number of
//! problems, the mean and the longest time of the first lookup of a shape.
//!
//!     cargo bench --bench lookup -- [count=N] [seed=N] [longest=N]
//!
//! `longest=N` names the N problems that take longest.

use flashtune::device::{Arch, Device};
use flashtune::plan::key::Class;
use flashtune::plan::{Known, choices, shipped};
use flashtune::problem::{Causal, Dtype, Pass, Problem};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KINDS: [&str; 5] = ["many", "few", "gqa", "cross", "short"];
const HEAD_DIMS: [i64; 11] = [64, 64, 128, 128, 128, 80, 96, 256, 192, 72, 40];
/// A lookup is timed so many times. The least time counts: others wait for the machine.
const RUNS: usize = 3;

/// A linear congruential generator.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    fn pick(&mut self, from: &[i64]) -> i64 {
        from[(self.unit() * from.len() as f64) as usize]
    }

    /// A length between two bounds, uniform in its logarithm.
    fn length(&mut self, low: i64, high: i64) -> i64 {
        let (low, high) = ((low as f64).ln(), (high as f64).ln());
        (low + self.unit() * (high - low)).exp().round() as i64
    }
}

/// A problem of a kind, as bench/random_cases.py draws them.
fn draw(random: &mut Random, kind: &str) -> Problem {
    let head_dim = random.pick(&HEAD_DIMS);
    let (batch_size, heads, heads_kv, seqlen_q, seqlen_k) = match kind {
        "many" => {
            let (heads, seqlen) = (random.pick(&[8, 12, 16, 32]), random.length(256, 8192));
            ((random.length(4096, 32768) / seqlen).clamp(1, 16), heads, heads, seqlen, seqlen)
        }
        "few" => {
            let (heads, seqlen) = (random.pick(&[1, 2, 3, 4]), random.length(1024, 32768));
            (random.pick(&[1, 1, 2]), heads, heads, seqlen, seqlen)
        }
        "gqa" => {
            let (heads_kv, seqlen) = (random.pick(&[1, 1, 2, 4, 8]), random.length(256, 16384));
            (random.pick(&[1, 1, 2, 4]), heads_kv * random.pick(&[4, 7, 8, 16]), heads_kv, seqlen, seqlen)
        }
        "cross" => {
            let (heads, seqlen_q) = (random.pick(&[5, 8, 10, 20]), random.pick(&[300, 1024, 2304, 4096, 9216]));
            (random.pick(&[1, 2, 4]), heads, heads, seqlen_q, random.pick(&[77, 154, 226, 512, 1500]))
        }
        _ => {
            let (heads, seqlen) = (random.pick(&[3, 6, 12, 16]), random.pick(&[49, 64, 77, 128, 197, 256]));
            (random.pick(&[32, 64, 128, 256]), heads, heads, seqlen, seqlen)
        }
    };
    let is_causal = kind != "cross" && random.unit() < 0.5;
    let pass = if random.unit() < 0.5 { Pass::Forward } else { Pass::Backward };
    Problem {
        num_heads_kv: heads_kv,
        seqlen_k,
        causal: if is_causal { Causal::BottomRight } else { Causal::None },
        ..Problem::dense(pass, Dtype::Bf16, batch_size, heads, seqlen_q, head_dim)
    }
}

fn main() {
    let given: HashMap<String, String> =
        std::env::args().filter_map(|arg| arg.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()))).collect();
    let number = |name: &str, default: u64| given.get(name).map_or(default, |v| v.parse().expect("a number"));
    let device = Device::typical(Arch::Sm(9, 0)).expect("sm_90 has a typical GPU");
    let records: Vec<_> = shipped::records(device.arch).into_iter().map(Arc::new).collect();
    let mut random = Random(number("seed", 1));
    let mut timed: Vec<(Duration, &str, Problem)> = Vec::new();
    for at in 0..number("count", 500) as usize {
        let kind = KINDS[at % KINDS.len()];
        let problem = draw(&mut random, kind);
        // A lookup sees the records of the problem's class, as those of an engine do.
        let class = Class::of(&problem);
        let of_class = records.iter().filter(|record| Class::of(&record.problem) == class).cloned();
        let known = Known { shipped: of_class.collect(), ..Known::default() };
        let run = || {
            let start = Instant::now();
            std::hint::black_box(choices(&known, &problem, &device));
            start.elapsed()
        };
        timed.push(((0..RUNS).map(|_| run()).min().expect("there are runs"), kind, problem));
    }
    for pass in [Pass::Forward, Pass::Backward] {
        for kind in KINDS {
            let of_kind = timed.iter().filter(|(_, other, problem)| *other == kind && problem.pass == pass);
            let times: Vec<f64> = of_kind.map(|(time, ..)| time.as_secs_f64() * 1e3).collect();
            let (sum, most) = times.iter().fold((0.0, 0.0f64), |(sum, most), ms| (sum + ms, most.max(*ms)));
            println!(
                "{pass:?} {kind}: {} problems, {:.2} ms, at most {most:.2}",
                times.len(),
                sum / times.len() as f64
            );
        }
    }
    timed.sort_by_key(|(time, ..)| std::cmp::Reverse(*time));
    for (time, kind, problem) in timed.iter().take(number("longest", 0) as usize) {
        println!("{:.2} ms {kind} {problem:?}", time.as_secs_f64() * 1e3);
    }
}
