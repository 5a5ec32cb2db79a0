//! Worker: the bench in a child process. A candidate may hang or crash it without losing the run.
//!
//! The parent (`parent.rs`) asks one step at a time and waits for it with a watchdog; the child
//! (`child.rs`) owns a `Rig` and answers. Both speak JSON, one message a line, over the child's
//! standard input and output. The search itself, its time limit and its memory of failures stay in
//! the parent.

mod child;
mod parent;

pub use child::serve;
pub use parent::Worker;

use crate::config::Config;
use crate::error::Error;
use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::time::Duration;

/// How to start a child that calls `serve`.
#[derive(Clone, Debug)]
pub struct Command {
    pub program: OsString,
    pub args: Vec<OsString>,
    /// The longest time of one check or run of a candidate on a small problem, after which the
    /// child is ended. A large problem gets more.
    pub patience: Duration,
    /// The same for compiling one candidate, whatever the problem's size.
    pub build_patience: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    /// The first line. All the others are about this problem.
    Problem(Problem),
    Build(Vec<Config>),
    Check(Config),
    Sample(Config),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The device is open and the check's reference computed.
    Ready,
    /// One answer for each config of a `Build`, in any order.
    Built {
        index: usize,
        spill_bytes: u32,
    },
    NotBuilt {
        index: usize,
        failure: Failure,
    },
    Checked {
        error: f64,
    },
    Sampled {
        ns: u64,
        sm_clock_hz: Option<f64>,
    },
    Failed(Failure),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Failure {
    /// The candidate is to blame. If `poisoned`, the child ends after this answer.
    Candidate { reason: String, poisoned: bool },
    /// The child cannot go on, whatever the candidate.
    Child { status: i32, message: String },
}

impl Failure {
    fn of_child(error: Error) -> Failure {
        Failure::Child { status: error.status as i32, message: error.message }
    }
}
