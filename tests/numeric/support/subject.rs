//! Subject: the backend under test, its built executables, and runs of a case on it.
//!
//! A GPU builds one executable per problem class and config, which takes about a second.
//! Executables are kept for the process, and `build_all` makes those of a whole test in parallel.

use super::buffer::{Array, Buffer, upload_u64};
use super::case::{Case, Data, Kind, Random};
use super::extra_buffers::ExtraBuffers;
use flashtune::backend::{Backend, Executable, Memory};
use flashtune::call::Call;
use flashtune::config::Config;
use flashtune::family;
use flashtune::plan::key::Class;
use flashtune::problem::{Dtype, Pass, Problem};
use flashtune::tune::candidates;
use flashtune::{cpu, kernel};
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

pub struct Subject {
    pub backend: Backend,
    built: Mutex<HashMap<String, Arc<Executable>>>,
}

/// The forward results, (batch, seqlen, heads, dim) and (batch, heads, seqlen). Unused rows are 0
/// and -inf.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
    /// Empty if dbias is not requested.
    pub dbias: Vec<f32>,
    /// Empty without sinks.
    pub dsinks: Vec<f32>,
}

impl Subject {
    pub fn cpu(num_threads: usize) -> Subject {
        Subject::new(Backend::Cpu(cpu::Cpu::new(num_threads).expect("the CPU backend starts on every machine")))
    }

    /// None without a GPU, with a message; `FLASHTUNE_REQUIRE_GPU=1` makes that a failure.
    pub fn gpu() -> Option<Subject> {
        match kernel::Gpu::new(0, None, None) {
            Ok(gpu) => Some(Subject::new(Backend::Cuda(gpu))),
            Err(error) if std::env::var("FLASHTUNE_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
                panic!("FLASHTUNE_REQUIRE_GPU=1, but there is no usable GPU: {error}")
            }
            Err(error) => {
                eprintln!("SKIPPED: no usable GPU, so nothing was tested: {error}");
                None
            }
        }
    }

    fn new(backend: Backend) -> Subject {
        Subject { backend, built: Mutex::default() }
    }

    pub fn dtypes(&self) -> &'static [Dtype] {
        match self.backend {
            Backend::Cuda(_) => &[Dtype::Fp16, Dtype::Bf16, Dtype::Fp32],
            Backend::Cpu(_) => &[Dtype::Fp32, Dtype::Fp16, Dtype::Bf16],
        }
    }

    pub fn is_gpu(&self) -> bool {
        matches!(self.backend, Backend::Cuda(_))
    }

    pub fn heuristic(&self, case: &Case, pass: Pass) -> Config {
        family::heuristic(&case.problem(pass), self.backend.device())
    }

    /// The heuristic config of each family that serves the case, the preferred family's first, then
    /// up to `extra` others. The case's seed picks these, with the same chance for every family,
    /// however many configs it has.
    pub fn configs(&self, case: &Case, pass: Pass, extra: usize) -> Vec<Config> {
        let (problem, device) = (case.problem(pass), self.backend.device());
        let mut picked = family::heuristics(&problem, device);
        let mut others = candidates::all(&problem, device);
        others.retain(|config| !picked.contains(config));
        let families = family::families(&problem, device);
        let mut random = Random::new(case.seed ^ 0xc0f1);
        for pick in 0..extra as u64 {
            let family = families[((case.seed + pick) % families.len() as u64) as usize];
            let of_family: Vec<usize> = (0..others.len()).filter(|index| others[*index].family == family).collect();
            if !of_family.is_empty() {
                picked.push(others.swap_remove(random.pick(&of_family)));
            }
        }
        picked
    }

    /// Builds the executables of a test in parallel.
    pub fn build_all(&self, work: &[(Problem, Config)]) {
        work.par_iter().for_each(|(problem, config)| {
            self.executable(problem, config);
        });
    }

    pub fn executable(&self, problem: &Problem, config: &Config) -> Arc<Executable> {
        let key = format!("{} {config}", Class::of(problem));
        if let Some(executable) = self.built.lock().unwrap().get(&key) {
            return executable.clone();
        }
        let built = self.backend.build(problem, config).unwrap_or_else(|error| panic!("build {key}: {error}"));
        self.built.lock().unwrap().entry(key).or_insert(Arc::new(built)).clone()
    }

    pub fn forward(&self, case: &Case, data: &Data, config: &Config) -> Forward {
        self.forward_with(case, data, |_| (), config)
    }

    /// Runs forward after `change` replaced some of the call's arguments.
    pub fn forward_with(&self, case: &Case, data: &Data, change: impl Fn(&mut Call), config: &Config) -> Forward {
        self.forward_runs(case, data, change, config, 1)
    }

    /// Runs forward `runs` times on the same tensors and returns the last result. Outputs are
    /// poisoned before each run, and all runs must leave the same bytes.
    pub fn forward_runs(
        &self,
        case: &Case,
        data: &Data,
        change: impl Fn(&mut Call),
        config: &Config,
        runs: usize,
    ) -> Forward {
        let problem = case.problem(Pass::Forward);
        let buffers = self.inputs(case, data, &[Kind::Q, Kind::K, Kind::V]);
        let out = Buffer::output(&self.backend, case, Kind::Out);
        let extras = ExtraBuffers::new(&self.backend, case, data, None);
        let lse = Array::output(&self.backend, case.lse_len() * 4);
        let workspace = Array::output(&self.backend, problem.workspace_bytes());
        let mut call = Call {
            out: out.view(),
            lse: lse.address().cast(),
            features: extras.args(case),
            workspace: workspace.address(),
            ..call(case, problem, &buffers)
        };
        change(&mut call);
        let bytes = || (out.bytes(&self.backend), lse.bytes(&self.backend));
        self.launch(case, &call, config);
        let first = (runs > 1).then(bytes);
        for run in 1..runs {
            out.poison(&self.backend);
            lse.poison(&self.backend);
            self.launch(case, &call, config);
            assert!(first == Some(bytes()), "run {run} differs: {case}, {config}");
        }
        workspace.check_guards(&self.backend, "workspace");
        Forward {
            out: out.read_output(&self.backend, "out"),
            lse: lse.read_output(&self.backend, "lse", Some(&case.used_lse())),
        }
    }

    /// O alone; the pointer to LSE is NULL.
    pub fn forward_without_lse(&self, case: &Case, data: &Data, config: &Config) -> Vec<f32> {
        let problem = case.problem(Pass::Forward);
        let buffers = self.inputs(case, data, &[Kind::Q, Kind::K, Kind::V]);
        let out = Buffer::output(&self.backend, case, Kind::Out);
        let workspace = Array::output(&self.backend, problem.workspace_bytes());
        let extras = ExtraBuffers::new(&self.backend, case, data, None);
        let (features, workspace) = (extras.args(case), workspace.address());
        let call = Call { out: out.view(), features, workspace, ..call(case, problem, &buffers) };
        self.launch(case, &call, config);
        out.read_output(&self.backend, "out")
    }

    /// Gradients from O and LSE of the forward pass.
    pub fn backward(&self, case: &Case, data: &Data, forward: &Forward, config: &Config) -> Gradients {
        let problem = case.problem(Pass::Backward);
        let buffers = self.inputs(case, data, &[Kind::Q, Kind::K, Kind::V, Kind::Dout]);
        let out = Buffer::input(&self.backend, case, Kind::Out, &forward.out);
        let lse_of_row = |(lse, is_used): (&f32, bool)| if is_used { *lse } else { f32::NAN };
        let lse: Vec<f32> = forward.lse.iter().zip(case.used_lse()).map(lse_of_row).collect();
        let lse = Array::input(&self.backend, &lse);
        let extras = ExtraBuffers::new(&self.backend, case, data, Some(&forward.lse));
        let output = |kind| Buffer::output(&self.backend, case, kind);
        let (dq, dk, dv) = (output(Kind::Dq), output(Kind::Dk), output(Kind::Dv));
        let workspace = Array::output(&self.backend, problem.workspace_bytes());
        let call = Call {
            out: out.view(),
            lse: lse.address().cast(),
            dout: buffers[3].view(),
            dq: dq.view(),
            dk: dk.view(),
            dv: dv.view(),
            features: extras.args(case),
            workspace: workspace.address(),
            ..call(case, problem, &buffers)
        };
        self.launch(case, &call, config);
        workspace.check_guards(&self.backend, "workspace");
        lse.check_guards(&self.backend, "lse");
        Gradients {
            dq: dq.read_output(&self.backend, "dq"),
            dk: dk.read_output(&self.backend, "dk"),
            dv: dv.read_output(&self.backend, "dv"),
            dbias: extras.read_dbias(&self.backend),
            dsinks: extras.read_dsinks(&self.backend),
        }
    }

    fn inputs(&self, case: &Case, data: &Data, kinds: &[Kind]) -> Vec<Buffer> {
        let values = |kind: &Kind| match kind {
            Kind::Q => &data.q,
            Kind::K => &data.k,
            Kind::V => &data.v,
            _ => &data.dout,
        };
        kinds.iter().map(|kind| Buffer::input(&self.backend, case, *kind, values(kind))).collect()
    }

    /// Even seeds pass the dropout seed and offset by value, odd seeds through device memory.
    fn launch(&self, case: &Case, call: &Call, config: &Config) {
        let mut call = *call;
        let memory: [Memory; 2] =
            [call.dropout.seed, call.dropout.offset].map(|value| upload_u64(&self.backend, value));
        if case.seed % 2 == 1 {
            call.dropout.seed_ptr = memory[0].address().cast();
            call.dropout.offset_ptr = memory[1].address().cast();
            (call.dropout.seed, call.dropout.offset) = (!0, !0);
        }
        let executable = self.executable(&call.problem, config);
        let launched = executable.launch(&call, self.backend.stream()).and_then(|()| self.backend.synchronize());
        launched.unwrap_or_else(|error| panic!("{error}\n  case: {case}\n  config: {config}"));
    }
}

/// A call with the first three tensors; everything else is NULL.
fn call(case: &Case, problem: Problem, inputs: &[Buffer]) -> Call {
    let inputs = [inputs[0].view(), inputs[1].view(), inputs[2].view()];
    Call::of_inputs(problem, case.softmax_scale, case.dropout(), inputs)
}
