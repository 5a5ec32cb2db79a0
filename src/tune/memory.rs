//! Memory: whether the buffers of a tuning run fit, before any of them is allocated.
//!
//! A caller's sizes may ask for more than there is. Most allocations in Rust end the process when
//! the system refuses them, so the whole need is asked for once, in a way that may fail, and given
//! back.

use super::arena;
use super::check;
use crate::backend::Backend;
use crate::cpu::require_available;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;

/// For everything whose size does not follow from the problem: threads, random numbers, texts.
const FIXED_BYTES: u128 = 48 << 20;

/// OUT_OF_MEMORY if the device or the host cannot hold what a run of the problem needs.
pub fn require(backend: &Backend, problem: &Problem) -> Result<()> {
    let device = backend.device();
    let arena = arena::arena_bytes(problem);
    let host = host_bytes(problem) + 2 * u128::from(device.l2_bytes);
    let too_large = |bytes: u128, place: &str| {
        let there = device.memory_bytes;
        Error::new(Status::OutOfMemory, format!("tuning needs {bytes} bytes of memory on {place}, which has {there}"))
    };
    let needed = match backend {
        Backend::Cpu(_) => arena + host,
        Backend::Cuda(_) => {
            if arena > u128::from(device.memory_bytes) {
                return Err(too_large(arena, &device.name));
            }
            host
        }
    };
    if matches!(backend, Backend::Cpu(_)) && device.memory_bytes > 0 && needed > u128::from(device.memory_bytes) {
        return Err(too_large(needed, "this host"));
    }
    let bytes = usize::try_from(needed).unwrap_or(usize::MAX);
    require_available(bytes).map_err(|error| error.context("tuning"))
}

/// What the host holds beside the tensors of the arena: the values of one tensor before they are
/// uploaded, those of the LSE in three forms, the lengths of the sequences, and the check.
fn host_bytes(problem: &Problem) -> u128 {
    let tensor = arena::largest_tensor_bytes(problem);
    let lse = 16 * problem.lse_elements() as u128;
    let lengths = 32 * problem.batch_size as u128;
    let features = 3 * super::features::feature_bytes(problem) as u128;
    tensor + lse + lengths + features + check::host_bytes(problem) + FIXED_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::problem::{Dtype, Pass};

    #[test]
    fn a_problem_larger_than_the_machine_is_refused_and_a_small_one_is_not() {
        let cpu = Backend::Cpu(Cpu::new(1).unwrap());
        for pass in [Pass::Forward, Pass::Backward] {
            require(&cpu, &Problem::dense(pass, Dtype::Fp32, 2, 4, 128, 64)).unwrap();
            let large = Problem::dense(pass, Dtype::Fp32, i64::from(i32::MAX), 1, 4096, 64);
            let error = require(&cpu, &large).unwrap_err();
            assert_eq!(error.status, Status::OutOfMemory, "{error}");
        }
    }
}
