//! The table in `docs/support.md`, made by asking every backend and kernel family for every feature
//! in both passes.
//!
//! A GPU family's kernel is rendered, must differ from the kernel without the feature, and is
//! compiled by NVRTC, that of sm90fp8 excepted. The CPU backend runs the case, and the error rule
//! judges the result. Without NVRTC the test skips compilation and says so;
//! `FLASHTUNE_REQUIRE_NVRTC=1` makes that skip a failure. A gap without a reason in `feature_list`
//! fails the test.

use crate::feature_list::{Feature, LACKS, features};
use crate::nvrtc::{compile, nvrtc};
use crate::source_tree::root;
use crate::support::case::Case;
use crate::support::check::Prepared;
use crate::support::extras::Extras;
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::kernel::compile::target;
use flashtune::kernel::render_pass;
use flashtune::problem::{self, Causal, Eight, EightBits, Features, Pass, Problem};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A family in a pass, on a device that the family is made for, with lengths for which it is the
/// preferred family.
struct Column {
    pass: Pass,
    family: Family,
    arch: Arch,
    lengths: (i64, i64),
}

const fn column(pass: Pass, family: Family, arch: Arch, lengths: (i64, i64)) -> Column {
    Column { pass, family, arch, lengths }
}

impl Column {
    /// The feature's case with what the family serves alone.
    fn case(&self, feature: &Feature) -> Case {
        let case = feature.case(self.lengths);
        if self.family != Family::Sm90Fp8 {
            return case;
        }
        let eight = case.extras.eight.unwrap_or(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
        Case { extras: Extras { eight: Some(eight), ..case.extras }, ..case }
    }

    /// NVRTC takes long. `tiny.rs` compiles and runs kernels of sm90fp8, and tests/kernels compiles
    /// sm80's with these features in combination.
    fn is_compiled(&self) -> bool {
        !matches!(self.family, Family::Sm80 | Family::Sm90Fp8)
    }
}

/// A few tiles of the CPU backend. The slow reference can compute these lengths too.
const SHORT: (i64, i64) = (70, 130);
const MANY: (i64, i64) = (4000, 4000);
const FEW_QUERIES: (i64, i64) = (4, 4000);

const COLUMNS: [Column; 8] = [
    column(Pass::Forward, Family::Cpu, Arch::Cpu, SHORT),
    column(Pass::Forward, Family::Sm80, Arch::Sm(8, 0), MANY),
    column(Pass::Forward, Family::Sm90, Arch::Sm(9, 0), MANY),
    column(Pass::Forward, Family::Sm90Fp8, Arch::Sm(9, 0), MANY),
    column(Pass::Forward, Family::Decode, Arch::Sm(8, 0), FEW_QUERIES),
    column(Pass::Backward, Family::Cpu, Arch::Cpu, SHORT),
    column(Pass::Backward, Family::Sm80, Arch::Sm(8, 0), MANY),
    column(Pass::Backward, Family::Sm90, Arch::Sm(9, 0), MANY),
];

/// The library's answer for one feature in one column.
#[allow(clippy::large_enum_variant)] // there is one table, of a few hundred cells
enum Cell {
    /// The pass does not have this feature.
    Meaningless,
    Lacks,
    Has(Case, Problem, Config),
}

impl Cell {
    fn of(feature: &Feature, column: &Column, device: &Device) -> Cell {
        if !feature.belongs_to(column.pass) {
            return Cell::Meaningless;
        }
        let case = column.case(feature);
        let problem = case.problem(column.pass);
        let configs = match family::supported(&problem, device) {
            Ok(()) => family::heuristics(&problem, device),
            Err(_) => Vec::new(),
        };
        let takes = |config: &Config| family::check(&problem, config, device).is_ok() && (feature.has)(config);
        match configs.into_iter().find(|config| config.family == column.family && takes(config)) {
            Some(config) => Cell::Has(case, problem, config),
            None => Cell::Lacks,
        }
    }

    /// The cell's text, with the space before it.
    fn text(&self) -> &'static str {
        match self {
            Cell::Meaningless => "",
            Cell::Lacks => " no",
            Cell::Has(..) => " yes",
        }
    }
}

/// The same problem without any feature that changes the rendered text. A bias stays where its
/// gradient is asked for, and so do 8-bit queries, which have a family of their own.
fn without_features(problem: &Problem) -> Problem {
    let eight_bits = problem.features.eight_bits.filter(|eight| eight.queries);
    let features = Features { bias: problem.features.dbias, eight_bits, ..Features::NONE };
    Problem { causal: Causal::None, dropout: false, deterministic: false, features, ..*problem }
}

fn device(arch: Arch, cpu: &Subject) -> Device {
    Device::typical(arch).unwrap_or_else(|| cpu.backend.device().clone())
}

/// A row for each feature, a cell for each column.
fn table(cpu: &Subject) -> Vec<(Feature, Vec<Cell>)> {
    let devices = COLUMNS.map(|column| device(column.arch, cpu));
    let row = |feature: Feature| {
        let cells = COLUMNS.iter().zip(&devices).map(|(column, device)| Cell::of(&feature, column, device)).collect();
        (feature, cells)
    };
    features().into_iter().map(row).collect()
}

/// Runs a case that the CPU backend claims to support and judges the result.
fn run_on_cpu(cpu: &Subject, case: &Case, problem: &Problem, config: &Config) {
    assert_eq!(case.problem(problem.pass), *problem, "the test case does not describe the whole problem");
    let prepared = Prepared::new(case);
    let forward = prepared.forward(cpu, &cpu.heuristic(case, Pass::Forward));
    if problem.pass == Pass::Backward {
        prepared.backward(cpu, &forward, config);
    }
}

/// The texts of the kernels that a GPU runs. A feature must change at least one of them.
fn kernels(problem: &Problem, config: &Config, arch: Arch) -> Vec<(&'static str, String)> {
    let texts = |problem: &Problem| -> Vec<(&'static str, String)> {
        let rendered = render_pass(problem, config, arch).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
        rendered.into_iter().map(|(spec, text)| (spec.template, text)).collect()
    };
    let (with, plain) = (texts(problem), without_features(problem));
    assert!(*problem == plain || with != texts(&plain), "{config} silently ignores a feature of {problem:?}");
    with
}

/// The generated part of `docs/support.md`: the table, then the reason for every gap.
fn rendered(table: &[(Feature, Vec<Cell>)]) -> String {
    let heading = |pass: Pass| if pass == Pass::Forward { "forward" } else { "backward" };
    let columns = COLUMNS.iter().map(|column| format!(" {}: {} |", heading(column.pass), column.family.name()));
    let mut text = format!("| |{}\n|---|{}\n", columns.collect::<String>(), "---|".repeat(COLUMNS.len()));
    for (feature, cells) in table {
        let cells: String = cells.iter().map(|cell| format!("{} |", cell.text())).collect();
        text += &format!("| {} |{cells}\n", feature.name);
    }
    text += "\n";
    for lack in LACKS {
        let families: Vec<&str> = lack.families.iter().map(|family| family.name()).collect();
        text += &format!("- {}, not in {}: {}.\n", lack.feature, families.join(", "), lack.reason);
    }
    text
}

const BEGIN: &str = "<!-- begin: generated by tests/numeric/feature_table.rs (make table) -->\n";
const END: &str = "<!-- end: generated -->\n";

#[test]
fn docs_support_says_what_runs_where() {
    let cpu = Subject::cpu(2);
    let table = table(&cpu);
    let mut to_compile = BTreeMap::new();
    for (column, cell) in table.iter().flat_map(|(_, cells)| COLUMNS.iter().zip(cells)) {
        match cell {
            Cell::Has(case, problem, config) if column.family == Family::Cpu => run_on_cpu(&cpu, case, problem, config),
            Cell::Has(_, problem, config) => {
                let kernels = kernels(problem, config, column.arch);
                let compiled = kernels.into_iter().filter(|_| column.is_compiled());
                to_compile.extend(compiled.map(|(template, text)| (text, (template, column))));
            }
            Cell::Meaningless | Cell::Lacks => {}
        }
    }
    if let Some(nvrtc) = nvrtc() {
        let complaint = |(text, (template, column)): (&String, &(&str, &Column))| {
            let target = target(column.arch, column.family, nvrtc).unwrap();
            compile(nvrtc, template, text, &target).err().map(|error| error.to_string())
        };
        let complaints: Vec<String> = to_compile.par_iter().filter_map(complaint).collect();
        assert!(
            complaints.is_empty(),
            "{} of {} kernels:\n{}",
            complaints.len(),
            to_compile.len(),
            complaints.join("\n")
        );
    }

    let path = root().join("docs/support.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = document.split_once(BEGIN).unwrap_or_else(|| panic!("docs/support.md has no line {BEGIN}"));
    let (committed, after) = rest.split_once(END).unwrap_or_else(|| panic!("docs/support.md has no line {END}"));
    let made = rendered(&table);
    if std::env::var_os("FLASHTUNE_UPDATE_SUPPORT").is_some_and(|value| value == "1") {
        return std::fs::write(&path, [before, BEGIN, &made, END, after].concat()).unwrap();
    }
    let drift = made.lines().zip(committed.lines()).find(|(new, old)| new != old);
    assert!(
        committed == made,
        "docs/support.md is out of date; first difference: {drift:?}\n`make table` writes it anew"
    );
}

#[test]
fn gaps_of_a_family_are_listed_with_their_reasons() {
    let mut lacking = BTreeSet::new();
    for (feature, cells) in table(&Subject::cpu(1)) {
        for (column, cell) in COLUMNS.iter().zip(&cells) {
            if matches!(cell, Cell::Lacks) {
                lacking.insert((feature.name, column.family));
            }
        }
    }
    let listed = LACKS.iter().flat_map(|lack| lack.families.iter().map(|family| (lack.feature, *family))).collect();
    let (unlisted, idle): (Vec<_>, Vec<_>) =
        (lacking.difference(&listed).collect(), listed.difference(&lacking).collect());
    assert!(unlisted.is_empty(), "gaps without a reason in LACKS of tests/numeric/feature_list: {unlisted:?}");
    assert!(idle.is_empty(), "entries of LACKS in tests/numeric/feature_list that are no gaps: {idle:?}");
}

#[test]
fn every_feature_of_a_problem_has_its_row() {
    let rows = features();
    let requested = |pass: Pass| {
        let rows = rows.iter().filter(move |row| row.belongs_to(pass));
        rows.map(move |row| row.case(SHORT).problem(pass))
    };
    let problems: Vec<Problem> = requested(Pass::Forward).chain(requested(Pass::Backward)).collect();
    for feature in problem::Feature::ALL {
        assert!(problems.iter().any(|problem| problem.features.is_on(*feature)), "{feature:?} has no row");
    }
    let any = |is_on: fn(&Problem) -> bool| problems.iter().any(is_on);
    assert!(any(|problem| problem.dropout) && any(|problem| problem.deterministic));
    assert!(any(|problem| problem.batch_invariant));
    assert!(any(|problem| problem.causal == Causal::BottomRight) && any(|problem| problem.causal == Causal::TopLeft));
}
