//! Packing: which configs, kernels and records a pack holds, for problems and architectures that
//! are given. It needs NVRTC but no GPU.
//!
//! Configs are chosen for a typical GPU of each architecture, for every GPU that records name, and
//! for other numbers of SMs if they are asked for. Each problem gets the config that a lookup with
//! the pack's records would choose there. `kernel::pack` compiles and writes.

use super::canonical::{Canonical, canonical};
use super::key;
use super::known_records::read_only;
use super::lookup::{self, Choice, Known};
use super::record::Record;
use crate::device::{Arch, Device};
use crate::error::{Error, Result, Status};
use crate::family::{self, spec::KernelSpec};
use crate::kernel::cubin_cache::CubinCache;
use crate::kernel::fixed::FAMILY;
use crate::kernel::pack::{Builder, KernelText, PackedGpu, PackedOperation, PackedPlan};
use crate::kernel::{render_fixed, render_pass};
use crate::ops::all;
use crate::problem::{Dtype, Problem};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// What a pack is made for.
pub struct Wanted<'a> {
    pub archs: &'a [Arch],
    /// Numbers of SMs of more GPUs that configs are chosen for, on each architecture.
    pub sm_counts: &'a [u32],
    pub problems: &'a [Problem],
    /// Records of tuned GPUs. Those of the pack's architectures go into it and choose configs.
    pub records: &'a [Record],
    /// The folder of cubins (`cache_dir::resolve`). Kernels that are there are not compiled again.
    pub cache_dir: Option<&'a Path>,
}

/// The bytes of a pack, and the problems that have no place in it.
pub struct Packed {
    pub bytes: Vec<u8>,
    /// The key of each problem with its architecture, and why it was left out.
    pub left_out: Vec<(String, String)>,
}

/// A problem on a device, and the configs that it may have, best first.
struct Item {
    device: Device,
    problem: Canonical,
    choices: std::vec::IntoIter<Choice>,
}

impl Item {
    fn is(&self, other: &Item) -> bool {
        (&self.device, &self.problem) == (&other.device, &other.problem)
    }
}

/// A choice whose kernels are rendered.
struct Rendered {
    choice: Choice,
    texts: Vec<KernelText>,
}

/// Chooses, renders and compiles, and calls `progress` with the number of texts to compile, then
/// with 0 after each.
pub fn pack(wanted: &Wanted, progress: &(dyn Fn(usize) + Sync)) -> Result<Packed> {
    let mut builder = Builder::new(CubinCache::new(wanted.cache_dir))?;
    let (mut items, mut left_out, mut lines) = (Vec::new(), Vec::new(), BTreeSet::new());
    for arch in wanted.archs {
        let of_arch = wanted.records.iter().filter(|record| record.arch == *arch);
        let of_arch: Vec<String> = of_arch.map(line).collect::<Result<_>>()?;
        let known = read_only(&of_arch, *arch);
        lines.extend(of_arch);
        for device in devices(*arch, wanted.sm_counts, &known)? {
            for problem in wanted.problems {
                match item(&known, problem, &device) {
                    // Several problems may have one plan.
                    Ok(item) if items.iter().any(|other| item.is(other)) => {}
                    Ok(item) => items.push(item),
                    Err(error) => left_out.push((format!("{arch} {}", key::record_key(problem)), error.message)),
                }
            }
        }
    }
    let operations = operations(wanted)?;
    let texts: Vec<KernelText> = operations.iter().map(|(_, text)| text.clone()).collect();
    progress(texts.len());
    builder.compile(&texts, &|_| progress(0))?;
    for (operation, text) in operations {
        builder.add_operation(PackedOperation { kernel: builder.kernel(&text)?, ..operation });
    }
    plans(&mut builder, items, &mut left_out, &mut lines, progress)?;
    // Each GPU says the same of a problem.
    let mut seen = BTreeSet::new();
    left_out.retain(|problem| seen.insert(problem.clone()));
    Ok(Packed { bytes: builder.finish(lines.into_iter().collect())?, left_out })
}

/// Compiles the first choice of each item, then the next choice of those that did not compile, and
/// so on.
fn plans(
    builder: &mut Builder,
    mut items: Vec<Item>,
    left_out: &mut Vec<(String, String)>,
    lines: &mut BTreeSet<String>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<()> {
    while !items.is_empty() {
        let mut round: Vec<(Item, Rendered)> = Vec::new();
        for mut item in items {
            match item.choices.next() {
                Some(choice) => {
                    let texts = texts(&item.problem, &choice, item.device.arch)?;
                    round.push((item, Rendered { choice, texts }));
                }
                None => {
                    let name = format!("{} {}", item.device.arch, key::record_key(&item.problem));
                    left_out.push((name, "none of its configs compiles".to_owned()));
                }
            }
        }
        let texts: Vec<KernelText> = round.iter().flat_map(|(_, rendered)| rendered.texts.clone()).collect();
        progress(texts.len());
        builder.compile(&texts, &|_| progress(0))?;
        items = Vec::new();
        for (item, Rendered { choice, texts }) in round {
            let kernels: Result<Vec<u32>> = texts.iter().map(|text| builder.kernel(text)).collect();
            match kernels {
                Ok(kernels) => {
                    if let Some(record) = &choice.record {
                        lines.insert(line(record)?);
                    }
                    let Device { arch, name, sm_count, .. } = item.device.clone();
                    let gpus = vec![builder.gpu(PackedGpu { arch, name, sm_count })];
                    builder.add_plan(PackedPlan { arch, gpus, problem: *item.problem, config: choice.config, kernels });
                }
                Err(error) => {
                    log::warn!("{} for {}: {error}", choice.config, key::record_key(&item.problem));
                    items.push(item);
                }
            }
        }
    }
    Ok(())
}

fn item(known: &Known, problem: &Problem, device: &Device) -> Result<Item> {
    family::supported(problem, device)?;
    // A call comes in this form.
    let problem = canonical(&problem.without_idle_causal());
    let choices = lookup::choices(known, &problem, device).into_iter();
    Ok(Item { device: device.clone(), problem, choices })
}

fn texts(problem: &Problem, choice: &Choice, arch: Arch) -> Result<Vec<KernelText>> {
    let config = &choice.config;
    let text = |(spec, text): (KernelSpec, String)| KernelText {
        name: spec.template,
        arch,
        family: spec.family(config),
        text,
    };
    Ok(render_pass(problem, config, arch)?.into_iter().map(text).collect())
}

/// The kernels of small operations for the dtypes of the problems. They are short.
fn operations(wanted: &Wanted) -> Result<Vec<(PackedOperation, KernelText)>> {
    let dtypes: BTreeSet<Dtype> = wanted.problems.iter().map(|problem| problem.dtype).collect();
    let mut operations = Vec::new();
    for arch in wanted.archs {
        for (class, spec) in all::kernels(dtypes.iter().copied()) {
            let text = render_fixed(&spec, *arch)?;
            let text = KernelText { name: spec.name, arch: *arch, family: FAMILY, text };
            operations.push((PackedOperation { arch: *arch, class: class.to_string(), kernel: 0 }, text));
        }
    }
    Ok(operations)
}

/// The GPUs of an architecture that configs are chosen for, the typical one first.
fn devices(arch: Arch, sm_counts: &[u32], known: &Known) -> Result<Vec<Device>> {
    let typical = Device::typical(arch)
        .ok_or_else(|| Error::new(Status::Unsupported, format!("the kernels do not run on {arch}")))?;
    let of_record = |record: &Arc<Record>| Device {
        name: record.device.clone(),
        sm_count: record.sm_count,
        ..Device::named(arch, &record.device).unwrap_or_else(|| typical.clone())
    };
    let recorded = known.pack.iter().chain(&known.shipped).map(of_record);
    let asked_for = sm_counts.iter().map(|sm_count| Device { sm_count: *sm_count, ..typical.clone() });
    let mut devices = vec![typical.clone()];
    for device in recorded.chain(asked_for) {
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    Ok(devices)
}

fn line(record: &Record) -> Result<String> {
    record.to_line().map_err(|reason| Error::new(Status::Internal, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::shipped;

    #[test]
    fn configs_are_chosen_for_every_gpu_with_records_and_what_these_lookups_need_is_known_of_it() {
        let archs: BTreeSet<&str> = shipped::EMBEDDED.iter().filter_map(|(path, _)| path.split('/').next()).collect();
        for arch in archs.into_iter().map(|arch| arch.parse::<Arch>().unwrap()) {
            let known = read_only(&[], arch);
            let chosen_for = devices(arch, &[78, 78], &known).unwrap();
            assert_eq!(chosen_for[0], Device::typical(arch).unwrap());
            assert_eq!(chosen_for.iter().filter(|device| device.sm_count == 78).count(), 1);
            for record in &known.shipped {
                let is_of = |device: &&Device| key::device_key(device) == record.device_key();
                assert_eq!(chosen_for.iter().filter(is_of).count(), 1, "{}", record.device);
                assert!(Device::named(arch, &record.device).is_some(), "the rate of {}'s memory", record.device);
            }
        }
    }
}
