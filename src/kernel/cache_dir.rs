//! The cache folder: where it is, and whether it may be trusted.
//!
//! Cubins and records both lie under it, so `plan` calls this file too. A cubin is code: a folder
//! that another user owns or may write to is refused as a whole.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Resolves the cache folder: `FLASHTUNE_CACHE_DIR`, else `setting`, else
/// `$XDG_CACHE_HOME/flashtune`, else `$HOME/.cache/flashtune`. None means memory only. An empty
/// variable counts as unset. So does a relative XDG_CACHE_HOME or HOME, by the XDG Base Directory
/// Specification.
pub fn resolve(setting: Option<&Path>) -> Option<PathBuf> {
    resolve_with(setting, |name| std::env::var_os(name))
}

fn resolve_with(setting: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("FLASHTUNE_CACHE_DIR")
        .or_else(|| setting.filter(|setting| !setting.as_os_str().is_empty()).map(Path::to_path_buf))
        .or_else(|| path("XDG_CACHE_HOME").filter(|base| base.is_absolute()).map(|base| base.join("flashtune")))
        .or_else(|| path("HOME").filter(|home| home.is_absolute()).map(|home| home.join(".cache/flashtune")))
}

/// Creates the folder and its missing parents with mode 0700. Checks that the folder belongs to
/// this user and that nobody else may write to it. The error is one sentence for a log line.
pub fn secure(folder: &Path) -> Result<(), String> {
    let failed = |doing: &str, error: std::io::Error| format!("{doing} {}: {error}", folder.display());
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| failed("creating", error))?;
    let metadata = folder.metadata().map_err(|error| failed("reading", error))?;
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    if metadata.uid() != user {
        return Err(format!(
            "{} belongs to user {}, but this process runs as user {user}",
            folder.display(),
            metadata.uid()
        ));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(format!(
            "{} has mode {:04o}; it holds code, so no other user may write to it",
            folder.display(),
            metadata.mode() & 0o7777
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn resolved(setting: Option<&str>, variables: &[(&str, &str)]) -> Option<PathBuf> {
        resolve_with(setting.map(Path::new), |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_environment_comes_before_the_setting_and_the_setting_before_the_home() {
        let all = [("FLASHTUNE_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(resolved(Some("/s"), &all), Some("/a".into()));
        assert_eq!(resolved(Some("/s"), &all[1..]), Some("/s".into()));
        assert_eq!(resolved(None, &all[1..]), Some("/x/flashtune".into()));
        assert_eq!(resolved(None, &all[2..]), Some("/h/.cache/flashtune".into()));
        assert_eq!(resolved(None, &[]), None);
        assert_eq!(resolved(None, &[("FLASHTUNE_CACHE_DIR", ""), ("XDG_CACHE_HOME", "x"), ("HOME", "")]), None);
    }

    #[test]
    fn a_missing_folder_is_made_private() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("a/b");
        secure(&folder).unwrap();
        assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o770)).unwrap();
        assert!(secure(folder.path()).unwrap_err().contains("0770"));
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        secure(folder.path()).unwrap();
    }

    #[test]
    fn a_file_in_the_folders_place_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(secure(file.path()).is_err());
    }
}
