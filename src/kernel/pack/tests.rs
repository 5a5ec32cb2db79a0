//! Packs that are written and read back, damaged at every place, or made by another library.

use super::contents::{Manifest, Origin, PackedGpu, PackedKernel, PackedOperation, PackedPlan};
use super::format::{decode, encode};
use super::opened::Pack;
use super::place::Place;
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::kernel::cubin_cache::TextDigest;
use crate::kernel::templates_digest;
use crate::problem::{Dtype, Pass, Problem};
use sha2::{Digest, Sha256};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const SM90: Arch = Arch::Sm(9, 0);
const HEADER_BYTES: usize = 28;
const DIGEST_BYTES: usize = 32;

fn origin() -> Origin {
    Origin {
        library_version: env!("CARGO_PKG_VERSION").to_owned(),
        templates_digest: templates_digest().unwrap(),
        nvrtc_version: (12, 8),
    }
}

fn kernel(name: &str, arch: Arch, target: &str) -> PackedKernel {
    PackedKernel {
        name: name.to_owned(),
        arch,
        target: target.to_owned(),
        text: TextDigest::new(name).as_str().to_owned(),
        cubin_bytes: 0,
        packed_bytes: 0,
        log: "a warning\n".to_owned(),
        resources: Default::default(),
    }
}

fn manifest() -> Manifest {
    let problem = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 2, 128, 64);
    let plan = |arch| PackedPlan {
        arch,
        gpus: vec![0],
        problem,
        config: Config::new(Family::Sm80, [("block_m", 64)]),
        kernels: vec![0, 1],
    };
    Manifest {
        origin: origin(),
        kernels: vec![
            kernel("main", SM90, "sm_90a"),
            kernel("beside", SM90, "sm_90"),
            kernel("ampere", Arch::Sm(8, 0), "sm_80"),
        ],
        gpus: vec![PackedGpu { arch: SM90, name: "NVIDIA H200".to_owned(), sm_count: 132 }],
        plans: vec![plan(SM90)],
        operations: vec![PackedOperation { arch: SM90, class: "merge".to_owned(), kernel: 1 }],
        records: vec!["a line".to_owned()],
    }
}

fn cubins() -> Vec<Vec<u8>> {
    (0..3u8).map(|n| (0..2000u32).map(|i| (i / 7) as u8 ^ n).collect()).collect()
}

fn bytes() -> Vec<u8> {
    encode(&manifest(), &cubins()).unwrap()
}

fn open(bytes: Vec<u8>) -> Result<Pack, String> {
    Pack::from_bytes(Path::new("a.pack"), bytes)
}

fn refused(bytes: Vec<u8>) -> String {
    open(bytes).err().expect("it was taken")
}

/// The pack with a checksum that fits, as if it had been written like this.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - DIGEST_BYTES;
    let digest = Sha256::digest(&bytes[..end]);
    bytes[end..].copy_from_slice(digest.as_slice());
    bytes
}

/// Numbers that follow from a seed (splitmix64).
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[test]
fn a_pack_is_read_as_it_was_written() {
    let (bytes, again) = (bytes(), bytes());
    assert!(bytes == again, "the same input gives the same bytes");
    let pack = open(bytes.clone()).unwrap();
    assert_eq!(pack.bytes(), bytes.len());
    assert!(bytes.len() < 2500, "{} bytes: cubins are compressed", bytes.len());
    let read = pack.manifest();
    assert_eq!((&read.origin, &read.plans, &read.operations), (&origin(), &manifest().plans, &manifest().operations));
    assert_eq!((read.records.as_slice(), read.archs()), (&["a line".to_owned()][..], vec![Arch::Sm(8, 0), SM90]));
    let targets = ["sm_90".to_owned(), "sm_90a".to_owned()];
    let cubin = |name: &str| pack.cubin(&TextDigest::new(name), &targets);
    let main = cubin("main").unwrap();
    assert_eq!((&main.cubin, main.log.as_str()), (&cubins()[0], "a warning\n"));
    assert_eq!(cubin("beside").unwrap().cubin, cubins()[1]);
    assert_eq!(cubin("ampere"), None, "its target is not asked for");
    assert_eq!(cubin("another text"), None);
    assert_eq!((pack.kernels(SM90).count(), pack.plans(SM90).count(), pack.plans(Arch::Sm(8, 0)).count()), (2, 1, 0));
    pack.check_library().unwrap();
}

#[test]
fn a_truncated_pack_is_refused() {
    let whole = bytes();
    for length in 0..whole.len() {
        let reason = refused(whole[..length].to_vec());
        let expected = if length < 8 { "is no pack" } else { "truncated" };
        assert!(reason.contains(expected), "{length} bytes: {reason}");
    }
    let longer = [whole.clone(), vec![0]].concat();
    assert!(refused(longer).contains(&format!("says {}", whole.len())));
}

#[test]
fn a_changed_bit_at_any_place_is_refused() {
    let whole = bytes();
    for place in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[place] ^= 1 << (place % 8);
        let reason = refused(damaged);
        let expected = match place {
            0..8 => "does not begin as a pack",
            8..12 => "its format is version",
            20..28 => "bytes",
            _ => "checksum",
        };
        assert!(reason.contains(expected), "byte {place}: {reason}");
    }
}

#[test]
fn other_files_are_no_packs() {
    for other in [&b"\x7fELF\x02\x01\x01 and so on, for longer than a header is"[..], b"", b"PK\x03\x04"] {
        assert!(!refused(other.to_vec()).is_empty());
    }
}

/// Writers make mistakes too: the checksum says nothing about what was written.
#[test]
fn wrong_lengths_under_a_right_checksum_are_refused_without_allocating_them() {
    let whole = bytes();
    let with = |at: usize, value: u32| {
        let mut changed = whole.clone();
        changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
        refused(sealed(changed))
    };
    assert!(with(12, u32::MAX).contains("too many"));
    assert!(with(12, whole.len() as u32).contains("too many"));
    assert!(with(12, 0).contains("cannot be inflated"));
    assert!(with(16, u32::MAX).contains("too many"));
    assert!(with(16, 10).contains("cannot be inflated"));
    // 64 MB are promised, and not that many come.
    assert!(with(16, 64 << 20).contains("cannot be inflated"));
    let mut seed = 5;
    for _ in 0..2000 {
        let mut changed = whole.clone();
        for _ in 0..1 + random(&mut seed) % 3 {
            let place = 12 + random(&mut seed) as usize % (whole.len() - DIGEST_BYTES - 12);
            changed[place] = random(&mut seed) as u8;
        }
        // Any outcome but a panic or an allocation without bound: a cubin may be inflated to other
        // bytes.
        if let Ok(pack) = open(sealed(changed)) {
            for name in ["main", "beside", "ampere"] {
                let cubin = pack.cubin(&TextDigest::new(name), &["sm_90a".to_owned(), "sm_90".to_owned()]);
                assert!(cubin.is_none_or(|cubin| cubin.cubin.len() <= 64 << 20));
            }
        }
    }
}

#[test]
fn wrong_numbers_in_the_manifest_are_refused() {
    let refusal = |change: &dyn Fn(&mut Manifest)| {
        // `encode` would set the sizes, so the manifest is exchanged in the bytes.
        let decoded = decode(&bytes(), || ()).unwrap();
        let mut changed = decoded.manifest;
        change(&mut changed);
        let text = serde_json::to_vec(&changed).unwrap();
        let deflated = miniz_oxide::deflate::compress_to_vec(&text, 6);
        let whole = bytes();
        let cubins = &whole[decoded.cubins[0].start..whole.len() - DIGEST_BYTES];
        let mut other = whole[..12].to_vec();
        other.extend((deflated.len() as u32).to_le_bytes());
        other.extend((text.len() as u32).to_le_bytes());
        other.extend(((HEADER_BYTES + deflated.len() + cubins.len() + DIGEST_BYTES) as u64).to_le_bytes());
        other.extend(deflated);
        other.extend(cubins);
        other.extend([0; DIGEST_BYTES]);
        open(sealed(other)).err()
    };
    assert_eq!(refusal(&|_| {}), None);
    let contains = |reason: Option<String>, part: &str| assert!(reason.as_ref().unwrap().contains(part), "{reason:?}");
    contains(refusal(&|manifest| manifest.plans[0].kernels[1] = 3), "it names kernel 3 of 3");
    contains(refusal(&|manifest| manifest.operations[0].kernel = u32::MAX), "it names kernel 4294967295 of 3");
    contains(refusal(&|manifest| manifest.plans[0].gpus[0] = 1), "it names GPU 1 of 1");
    contains(refusal(&|manifest| manifest.kernels[0].packed_bytes = u32::MAX), "longer than the file");
    contains(refusal(&|manifest| manifest.kernels[2].packed_bytes += 1), "longer than the file");
    contains(refusal(&|manifest| manifest.kernels[2].packed_bytes -= 1), "follow its last cubin");
    contains(refusal(&|manifest| manifest.kernels[0].cubin_bytes = u32::MAX), "longer than the file");
}

#[test]
fn a_cubin_of_another_size_than_it_says_is_missing() {
    let whole = bytes();
    let decoded = decode(&whole, || ()).unwrap();
    let mut changed = whole.clone();
    changed[decoded.cubins[0].clone()].fill(0xff);
    let pack = open(sealed(changed)).unwrap();
    assert_eq!(pack.cubin(&TextDigest::new("main"), &["sm_90a".to_owned()]), None);
    assert!(pack.cubin(&TextDigest::new("beside"), &["sm_90".to_owned()]).is_some());
}

#[test]
fn a_pack_of_another_library_or_device_says_so() {
    let of = |origin: Origin| open(encode(&Manifest { origin, ..manifest() }, &cubins()).unwrap()).unwrap();
    let version = of(Origin { library_version: "0.0.9".to_owned(), ..origin() }).check_library().unwrap_err();
    assert!(version.contains("flashtune 0.0.9; this is "), "{version}");
    let templates = of(Origin { templates_digest: "0123".to_owned(), ..origin() }).check_library().unwrap_err();
    assert!(templates.contains("templates 0123; this library has "), "{templates}");
    let device = |arch, driver_version| Device { driver_version, ..Device::typical(arch).unwrap() };
    let pack = of(origin());
    pack.check_device(&device(SM90, 12000)).unwrap();
    let arch = pack.check_device(&device(Arch::Sm(8, 6), 13000)).unwrap_err();
    assert!(arch.contains("no kernels for NVIDIA A10 (sm_86); it has sm_80 sm_90"), "{arch}");
    let newer = of(Origin { nvrtc_version: (13, 0), ..origin() });
    let driver = newer.check_device(&device(SM90, 12080)).unwrap_err();
    assert!(driver.contains("NVRTC 13.0; the driver is of CUDA 12.8"), "{driver}");
}

/// A manifest of a later library may lack fields that this one needs.
#[test]
fn a_manifest_that_cannot_be_read_names_the_library_that_wrote_it() {
    let text = br#"{"library_version":"7.0.0","templates_digest":"x","nvrtc_version":[14,0],"plans":"elsewhere"}"#;
    let deflated = miniz_oxide::deflate::compress_to_vec(text, 6);
    let mut other = bytes()[..12].to_vec();
    other.extend((deflated.len() as u32).to_le_bytes());
    other.extend((text.len() as u32).to_le_bytes());
    other.extend(((HEADER_BYTES + deflated.len() + DIGEST_BYTES) as u64).to_le_bytes());
    other.extend(deflated);
    other.extend([0; DIGEST_BYTES]);
    assert!(refused(sealed(other)).contains("made by flashtune 7.0.0"));
}

#[test]
fn a_pack_that_nobody_named_must_come_from_an_owner_who_is_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let [path, library] = ["libflashtune.pack", "libflashtune.so"].map(|name| folder.path().join(name));
    std::fs::write(&path, bytes()).unwrap();
    std::fs::write(&library, "").unwrap();
    let reason = |found_beside: Option<&Path>| {
        let place = Place { path: path.clone(), named_by: "a test", found_beside: found_beside.map(Path::to_owned) };
        Pack::open_at(&place).err()
    };
    let set_mode = |file: &Path, mode| std::fs::set_permissions(file, PermissionsExt::from_mode(mode)).unwrap();
    set_mode(&path, 0o664);
    set_mode(&library, 0o755);
    assert!(reason(Some(&library)).unwrap().contains("its mode is 0664"));
    assert!(reason(Some(Path::new("/nowhere"))).unwrap().contains("its mode is 0664"));
    assert_eq!(reason(None), None);
    // A wheel that pip installed under umask 002.
    set_mode(&library, 0o775);
    assert_eq!(reason(Some(&library)), None);
    set_mode(&path, 0o666);
    assert!(reason(Some(&library)).unwrap().contains("its mode is 0666"));
    set_mode(&path, 0o664);
    // Only root may give a file to another group or owner.
    if std::os::unix::fs::chown(&library, None, Some(12345)).is_ok() {
        assert!(reason(Some(&library)).unwrap().contains("its mode is 0664"));
        std::os::unix::fs::chown(&path, Some(12345), Some(12345)).unwrap();
        assert!(reason(Some(&library)).unwrap().contains("its mode is 0664"));
        std::os::unix::fs::chown(&library, Some(12345), None).unwrap();
        assert_eq!(reason(Some(&library)), None);
        std::os::unix::fs::chown(&library, Some(0), None).unwrap();
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    }
    set_mode(&path, 0o644);
    set_mode(&library, 0o755);
    assert_eq!(reason(Some(&library)), None);
    if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
        assert!(reason(Some(&library)).unwrap().contains("it belongs to user 12345"));
        assert_eq!(reason(None), None);
        std::os::unix::fs::chown(&library, Some(12345), None).unwrap();
        assert_eq!(reason(Some(&library)), None);
    }
}

#[test]
fn work_beside_the_reading_of_a_pack_is_done_only_where_the_checksum_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pack");
    let place = Place { path: path.clone(), named_by: "a test", found_beside: None };
    let runs = || {
        let count = AtomicUsize::new(0);
        let pack = Pack::open_beside(&place, || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        (pack.is_ok(), count.into_inner())
    };
    assert_eq!(runs(), (false, 0), "there is no file");
    let whole = bytes();
    let mut damaged = whole.clone();
    damaged[HEADER_BYTES] ^= 1;
    for (bytes, expected) in [(&whole[..9], (false, 0)), (&damaged, (false, 0)), (&whole, (true, 1))] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(runs(), expected);
    }
}

#[test]
fn only_a_regular_file_that_not_everybody_may_write_to_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pack");
    let reason = || Pack::open(&path).err();
    assert!(reason().unwrap().contains("No such file"));
    std::fs::write(&path, bytes()).unwrap();
    assert_eq!(reason(), None);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    assert!(reason().unwrap().contains("its mode is 0666"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_eq!(reason().unwrap(), "it is not a regular file");
    std::fs::remove_dir(&path).unwrap();
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a C string. Nobody writes to the FIFO: opening it to read would wait for ever.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert_eq!(reason().unwrap(), "it is not a regular file");
    assert_eq!(Pack::open(Path::new("/dev/zero")).err().unwrap(), "it is not a regular file");
    std::fs::remove_file(&path).unwrap();
    let sparse = std::fs::File::create(&path).unwrap();
    sparse.set_len(1 << 40).unwrap();
    assert!(reason().unwrap().contains("a pack has at most"));
}
