//! What a page is made of: the problems, and the records that a lookup would see.

use crate::tuning_log::Entry;
use flashtune::device::Device;
use flashtune::plan::key::Class;
use flashtune::plan::{Known, Record, Source};
use std::collections::HashMap;
use std::sync::Arc;

/// What the page is made of.
pub struct Input {
    pub entries: Vec<Entry>,
    pub known: Records,
    /// Lines of files that are not shown, one sentence for each file.
    pub notes: Vec<String>,
    /// The CPU of this host.
    pub cpu: Device,
}

/// The records that a lookup sees.
#[derive(Default)]
pub struct Records {
    /// No other class concerns a lookup.
    pub by_class: HashMap<Class, Known>,
    pub are_of_files: bool,
}

impl Records {
    pub fn add(&mut self, source: Source, record: Record) {
        let known = self.by_class.entry(Class::of(&record.problem)).or_default();
        let records = match source {
            Source::Process => &mut known.process,
            Source::Pack => &mut known.pack,
            Source::Shipped | Source::NearestGpu => &mut known.shipped,
            Source::Machine | Source::Pinned | Source::Heuristic => &mut known.machine,
        };
        records.push(Arc::new(record));
    }
}
