//! The child's side: reads questions and answers them with a `Rig`. It ends when its input ends or
//! its device is lost.

use super::{Answer, Failure, Question};
use crate::backend::{Backend, Elapsed};
use crate::error::{Error, Result, Status};
use crate::tune::rig::Rig;
use crate::tune::search::{Bench, Fault};
use std::io::Write;
use std::ops::ControlFlow;

/// Answers until `questions` (lines) ends. A candidate that loses the device's context ends it
/// early, after its answer.
pub fn serve(backend: &Backend, mut questions: impl Iterator<Item = String>, mut answers: impl Write) -> Result<()> {
    let Some(first) = questions.next() else { return Ok(()) };
    let Question::Problem(problem) = read(&first)? else {
        return Err(Error::invalid("the first line must be a problem"));
    };
    let mut rig = Rig::new(backend, &problem);
    write(&mut answers, &Answer::Ready)?;
    for line in questions {
        let mut lost = false;
        let mut fail = |fault| {
            lost |= matches!(fault, Fault::Poisoned(_));
            failure(fault)
        };
        match read(&line)? {
            Question::Problem(_) => return Err(Error::invalid("the problem was given before")),
            Question::Build(configs) => {
                let mut written = Ok(());
                rig.build(&configs, &mut |index, result| {
                    let answer = match result {
                        Ok(spill_bytes) => Answer::Built { index, spill_bytes },
                        Err(fault) => Answer::NotBuilt { index, failure: fail(fault) },
                    };
                    written = write(&mut answers, &answer);
                    if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                });
                written?;
            }
            Question::Check(config) => {
                let answer = match rig.check(&config) {
                    Ok(error) => Answer::Checked { error },
                    Err(fault) => Answer::Failed(fail(fault)),
                };
                write(&mut answers, &answer)?;
            }
            Question::Sample(config) => {
                let answer = match rig.sample(&config) {
                    Ok(Elapsed { time, sm_clock_hz }) => Answer::Sampled { ns: time.as_nanos() as u64, sm_clock_hz },
                    Err(fault) => Answer::Failed(fail(fault)),
                };
                write(&mut answers, &answer)?;
            }
        }
        if lost {
            return Err(Error::new(Status::Cuda, "a candidate lost the device's context"));
        }
    }
    Ok(())
}

fn read(line: &str) -> Result<Question> {
    serde_json::from_str(line).map_err(|error| Error::invalid(format!("question {line:?}: {error}")))
}

fn write(answers: &mut impl Write, answer: &Answer) -> Result<()> {
    let mut line = serde_json::to_vec(answer).map_err(|error| Error::new(Status::Internal, error.to_string()))?;
    line.push(b'\n');
    answers.write_all(&line)?;
    Ok(answers.flush()?)
}

fn failure(fault: Fault) -> Failure {
    match fault {
        // The parent tells the two apart by its question.
        Fault::Candidate(reason) | Fault::Here(reason) => Failure::Candidate { reason, poisoned: false },
        Fault::Poisoned(reason) => Failure::Candidate { reason, poisoned: true },
        Fault::Bench(error) => Failure::of_child(error),
    }
}
