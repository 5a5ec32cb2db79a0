//! The page: devices with their problems, as values of the template beside this file.

use super::chart::{self, Overview};
use super::input::Input;
use super::problem::{Told, told};
use super::text::day;
use crate::tuning_log::Entry;
use flashtune::device::Arch;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use tera::{Context, Tera};

const TEMPLATE: &str = include_str!("page.html.tera");
const STYLE: &str = include_str!("page.css");

#[derive(Serialize)]
struct Page<'a> {
    version: &'static str,
    /// A constant of this program, and the only text that is not escaped.
    style: &'static str,
    notes: &'a [String],
    count: usize,
    devices: Vec<OfDevice>,
}

#[derive(Serialize)]
struct OfDevice {
    name: String,
    /// Names and values.
    facts: Vec<(&'static str, String)>,
    summary: String,
    overview: Option<Overview>,
    problems: Vec<Told>,
}

pub fn html(input: &Input) -> Result<String, String> {
    let mut devices: BTreeMap<(Arch, &str, u32), Vec<&Entry>> = BTreeMap::new();
    for entry in &input.entries {
        devices.entry((entry.arch, &entry.device, entry.sm_count)).or_default().push(entry);
    }
    let devices = devices.into_values().map(|entries| of_device(entries, input)).collect();
    let page = Page {
        version: env!("CARGO_PKG_VERSION"),
        style: STYLE,
        notes: &input.notes,
        count: input.entries.len(),
        devices,
    };
    render(&page).map_err(|error| format!("the page's template: {error}"))
}

fn render(page: &Page) -> tera::TeraResult<String> {
    let mut tera = Tera::new();
    // Values are escaped in all templates, whatever their names.
    tera.autoescape_on([""]);
    tera.add_raw_template("page", TEMPLATE)?;
    tera.render("page", &Context::from_serialize(page)?)
}

fn of_device(mut entries: Vec<&Entry>, input: &Input) -> OfDevice {
    entries.sort_by_cached_key(|entry| {
        let p = &entry.problem;
        (p.pass, p.dtype, p.head_dim, p.head_dim_v, p.causal, p.seqlen_q, p.seqlen_k, p.batch_size, entry.id())
    });
    let problems: Vec<Told> = entries.iter().map(|entry| told(entry, &input.known, &input.cpu)).collect();
    let name_of = |told: &Told| format!("{}; {}", told.name, told.shape);
    let ratios = problems.iter().filter_map(|told| Some((name_of(told), told.ratio?))).collect();
    let name = entries.first().map_or(String::new(), |entry| entry.device.clone());
    OfDevice { name, facts: facts(&entries), summary: summary(&problems), overview: chart::of_ratios(ratios), problems }
}

fn facts(entries: &[&Entry]) -> Vec<(&'static str, String)> {
    let Some(first) = entries.first() else { return Vec::new() };
    let records = || entries.iter().filter_map(|entry| entry.result.as_deref().ok());
    let distinct = |values: &mut dyn Iterator<Item = String>| values.collect::<BTreeSet<_>>();
    let joined = |values: BTreeSet<String>| values.into_iter().collect::<Vec<_>>().join(", ");
    let is_gpu = first.arch != Arch::Cpu;
    let mut facts = vec![
        ("Architecture", first.arch.to_string()),
        (if is_gpu { "SMs" } else { "Threads" }, first.sm_count.to_string()),
    ];
    if is_gpu {
        let driver = |version: u32| format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
        facts.push(("Driver", joined(distinct(&mut records().map(|record| driver(record.driver_version))))));
        let nvrtc = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        facts.push(("NVRTC", joined(distinct(&mut records().map(|record| nvrtc(record.nvrtc_version))))));
    }
    facts.push((
        "Tuned with",
        joined(distinct(&mut records().map(|record| format!("flashtune {}", record.library_version)))),
    ));
    let days = distinct(&mut entries.iter().filter_map(|entry| day(entry.run.as_ref()?.ended_at)));
    facts.push(match (days.first(), days.last()) {
        (Some(first), Some(last)) if first == last => ("Measured", first.clone()),
        (Some(first), Some(last)) => ("Measured", format!("{first} to {last}")),
        _ => ("Measured", "records keep no date".to_owned()),
    });
    facts.retain(|(_, value)| !value.is_empty());
    facts
}

fn summary(problems: &[Told]) -> String {
    let ratios: Vec<f64> = problems.iter().filter_map(|told| told.ratio).collect();
    let won = problems.iter().filter(|told| told.has_winner()).count();
    let changed = problems.iter().filter(|told| told.has_other_winner()).count();
    let mut text = format!("{won} of {} problems have a winner; in {changed} it is not the default.", problems.len());
    if !ratios.is_empty() {
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let most = ratios.iter().copied().fold(0.0, f64::max);
        text += &format!(" Default over winner: {mean:.3} on geometric mean, {most:.3} at most.");
    }
    text
}
