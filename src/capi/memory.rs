//! The memory that holds a call's data, and whether the host can read it. A context that
//! FLASHTUNE_BACKEND_AUTO opened on the CPU may be given device pointers, which the CPU backend
//! would dereference.
//!
//! The kernel copies one byte from each end of a tensor and reports the first address that fails.
//! So nothing is dereferenced here. A sandbox may forbid that system call. Then nothing is refused.

use super::overlap::Footprint;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::family;
use crate::problem::Problem;

/// The memory that holds a context's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Kernels load vectors, so strides and addresses decide the layout class. Only kernels read
    /// lengths. `widens`: kernels may write 8-bit and int4 keys to the workspace in 16 bits.
    Device { widens: bool },
    /// The head dims alone decide the layout class. The CPU loads unaligned data, and a class that
    /// followed malloc would change from call to call. A launch checks lengths.
    Host,
    /// As Host, in a context that FLASHTUNE_BACKEND_AUTO opened on the CPU. The caller may hold
    /// device pointers, so a launch checks that the host can read its tensors.
    Fallback,
}

impl Memory {
    /// `is_auto`: the caller left the choice of the backend to the library.
    pub fn of(backend: &Backend, is_auto: bool) -> Memory {
        match backend {
            Backend::Cuda(gpu) => Memory::Device { widens: family::may_widen_kv(gpu.device()) },
            Backend::Cpu(_) if is_auto => Memory::Fallback,
            Backend::Cpu(_) => Memory::Host,
        }
    }

    /// The workspace that a launch needs. The host never splits keys or walks, so it needs no room
    /// for partial results.
    pub fn workspace_bytes(self, problem: &Problem) -> usize {
        match self {
            Memory::Host | Memory::Fallback => problem.partials_offset(),
            Memory::Device { widens: true } => problem.workspace_bytes(),
            Memory::Device { widens: false } => problem.workspace_bytes_unwidened(),
        }
    }
}

/// The system call takes at most so many addresses (Linux, IOV_MAX).
const MOST: usize = 1024;

/// Refuses the first tensor whose first or last byte the host cannot read.
pub fn refuse_foreign_memory<'a>(tensors: impl IntoIterator<Item = &'a Footprint>) -> Result<()> {
    let ends = tensors.into_iter().filter(|tensor| tensor.extent > 0).flat_map(|tensor| {
        let first = tensor.start as usize;
        [(tensor, first), (tensor, first + (tensor.extent as usize - 1))]
    });
    let ends: Vec<_> = ends.take(MOST).collect();
    let readable = readable(ends.iter().map(|(_, address)| *address));
    match ends.get(readable) {
        None => Ok(()),
        Some((tensor, address)) => Err(Error::invalid(format!(
            "{tensor}: the host cannot read {address:#x}, and FLASHTUNE_BACKEND_AUTO opened this context on the CPU; \
             pass host memory, or ask for FLASHTUNE_BACKEND_CUDA to learn why no GPU is used"
        ))),
    }
}

/// How many of the addresses, up to the first failure, this process can read.
#[cfg(target_os = "linux")]
fn readable(addresses: impl Iterator<Item = usize>) -> usize {
    let remote: Vec<libc::iovec> = addresses
        .map(|address| libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: 1 })
        .collect();
    let mut bytes = vec![0u8; remote.len()];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: `local` names `bytes`, and the kernel itself checks the addresses of `remote`.
    let copied =
        unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    match (copied, std::io::Error::last_os_error().raw_os_error()) {
        (-1, Some(libc::EFAULT)) => 0,
        (-1, _) => remote.len(),
        (copied, _) => copied as usize,
    }
}

#[cfg(not(target_os = "linux"))]
fn readable(addresses: impl Iterator<Item = usize>) -> usize {
    addresses.count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Arch, Device};
    use crate::problem::{Dtype, Eight, EightBits, Features, Pass};

    #[test]
    fn room_for_widened_keys_is_taken_where_a_kernel_may_widen_them() {
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 });
        let features = Features { eight_bits, ..Features::NONE };
        let prompt = Problem { features, ..Problem::dense(Pass::Forward, Dtype::Bf16, 4, 128, 1024, 64) };
        let bytes = [Memory::Device { widens: true }, Memory::Device { widens: false }, Memory::Host]
            .map(|memory| memory.workspace_bytes(&prompt));
        assert_eq!(bytes, [prompt.places_of_widened().end, 0, 0]);
        assert!([(9, 0, true), (8, 0, false), (10, 0, false)].into_iter().all(|(major, minor, widens)| {
            family::may_widen_kv(&Device::typical(Arch::Sm(major, minor)).unwrap()) == widens
        }));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_tensor_that_the_host_cannot_read_is_named() {
        let page = 1 << 16;
        // SAFETY: a new mapping without access, which nothing dereferences.
        let hole = unsafe {
            libc::mmap(std::ptr::null_mut(), page, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(hole, libc::MAP_FAILED);
        let own = [0u8; 100];
        let readable = Footprint::contiguous("q", own.as_ptr() as u64, own.len() as i64);
        let foreign = Footprint::contiguous("k", hole as u64, 64);
        refuse_foreign_memory([&readable, &readable]).unwrap();
        for order in [[&foreign, &readable], [&readable, &foreign]] {
            let message = refuse_foreign_memory(order).unwrap_err().message;
            assert!(message.starts_with("k [0x") && message.contains("FLASHTUNE_BACKEND_AUTO"), "{message}");
        }
        // The last byte alone is out of reach.
        let end = Footprint::contiguous("v", own.as_ptr() as u64, hole as i64 - own.as_ptr() as i64 + 1);
        if end.extent > 0 {
            assert!(refuse_foreign_memory([&end]).unwrap_err().message.starts_with("v [0x"));
        }
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(hole, page) };
    }
}
