//! Place: which file a context uses as its pack.
//!
//! The environment comes first, then the context's setting, then a file beside the library. The
//! order is that of the cache folder (`cache_dir`).

use crate::cuda::library::path_of;
use crate::environment::variable;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A pack beside the library has this name.
const BESIDE: &str = "libflashtune.pack";
const VARIABLE: &str = "FLASHTUNE_PACK";

/// What the caller of a context says about its pack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Setting {
    /// The environment's, or the one beside the library.
    #[default]
    Default,
    /// No pack, whatever the environment says.
    None,
    /// This one, unless the environment names another.
    Path(PathBuf),
}

/// The file of a pack, which may be missing or damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub path: PathBuf,
    /// Who named it.
    pub named_by: &'static str,
    /// The library or program that it lies beside, if nobody named it. Such a file is refused
    /// unless root, this user or the owner of the library put it there.
    pub found_beside: Option<PathBuf>,
}

/// The place of a context's pack; None if it uses none.
pub fn place(setting: &Setting) -> Option<Place> {
    place_with(setting, variable(VARIABLE), beside_library)
}

/// `beside` returns a pack and the library or program that it lies beside.
fn place_with(
    setting: &Setting,
    named: Option<OsString>,
    beside: impl FnOnce() -> Option<(PathBuf, PathBuf)>,
) -> Option<Place> {
    if *setting == Setting::None {
        return None;
    }
    let of = |path: PathBuf, named_by| Some(Place { path, named_by, found_beside: None });
    match (named.filter(|value| !value.is_empty()), setting) {
        (Some(path), _) => of(path.into(), VARIABLE),
        (None, Setting::Path(path)) => of(path.clone(), "the context's option"),
        (None, _) => beside().map(|(path, library)| Place {
            path,
            named_by: "its place beside the library",
            found_beside: Some(library),
        }),
    }
}

/// The pack beside the shared library, or beside the program that holds the library; and that
/// library or program. None if there is no such file.
fn beside_library() -> Option<(PathBuf, PathBuf)> {
    let own = path_of(place as *const ());
    // A program is named as its caller wrote it, which may be a name alone.
    let own = own.filter(|path| path.is_absolute()).or_else(|| std::env::current_exe().ok())?;
    let pack = Path::parent(&own)?.join(BESIDE);
    pack.symlink_metadata().is_ok().then_some((pack, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_comes_before_the_setting_and_the_setting_before_the_file_beside() {
        let path = |setting: &Setting, variable: Option<&str>, beside: Option<&str>| {
            let beside = || beside.map(|pack| (pack.into(), "/l".into()));
            let place = place_with(setting, variable.map(OsString::from), beside)?;
            // Only a pack that nobody named must have a trusted owner.
            assert_eq!(place.found_beside, (place.path == Path::new("/b")).then(|| "/l".into()));
            Some(place.path)
        };
        let set = Setting::Path("/s".into());
        assert_eq!(path(&set, Some("/e"), Some("/b")), Some("/e".into()));
        assert_eq!(path(&set, Some(""), Some("/b")), Some("/s".into()));
        assert_eq!(path(&set, None, Some("/b")), Some("/s".into()));
        assert_eq!(path(&Setting::Default, None, Some("/b")), Some("/b".into()));
        assert_eq!(path(&Setting::Default, Some("/e"), None), Some("/e".into()));
        assert_eq!(path(&Setting::Default, None, None), None);
        assert_eq!(path(&Setting::None, Some("/e"), Some("/b")), None);
    }
}
