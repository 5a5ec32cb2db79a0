//! Machine: the records of this machine, and the trials of runs that did not end.
//!
//! Both live in memory, with the store behind them. Changes are gathered and written in batches. A
//! change that cannot be written goes with the next batch. This file knows how records and trials
//! lie in the store, not which of them a lookup takes.

use super::key::Class;
use super::record::Record;
use super::store::{Change, Entries, Store};
use crate::device::{Arch, Device};
use crate::kernel;
use crate::problem::Problem;
use crate::tune::{Trial, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The interval between writes of a run's trials: a killed run loses no more than this.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The longest wait of a batch of trials for other processes. It then stays in memory.
const WRITE_DEADLINE: Duration = Duration::from_secs(2);
/// The same for winners, which cost a whole run, and for an engine's last batch, which has no later
/// one to go with.
const LONG_DEADLINE: Duration = Duration::from_secs(10);

const RECORD: &str = "record | ";
const TRIAL: &str = "trial | ";
const FAILURE: &str = "failure | ";

pub struct Machine {
    store: Option<Store>,
    state: Mutex<State>,
}

struct State {
    entries: Entries,
    pending: BTreeMap<String, Option<String>>,
    written: Instant,
}

impl Machine {
    /// Reads the store, once.
    pub fn new(store: Option<Store>) -> Machine {
        let entries = store.as_ref().map(Store::read).unwrap_or_default();
        Machine { store, state: Mutex::new(State { entries, pending: BTreeMap::new(), written: Instant::now() }) }
    }

    /// All records that can be read. Others are left where they are and ignored.
    pub fn records(&self) -> Vec<Record> {
        let state = self.state();
        under(&state.entries, RECORD).filter_map(|(_, line)| Record::from_line(line).ok()).collect()
    }

    /// Adds or replaces records, which ends the runs that led to them: their measurements go, their
    /// failures stay.
    pub fn put(&self, records: &[Record]) {
        let mut state = self.state();
        records.iter().for_each(|record| state.put(record));
        self.write(&mut state, LONG_DEADLINE);
    }

    /// The same for records that are better than the one of their id, or have no usable one there.
    /// Returns their ids.
    pub fn put_better(&self, records: &[Record], here: &Device) -> BTreeSet<String> {
        let mut state = self.state();
        // Other processes may have found better ones since this one read the store.
        self.exchange(&mut state, LONG_DEADLINE);
        let mut taken = BTreeSet::new();
        for record in records {
            let id = record.id();
            let line = state.entries.get(&format!("{RECORD}{id}"));
            let present = line.and_then(|line| Record::from_line(line).ok()).filter(|found| found.check(here).is_ok());
            if present.is_none_or(|present| record.is_better_than(&present, here)) {
                state.put(record);
                taken.insert(id);
            }
        }
        self.write(&mut state, LONG_DEADLINE);
        taken
    }

    /// The known trials of candidates for a problem: measurements of a run that did not end, and
    /// failures for its class or for itself.
    pub fn trials(&self, record_id: &str, problem: &Problem, device: &Device) -> Vec<Trial> {
        let folders =
            [trials_of(record_id), failures_of_class(problem, device), failures_of_problem(record_id, device)];
        let state = self.state();
        let lines = folders.iter().flat_map(|folder| under(&state.entries, folder));
        lines.filter_map(|(_, line)| serde_json::from_str(line).ok()).collect()
    }

    /// A measurement belongs to the problem and takes back the failures of its config. A failure
    /// belongs to the problem or its class, on this compiler and library.
    pub fn note(&self, record_id: &str, problem: &Problem, device: &Device, trial: &Trial) {
        let folder = match trial.verdict {
            Verdict::Measured { .. } => trials_of(record_id),
            Verdict::Failed { .. } => failures_of_class(problem, device),
            Verdict::FailedHere { .. } => failures_of_problem(record_id, device),
        };
        let Ok(line) = serde_json::to_string(trial) else { return };
        let mut state = self.state();
        if let Verdict::Measured { .. } = trial.verdict {
            for folder in [failures_of_class(problem, device), failures_of_problem(record_id, device)] {
                let failure = format!("{folder}{}", trial.config);
                if state.entries.contains_key(&failure) {
                    state.set(failure, None);
                }
            }
        }
        state.set(format!("{folder}{}", trial.config), Some(line));
        if state.written.elapsed() > BATCH_INTERVAL {
            self.write(&mut state, WRITE_DEADLINE);
        }
    }

    /// Writes the pending changes.
    pub fn flush(&self) {
        self.write(&mut self.state(), WRITE_DEADLINE);
    }

    fn write(&self, state: &mut State, deadline: Duration) {
        if state.pending.is_empty() {
            state.written = Instant::now();
        } else {
            self.exchange(state, deadline);
        }
    }

    /// Writes the pending changes, if any, and reads the store.
    fn exchange(&self, state: &mut State, deadline: Duration) {
        state.written = Instant::now();
        let Some(store) = &self.store else { return };
        let mut written = store.write(&state.changes(), deadline);
        if store.has_begun_anew() {
            // The damaged database took the entries read before with it; this process still has
            // them.
            let all = state.entries.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
            state.pending.extend(all);
            written = store.write(&state.changes(), deadline);
        }
        // The store now has the winners of other processes too.
        if let Some(entries) = written {
            state.entries = entries;
            state.pending.clear();
        }
    }

    /// A panic under the lock left nothing half done: each change is one insertion.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.write(&mut self.state(), LONG_DEADLINE);
    }
}

impl State {
    fn put(&mut self, record: &Record) {
        let Ok(line) = record.to_line() else { return };
        self.set(format!("{RECORD}{}", record.id()), Some(line));
        let trials: Vec<String> =
            under(&self.entries, &trials_of(&record.id())).map(|(key, _)| key.to_owned()).collect();
        trials.into_iter().for_each(|key| self.set(key, None));
    }

    fn set(&mut self, key: String, value: Option<String>) {
        match &value {
            Some(value) => drop(self.entries.insert(key.clone(), value.clone())),
            None => drop(self.entries.remove(&key)),
        }
        self.pending.insert(key, value);
    }

    fn changes(&self) -> Vec<Change> {
        self.pending.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

fn trials_of(record_id: &str) -> String {
    format!("{TRIAL}{record_id} | ")
}

fn failures_of_class(problem: &Problem, device: &Device) -> String {
    format!("{} | {} | {} | ", failures(device), device.arch, Class::of(problem))
}

fn failures_of_problem(record_id: &str, device: &Device) -> String {
    format!("{} | {record_id} | ", failures(device))
}

/// A failure says nothing about another library, compiler or template text: after a fix its
/// candidates are tried again.
fn failures(device: &Device) -> String {
    let (major, minor) = device.nvrtc_version;
    let built_by = match device.arch {
        Arch::Cpu => String::new(),
        Arch::Sm(..) => format!(" templates-{} nvrtc{major}.{minor}", kernel::templates_digest().unwrap_or_default()),
    };
    format!("{FAILURE}{}{built_by}", env!("CARGO_PKG_VERSION"))
}

/// The entries whose keys begin with the prefix.
fn under<'a>(entries: &'a Entries, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let from = entries.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
    from.take_while(move |(key, _)| key.starts_with(prefix)).map(|(key, value)| (key.as_str(), value.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Family};
    use crate::family;
    use crate::problem::{Dtype, Pass};
    use crate::tune::{Outcome, Timed};

    const PROBLEM: Problem = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 1, 65536, 64);

    fn failed(block_m: u32, verdict: fn(String) -> Verdict) -> Trial {
        Trial { config: Config::new(Family::Sm80, [("block_m", block_m)]), verdict: verdict("why".into()) }
    }

    #[test]
    fn a_failure_of_the_class_is_known_for_its_other_shapes_and_one_of_the_problem_is_not() {
        let (machine, device) = (Machine::new(None), Device::typical(Arch::Sm(9, 0)).unwrap());
        let of_class = failed(64, |reason| Verdict::Failed { reason });
        let of_problem = failed(128, |reason| Verdict::FailedHere { reason });
        for trial in [&of_class, &of_problem] {
            machine.note("gpu | huge", &PROBLEM, &device, trial);
        }
        let small = Problem { seqlen_q: 128, seqlen_k: 128, ..PROBLEM };
        assert_eq!(machine.trials("gpu | small", &small, &device), std::slice::from_ref(&of_class));
        assert_eq!(machine.trials("gpu | huge", &PROBLEM, &device), [of_class, of_problem]);
    }

    #[test]
    fn what_is_measured_has_not_failed() {
        let (machine, device) = (Machine::new(None), Device::typical(Arch::Sm(9, 0)).unwrap());
        let works =
            |trial: &Trial| Trial { verdict: Verdict::Measured { median_us: 1.0, utilisation: None }, ..trial.clone() };
        let other = failed(32, |reason| Verdict::Failed { reason });
        machine.note("id", &PROBLEM, &device, &other);
        for trial in
            [failed(64, |reason| Verdict::Failed { reason }), failed(128, |reason| Verdict::FailedHere { reason })]
        {
            machine.note("id", &PROBLEM, &device, &trial);
            machine.note("id", &PROBLEM, &device, &works(&trial));
        }
        let left = machine.trials("id", &PROBLEM, &device);
        let failed: Vec<_> = left.iter().filter(|trial| !matches!(trial.verdict, Verdict::Measured { .. })).collect();
        assert_eq!((left.len(), failed), (3, vec![&other]));
    }

    #[test]
    fn a_record_that_tried_the_preferred_family_goes_before_a_faster_one_that_did_not() {
        let (machine, device) = (Machine::new(None), Device::typical(Arch::Sm(9, 0)).unwrap());
        let [sm90, sm80] = &family::heuristics(&PROBLEM, &device)[..] else { panic!("two families serve") };
        let record = |config: &Config, median_us| {
            let winner = Timed { config: config.clone(), median_us, utilisation: None };
            let outcome = Outcome { winner, spread: 0.01, check_error: 0.001, runner_up: None, default_us: None };
            Record::new(&PROBLEM, &device, outcome)
        };
        let tried_both = |median_us| Record { also_tried: [Family::Sm90].into(), ..record(sm80, median_us) };
        // The CPU imports them as well: the preferred family depends on the record's device.
        let here = Device { arch: Arch::Cpu, ..device.clone() };
        for (imported, is_taken) in [
            (record(sm80, 10.0), true),
            (record(sm80, 11.0), false),
            (record(sm90, 20.0), true),
            (record(sm80, 5.0), false),
            (tried_both(30.0), false),
            (tried_both(15.0), true),
        ] {
            let taken = machine.put_better(std::slice::from_ref(&imported), &here);
            assert_eq!((taken.len() == 1, machine.records().contains(&imported)), (is_taken, is_taken), "{imported:?}");
        }
    }
}
