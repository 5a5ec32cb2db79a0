//! Covering: a small set of configs that serves every problem of some ranges.
//!
//! Each sampled shape has a first choice (`lookup`). Kernels, the texts to compile, are what costs,
//! and configs that differ only in numbers of the launch share them. So a class gets few sets of
//! kernels, each with all its configs, such that at every sample some config takes about as long as
//! the first choice. A problem that follows no record gets exactly its own config. In the end every
//! listed shape has a config that fits. Nothing here compiles.

use super::canonical::Canonical;
use super::key::Class;
use super::lookup::{self, Choice, Known};
use super::range::Range;
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::error::{Error, Result, Status};
use crate::family;
use crate::kernel;
use crate::problem::Problem;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The configs that ranges need, and the kernels of them all.
#[derive(Default)]
pub struct Covering {
    /// Each config with a problem of its class that it fits.
    pub configs: Vec<(Canonical, Config)>,
    /// No two have the same text. A config of the CPU backend has none.
    pub kernels: Vec<Kernel>,
}

/// The text of a kernel, which several configs and classes may share.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    /// The template's name, for messages.
    pub name: &'static str,
    /// The family for whose targets the text is compiled.
    pub family: Family,
    pub text: String,
}

impl Kernel {
    pub fn source(&self) -> kernel::Source<'_> {
        kernel::Source { name: self.name, family: self.family, text: &self.text }
    }
}

/// Covers the ranges with configs that `choices` names for a problem, best first, and that
/// `may_use` lets pass. The same input gives the same configs.
pub fn covering(
    known: &Known,
    ranges: &[Range],
    device: &Device,
    choices: &(dyn Fn(&Canonical) -> Vec<Choice> + Sync),
    may_use: &(dyn Fn(&Canonical, &Config) -> bool + Sync),
) -> Result<Covering> {
    let mut classes: BTreeMap<Class, Shapes> = BTreeMap::new();
    for range in ranges {
        let is_possible = |problem: &Canonical| family::supported(problem, device).is_ok();
        for problem in range.samples()?.into_iter().filter(is_possible) {
            classes.entry(Class::of(&problem)).or_default().samples.push(problem);
        }
        for problem in range.shapes()?.into_iter().filter(is_possible) {
            classes.entry(Class::of(&problem)).or_default().all.push(problem);
        }
    }
    let mut texts = Texts::default();
    let mut covering = Covering::default();
    for shapes in classes.into_values() {
        let may_split_short = shapes.all.iter().any(|problem| problem.short_splits() > 1);
        let may_split = shapes.all.iter().any(|problem| problem.max_splits() > 1);
        let choose = |problem: &Canonical| {
            let is_wanted = |config: &Config| !splits_keys_of_device(problem, config) && may_use(problem, config);
            let forms = |Choice { config, .. }| {
                let splittable = match config.family {
                    Family::Decode if may_split => Some(with_a_kernel_that_splits(&config)),
                    Family::Sm90 if may_split_short => Some(with_splits_of_short_sequences(&config)),
                    _ => None,
                };
                splittable.into_iter().chain([config])
            };
            choices(problem).into_iter().flat_map(forms).find(is_wanted)
        };
        let configs = match shapes.samples.first().and_then(|problem| problem.follows_no_record()) {
            Some(_) => own_configs(&shapes.samples, choose, &mut texts, device)?,
            None => few_configs(known, &shapes, choose, &mut texts, device)?,
        };
        covering.configs.extend(configs);
    }
    covering.kernels = texts.taken();
    Ok(covering)
}

/// Whether a config splits the keys of tiles over pages or with lengths on the device. It takes two
/// kernels that no other config shares, so ranges do without. Batch-invariant problems keep their
/// own configs.
fn splits_keys_of_device(problem: &Problem, config: &Config) -> bool {
    let splits = config.get("num_splits").is_some_and(|splits| splits > 1);
    let reads_lengths = problem.features.paged.is_some() || problem.features.varlen.is_some();
    reads_lengths && config.family != Family::Decode && splits && !problem.batch_invariant
}

/// The config with the decode kernel that may split the keys of short sequences, if it has any.
/// Batches of many sequences launch that kernel unsplit, so that a range has one for all batches.
fn with_splits_of_short_sequences(config: &Config) -> Config {
    match config.get("decode_rows") {
        Some(1..) => config.clone().with("decode_splits", 1),
        _ => config.clone(),
    }
}

/// The config of unsplit decoding with the kernel of split decoding, if it is one. So a tile has
/// one kernel in a range, for batches that split keys and for those that do not.
fn with_a_kernel_that_splits(config: &Config) -> Config {
    match config.get("num_splits") {
        Some(1) => config.clone().with("splittable", 1),
        _ => config.clone(),
    }
}

/// The problems of a class.
#[derive(Default)]
struct Shapes {
    samples: Vec<Canonical>,
    all: Vec<Canonical>,
}

/// The config of each problem.
fn own_configs(
    problems: &[Canonical],
    choose: impl Fn(&Canonical) -> Option<Config> + Sync,
    texts: &mut Texts,
    device: &Device,
) -> Result<Vec<(Canonical, Config)>> {
    let chosen: Vec<(Canonical, Config)> = problems
        .par_iter()
        .map(|problem| Ok((*problem, choose(problem).ok_or_else(|| nothing_builds(problem))?)))
        .collect::<Result<_>>()?;
    let mut configs: Vec<(Canonical, Config)> = Vec::new();
    for (problem, config) in chosen {
        if configs.iter().all(|(_, other)| *other != config) {
            configs.push((problem, config));
        }
    }
    for index in texts.of_configs(&configs, device)?.into_iter().flatten() {
        texts.take(index);
    }
    Ok(configs)
}

/// Few sets of kernels of one class, with all their configs.
fn few_configs(
    known: &Known,
    shapes: &Shapes,
    choose: impl Fn(&Canonical) -> Option<Config> + Sync,
    texts: &mut Texts,
    device: &Device,
) -> Result<Vec<(Canonical, Config)>> {
    let chosen: Vec<Config> = shapes
        .samples
        .par_iter()
        .map(|problem| choose(problem).ok_or_else(|| nothing_builds(problem)))
        .collect::<Result<_>>()?;
    let mut problem_of: BTreeMap<&Config, Canonical> = BTreeMap::new();
    for (problem, config) in shapes.samples.iter().zip(&chosen) {
        problem_of.entry(config).or_insert(*problem);
    }
    let candidates: Vec<(Canonical, Config)> =
        problem_of.iter().map(|(config, problem)| (*problem, (*config).clone())).collect();
    let sets = KernelSet::of(texts.of_configs(&candidates, device)?);

    // For each sample the sets that serve it about as fast as its first choice.
    let configs: Vec<&Config> = candidates.iter().map(|(_, config)| config).collect();
    let serving: Vec<BTreeSet<usize>> = shapes
        .samples
        .par_iter()
        .zip(&chosen)
        .map(|(problem, first)| {
            let slowdowns = lookup::slowdowns(known, problem, first, &configs, device);
            let is_fast =
                |candidate: &usize| slowdowns[*candidate].is_some_and(|factor| factor <= 1.0 + lookup::TOLERANCE);
            (0..sets.len()).filter(|set| sets[*set].candidates.iter().any(is_fast)).collect()
        })
        .collect();
    let taken = take_sets(&sets, &serving, texts).into_iter().flat_map(|set| &sets[set].candidates);
    let mut configs: Vec<(Canonical, Config)> = taken.map(|candidate| candidates[*candidate].clone()).collect();

    // Every shape has a config that fits.
    let fits = |problem: &Canonical, config: &Config| family::check(problem, config, device).is_ok();
    for problem in &shapes.all {
        if configs.iter().any(|(_, config)| fits(problem, config)) {
            continue;
        }
        let config = choose(problem).filter(|config| fits(problem, config)).ok_or_else(|| nothing_builds(problem))?;
        let own = [(*problem, config)];
        for index in texts.of_configs(&own, device)?.into_iter().flatten() {
            texts.take(index);
        }
        configs.extend(own);
    }
    Ok(configs)
}

/// Kernels by their numbers, and the candidates that need exactly these.
struct KernelSet {
    kernels: Vec<usize>,
    candidates: Vec<usize>,
}

impl KernelSet {
    /// The sets of candidates, for each of which its kernels are given.
    fn of(kernels: Vec<Vec<usize>>) -> Vec<KernelSet> {
        let mut sets: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for (candidate, kernels) in kernels.into_iter().enumerate() {
            sets.entry(kernels).or_default().push(candidate);
        }
        sets.into_iter().map(|(kernels, candidates)| KernelSet { kernels, candidates }).collect()
    }
}

/// Takes sets until each sample has one that serves it. Each is the one that serves most of the
/// other samples for each new kernel, and the first of those that are equal.
fn take_sets(sets: &[KernelSet], serving: &[BTreeSet<usize>], texts: &mut Texts) -> Vec<usize> {
    let mut taken = Vec::new();
    let mut uncovered: Vec<&BTreeSet<usize>> = serving.iter().collect();
    while !uncovered.is_empty() {
        let worth = |set: &usize| {
            let served = uncovered.iter().filter(|serving| serving.contains(set)).count();
            let new_kernels = sets[*set].kernels.iter().filter(|text| !texts.is_taken(**text)).count();
            served as f64 / (new_kernels as f64).max(0.01)
        };
        let best = (0..sets.len()).rev().max_by(|a, b| worth(a).total_cmp(&worth(b))).expect("a sample has its choice");
        taken.push(best);
        sets[best].kernels.iter().for_each(|text| texts.take(*text));
        uncovered.retain(|serving| !serving.contains(&best));
    }
    taken
}

fn nothing_builds(problem: &Canonical) -> Error {
    Error::new(Status::CompileFailed, format!("no config of {} builds", Class::of(problem)))
}

/// Kernels by number, and which of them are wanted.
#[derive(Default)]
struct Texts {
    numbers: HashMap<Kernel, usize>,
    kernels: Vec<Kernel>,
    taken: BTreeSet<usize>,
}

impl Texts {
    /// The numbers of each config's kernels, in rising order. A config of the CPU backend has one
    /// that is no text.
    fn of_configs(&mut self, configs: &[(Canonical, Config)], device: &Device) -> Result<Vec<Vec<usize>>> {
        let rendered: Vec<Vec<Kernel>> =
            configs.par_iter().map(|(problem, config)| kernels(problem, config, device)).collect::<Result<_>>()?;
        let mut number = |kernel: Kernel| match self.numbers.get(&kernel) {
            Some(number) => *number,
            None => {
                self.numbers.insert(kernel.clone(), self.kernels.len());
                self.kernels.push(kernel);
                self.kernels.len() - 1
            }
        };
        Ok(rendered
            .into_iter()
            .map(|kernels| {
                let mut numbers: Vec<usize> = kernels.into_iter().map(&mut number).collect();
                numbers.sort_unstable();
                numbers
            })
            .collect())
    }

    fn take(&mut self, number: usize) {
        self.taken.insert(number);
    }

    fn is_taken(&self, number: usize) -> bool {
        self.taken.contains(&number)
    }

    /// The wanted kernels, without those of the CPU backend.
    fn taken(&self) -> Vec<Kernel> {
        let kernels = self.taken.iter().map(|number| &self.kernels[*number]);
        kernels.filter(|kernel| kernel.family != Family::Cpu).cloned().collect()
    }
}

fn kernels(problem: &Canonical, config: &Config, device: &Device) -> Result<Vec<Kernel>> {
    if device.arch == Arch::Cpu {
        return Ok(vec![Kernel { name: "cpu", family: config.family, text: config.to_string() }]);
    }
    let rendered = kernel::render_pass(problem, config, device.arch)?;
    let kernel = |(spec, text): (family::spec::KernelSpec, String)| Kernel {
        name: spec.template,
        family: spec.family(config),
        text,
    };
    Ok(rendered.into_iter().map(kernel).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::plan::canonical::canonical;
    use crate::plan::{Sizes, lookup};
    use crate::problem::{Causal, Dtype, Features, Pass, Problem, Varlen};

    /// A server whose batches have one to 64 sequences, few of which get splits.
    #[test]
    fn a_range_has_the_kernels_that_split_short_sequences_unless_they_may_not_be_used() {
        let varlen = Some(Varlen { total_q: Some(4096), ..Varlen::default() });
        let largest = Problem {
            num_heads_kv: 8,
            causal: Causal::BottomRight,
            features: Features { varlen, paged: Some(16), ..Features::NONE },
            ..Problem::dense(Pass::Forward, Dtype::Bf16, 64, 32, 2048, 128)
        };
        let ranges = [Range { largest, least: Sizes::ONE }];
        let (known, device) = (Known::default(), Device::typical(Arch::Sm(9, 0)).unwrap());
        let choices = |problem: &Canonical| lookup::choices(&known, problem, &device);
        let decode_splits = |may_use: &(dyn Fn(&Canonical, &Config) -> bool + Sync)| {
            let covering = covering(&known, &ranges, &device, &choices, may_use).unwrap();
            let of_mixed = covering.configs.iter().filter(|(_, config)| config.get("decode_rows").is_some());
            of_mixed.map(|(_, config)| config.get("decode_splits").unwrap()).collect::<Vec<_>>()
        };
        let split = decode_splits(&|_, _| true);
        assert!(!split.is_empty() && split.iter().all(|splits| *splits == 1), "{split:?}");
        let unsplit = decode_splits(&|_, config| config.get("decode_splits") != Some(1));
        assert!(!unsplit.is_empty() && unsplit.iter().all(|splits| *splits == 0), "{unsplit:?}");
    }

    /// A cost tells two and eight splits of few CTAs hardly apart.
    #[test]
    fn the_prepared_config_with_the_splits_of_the_choice_is_taken() {
        let (known, device) = (Known::default(), Device::typical(Arch::Sm(9, 0)).unwrap());
        let decode =
            Problem { seqlen_q: 1, seqlen_k: 2048, ..Problem::dense(Pass::Forward, Dtype::Bf16, 4, 16, 1, 64) };
        let features = Features { varlen: Some(Varlen::default()), paged: Some(16), ..Features::NONE };
        let problem = canonical(&Problem { features, ..decode });
        let first = family::heuristic(&problem, &device);
        let tile = first.clone().with("block_n", 32).with("ctas_per_sm", 2).with("num_stages", 3);
        let splits = [2, 4, 8].map(|splits| tile.clone().with("num_splits", splits));
        let configs: Vec<&Config> = splits.iter().collect();
        for (index, splits) in [2, 4, 8].into_iter().enumerate() {
            let first = first.clone().with("num_splits", splits);
            assert_eq!(lookup::substitute(&known, &problem, &first, &configs, &device), Some(index));
        }
    }
}
