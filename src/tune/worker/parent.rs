//! The parent's side: a `Bench` whose candidates run in a child. It kills a child that hangs and
//! replaces one that dies. In both cases the candidate at work is to blame.

use super::{Answer, Command, Failure, Question};
use crate::backend::Elapsed;
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;
use crate::tune::search::{Bench, BuildObserver, Fault};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::ops::ControlFlow;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// The time to start a process and open the device, without compiling.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// A candidate below this many operations a second is taken as hung. Small GPUs do ten times as
/// many.
const SLOWEST_FLOPS: f64 = 1e13;

pub struct Worker {
    command: Command,
    problem: Problem,
    running: Option<Running>,
}

struct Running {
    child: Child,
    questions: ChildStdin,
    answers: Receiver<Answer>,
}

/// The reason for a missing answer.
enum Silence {
    Hung,
    Died(String),
}

impl Worker {
    pub fn new(command: Command, problem: &Problem) -> Worker {
        Worker { command, problem: *problem, running: None }
    }

    fn start(&mut self) -> Result<&mut Running> {
        if self.running.is_none() {
            let running = spawn(&self.command).map_err(|error| {
                // The system refuses a process or a thread with EAGAIN.
                let is_refused = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory);
                let status = if is_refused { Status::OutOfMemory } else { Status::Io };
                Error::new(status, format!("starting {}: {error}", self.command.program.display()))
            })?;
            self.running = Some(running);
            let ready = self.ask(&Question::Problem(self.problem)).and_then(|()| self.listen(START_PATIENCE));
            match ready {
                Ok(Answer::Ready) => {}
                Ok(other) => return Err(unexpected(&other)),
                Err(silence) => {
                    return Err(Error::new(Status::Internal, format!("the worker {}", described(&silence))));
                }
            }
        }
        self.running.as_mut().ok_or_else(|| Error::new(Status::Internal, "the worker is gone"))
    }

    fn ask(&mut self, question: &Question) -> Result<(), Silence> {
        let Some(running) = &mut self.running else { return Err(Silence::Died("is gone".into())) };
        let line = serde_json::to_string(question).map_err(|error| Silence::Died(error.to_string()))?;
        match writeln!(running.questions, "{line}") {
            Ok(()) => Ok(()),
            Err(_) => Err(Silence::Died(self.end())),
        }
    }

    fn listen(&mut self, patience: Duration) -> Result<Answer, Silence> {
        let Some(running) = &mut self.running else { return Err(Silence::Died("is gone".into())) };
        match running.answers.recv_timeout(patience) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                self.end();
                Err(Silence::Hung)
            }
            Err(RecvTimeoutError::Disconnected) => Err(Silence::Died(self.end())),
        }
    }

    /// Ends the child and says how it ended. It is replaced when it is next needed.
    fn end(&mut self) -> String {
        let Some(mut running) = self.running.take() else { return "is gone".into() };
        drop(running.questions);
        // A child that closed its output gets a moment to exit, so that its status says why.
        for _ in 0..20 {
            match running.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Ok(Some(status)) => {
                    return match status.signal() {
                        Some(signal) => format!("was ended by signal {signal}"),
                        None => format!("ended with {}", status.code().unwrap_or_default()),
                    };
                }
                Err(_) => break,
            }
        }
        let _ = running.child.kill();
        let _ = running.child.wait();
        "was killed".into()
    }

    /// One step of one candidate.
    fn step(&mut self, question: &Question) -> Result<Answer, Fault> {
        self.start().map_err(Fault::Bench)?;
        let is_build = matches!(question, Question::Build(_));
        let patience = if is_build { self.command.build_patience } else { self.run_patience() };
        let answer = self.ask(question).and_then(|()| self.listen(patience));
        let reason = match answer {
            Ok(Answer::Failed(failure)) => return Err(self.fault(failure)),
            Ok(answer) => return Ok(answer),
            Err(Silence::Hung) => format!("hung: no answer within {patience:.0?}, the process was ended"),
            Err(silence) => format!("crashed: the process {}", described(&silence)),
        };
        // A compiler hangs or crashes whatever the problem's size.
        Err(if is_build { Fault::Candidate(reason) } else { Fault::Here(reason) })
    }

    fn run_patience(&self) -> Duration {
        let runs = Duration::try_from_secs_f64(self.problem.flops() / SLOWEST_FLOPS).unwrap_or(Duration::MAX);
        self.command.patience.saturating_add(runs)
    }

    fn fault(&mut self, failure: Failure) -> Fault {
        match failure {
            Failure::Candidate { reason, poisoned } => {
                if !poisoned {
                    return Fault::Candidate(reason);
                }
                self.end();
                Fault::Here(reason)
            }
            Failure::Child { status, message } => Fault::Bench(Error::new(known_status(status), message)),
        }
    }

    /// Builds the batch in one child. Returns the configs that the child fell silent before
    /// answering for.
    fn build_batch(&mut self, configs: &[Config], done: &mut BuildObserver) -> ControlFlow<(), Vec<usize>> {
        let mut waiting: Vec<usize> = (0..configs.len()).collect();
        if let Err(error) = self.start() {
            return done(0, Err(Fault::Bench(error))).map_continue(|()| Vec::new());
        }
        if self.ask(&Question::Build(configs.to_vec())).is_err() {
            return ControlFlow::Continue(waiting);
        }
        while !waiting.is_empty() {
            let patience = self.command.build_patience;
            let (index, result) = match self.listen(patience) {
                Ok(Answer::Built { index, spill_bytes }) => (index, Ok(spill_bytes)),
                Ok(Answer::NotBuilt { index, failure }) => (index, Err(self.fault(failure))),
                Ok(other) => {
                    let error = unexpected(&other);
                    self.end();
                    return done(0, Err(Fault::Bench(error))).map_continue(|()| Vec::new());
                }
                Err(_) => return ControlFlow::Continue(waiting),
            };
            waiting.retain(|other| *other != index);
            if index < configs.len() && done(index, result).is_break() {
                // The child is compiling the rest for nothing. A new child finds finished cubins in
                // the cache.
                if !waiting.is_empty() {
                    self.end();
                }
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(waiting)
    }
}

impl Bench for Worker {
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver) {
        let ControlFlow::Continue(unanswered) = self.build_batch(configs, done) else { return };
        // One of them crashed or hung the compiler. Built one at a time, it shows.
        for index in unanswered {
            let flow = match self.step(&Question::Build(vec![configs[index].clone()])) {
                Ok(Answer::Built { spill_bytes, .. }) => done(index, Ok(spill_bytes)),
                Ok(Answer::NotBuilt { failure, .. }) => {
                    let fault = self.fault(failure);
                    done(index, Err(fault))
                }
                Ok(other) => done(index, Err(Fault::Bench(unexpected(&other)))),
                Err(fault) => done(index, Err(fault)),
            };
            if flow.is_break() {
                return;
            }
        }
    }

    fn check(&mut self, config: &Config) -> Result<f64, Fault> {
        match self.step(&Question::Check(config.clone()))? {
            Answer::Checked { error } => Ok(error),
            other => Err(Fault::Bench(unexpected(&other))),
        }
    }

    fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault> {
        match self.step(&Question::Sample(config.clone()))? {
            Answer::Sampled { ns, sm_clock_hz } => Ok(Elapsed { time: Duration::from_nanos(ns), sm_clock_hz }),
            other => Err(Fault::Bench(unexpected(&other))),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

fn spawn(command: &Command) -> std::io::Result<Running> {
    let mut child = std::process::Command::new(&command.program)
        .args(&command.args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // A process group of its own: Ctrl-C on the terminal then reaches only the parent, which
        // ends the child in order.
        .process_group(0)
        .spawn()?;
    let (Some(questions), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(std::io::Error::other("the child has no pipes"));
    };
    let (sender, answers) = mpsc::channel();
    // The thread ends with the child's output. It skips lines that are no answer, which a library
    // may print.
    let read_answers = move || {
        for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
            if let Ok(answer) = serde_json::from_str(&line)
                && sender.send(answer).is_err()
            {
                break;
            }
        }
    };
    // The panic hook of the C face knows our threads by their names.
    std::thread::Builder::new().name("flashtune-answers".into()).spawn(read_answers)?;
    Ok(Running { child, questions, answers })
}

fn described(silence: &Silence) -> &str {
    match silence {
        Silence::Hung => "did not answer in time",
        Silence::Died(how) => how,
    }
}

fn unexpected(answer: &Answer) -> Error {
    Error::new(Status::Internal, format!("the worker answered {answer:?} to another question"))
}

/// The statuses that `rig` blames on the bench.
fn known_status(status: i32) -> Status {
    [Status::NoDevice, Status::NoCompiler, Status::OutOfMemory]
        .into_iter()
        .find(|s| *s as i32 == status)
        .unwrap_or(Status::Internal)
}
