//! KnownRecords: every record that an engine knows, in memory, with this machine's store behind it.
//!
//! The lookup reads a snapshot; tuning and import add to it. Records come from a pack and from
//! `shipped`, when a lookup first asks for their class, and from and to `machine`. Nothing here
//! chooses a config.

use super::key::{self, Class};
use super::lines::Lines;
use super::lookup::{Known, Source};
use super::machine::{Imported, Machine};
use super::record::{self, Record};
use super::store::Store;
use super::unread::Unread;
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::kernel::pack::Pack;
use crate::problem::Problem;
use crate::tune::Trial;
use arc_swap::ArcSwap;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

pub struct KnownRecords {
    device: Device,
    device_key: String,
    machine: Machine,
    unread: Unread,
    read: ArcSwap<Read>,
}

/// The records that are read.
#[derive(Clone)]
struct Read {
    known: Arc<Known>,
    /// The classes of `unread` that they contain.
    classes: BTreeSet<String>,
}

impl KnownRecords {
    /// Reads this machine's records, once. Those of the pack and the shipped ones are read by
    /// class. Without a folder records live in memory alone.
    pub fn read(cache_dir: Option<&Path>, device: &Device, pack: Option<&Pack>) -> KnownRecords {
        let store = match cache_dir {
            None => Err("there is no cache folder".to_owned()),
            Some(folder) => {
                Store::in_folder(folder).inspect_err(|reason| log::warn!("records are kept in memory only: {reason}"))
            }
        };
        let machine = Machine::new(store);
        let unread = Unread::new(pack.map_or(&[], |pack| &pack.manifest().records), device.arch);
        let known = Known { machine: machine.records().into_iter().map(Arc::new).collect(), ..Known::default() };
        let read = ArcSwap::from_pointee(Read { known: Arc::new(known), classes: BTreeSet::new() });
        let (device, device_key) = (device.clone(), key::device_key(device));
        let records = KnownRecords { device, device_key, machine, unread, read };
        // A line whose class is unknown may match any lookup, so it is read now.
        records.with_classes(&[""]);
        records
    }

    /// All records that are known now. Takes no lock. The first call for a class parses its lines
    /// of JSON.
    pub fn snapshot(&self) -> Arc<Known> {
        self.with_classes(&self.unread.classes().collect::<Vec<_>>())
    }

    /// What a lookup of a problem of this class sees now. As `snapshot`, for one class.
    pub fn snapshot_of(&self, class: &Class) -> Arc<Known> {
        self.with_classes(&[&class.to_string()])
    }

    /// The known records, those of these classes among them.
    fn with_classes(&self, classes: &[&str]) -> Arc<Known> {
        let is_new = |read: &Read, class: &str| self.unread.has(class) && !read.classes.contains(class);
        let now = self.read.load();
        if !classes.iter().any(|class| is_new(&now, class)) {
            return Arc::clone(&now.known);
        }
        self.read.rcu(|read| {
            let mut next = Read::clone(read);
            let known = Arc::make_mut(&mut next.known);
            for class in classes.iter().filter(|class| is_new(read, class)) {
                let Known { pack, shipped, .. } = self.unread.read(class);
                known.pack.extend(pack);
                known.shipped.extend(shipped);
                next.classes.insert(class.to_string());
            }
            next
        });
        Arc::clone(&self.read.load().known)
    }

    /// This device's record of exactly this key, from this process or machine.
    pub fn own(&self, problem: &Problem) -> Option<Arc<Record>> {
        let key = key::record_key(problem);
        let known = &self.read.load().known;
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

    /// This machine's records, the pack's and the shipped ones, with where each comes from.
    pub fn all(&self) -> Vec<(Source, Record)> {
        let known = self.snapshot();
        let shipped = known.shipped.iter().map(|record| match record.device_key() == self.device_key {
            true => (Source::Shipped, Record::clone(record)),
            false => (Source::NearestGpu, Record::clone(record)),
        });
        let pack = known.pack.iter().map(|record| (Source::Pack, Record::clone(record)));
        let process = known.process.iter().map(|record| (Source::Process, Record::clone(record)));
        let machine = known.machine.iter().map(|record| (Source::Machine, Record::clone(record)));
        process.chain(machine).chain(pack).chain(shipped).collect()
    }

    /// Writes this device's own records (not the shipped ones) as sorted lines. Returns their
    /// number.
    pub fn export(&self, path: &Path) -> Result<usize> {
        let known = &self.read.load().known;
        // A record that this process tuned comes first and so replaces the one that it read at its
        // start.
        let own = known.process.iter().chain(&known.machine).filter(|record| record.device_key() == self.device_key);
        let records: Vec<Record> = own.map(|record| Record::clone(record)).collect();
        record::write_file(path, records)
    }

    /// Takes records of any device from the lines of a file into this machine's
    /// (`Machine::import`), without holding the file in memory. Passes over lines that are no
    /// record, and records that the space does not accept. After an error of reading, the records
    /// before it are taken.
    pub fn import(&self, path: &Path, replaces: bool) -> Result<Imported> {
        let failed = |error: std::io::Error| Error::from(error).context(path.display());
        let mut lines = Lines::open(path).map_err(failed)?;
        let mut failure = None;
        let mut next = |imported: &mut Imported| {
            loop {
                let (number, line) = match lines.next() {
                    Ok(Some(line)) => line,
                    Ok(None) => return None,
                    Err(error) => {
                        failure = Some(error);
                        return None;
                    }
                };
                let accepted = |record: Record| record.check(&self.device).map(|()| record);
                match line.and_then(|line| Record::from_line(&line)).and_then(accepted) {
                    Ok(record) => return Some(record),
                    Err(reason) => imported.refuse(|| format!("line {number}: {reason}")),
                }
            }
        };
        let imported = self.machine.import(&mut next, &self.device, replaces);
        // The lookup prefers records that this process tuned, so one that was replaced must go.
        self.refresh(|process| process.retain(|own| !imported.taken.contains(&own.id())));
        failure.map_or(Ok(imported), |error| Err(failed(error)))
    }

    /// An error if a record of this process is not in the cache folder: the reason.
    pub fn keep_all(&self) -> std::result::Result<(), String> {
        self.machine.keep_all()
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
        self.read.rcu(|read| {
            let mut process = read.known.process.clone();
            change(&mut process);
            let is_own = |record: &&Arc<Record>| process.iter().any(|own| own.id() == record.id());
            let machine = machine.iter().filter(|record| !is_own(record)).cloned().collect();
            let (pack, shipped) = (read.known.pack.clone(), read.known.shipped.clone());
            let known = Known { process, machine, pack, shipped };
            Read { known: Arc::new(known), classes: read.classes.clone() }
        });
    }
}

/// The records of an architecture that no engine changes: of a pack's lines and those that ship. A
/// record of the pack replaces the shipped one of its device and problem.
pub fn read_only(lines: &[String], arch: Arch) -> Known {
    let unread = Unread::new(lines, arch);
    unread.classes().map(|class| unread.read(class)).fold(Known::default(), |mut all, known| {
        all.pack.extend(known.pack);
        all.shipped.extend(known.shipped);
        all
    })
}
