//! Format: a pack as bytes.
//!
//! Numbers are little-endian. The file is a header of `HEADER_BYTES`, the manifest as deflated
//! JSON, the deflated cubins one behind the other, and the SHA-256 of all before it:
//!
//! | bytes | field |
//! |---|---|
//! | 8 | magic |
//! | 4 | version of the format |
//! | 4 | bytes of the deflated manifest |
//! | 4 | bytes of the manifest |
//! | 8 | bytes of the file |
//!
//! Every length is compared with the bytes that are there before anything is allocated, and
//! inflating stops at the length that the manifest gives.

use super::contents::{Manifest, Origin};
use crate::pool;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use sha2::{Digest, Sha256};

/// A text that a transfer as text would change, as in PNG.
const MAGIC: &[u8; 8] = b"\x89FTPACK\n";
/// Goes up when the layout changes.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 4 + 4 + 8;
const DIGEST_BYTES: usize = 32;
/// Packs are some hundred KB for each model and architecture.
pub const MAX_PACK_BYTES: u64 = 256 << 20;
const MAX_MANIFEST_BYTES: u32 = 64 << 20;
const MAX_CUBIN_BYTES: u32 = 64 << 20;
/// A cubin shrinks to 29 % at levels 6 to 9, which differ by 2 %.
const LEVEL: u8 = 8;

/// A decoded pack: its manifest, and where the compressed cubin of each kernel lies in the bytes.
pub struct Decoded {
    pub manifest: Manifest,
    pub cubins: Vec<std::ops::Range<usize>>,
}

/// The bytes of a pack. The kernels' sizes in the manifest are set to those of `cubins`, which are
/// in the order of its kernels. The same input gives the same bytes.
pub fn encode(manifest: &Manifest, cubins: &[Vec<u8>]) -> Result<Vec<u8>, String> {
    if manifest.kernels.len() != cubins.len() {
        return Err(format!("{} kernels with {} cubins", manifest.kernels.len(), cubins.len()));
    }
    let packed: Vec<Vec<u8>> = cubins.iter().map(|cubin| compress_to_vec(cubin, LEVEL)).collect();
    let mut manifest = manifest.clone();
    for ((kernel, cubin), packed) in manifest.kernels.iter_mut().zip(cubins).zip(&packed) {
        let size = |bytes: &[u8]| u32::try_from(bytes.len()).ok().filter(|bytes| *bytes <= MAX_CUBIN_BYTES);
        let sizes = size(cubin).zip(size(packed));
        (kernel.cubin_bytes, kernel.packed_bytes) =
            sizes.ok_or_else(|| format!("the cubin of {} has {} bytes", kernel.name, cubin.len()))?;
    }
    let text = serde_json::to_vec(&manifest).map_err(|error| error.to_string())?;
    let deflated = compress_to_vec(&text, LEVEL);
    let total = HEADER_BYTES + deflated.len() + packed.iter().map(Vec::len).sum::<usize>() + DIGEST_BYTES;
    if text.len() > MAX_MANIFEST_BYTES as usize || total as u64 > MAX_PACK_BYTES {
        return Err(format!(
            "the pack would have {total} bytes; a pack has at most {MAX_PACK_BYTES}, with {MAX_MANIFEST_BYTES} of manifest"
        ));
    }
    let mut bytes = Vec::with_capacity(total);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((deflated.len() as u32).to_le_bytes());
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend((total as u64).to_le_bytes());
    bytes.extend(deflated);
    packed.iter().for_each(|cubin| bytes.extend(cubin));
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest.as_slice());
    Ok(bytes)
}

/// Reads what `encode` wrote. The error is one clause about the pack: why it is none, or how it is
/// damaged, or which library made it. `after_checksum` runs on the thread of the checksum if that
/// is right, beside the reading of the manifest.
pub fn decode(bytes: &[u8], after_checksum: impl Fn() + Sync) -> Result<Decoded, String> {
    let Some(magic) = bytes.get(..MAGIC.len()) else {
        return Err(format!("it has {} bytes and is no pack", bytes.len()));
    };
    if magic != MAGIC {
        return Err("it does not begin as a pack does".to_owned());
    }
    let truncated = |expected: u64| format!("it is truncated: {} bytes of {expected}", bytes.len());
    let Some(header) = bytes.get(..HEADER_BYTES) else {
        return Err(truncated(HEADER_BYTES as u64));
    };
    let number = |at: usize, count: usize| {
        header[at..at + count].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    };
    let (version, deflated_bytes, text_bytes, total) = (number(8, 4), number(12, 4), number(16, 4), number(20, 8));
    if version != u64::from(VERSION) {
        return Err(format!("its format is version {version}; this library reads version {VERSION}"));
    }
    match (bytes.len() as u64).cmp(&total) {
        std::cmp::Ordering::Less => return Err(truncated(total)),
        std::cmp::Ordering::Greater => return Err(format!("it has {} bytes, and says {total}", bytes.len())),
        std::cmp::Ordering::Equal => {}
    }
    let sealed = bytes.len().checked_sub(DIGEST_BYTES).filter(|sealed| *sealed >= HEADER_BYTES);
    let Some(sealed) = sealed else {
        return Err(truncated((HEADER_BYTES + DIGEST_BYTES) as u64));
    };
    let is_intact = || {
        let is_intact = Sha256::digest(&bytes[..sealed]).as_slice() == &bytes[sealed..];
        if is_intact {
            after_checksum();
        }
        is_intact
    };
    // The checksum takes as long as all other steps together. What they find counts only if it is
    // right.
    let (is_intact, contents) = pool::beside(is_intact, || contents(bytes, sealed, deflated_bytes, text_bytes));
    match is_intact {
        true => contents,
        false => Err("it is damaged: its checksum differs".to_owned()),
    }
}

/// The manifest and the places of the cubins. The bytes may be damaged or written wrong: only the
/// header was checked, not yet the checksum, which begins at `sealed`.
fn contents(bytes: &[u8], sealed: usize, deflated_bytes: u64, text_bytes: u64) -> Result<Decoded, String> {
    let cubins_at = HEADER_BYTES as u64 + deflated_bytes;
    if cubins_at > sealed as u64 || text_bytes > u64::from(MAX_MANIFEST_BYTES) {
        return Err(format!("its manifest has {deflated_bytes} bytes, or {text_bytes} inflated, which is too many"));
    }
    let cubins_at = cubins_at as usize;
    let text = inflate(&bytes[HEADER_BYTES..cubins_at], text_bytes as usize)
        .map_err(|reason| format!("its manifest cannot be inflated: {reason}"))?;
    // Another version's manifest may have other fields. Its origin says more than the missing one.
    let unreadable = |error: serde_json::Error| match serde_json::from_slice::<Origin>(&text) {
        Ok(origin) => format!(
            "it was made by flashtune {}, and its manifest cannot be read here: {error}",
            origin.library_version
        ),
        Err(_) => format!("its manifest cannot be read: {error}"),
    };
    let manifest: Manifest = serde_json::from_slice(&text).map_err(unreadable)?;
    manifest.check()?;
    let (mut cubins, mut at) = (Vec::with_capacity(manifest.kernels.len()), cubins_at);
    for kernel in &manifest.kernels {
        let end = at.checked_add(kernel.packed_bytes as usize).filter(|end| *end <= sealed);
        let Some(end) = end.filter(|_| kernel.cubin_bytes <= MAX_CUBIN_BYTES) else {
            return Err(format!("the cubin of {} is longer than the file", kernel.name));
        };
        cubins.push(at..end);
        at = end;
    }
    match at == sealed {
        true => Ok(Decoded { manifest, cubins }),
        false => Err(format!("{} bytes follow its last cubin", sealed - at)),
    }
}

/// Inflates to exactly this many bytes.
pub fn inflate(deflated: &[u8], bytes: usize) -> Result<Vec<u8>, String> {
    let inflated = decompress_to_vec_with_limit(deflated, bytes).map_err(|error| error.to_string())?;
    match inflated.len() == bytes {
        true => Ok(inflated),
        false => Err(format!("{} bytes came of {bytes}", inflated.len())),
    }
}
