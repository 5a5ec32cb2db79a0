//! Builder: compiles rendered texts for a pack, each once, side by side, or takes them from the
//! cubin cache. It needs NVRTC but no GPU.
//!
//! It knows texts and cubins. Which texts a pack has is decided above.

use super::contents::{Manifest, Origin, PackedGpu, PackedKernel, PackedOperation, PackedPlan};
use super::format::encode;
use crate::config::Family;
use crate::cuda::nvrtc::Nvrtc;
use crate::device::Arch;
use crate::error::{Error, Result, Status};
use crate::kernel::compile::{self, Compiled};
use crate::kernel::cubin_cache::{CubinCache, TextDigest};
use crate::kernel::render::Renderer;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::collections::HashMap;

/// A rendered text, and what it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelText {
    /// Name of the template.
    pub name: &'static str,
    pub arch: Arch,
    /// The family whose targets the text is compiled for.
    pub family: Family,
    pub text: String,
}

pub struct Builder {
    nvrtc: &'static Nvrtc,
    cache: CubinCache,
    /// By target and text. An error says that the text does not compile.
    compiled: HashMap<(String, String), Result<u32>>,
    kernels: Vec<PackedKernel>,
    cubins: Vec<Vec<u8>>,
    gpus: Vec<PackedGpu>,
    plans: Vec<PackedPlan>,
    operations: Vec<PackedOperation>,
}

impl Builder {
    /// An error without NVRTC.
    pub fn new(cache: CubinCache) -> Result<Builder> {
        Ok(Builder {
            nvrtc: Nvrtc::get()?,
            cache,
            compiled: HashMap::new(),
            kernels: Vec::new(),
            cubins: Vec::new(),
            gpus: Vec::new(),
            plans: Vec::new(),
            operations: Vec::new(),
        })
    }

    /// (major, minor) of the NVRTC that compiles.
    pub fn nvrtc_version(&self) -> (u32, u32) {
        self.nvrtc.version()
    }

    /// Compiles the texts that are new on all cores, and calls `done` after each. A text that does
    /// not compile is remembered as such (`kernel`); other errors end the work.
    pub fn compile(&mut self, texts: &[KernelText], done: &(dyn Fn(&KernelText) + Sync)) -> Result<()> {
        let mut fresh: Vec<(&KernelText, (String, String))> = Vec::new();
        for text in texts {
            let key = self.key(text)?;
            if !self.compiled.contains_key(&key) && fresh.iter().all(|(_, other)| *other != key) {
                fresh.push((text, key));
            }
        }
        let (nvrtc, cache) = (self.nvrtc, &self.cache);
        let results: Vec<Result<Compiled>> = fresh
            .par_iter()
            .map(|(text, (target, _))| {
                let digest = TextDigest::new(&text.text);
                let compiled = cache.get_or_compile(nvrtc, text.name, &text.text, &digest, target);
                done(text);
                compiled.map(|(compiled, _)| compiled)
            })
            .collect();
        // In the order of the texts, so that the same texts make the same pack.
        for ((text, key), result) in fresh.into_iter().zip(results) {
            let index = match result {
                Ok(compiled) => Ok(self.add(text, &key, compiled)),
                Err(error) if error.status == Status::CompileFailed => Err(error),
                Err(error) => return Err(error),
            };
            self.compiled.insert(key, index);
        }
        Ok(())
    }

    /// The index of a text's kernel after `compile`; an error if the text does not compile.
    pub fn kernel(&self, text: &KernelText) -> Result<u32> {
        let compiled = self.compiled.get(&self.key(text)?);
        compiled
            .cloned()
            .unwrap_or_else(|| Err(Error::new(Status::Internal, format!("{} was not compiled", text.name))))
    }

    /// The index of a GPU.
    pub fn gpu(&mut self, gpu: PackedGpu) -> u32 {
        let known = self.gpus.iter().position(|other| *other == gpu);
        let index = known.unwrap_or_else(|| {
            self.gpus.push(gpu);
            self.gpus.len() - 1
        });
        index as u32
    }

    /// Adds a plan, or its GPUs to a plan that is otherwise the same.
    pub fn add_plan(&mut self, plan: PackedPlan) {
        let is_same = |other: &&mut PackedPlan| {
            (other.arch, &other.problem, &other.config) == (plan.arch, &plan.problem, &plan.config)
        };
        match self.plans.iter_mut().find(is_same) {
            Some(known) => known.gpus.extend(plan.gpus),
            None => self.plans.push(plan),
        }
    }

    pub fn add_operation(&mut self, operation: PackedOperation) {
        self.operations.push(operation);
    }

    /// The bytes of the pack.
    pub fn finish(self, records: Vec<String>) -> Result<Vec<u8>> {
        let origin = Origin {
            library_version: env!("CARGO_PKG_VERSION").to_owned(),
            templates_digest: Renderer::shared()?.digest(),
            nvrtc_version: self.nvrtc.version(),
        };
        let Builder { kernels, cubins, gpus, plans, operations, .. } = self;
        let manifest = Manifest { origin, kernels, gpus, plans, operations, records };
        encode(&manifest, &cubins).map_err(|reason| Error::new(Status::Unsupported, reason))
    }

    fn key(&self, text: &KernelText) -> Result<(String, String)> {
        let target = compile::target(text.arch, text.family, self.nvrtc)?;
        Ok((target, TextDigest::new(&text.text).as_str().to_owned()))
    }

    fn add(&mut self, text: &KernelText, (target, digest): &(String, String), compiled: Compiled) -> u32 {
        let index = self.kernels.len() as u32;
        self.kernels.push(PackedKernel {
            name: text.name.to_owned(),
            arch: text.arch,
            target: target.clone(),
            text: digest.clone(),
            cubin_bytes: 0,
            packed_bytes: 0,
            log: compiled.log,
            resources: compiled.resources,
        });
        self.cubins.push(compiled.cubin);
        index
    }
}
