//! From a rendered text to a module on the device: this process, then the pack, then the cubin
//! cache, then NVRTC. The cache's keys have the version of NVRTC, which takes time to find. So the
//! pack comes first.
//!
//! A text is loaded once per context, however many plans use it, and is unloaded with the last of
//! them. Two threads that want the same text at once compile it once. Different texts do not wait
//! for each other.

use super::compile::{Compiled, EntryResources, Target, options, target, targets};
use super::cubin_cache::{CubinCache, Key, TextDigest};
use super::cubins::Cubins;
use super::sass;
use crate::config::Family;
use crate::cuda::context::Context;
use crate::cuda::module::Module;
use crate::cuda::nvrtc::{Nvrtc, OLDEST_MAJOR};
use crate::device::Device;
use crate::error::Result;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

pub(super) struct Loaded {
    pub module: Arc<Module>,
    pub resources: BTreeMap<String, EntryResources>,
    /// `sass::consumer_spill_bytes` of the module's cubin.
    pub consumer_spill_bytes: Option<u32>,
}

type Slot = Arc<Mutex<Weak<Loaded>>>;
/// By context and text. The target of a text follows from the context's device and the family that
/// the text names.
type Slots = HashMap<(usize, TextDigest), Slot>;

/// Where a kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It was loaded already.
    Process,
    /// The pack, or the cubin cache.
    Cache,
    /// NVRTC, now.
    Compiler,
}

/// A rendered text.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Name in messages.
    pub name: &'a str,
    /// The family whose targets the text is compiled for.
    pub family: Family,
    pub text: &'a str,
}

/// The module of a text, loaded into the context, and where it came from.
pub(super) fn load(
    context: &Arc<Context>,
    device: &Device,
    cubins: &Cubins,
    source: &Source,
) -> Result<(Arc<Loaded>, Origin)> {
    let digest = TextDigest::new(source.text);
    let slot = slot(context.id(), &digest);
    let mut loaded = lock(&slot);
    if let Some(loaded) = loaded.upgrade() {
        return Ok((loaded, Origin::Process));
    }
    let (compiled, origin) = cubin(device, cubins, source, &digest)?;
    let module = Module::load(context, &compiled.cubin).map_err(|error| error.context(source.name))?;
    let consumer_spill_bytes = sass::consumer_spill_bytes(&compiled.cubin);
    let fresh = Arc::new(Loaded { module, resources: compiled.resources, consumer_spill_bytes });
    *loaded = Arc::downgrade(&fresh);
    Ok((fresh, origin))
}

fn slot(context: usize, digest: &TextDigest) -> Slot {
    static SLOTS: OnceLock<Mutex<Slots>> = OnceLock::new();
    let mut slots = lock(SLOTS.get_or_init(Mutex::default));
    // Drops slots that no thread uses and whose module is gone. A tuning run leaves thousands.
    slots.retain(|_, slot| Arc::strong_count(slot) > 1 || lock(slot).strong_count() > 0);
    slots.entry((context, digest.clone())).or_default().clone()
}

/// A poisoned lock is taken too: its Weak stays valid when a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cubin of a text for a device, from the pack, the cache, or compiled now. Without NVRTC, or
/// where it is too old for the device, a cached cubin of any NVRTC version that the driver can load
/// serves: the maths is the same, and there is no alternative.
fn cubin(device: &Device, cubins: &Cubins, source: &Source, digest: &TextDigest) -> Result<(Compiled, Origin)> {
    let Source { name, family, text } = *source;
    let runs = targets(device.arch, family)?;
    if let Some(pack) = cubins.pack.pack() {
        let names: Vec<String> = runs.iter().map(Target::to_string).collect();
        if let Some(compiled) = pack.cubin(digest, &names) {
            return Ok((compiled, Origin::Cache));
        }
    }
    match Nvrtc::get().and_then(|nvrtc| Ok((nvrtc, target(device.arch, family, nvrtc)?))) {
        Ok((nvrtc, target)) => {
            let (compiled, is_new) = cubins.cache.get_or_compile(nvrtc, name, text, digest, &target)?;
            Ok((compiled, if is_new { Origin::Compiler } else { Origin::Cache }))
        }
        Err(missing) => {
            let cached = any_version(&runs, device.driver_version / 1000, &cubins.cache, digest);
            cached.map(|compiled| (compiled, Origin::Cache)).ok_or_else(|| {
                let note = cubins.pack.note().map_or(String::new(), |note| format!(", and {note}"));
                missing.context(format_args!("{name} is not in the cubin cache{note}"))
            })
        }
    }
}

/// The newest cached cubin of a text, of NVRTC versions up to the driver's major version and of all
/// targets that the device runs.
fn any_version(targets: &[Target], driver_major: u32, cubins: &CubinCache, digest: &TextDigest) -> Option<Compiled> {
    /// No major version of CUDA had a higher minor version.
    const NEWEST_MINOR: u32 = 9;
    let versions =
        (OLDEST_MAJOR..=driver_major).rev().flat_map(|major| (0..=NEWEST_MINOR).rev().map(move |minor| (major, minor)));
    versions
        .flat_map(|version| targets.iter().map(move |target| (version, target)))
        .find_map(|(version, target)| cubins.get(&Key::new(digest, &options(&target.to_string(), version), version)))
}
