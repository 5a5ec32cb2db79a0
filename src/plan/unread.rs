//! Unread: the lines of records that no lookup has asked for, by the class of their problems.
//!
//! A library ships some hundred records, and a process asks for those of a few classes. Reading all
//! of them took a third of the time of a new context. The class of a line stands in its key, so it
//! is found without reading the line. Nothing here changes after `new`.

use super::key;
use super::lookup::Known;
use super::record::Record;
use super::shipped;
use crate::device::Arch;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

pub struct Unread {
    arch: Arch,
    files: Vec<File>,
    lines: BTreeMap<String, Vec<Line>>,
}

struct File {
    /// In messages.
    name: String,
    text: Cow<'static, str>,
    is_pack: bool,
}

struct Line {
    file: usize,
    /// From 1.
    number: usize,
    place: Range<usize>,
}

impl Unread {
    /// The lines of a pack, and of the records that ship for an architecture.
    pub fn new(pack: &[String], arch: Arch) -> Unread {
        let of_pack = File { name: "the pack's records".to_owned(), text: pack.join("\n").into(), is_pack: true };
        let shipped = shipped::texts(arch).into_iter().map(|(name, text)| File { name, text, is_pack: false });
        let files: Vec<File> = std::iter::once(of_pack).chain(shipped).collect();
        let mut lines: BTreeMap<String, Vec<Line>> = BTreeMap::new();
        for (file, File { text, .. }) in files.iter().enumerate() {
            let mut from = 0;
            for (at, line) in text.split('\n').enumerate() {
                let place = from..from + line.len();
                from = place.end + 1;
                if !line.trim().is_empty() {
                    let class = class_of(line).unwrap_or_default().to_owned();
                    lines.entry(class).or_default().push(Line { file, number: at + 1, place });
                }
            }
        }
        Unread { arch, files, lines }
    }

    /// The classes of the lines. A line that does not tell its class has the class "".
    pub fn classes(&self) -> impl Iterator<Item = &str> {
        self.lines.keys().map(String::as_str)
    }

    pub fn has(&self, class: &str) -> bool {
        self.lines.contains_key(class)
    }

    /// The records of a class. One of the pack replaces the shipped one of its device and problem.
    pub fn read(&self, class: &str) -> Known {
        let (mut known, mut ignored) = (Known::default(), Vec::new());
        let (of_pack, shipped): (Vec<&Line>, Vec<&Line>) =
            self.lines.get(class).into_iter().flatten().partition(|line| self.files[line.file].is_pack);
        let mut read = |line: &Line| match Record::from_line(self.text(line)) {
            Ok(record) => Some(Arc::new(record)),
            Err(reason) => {
                ignored.push((line.file, line.number, reason));
                None
            }
        };
        // A pack repeats the lines of the shipped records that chose its configs.
        let texts: HashSet<&str> = of_pack.iter().map(|line| self.text(line)).collect();
        known.pack = of_pack.into_iter().filter_map(&mut read).filter(|record| record.arch == self.arch).collect();
        let ids: HashSet<String> = known.pack.iter().map(|record| record.id()).collect();
        let others = shipped.into_iter().filter(|line| !texts.contains(self.text(line)));
        known.shipped = others.filter_map(&mut read).filter(|record| !ids.contains(&record.id())).collect();
        if let Some((file, line, reason)) = ignored.first() {
            log::warn!("{}: {} records ignored; line {line}: {reason}", self.files[*file].name, ignored.len());
        }
        known
    }

    fn text(&self, line: &Line) -> &str {
        &self.files[line.file].text[line.place.clone()]
    }
}

/// The class of a record's line, as its key has it. A record is only taken if its key is that of
/// its problem (`Record::from_line`).
fn class_of(line: &str) -> Option<&str> {
    let (key, _) = line.strip_prefix("{\"key\":\"")?.split_once('"')?;
    // A text with escapes may stand for another key.
    if key.contains('\\') { None } else { key::class_in_key(key) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::key::Class;

    const ARCH: Arch = Arch::Sm(9, 0);

    #[test]
    fn the_class_of_a_line_is_that_of_its_record() {
        for record in shipped::records(ARCH) {
            let line = record.to_line().unwrap();
            assert_eq!(class_of(&line), Some(Class::of(&record.problem).to_string().as_str()), "{line}");
            assert_eq!(class_of(&format!(" {line}")), None);
            assert_eq!(
                class_of(&line.replacen("forward", "f\\u006frward", 1).replacen("backward", "\\u0062", 1)),
                None
            );
        }
    }

    #[test]
    fn each_class_has_its_records_and_the_classes_together_have_all() {
        let ids = |records: &[Arc<Record>]| -> Vec<String> { records.iter().map(|record| record.id()).collect() };
        let all: Vec<Arc<Record>> = shipped::records(ARCH).into_iter().map(Arc::new).collect();
        // The pack repeats one line, has a faster record of another problem, and one that tells no
        // class.
        let faster = Record { median_us: all[1].median_us - 1.0, ..Record::clone(&all[1]) };
        let mut lines = [&*all[0], &faster, &all[2]].map(|record| record.to_line().unwrap());
        lines[2].insert(0, ' ');
        let unread = Unread::new(&lines, ARCH);
        let (mut pack, mut shipped) = (Vec::new(), Vec::new());
        for class in unread.classes() {
            let known = unread.read(class);
            if class.is_empty() {
                assert_eq!(ids(&known.pack), ids(&all[2..3]));
            } else {
                assert!(known.shipped.iter().chain(&known.pack).all(|r| Class::of(&r.problem).to_string() == class));
            }
            pack.extend(known.pack);
            shipped.extend(known.shipped);
        }
        assert!(unread.has(&Class::of(&faster.problem).to_string()) && !unread.has("another"));
        assert!(pack.contains(&Arc::new(faster)));
        // The shipped record whose twin tells no class is there beside it.
        let (mut found, mut expected) = (ids(&shipped), ids(&all[2..]));
        found.sort();
        expected.sort();
        assert_eq!((pack.len(), found), (3, expected));
        assert!(unread.read("another").shipped.is_empty());
    }
}
