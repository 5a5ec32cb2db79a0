//! The GPUs and the pack: whether the kernels run on a GPU, by running what comes before a launch.

use super::check::{Check, Status, quoted};
use flashtune::backend::Backend;
use flashtune::call::TensorRef;
use flashtune::device::{Arch, Device};
use flashtune::environment::variable;
use flashtune::error::Result;
use flashtune::kernel::Gpu;
use flashtune::kernel::pack::{Pack, Place};
use flashtune::ops::merge::{Merge, MergeClass};
use flashtune::problem::{Dtype, Layout};

/// The pack that contexts of this environment use, and what was found about it.
pub struct PackFound {
    pub check: Check,
    pack: Option<Pack>,
}

impl PackFound {
    pub fn at(place: Option<Place>, gpus: &[Device]) -> PackFound {
        const NAME: &str = "pack";
        let Some(place) = place else {
            return PackFound {
                check: Check::ok(NAME, "no pack is named, and none lies beside the library"),
                pack: None,
            };
        };
        let path = quoted(place.path.display());
        let opened = Pack::open_at(&place).and_then(|pack| pack.check_library().map(|()| pack));
        let fits = |pack: &Pack| match gpus.iter().map(|gpu| pack.check_device(gpu)).collect::<Vec<_>>() {
            results if results.iter().all(|result| result.is_err()) => results.into_iter().next().unwrap_or(Ok(())),
            _ => Ok(()),
        };
        // A wheel has its pack on every GPU.
        let is_for_others =
            |pack: &Pack| place.found_beside.is_some() && !gpus.iter().any(|gpu| pack.has_arch(gpu.arch));
        let refused = |reason: &str| format!("{path} ({}) is not used: {reason}", place.named_by);
        match opened.map(|pack| (fits(&pack), pack)) {
            Ok((Ok(()), pack)) => {
                let archs: Vec<String> = pack.manifest().archs().iter().map(Arch::to_string).collect();
                let fact = format!("{path} ({}) has kernels for {}", place.named_by, archs.join(", "));
                PackFound { check: Check::ok(NAME, fact), pack: Some(pack) }
            }
            Ok((Err(reason), pack)) if is_for_others(&pack) => {
                PackFound { check: Check::missing(NAME, refused(&reason), None), pack: None }
            }
            Ok((Err(reason), _)) | Err(reason) => {
                let mend = mend(&place, gpus, &reason);
                PackFound { check: Check::wrong(NAME, refused(&reason), Some(mend)), pack: None }
            }
        }
    }

    pub fn serves(&self, gpu: &Device) -> bool {
        self.pack.as_ref().is_some_and(|pack| pack.check_device(gpu).is_ok())
    }

    /// Its lines of records.
    pub fn records(&self) -> &[String] {
        self.pack.as_ref().map_or(&[], |pack| &pack.manifest().records)
    }
}

/// A file that is refused for its mode gets the right one. Any other pack is made anew for the
/// GPUs, or left out where there is none.
fn mend(place: &Place, gpus: &[Device], reason: &str) -> String {
    let path = quoted(place.path.display());
    let metadata = std::fs::metadata(&place.path);
    let mut archs: Vec<String> = gpus.iter().map(|gpu| gpu.arch.to_string()).collect();
    archs.dedup();
    match metadata {
        Ok(file) if file.is_file() && reason.starts_with("its mode is") => format!("chmod go-w {path}"),
        Ok(file) if file.is_file() && !archs.is_empty() => {
            format!("flashtune pack --arch {} --preset all --output {path}", archs.join(","))
        }
        _ if place.found_beside.is_none() => "unset FLASHTUNE_PACK".to_owned(),
        _ => format!("rm {path}"),
    }
}

/// Whether the kernels are for GPUs of this architecture.
pub fn is_served(gpu: &Device) -> bool {
    matches!(gpu.arch, Arch::Sm(major, _) if major >= 8)
}

/// The check of a GPU. `compiler` is the check of NVRTC, whose command mends the GPU too.
pub fn check(ordinal: usize, all: &[Device], pack: (&PackFound, Option<Place>), compiler: &Check) -> Check {
    const NAME: &str = "gpu";
    let gpu = &all[ordinal];
    let name = format!("GPU {ordinal}, {} ({})", gpu.name, gpu.arch);
    if !is_served(gpu) {
        let fact = format!("{name} is not served; the kernels need sm_80 or newer");
        let others: Vec<String> = (0..all.len()).filter(|o| is_served(&all[*o])).map(|o| o.to_string()).collect();
        let is_chosen = variable("CUDA_VISIBLE_DEVICES").is_some();
        let mend =
            (!others.is_empty() && !is_chosen).then(|| format!("export CUDA_VISIBLE_DEVICES={}", others.join(",")));
        return Check::missing(NAME, fact, mend);
    }
    let (found, place) = pack;
    let is_packed = found.serves(gpu);
    let has_compiler = compiler.status == Status::Ok;
    if !has_compiler && !is_packed {
        let fact = format!("{name} has neither an NVRTC that compiles for it nor a pack");
        return Check::wrong(NAME, fact, compiler.mend.clone());
    }
    let opened = Gpu::new(ordinal as i32, None, None);
    let built = opened.and_then(|gpu| match has_compiler {
        // A pack need not have this kernel.
        false => Ok("the pack has kernels for it"),
        true => build(gpu.with_pack(place)).map(|()| "a kernel was built and loaded"),
    });
    match built {
        Ok(how) => Check::ok(NAME, format_args!("{name} is ready: {how}")),
        Err(error) => Check::wrong(NAME, format_args!("{name} cannot run kernels: {}", error.message), None),
    }
}

/// Builds the smallest kernel, outside of the cubin cache, so that NVRTC must work.
fn build(gpu: Gpu) -> Result<()> {
    let class = MergeClass { dtype: Dtype::Bf16, partial_dtype: Dtype::Fp32, layout: Layout::Vec4 };
    let merge = Merge {
        class,
        num_partials: 1,
        batch_size: 1,
        seqlen: 1,
        num_heads: 1,
        head_dim_v: 64,
        partial_out: TensorRef::NULL,
        partial_out_stride: 0,
        partial_lse: std::ptr::null(),
        partial_lse_stride: 0,
        out: TensorRef::NULL,
        lse: std::ptr::null_mut(),
    };
    Backend::Cuda(gpu).build_op(&merge).map(drop)
}
