//! The cache folder: where it is, and whether it may be trusted.
//!
//! Cubins and records both lie under it, so `plan` calls this file too. A cubin is code, and its
//! hash has no key: what keeps a foreign one out is that no other user can write to the folder. So
//! a folder is refused as a whole that another user owns, may write to or may replace.

use crate::environment;
use std::ffi::OsString;
use std::fmt;
use std::fs::{DirBuilder, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why the cache folder is refused. Its text is one sentence for a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The folder or link that breaks a rule: the cache folder, or one on the way to it.
    pub place: PathBuf,
    pub rule: Rule,
    text: String,
}

/// What a refused place lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// It can be made, read and entered.
    Usable,
    /// It belongs to this user, or, on the way to the cache folder, to root.
    Owner,
    /// No other user may write to it.
    Mode,
}

impl Refusal {
    fn new(place: &Path, rule: Rule, text: impl fmt::Display) -> Refusal {
        Refusal { place: place.to_owned(), rule, text: format!("{text}") }
    }

    fn failed(doing: &str, place: &Path, error: std::io::Error) -> Refusal {
        Refusal::new(place, Rule::Usable, format_args!("{doing} {}: {error}", place.display()))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Refusal> for String {
    fn from(refusal: Refusal) -> String {
        refusal.text
    }
}

/// Resolves the cache folder: `FLASHTUNE_CACHE_DIR`, else `setting`, else
/// `$XDG_CACHE_HOME/flashtune`, else `$HOME/.cache/flashtune`. None means memory only. An empty
/// variable counts as unset. So does a relative XDG_CACHE_HOME or HOME, by the XDG Base Directory
/// Specification. A relative path of the other two is one of the working directory of this moment:
/// a process that changes it later, as daemons do, keeps its cache.
pub fn resolve(setting: Option<&Path>) -> Option<PathBuf> {
    resolve_with(setting, environment::variable)
}

fn resolve_with(setting: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = path("FLASHTUNE_CACHE_DIR")
        .or_else(|| setting.filter(|setting| !setting.as_os_str().is_empty()).map(Path::to_path_buf))
        .or_else(|| path("XDG_CACHE_HOME").filter(|base| base.is_absolute()).map(|base| base.join("flashtune")))
        .or_else(|| path("HOME").filter(|home| home.is_absolute()).map(|home| home.join(".cache/flashtune")));
    folder.map(|folder| std::path::absolute(&folder).unwrap_or(folder))
}

/// Creates the folder and its missing parents with mode 0700. Checks that the folder belongs to
/// this user and that nobody else may write to it, nor put another folder in the place of one on
/// the way to it.
pub fn secure(folder: &Path) -> Result<(), Refusal> {
    let failed = |doing: &str, error: std::io::Error| Refusal::failed(doing, folder, error);
    let folder = std::path::absolute(folder).map_err(|error| failed("reading", error))?;
    // Nothing is created where others could redirect it.
    let above = folder.ancestors().skip(1).find(|ancestor| ancestor.symlink_metadata().is_ok());
    above.map_or(Ok(()), |above| require_safe_way(above).and_then(|()| require_safe(above)))?;
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(|error| failed("creating", error))?;
    require_safe_way(&folder)?;
    let metadata = folder.metadata().map_err(|error| failed("reading", error))?;
    let (place, user) = (folder.display(), user());
    if metadata.uid() != user {
        let text = format!("{place} belongs to user {}, but this process runs as user {user}", metadata.uid());
        return Err(Refusal::new(&folder, Rule::Owner, text));
    }
    if metadata.mode() & 0o022 != 0 {
        let mode = metadata.mode() & 0o7777;
        let text = format!("{place} has mode {mode:04o}; it holds code, so no other user may write to it");
        return Err(Refusal::new(&folder, Rule::Mode, text));
    }
    Ok(())
}

/// Checks each folder above `folder`, under the name given and under the name without links: it
/// belongs to root or to this user, and others may write to it only if it is sticky.
fn require_safe_way(folder: &Path) -> Result<(), Refusal> {
    let real = folder.canonicalize().map_err(|error| Refusal::failed("reading", folder, error))?;
    let given = folder.ancestors().take_while(|_| real != folder);
    for link in given {
        let metadata = link.symlink_metadata().map_err(|error| Refusal::failed("reading", link, error))?;
        if metadata.is_symlink() {
            require_owner(link, &metadata)?;
        }
        link.parent().map_or(Ok(()), require_safe)?;
    }
    real.ancestors().skip(1).try_for_each(require_safe)
}

fn require_safe(folder: &Path) -> Result<(), Refusal> {
    let metadata = folder.metadata().map_err(|error| Refusal::failed("reading", folder, error))?;
    require_owner(folder, &metadata)?;
    if metadata.mode() & 0o022 == 0 || metadata.mode() & 0o1000 != 0 {
        return Ok(());
    }
    let (place, mode) = (folder.display(), metadata.mode() & 0o7777);
    let text = format!("{place} has mode {mode:04o}; another user could replace the cache folder below it");
    Err(Refusal::new(folder, Rule::Mode, text))
}

/// Whoever owns the root folder can replace every folder. In a user namespace that may be a number
/// other than 0, the one of all users that the namespace does not map.
fn require_owner(place: &Path, metadata: &Metadata) -> Result<(), Refusal> {
    let of_root = Path::new("/").metadata().map_or(0, |root| root.uid());
    if [0, of_root, user()].contains(&metadata.uid()) {
        return Ok(());
    }
    let text = format!(
        "{} belongs to user {}, who could replace the cache folder below it; this process runs as user {}",
        place.display(),
        metadata.uid(),
        user()
    );
    Err(Refusal::new(place, Rule::Owner, text))
}

fn user() -> u32 {
    // SAFETY: geteuid takes no arguments and cannot fail.
    unsafe { libc::geteuid() }
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
    fn a_relative_folder_is_below_the_working_directory_of_its_resolution() {
        let expected = Some(std::env::current_dir().unwrap().join("r"));
        assert_eq!(resolved(Some("r"), &[]), expected);
        assert_eq!(resolved(None, &[("FLASHTUNE_CACHE_DIR", "r")]), expected);
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
        let refusal = secure(folder.path()).unwrap_err();
        assert_eq!((refusal.place.as_path(), refusal.rule), (folder.path(), Rule::Mode));
        assert!(refusal.to_string().contains("0770"), "{refusal}");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        secure(folder.path()).unwrap();
    }

    #[test]
    fn a_folder_that_others_may_replace_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let (open, folder) = (base.path().join("open"), base.path().join("open/cache"));
        secure(&folder).unwrap();
        for (mode, is_safe) in [(0o777, false), (0o770, false), (0o1777, true), (0o755, true)] {
            std::fs::set_permissions(&open, PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(secure(&folder).is_ok(), is_safe, "{mode:o}");
        }
        // A link is as safe as the folders that it leads through.
        let link = base.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        secure(&link).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
        let refusal = secure(&link).unwrap_err();
        assert_eq!(refusal.place, open.canonicalize().unwrap());
        assert!(refusal.to_string().contains("0777"), "{refusal}");
        // Nothing is created below such a folder.
        assert!(secure(&open.join("new/cache")).is_err());
        assert!(!open.join("new").exists());
    }

    #[test]
    fn a_file_in_the_folders_place_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(secure(file.path()).unwrap_err().rule, Rule::Usable);
    }
}
