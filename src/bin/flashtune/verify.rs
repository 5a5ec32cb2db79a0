//! `flashtune records verify`: whether each line of files of records may ship with this version.

use crate::device::DeviceArg;
use crate::failure::Failure;
use flashtune::plan::{record, review};
use std::collections::HashMap;

/// `texts` are names and contents. Files `in_tuning_db` must also be sorted, in flashtune's own
/// form.
pub fn run(texts: &[(String, String)], in_tuning_db: bool) -> Result<(), Failure> {
    let cpu = DeviceArg::Cpu.open()?;
    let (mut good, mut bad) = (0, 0);
    for (name, text) in texts {
        let mut records = Vec::new();
        let mut lines_of_ids: HashMap<String, usize> = HashMap::new();
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let (record, mut complaints) = review(line, cpu.device());
            if let Some(record) = record {
                let first = *lines_of_ids.entry(record.id()).or_insert(number);
                if first != number {
                    complaints.push(format!("line {first} is a record of the same device and problem"));
                }
                records.push(record);
            }
            complaints.iter().for_each(|complaint| eprintln!("{name}:{number}: {complaint}"));
            if complaints.is_empty() { good += 1 } else { bad += 1 }
        }
        if in_tuning_db && record::write_lines(records).as_deref() != Ok(text) {
            bad += 1;
            eprintln!("{name}: its lines are not sorted or not in flashtune's own format");
        }
    }
    eprintln!("{good} records are valid, {bad} are not");
    if bad == 0 { Ok(()) } else { Err(Failure::Failed(format!("{bad} records are not valid"))) }
}
