//! `worker`: the process in which a search measures.

use crate::{flashtune, program};
use flashtune::config::Config;
use flashtune::cpu::Cpu;
use flashtune::problem::{Causal, Dtype, Pass, Problem};
use flashtune::tune::{Bench, Fault, Worker, candidates, worker};
use std::ops::ControlFlow;
use std::process::Stdio;
use std::time::Duration;

const PROBLEM: Problem = Problem {
    num_heads_kv: 2,
    causal: Causal::BottomRight,
    dropout: true,
    ..Problem::dense(Pass::Backward, Dtype::Bf16, 1, 4, 64, 32)
};

#[test]
fn worker_answers_every_question_of_a_search() {
    let args = ["worker", "--device", "cpu"].map(Into::into).to_vec();
    let (patience, build_patience) = (Duration::from_secs(60), Duration::from_secs(60));
    let command = worker::Command { program: program::path().into(), args, patience, build_patience };
    let cpu = Cpu::new(0).unwrap();
    let good: Vec<Config> = candidates::all(&PROBLEM, cpu.device()).into_iter().take(3).collect();
    let configs = [&good[..], &[good[0].clone().with("block_m", 17)]].concat();
    let mut bench = Worker::new(command, &PROBLEM);
    let mut built = vec![None; configs.len()];
    bench.build(&configs, &mut |index, result| {
        built[index] = Some(result.is_ok());
        ControlFlow::Continue(())
    });
    assert_eq!(built, [Some(true), Some(true), Some(true), Some(false)]);
    for config in &good {
        let error = bench.check(config).unwrap();
        assert!(error > 0.0 && error < 0.02, "{error}");
        assert!(bench.sample(config).unwrap().time > Duration::ZERO);
    }
    assert!(matches!(bench.check(&configs[3]), Err(Fault::Candidate(reason)) if reason.contains("block_m is 17")));
}

#[test]
fn worker_ends_with_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = flashtune(folder.path()).args(["worker", "--device", "cpu"]).stdin(Stdio::piped()).spawn().unwrap();
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut child = flashtune(folder.path())
        .args(["worker", "--device", "cpu"])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The pipe stays open, because its end would end the worker too.
    let mut questions = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut questions, b"what?\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
