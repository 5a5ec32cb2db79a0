//! The compiler: whether there is a libnvrtc that makes cubins for this machine's GPUs.

use super::check::Check;
use flashtune::device::Device;
use flashtune::environment::variable;
use flashtune::kernel::{self, Search};
use std::path::Path;

const NAME: &str = "nvrtc";

/// `gpus` are those that kernels run on. `is_packed` says whether a pack serves one without NVRTC.
pub fn check(gpus: &[Device], is_packed: &dyn Fn(&Device) -> bool) -> Check {
    let search = kernel::nvrtc_search();
    let serves_all = !gpus.is_empty() && gpus.iter().all(is_packed);
    let bad = |is_there: bool, fact: String, mend| match (is_there, serves_all) {
        (_, true) => Check::missing(NAME, format_args!("{fact}; the pack serves without it"), Some(mend)),
        (true, false) => Check::wrong(NAME, fact, Some(mend)),
        (false, false) => Check::missing(NAME, fact, Some(mend)),
    };
    let Some(found) = &search.found else {
        let unusable = search.attempts.iter().find(|attempt| Path::new(&attempt.place).is_file());
        let fact = match unusable {
            Some(attempt) => format!("{}: {}", attempt.place, attempt.outcome),
            None => "there is no libnvrtc in the places that flashtune info lists".to_owned(),
        };
        return bad(unusable.is_some(), fact, mend(None));
    };
    let targets: Result<Vec<String>, _> = gpus.iter().map(|gpu| kernel::compiler_target(gpu.arch)).collect();
    match targets {
        Err(error) => bad(true, error.message, mend(Some(found))),
        Ok(targets) => {
            let version = search.version.map_or(String::new(), |(major, minor)| format!(" {major}.{minor}"));
            let targets = match targets.is_empty() {
                true => String::new(),
                false => format!(" and compiles for {}", targets.join(", ")),
            };
            Check::ok(NAME, format_args!("libnvrtc{version} is {found}{targets}"))
        }
    }
}

/// The command after which another NVRTC than the one in use, if any, is found.
fn mend(in_use: Option<&str>) -> String {
    match is_named() {
        true => "unset FLASHTUNE_NVRTC".to_owned(),
        false => install(kernel::driver_search(), in_use, needs_folder()),
    }
}

fn is_named() -> bool {
    variable("FLASHTUNE_NVRTC").is_some_and(|value| !value.is_empty())
}

/// Distributions forbid pip to write into their Python, except into a folder that is named
/// (PEP 668).
fn needs_folder() -> bool {
    let is_environment = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().any(|name| variable(name).is_some());
    let pythons = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    !is_environment && pythons.into_iter().any(|python| python.path().join("EXTERNALLY-MANAGED").exists())
}

/// A folder in which the library looks for NVRTC.
const FOLDER: &str = "~/.local/lib/python3/site-packages";

/// NVRTC of the driver's major version, by pip. The library takes the first NVRTC that it finds, so
/// one outside of Python's folders, if it is `in_use`, would still come first and is passed by.
fn install(driver: &Search, in_use: Option<&str>, needs_folder: bool) -> String {
    let major = driver.version.map(|(major, _)| major);
    // From CUDA 13 on, the package's name has no version.
    let (package, library) = match major {
        Some(12) => ("nvidia-cuda-nvrtc-cu12".to_owned(), "cuda_nvrtc".to_owned()),
        Some(major) => (format!("'nvidia-cuda-nvrtc<{}'", major + 1), format!("cu{major}")),
        None => ("nvidia-cuda-nvrtc".to_owned(), "cu13".to_owned()),
    };
    let is_of_python = in_use.is_none_or(|path| path.contains("/site-packages/"));
    let options = if needs_folder || !is_of_python { format!("--target {FOLDER} ") } else { String::new() };
    let pip = format!("python3 -m pip install --upgrade {options}{package}");
    match is_of_python {
        true => pip,
        false => format!("{pip} && export FLASHTUNE_NVRTC={FOLDER}/nvidia/{library}/lib"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_of_the_drivers_major_version() {
        let command = |version| install(&Search { version, ..Search::default() }, None, false);
        assert_eq!(command(Some((12, 8))), "python3 -m pip install --upgrade nvidia-cuda-nvrtc-cu12");
        assert_eq!(command(Some((13, 1))), "python3 -m pip install --upgrade 'nvidia-cuda-nvrtc<14'");
        assert_eq!(command(None), "python3 -m pip install --upgrade nvidia-cuda-nvrtc");
    }

    #[test]
    fn an_old_library_of_the_system_is_passed_by() {
        let driver = Search { version: Some((12, 8)), ..Search::default() };
        let command = install(&driver, Some("/usr/lib/libnvrtc.so.12"), false);
        let (pip, export) = command.split_once(" && ").unwrap();
        assert!(pip.contains(&format!("--target {FOLDER} ")), "{pip}");
        assert_eq!(export, format!("export FLASHTUNE_NVRTC={FOLDER}/nvidia/cuda_nvrtc/lib"));
        let in_python = install(&driver, Some("/v/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/l.so"), false);
        assert!(!in_python.contains("FLASHTUNE_NVRTC"), "{in_python}");
    }
}
