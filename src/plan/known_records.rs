//! KnownRecords: every record that an engine knows, in memory, with this machine's store behind it.
//!
//! The lookup reads a snapshot; tuning and import add to it. Records come from `shipped`, and from
//! and to `machine`. Nothing here chooses a config.

use super::key;
use super::lookup::{Known, Source};
use super::machine::Machine;
use super::record::{self, Record};
use super::shipped;
use super::store::Store;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::tune::Trial;
use arc_swap::{ArcSwap, Guard};
use std::path::Path;
use std::sync::Arc;

pub struct KnownRecords {
    device: Device,
    device_key: String,
    machine: Machine,
    known: ArcSwap<Known>,
}

impl KnownRecords {
    /// Reads this machine's records and the shipped ones, once. Without a folder records live in
    /// memory alone.
    pub fn read(cache_dir: Option<&Path>, device: &Device) -> KnownRecords {
        let machine = Machine::new(cache_dir.and_then(Store::in_folder));
        let known = Known {
            process: Vec::new(),
            machine: machine.records().into_iter().map(Arc::new).collect(),
            shipped: shipped::records(device.arch).into_iter().map(Arc::new).collect(),
        };
        let (device, device_key) = (device.clone(), key::device_key(device));
        KnownRecords { device, device_key, machine, known: ArcSwap::from_pointee(known) }
    }

    /// What a lookup sees now. Takes no lock.
    pub fn snapshot(&self) -> Guard<Arc<Known>> {
        self.known.load()
    }

    /// This device's record of exactly this key, from this process or machine.
    pub fn own(&self, problem: &Problem) -> Option<Arc<Record>> {
        let key = key::record_key(problem);
        let known = self.known.load();
        let mut own = known.process.iter().chain(&known.machine);
        own.find(|record| record.key == key && record.device_key() == self.device_key).cloned()
    }

    /// Adds the record of a tuning run of this process, and keeps it on this machine.
    pub fn insert(&self, record: &Record) {
        self.machine.put(std::slice::from_ref(record));
        self.refresh(|process| {
            process.retain(|other| other.id() != record.id());
            process.push(Arc::new(record.clone()));
        });
    }

    /// This machine's records and the shipped ones, with where each comes from.
    pub fn all(&self) -> Vec<(Source, Record)> {
        let known = self.known.load();
        let shipped = known.shipped.iter().map(|record| match record.device_key() == self.device_key {
            true => (Source::Shipped, Record::clone(record)),
            false => (Source::NearestGpu, Record::clone(record)),
        });
        let process = known.process.iter().map(|record| (Source::Process, Record::clone(record)));
        let machine = known.machine.iter().map(|record| (Source::Machine, Record::clone(record)));
        process.chain(machine).chain(shipped).collect()
    }

    /// Writes this device's own records (not the shipped ones) as sorted lines. Returns their
    /// number.
    pub fn export(&self, path: &Path) -> Result<usize> {
        let known = self.known.load();
        // A record that this process tuned comes first and so replaces the one that it read at its
        // start.
        let own = known.process.iter().chain(&known.machine).filter(|record| record.device_key() == self.device_key);
        let records: Vec<Record> = own.map(|record| Record::clone(record)).collect();
        record::write_file(path, records)
    }

    /// Takes records of any device from lines into this machine's, where they are better than those
    /// of the same device and key. Returns how many it took. It passes over records that the space
    /// does not accept.
    pub fn import(&self, path: &Path) -> Result<usize> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::from(error).context(path.display()))?;
        let (records, ignored) = record::read_lines(&text);
        if let Some((line, reason)) = ignored.first() {
            log::warn!("{}: {} records ignored; line {line}: {reason}", path.display(), ignored.len());
        }
        let fits = |record: &Record| match record.check(&self.device) {
            Ok(()) => true,
            Err(reason) => {
                log::warn!("{}: {} is passed over: {reason}", path.display(), record.id());
                false
            }
        };
        let records: Vec<Record> = records.into_iter().filter(fits).collect();
        let taken = self.machine.put_better(&records, &self.device);
        // The lookup prefers records that this process tuned, so one that was bettered must go.
        self.refresh(|process| process.retain(|own| !taken.contains(&own.id())));
        Ok(taken.len())
    }

    /// The trials of an earlier run for this problem that did not end, and the failures known for
    /// it or its class.
    pub fn trials(&self, problem: &Problem) -> Vec<Trial> {
        self.machine.trials(&self.id(problem), problem, &self.device)
    }

    /// Keeps a trial, for a later run in case this one does not end.
    pub fn note(&self, problem: &Problem, trial: &Trial) {
        self.machine.note(&self.id(problem), problem, &self.device, trial);
    }

    /// Writes the noted trials.
    pub fn flush(&self) {
        self.machine.flush();
    }

    /// The id of this device's record of a problem.
    fn id(&self, problem: &Problem) -> String {
        format!("{} | {}", self.device_key, key::record_key(problem))
    }

    /// Reads this machine's records again, and changes this process's own.
    fn refresh(&self, change: impl Fn(&mut Vec<Arc<Record>>)) {
        let machine: Vec<Arc<Record>> = self.machine.records().into_iter().map(Arc::new).collect();
        self.known.rcu(|known| {
            let mut process = known.process.clone();
            change(&mut process);
            let is_own = |record: &&Arc<Record>| process.iter().any(|own| own.id() == record.id());
            let machine = machine.iter().filter(|record| !is_own(record)).cloned().collect();
            Known { process, machine, shipped: known.shipped.clone() }
        });
    }
}
