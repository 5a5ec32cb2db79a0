//! Contents: what a pack says about itself and about its kernels. The cubins follow as bytes, which
//! `format` lays out.

use crate::config::Config;
use crate::device::Arch;
use crate::kernel::compile::EntryResources;
use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Who made a pack. A library reads this part of every version's manifest, so its fields stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Version of the library that rendered the kernels.
    pub library_version: String,
    /// `render::Renderer::digest` of the templates that it rendered.
    pub templates_digest: String,
    /// (major, minor) of the NVRTC that compiled them.
    pub nvrtc_version: (u32, u32),
}

/// All that a pack holds, except the cubins themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Fields")]
pub struct Manifest {
    #[serde(flatten)]
    pub origin: Origin,
    /// In the order of their cubins.
    pub kernels: Vec<PackedKernel>,
    /// The GPUs that configs were chosen for.
    pub gpus: Vec<PackedGpu>,
    pub plans: Vec<PackedPlan>,
    pub operations: Vec<PackedOperation>,
    /// Lines of tuning records (`plan::record`).
    pub records: Vec<String>,
}

/// A manifest as it is read. serde would copy every value first to find those of a flattened field.
#[derive(Deserialize)]
struct Fields {
    library_version: String,
    templates_digest: String,
    nvrtc_version: (u32, u32),
    kernels: Vec<PackedKernel>,
    gpus: Vec<PackedGpu>,
    plans: Vec<PackedPlan>,
    operations: Vec<PackedOperation>,
    records: Vec<String>,
}

impl From<Fields> for Manifest {
    fn from(fields: Fields) -> Manifest {
        let Fields { library_version, templates_digest, nvrtc_version, kernels, gpus, plans, operations, records } =
            fields;
        let origin = Origin { library_version, templates_digest, nvrtc_version };
        Manifest { origin, kernels, gpus, plans, operations, records }
    }
}

/// One cubin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedKernel {
    /// Name of the template.
    pub name: String,
    /// The architecture that the text was rendered for. Its GPUs alone run the kernel.
    pub arch: Arch,
    /// The target that the text was compiled for, such as `sm_90a`.
    pub target: String,
    /// `cubin_cache::TextDigest` of the rendered text.
    pub text: String,
    /// Bytes of the cubin, and of its compressed form in the file.
    pub cubin_bytes: u32,
    pub packed_bytes: u32,
    /// As in `compile::Compiled`.
    pub log: String,
    pub resources: BTreeMap<String, EntryResources>,
}

/// A GPU that configs were chosen for. Others of its architecture run the kernels too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedGpu {
    pub arch: Arch,
    /// As the driver spells it.
    pub name: String,
    pub sm_count: u32,
}

impl fmt::Display for PackedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} SMs)", self.name, self.sm_count)
    }
}

/// A problem that was planned for GPUs of this architecture, and the kernels of its config.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PackedPlan {
    pub arch: Arch,
    /// The GPUs that choose this config, as indices in `Manifest::gpus`.
    pub gpus: Vec<u32>,
    pub problem: Problem,
    pub config: Config,
    /// Indices in `Manifest::kernels`, in launch order.
    pub kernels: Vec<u32>,
}

/// A kernel of a small operation (`ops`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedOperation {
    pub arch: Arch,
    /// The class in words, such as `merge bf16 from fp32 vec4`.
    pub class: String,
    /// Index in `Manifest::kernels`.
    pub kernel: u32,
}

impl Manifest {
    /// The architectures that it has kernels for, ascending.
    pub fn archs(&self) -> Vec<Arch> {
        let mut archs: Vec<Arch> = self.kernels.iter().map(|kernel| kernel.arch).collect();
        archs.sort_unstable();
        archs.dedup();
        archs
    }

    /// An error if an index names no kernel or no GPU.
    pub fn check(&self) -> Result<(), String> {
        let of_plans = self.plans.iter().flat_map(|plan| &plan.kernels);
        let of_operations = self.operations.iter().map(|operation| &operation.kernel);
        within("kernel", of_plans.chain(of_operations), self.kernels.len())?;
        within("GPU", self.plans.iter().flat_map(|plan| &plan.gpus), self.gpus.len())
    }
}

fn within<'a>(noun: &str, mut indices: impl Iterator<Item = &'a u32>, count: usize) -> Result<(), String> {
    match indices.find(|index| **index as usize >= count) {
        Some(index) => Err(format!("it names {noun} {index} of {count}")),
        None => Ok(()),
    }
}
