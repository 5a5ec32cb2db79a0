//! Machine: the records of this machine, and the trials of runs that did not end.
//!
//! Both live in memory, with the store behind them. Changes are gathered and written in batches. A
//! change that cannot be written goes with the next batch. This file knows how records and trials
//! lie in the store, not which of them a lookup takes.

use super::journal::{Change, Entries};
use super::key::Class;
use super::record::Record;
use super::store::Store;
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

/// A store with more records is not one of measurements, and each process keeps all in memory.
const MAX_RECORDS: usize = 50_000;

/// This machine's own measurements.
const RECORD: &str = "record | ";
/// Records of files. One serves only where there is no own one of its id.
const IMPORTED: &str = "imported | ";
const TRIAL: &str = "trial | ";
const FAILURE: &str = "failure | ";

pub struct Machine {
    /// Or why there is none.
    store: Result<Store, String>,
    state: Mutex<State>,
}

struct State {
    entries: Entries,
    pending: BTreeMap<String, Option<String>>,
    written: Instant,
    /// Why the last write failed.
    failure: Option<String>,
}

/// What became of the records of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// The ids of those that are in use from now on.
    pub taken: BTreeSet<String>,
    /// Problems that this machine has measured itself.
    pub own: usize,
    /// Records no better than the one imported before.
    pub not_better: usize,
    /// Lines that are no record, or whose config or figures are not accepted.
    pub refused: usize,
    /// The line and the reason.
    pub first_refusal: Option<String>,
}

impl Imported {
    pub fn refuse(&mut self, reason: impl FnOnce() -> String) {
        self.refused += 1;
        self.first_refusal.get_or_insert_with(reason);
    }
}

impl Machine {
    /// Reads the store, once.
    pub fn new(store: Result<Store, String>) -> Machine {
        let entries = store.as_ref().map(Store::read).unwrap_or_default();
        let state = State { entries, pending: BTreeMap::new(), written: Instant::now(), failure: None };
        Machine { store, state: Mutex::new(state) }
    }

    /// All records that can be read. Others are left where they are and ignored.
    pub fn records(&self) -> Vec<Record> {
        let state = self.state();
        let of = |prefix: &'static str| {
            let lines = under(&state.entries, prefix);
            lines.filter_map(move |(key, line)| Some((&key[prefix.len()..], Record::from_line(line).ok()?)))
        };
        of(IMPORTED).chain(of(RECORD)).collect::<BTreeMap<&str, Record>>().into_values().collect()
    }

    /// An error if a record of this process is not in the store: the reason, which names the file.
    pub fn keep_all(&self) -> Result<(), String> {
        self.store.as_ref().map_err(String::clone)?;
        let mut state = self.state();
        self.write(&mut state, LONG_DEADLINE);
        let is_record = |key: &String| key.starts_with(RECORD) || key.starts_with(IMPORTED);
        match state.pending.keys().any(is_record) {
            false => Ok(()),
            true => Err(state.failure.clone().unwrap_or_default()),
        }
    }

    /// Adds or replaces records, which ends the runs that led to them: their measurements go, their
    /// failures stay.
    pub fn put(&self, records: &[Record]) {
        let mut state = self.state();
        records.iter().for_each(|record| state.put(record));
        self.write(&mut state, LONG_DEADLINE);
    }

    /// Takes records of files. An own measurement stays, unless `replaces`; of imported records of
    /// one id, the better one stays. `next` gives the records one by one, and None at the end.
    pub fn import(
        &self,
        next: &mut dyn FnMut(&mut Imported) -> Option<Record>,
        here: &Device,
        replaces: bool,
    ) -> Imported {
        let mut state = self.state();
        // Other processes may have found records since this one read the store.
        self.exchange(&mut state, LONG_DEADLINE);
        let mut count = under(&state.entries, RECORD).count() + under(&state.entries, IMPORTED).count();
        let mut imported = Imported::default();
        while let Some(record) = next(&mut imported) {
            let id = record.id();
            let (own, other) = (format!("{RECORD}{id}"), format!("{IMPORTED}{id}"));
            let usable = |key: &str| {
                let found = Record::from_line(state.entries.get(key)?).ok()?;
                found.check(here).is_ok().then_some(found)
            };
            let is_new = !state.entries.contains_key(&own) && !state.entries.contains_key(&other);
            if is_new && count >= MAX_RECORDS {
                imported.refuse(|| format!("{id}: this machine has {count} records, the most that it keeps"));
            } else if !replaces && usable(&own).is_some() {
                imported.own += 1;
            } else if !replaces && usable(&other).is_some_and(|present| !record.is_better_than(&present, here)) {
                imported.not_better += 1;
            } else if let Ok(line) = record.to_line() {
                if state.entries.contains_key(&own) {
                    state.set(own, None);
                }
                state.set(other, Some(line));
                count += usize::from(is_new);
                imported.taken.insert(id);
            }
        }
        self.write(&mut state, LONG_DEADLINE);
        imported
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
        let Ok(store) = &self.store else { return };
        let mut written = store.write(&state.changes(), deadline);
        if store.has_begun_anew() {
            // Another journal took the place of the one that was read, whose entries this process
            // still has.
            let all = state.entries.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
            state.pending.extend(all);
            written = store.write(&state.changes(), deadline);
        }
        // The store now has the winners of other processes too.
        match written {
            Ok(entries) => {
                state.entries = entries;
                state.pending.clear();
                state.failure = None;
            }
            Err(reason) => state.failure = Some(reason),
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
        let imported = format!("{IMPORTED}{}", record.id());
        self.set(format!("{RECORD}{}", record.id()), Some(line));
        if self.entries.contains_key(&imported) {
            self.set(imported, None);
        }
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
    let built_by = match device.arch {
        Arch::Cpu => String::new(),
        Arch::Sm(..) => {
            let (major, minor) = kernel::nvrtc_version();
            format!(" templates-{} nvrtc{major}.{minor}", kernel::templates_digest().unwrap_or_default())
        }
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
        let (machine, device) = (Machine::new(Err("no folder".into())), Device::typical(Arch::Sm(9, 0)).unwrap());
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
        let (machine, device) = (Machine::new(Err("no folder".into())), Device::typical(Arch::Sm(9, 0)).unwrap());
        let works = |trial: &Trial| Trial {
            verdict: Verdict::Measured { median_us: 1.0, utilisation: None, over_default: None, was_brief: false },
            ..trial.clone()
        };
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
        let (machine, device) = (Machine::new(Err("no folder".into())), Device::typical(Arch::Sm(9, 0)).unwrap());
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
            let mut lines = vec![imported.clone()];
            let outcome = machine.import(&mut |_| lines.pop(), &here, false);
            let taken = (outcome.taken.len() == 1, outcome.not_better == 0);
            assert_eq!(taken, (is_taken, is_taken), "{imported:?}");
            assert_eq!(machine.records().contains(&imported), is_taken, "{imported:?}");
        }
    }
}
