//! NVRTC for tests that compile. Without it they say so and pass; `FLASHTUNE_REQUIRE_NVRTC=1` makes
//! that a failure.

use flashtune::cuda::nvrtc::Nvrtc;

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
