//! The places where libnvrtc may lie on a machine, in the order in which they are tried.
//!
//! This file reads the environment and file names, and opens nothing. Within one place the highest
//! version comes first. Between places only the order decides, so the same machine always gives the
//! same library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A place and the files found there, or a bare name that the system searches for.
pub(super) struct Place {
    pub name: String,
    pub files: Vec<PathBuf>,
}

/// The oldest major version that compiles the kernels (C++17, 16-byte parameters,
/// `__grid_constant__`).
pub const OLDEST_MAJOR: u32 = 12;
/// The newest major version whose name is tried when there is no driver to name one.
const NEWEST_MAJOR: u32 = 14;

/// All places. `variable` reads the environment. `FLASHTUNE_NVRTC` makes its place the only one: a
/// user who names a library wants an error rather than another library.
pub(super) fn places(driver_major: Option<u32>, variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<Place> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(given) = path("FLASHTUNE_NVRTC") {
        let files = if given.is_dir() { libraries(&given.to_string_lossy()) } else { vec![given.clone()] };
        return vec![Place { name: format!("FLASHTUNE_NVRTC={}", given.display()), files }];
    }
    // A bare name also finds a library that the process has already loaded, whatever folder it came
    // from.
    let majors = (OLDEST_MAJOR..=driver_major.unwrap_or(NEWEST_MAJOR)).rev();
    let names = majors.map(|major| format!("libnvrtc.so.{major}")).chain(["libnvrtc.so".to_owned()]);
    let mut places: Vec<Place> =
        names.map(|name| Place { files: vec![PathBuf::from(&name)], name: format!("{name} of the system") }).collect();

    let mut folders = Vec::new();
    for toolkit in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path) {
        folders.extend(["lib64", "lib", "targets/*/lib"].map(|folder| toolkit.join(folder)));
    }
    folders.extend(
        ["/usr/local/cuda/lib64", "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib"].map(PathBuf::from),
    );
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
    prefixes.extend(variable("PATH").into_iter().flat_map(|value| python_prefixes(&value)));
    for prefix in &prefixes {
        folders.push(prefix.join("lib"));
        folders.push(prefix.join("lib/python3*/site-packages/nvidia/*/lib"));
        folders.push(prefix.join("lib/python3*/dist-packages/nvidia/*/lib"));
    }
    folders.extend(
        ["/usr/local/lib/python3*/dist-packages/nvidia/*/lib", "/usr/lib/python3/dist-packages/nvidia/*/lib"]
            .map(PathBuf::from),
    );
    folders.extend(path("HOME").map(|home| home.join(".local/lib/python3*/site-packages/nvidia/*/lib")));

    let mut seen = Vec::new();
    for folder in folders {
        let name = folder.to_string_lossy().into_owned();
        if !seen.contains(&name) {
            places.push(Place { files: libraries(&name), name: name.clone() });
            seen.push(name);
        }
    }
    places
}

/// The version in a file's name: `libnvrtc.so.12.4.127` is [12, 4, 127], `libnvrtc.so` is []; other
/// files are None.
pub(super) fn version_in_name(file: &Path) -> Option<Vec<u32>> {
    let rest = file.file_name()?.to_str()?.strip_prefix("libnvrtc.so")?;
    rest.split('.').skip(1).map(|part| part.parse().ok()).collect()
}

/// The libraries in the folders of a pattern, highest version first. Several names of one file
/// count once, under the shortest versioned name, which other libraries of the process ask for.
fn libraries(pattern: &str) -> Vec<PathBuf> {
    let mut files: Vec<(Vec<u32>, PathBuf)> = folders(Path::new(pattern))
        .into_iter()
        .flat_map(|folder| entries(&folder))
        .filter_map(|file| {
            let target = file.canonicalize().ok()?;
            let version = version_in_name(&target).filter(|version| !version.is_empty()).or(version_in_name(&file))?;
            version_in_name(&file).map(|_| (version, file))
        })
        .collect();
    let name_rank = |file: &Path| match version_in_name(file).map_or(0, |version| version.len()) {
        0 => usize::MAX,
        parts => parts,
    };
    files.sort_by(|(version_a, a), (version_b, b)| {
        version_b.cmp(version_a).then_with(|| name_rank(a).cmp(&name_rank(b))).then_with(|| a.cmp(b))
    });
    let mut targets = Vec::new();
    files.retain(|(_, file)| {
        let target = file.canonicalize().ok();
        let new = !targets.contains(&target);
        targets.push(target);
        new
    });
    files.into_iter().map(|(_, file)| file).collect()
}

/// The folders that a pattern with at most one `*` per component names, sorted.
fn folders(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for component in pattern.components() {
        let component = component.as_os_str();
        found = match component.to_str().and_then(|text| text.split_once('*')) {
            None => found.into_iter().map(|folder| folder.join(component)).collect(),
            Some((prefix, suffix)) => found
                .iter()
                .flat_map(|folder| entries(folder))
                .filter(|path| {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    name.len() >= prefix.len() + suffix.len() && name.starts_with(prefix) && name.ends_with(suffix)
                })
                .collect(),
        };
    }
    found.retain(|folder| folder.is_dir());
    found
}

/// The entries of a folder, sorted; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The installations that `python3` on the search path may belong to, as patterns: those of its
/// name (a virtual environment), of the file behind the name (the base), and all of pyenv's if the
/// name is one of its shims.
fn python_prefixes(search_path: &OsString) -> Vec<PathBuf> {
    let Some(python) =
        std::env::split_paths(search_path).map(|folder| folder.join("python3")).find(|file| file.is_file())
    else {
        return Vec::new();
    };
    let prefix = |file: &Path| {
        let folder = file.parent()?;
        let prefix = folder.parent()?;
        Some(if folder.ends_with("shims") { prefix.join("versions/*") } else { prefix.to_path_buf() })
    };
    let mut prefixes: Vec<PathBuf> = prefix(&python).into_iter().collect();
    prefixes.extend(python.canonicalize().ok().as_deref().and_then(prefix));
    prefixes.dedup();
    prefixes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(file: PathBuf) {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }

    fn names(place: &Place) -> Vec<String> {
        place.files.iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn within_a_folder_the_highest_version_comes_first_and_other_files_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.so.x"]
        {
            touch(folder.path().join(name));
        }
        std::os::unix::fs::symlink("libnvrtc.so.12", folder.path().join("libnvrtc.so")).unwrap();
        let given = folder.path().as_os_str().to_owned();
        let places = places(None, &|name| (name == "FLASHTUNE_NVRTC").then(|| given.clone()));
        assert_eq!(places.len(), 1);
        assert_eq!(names(&places[0]), ["libnvrtc.so.13", "libnvrtc.so.12"]);
    }

    #[test]
    fn a_virtual_environment_is_searched_without_running_python() {
        let environment = tempfile::tempdir().unwrap();
        touch(environment.path().join("lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
        touch(environment.path().join("lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"));
        let prefix = environment.path().as_os_str().to_owned();
        let places = places(Some(13), &|name| (name == "VIRTUAL_ENV").then(|| prefix.clone()));
        let found: Vec<&Place> = places.iter().filter(|p| p.name.starts_with(prefix.to_str().unwrap())).collect();
        let with_files: Vec<_> = found.iter().filter(|place| !place.files.is_empty()).map(|p| names(p)).collect();
        assert_eq!(with_files, [["libnvrtc.so.13", "libnvrtc.so.12"]]);
    }

    #[test]
    fn system_names_newer_than_the_driver_are_not_tried() {
        let places = places(Some(12), &|_| None);
        assert_eq!(places[0].name, "libnvrtc.so.12 of the system");
        assert_eq!(places[1].name, "libnvrtc.so of the system");
    }
}
