//! NVRTC for tests that compile. Without it they say so and pass; `FLASHTUNE_REQUIRE_NVRTC=1` makes
//! that a failure.

use flashtune::cuda::nvrtc::Nvrtc;
use flashtune::error::Result;
use flashtune::kernel::compile::{self, Compiled};
use flashtune::kernel::cubin_cache::{CubinCache, TextDigest};
use flashtune::kernel::cubin_limit::Limit;
use std::path::Path;
use std::sync::OnceLock;

pub fn nvrtc() -> Option<&'static Nvrtc> {
    match Nvrtc::get() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if std::env::var("FLASHTUNE_REQUIRE_NVRTC").is_ok_and(|value| value == "1") => {
            panic!("FLASHTUNE_REQUIRE_NVRTC=1, but {error}")
        }
        Err(error) => {
            eprintln!("SKIPPED: no NVRTC: {error}");
            None
        }
    }
}

/// Compiles a text for a target, or returns what another test has compiled from it.
///
/// The tests of one run share the folder `FLASHTUNE_TEST_CUBINS`, so that NVRTC compiles each text
/// once. The key is that of the library's cache: text, options and NVRTC's version. An entry holds
/// the log and the resources too, so a test judges the same facts. Failures are not kept. Without
/// the variable every call compiles.
pub fn compile(nvrtc: &Nvrtc, name: &str, text: &str, target: &str) -> Result<Compiled> {
    static SHARED: OnceLock<Option<CubinCache>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| {
        let folder = std::env::var_os("FLASHTUNE_TEST_CUBINS").filter(|folder| !folder.is_empty())?;
        Some(CubinCache::with_limit(Some(Path::new(&folder)), Limit::of_bytes(u64::MAX)))
    });
    let Some(cache) = shared else { return compile::compile(nvrtc, name, text, target) };
    let compiled = cache.get_or_compile(nvrtc, name, text, &TextDigest::new(text), target);
    compiled.map(|(compiled, _)| compiled)
}
