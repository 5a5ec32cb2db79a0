//! Records as lines of text: which are read, which are ignored, and how they are written.

use super::{LLAMA, config, h200, record};
use flashtune::device::{Arch, Device};
use flashtune::plan::record::{Record, read_lines, write_lines};
use flashtune::problem::{Dtype, Layout, Pass, Problem};
use flashtune::tune::{Outcome, Timed};

#[test]
fn record_of_a_deterministic_problem_is_ignored() {
    let deterministic = Problem { pass: Pass::Backward, deterministic: true, ..LLAMA };
    let line = record(&deterministic, &h200(), 0).to_line().unwrap();
    let (records, ignored) = read_lines(&line);
    assert!(records.is_empty() && ignored[0].1.contains("deterministic"), "{ignored:?}");
}

/// sm90's forward records are older than num_splits.
#[test]
fn record_older_than_a_knob_has_the_value_that_it_was_measured_with() {
    let device = h200();
    let index = (0..).find(|index| config(&LLAMA, &device, *index).get("num_splits") == Some(1)).unwrap();
    let present = record(&LLAMA, &device, index);
    let line = present.to_line().unwrap();
    let older = line.replace(r#""num_splits":1,"#, "");
    assert_ne!(older, line);
    assert_eq!(Record::from_line(&older).as_ref(), Ok(&*present));
}

#[test]
fn unknown_field_of_a_record_is_ignored_alone() {
    let line = record(&LLAMA, &h200(), 0).to_line().unwrap();
    let with = |field: &str| line.replacen('{', &format!("{{{field},"), 1);
    let read = Record::from_line(&with(r#""clock_mhz":1980,"notes":{"by":"me"}"#)).unwrap();
    assert_eq!(read, Record::from_line(&line).unwrap());
}

#[test]
fn record_with_an_unknown_meaning_is_ignored_whole() {
    let line = record(&LLAMA, &Device::typical(Arch::Sm(8, 0)).unwrap(), 0).to_line().unwrap();
    assert!(Record::from_line(&line).is_ok());
    for (from, to) in [
        // A later version's key has a field that this library does not know. Ignoring the field
        // would make it a record of full attention.
        ("v1 forward", "v2 forward"),
        ("vec8 gqa4", "vec8 window128 gqa4"),
        (r#""family":"sm80""#, r#""family":"sm200""#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":1"#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":-4096"#),
        (r#""median_us":100.0"#, r#""median_us":-1.0"#),
        (r#""arch":"sm_80""#, r#""arch":"gfx942""#),
        (r#""num_warps":"#, r#""num_warps":-"#),
    ] {
        let changed = line.replacen(from, to, 1);
        assert_ne!(changed, line, "{from}");
        assert!(Record::from_line(&changed).is_err(), "{changed}");
    }
    let text = format!("{line}\nnot json\n\n{line}\n");
    let (records, ignored) = read_lines(&text);
    assert_eq!((records.len(), ignored.len(), ignored[0].0), (2, 1, 2));
}

#[test]
fn record_with_a_layout_that_its_dtype_does_not_allow_is_ignored() {
    let read = |dtype, layout| {
        let problem = Problem { dtype, layout, ..LLAMA };
        Record::from_line(&record(&problem, &h200(), 0).to_line().unwrap())
    };
    assert!(read(Dtype::Fp32, Layout::Vec4).is_ok() && read(Dtype::Bf16, Layout::Vec8).is_ok());
    let reason = read(Dtype::Fp32, Layout::Vec8).unwrap_err();
    assert_eq!(reason, "its layout is vec8; of fp32 no call has more than vec4");
}

#[test]
fn lines_are_sorted_and_byte_stable() {
    let device = h200();
    let records: Vec<Record> = (0..40)
        .map(|index| {
            let problem = Problem { batch_size: 1 << (index % 7), seqlen_q: 100 + 300 * index, ..LLAMA };
            let mut record = Record::clone(&record(&problem, &device, index as usize % 5));
            let outcome = Outcome {
                winner: Timed {
                    config: record.config.clone(),
                    median_us: 1e4 / (1.0 + index as f64),
                    utilisation: (index % 3 == 0).then_some(2.0 / 3.0),
                },
                spread: 0.1 / 3.0 * index as f64,
                check_error: 1e-7 * index as f64 / 7.0,
                runner_up: Some(Timed {
                    config: record.config.clone(),
                    median_us: std::f64::consts::PI * (1.0 + index as f64),
                    utilisation: None,
                }),
                default_us: (index % 2 == 0).then_some(1.0 / 3.0),
            };
            record = Record::new(&problem, &device, outcome);
            record
        })
        .collect();
    let text = write_lines(records.clone()).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let (read, ignored) = read_lines(&text);
    assert!(ignored.is_empty() && read.len() == lines.len(), "{ignored:?}");
    let reversed: Vec<Record> = read.into_iter().rev().collect();
    assert_eq!(write_lines(reversed).unwrap(), text);
    lines.sort();
    assert_eq!(lines.join("\n") + "\n", text);
}
