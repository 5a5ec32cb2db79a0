//! Utilisation, u: the least time that a problem could take on a device, over its measured time.
//!
//! With many queries the least time is that of the pass's products (`Problem::flops`) on the tensor
//! cores of all SMs, at the clock that the SMs ran at. A power limit that lowers the clock thus
//! does not lower u, and u repeats from run to run where TFLOP/s do not. With few queries over many
//! keys the least time is that of reading K and V once at the memory's full rate. The measured time
//! is the whole pass's, with launches, the last wave and the small kernels of the backward pass.
//! Candidates are ranked by their time; u says how much there is left to gain.

use crate::backend::Elapsed;
use crate::device::Device;
use crate::family;
use crate::problem::{Dtype, Problem};

/// The least time that a problem takes on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Floor {
    /// Cycles with all SMs' tensor cores busy.
    Cycles(f64),
    /// Seconds with the memory at its full rate.
    Seconds(f64),
}

impl Floor {
    /// None if the device does not tell its ceilings, and in fp32, whose ceiling depends on how the
    /// products are made.
    pub fn of(problem: &Problem, device: &Device) -> Option<Floor> {
        let per_cycle = f64::from(device.sm_count) * f64::from(device.tensor_flops_per_cycle());
        let per_second = device.memory_bytes_per_second as f64;
        match family::is_bound_by_keys(problem) {
            _ if problem.dtype == Dtype::Fp32 => None,
            true => (per_second > 0.0).then(|| Floor::Seconds(problem.key_value_bytes() / per_second)),
            false => (per_cycle > 0.0).then(|| Floor::Cycles(problem.flops() / per_cycle)),
        }
    }

    /// The least over the measured time; None if it needs a clock that is not known.
    pub fn over(&self, elapsed: &Elapsed) -> Option<f64> {
        let seconds = match self {
            Floor::Cycles(cycles) => cycles / elapsed.sm_clock_hz?,
            Floor::Seconds(seconds) => *seconds,
        };
        Some(seconds / elapsed.time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::problem::{Causal, Features, Pass, Window};
    use std::time::Duration;

    const PROBLEM: Problem = Problem::dense(Pass::Forward, Dtype::Bf16, 4, 16, 4096, 128);

    fn u(problem: &Problem, us: u64, sm_clock_hz: Option<f64>) -> Option<f64> {
        let h200 = Device::typical(Arch::Sm(9, 0)).unwrap();
        Floor::of(problem, &h200)?.over(&Elapsed { time: Duration::from_micros(us), sm_clock_hz })
    }

    #[test]
    fn many_queries_give_the_share_of_the_tensor_cores_at_their_clock() {
        // 4 * 64 * 4096 * 4096 * 128 operations; 132 SMs of 4096 a cycle.
        let cycles = 549_755_813_888.0 / (132.0 * 4096.0);
        let at = |clock: f64| u(&PROBLEM, 800, Some(clock)).unwrap();
        assert!((at(1.6e9) - cycles / (1.6e9 * 800e-6)).abs() < 1e-9);
        assert!(at(1.4e9) > at(1.6e9), "as much in fewer cycles");
        assert!((u(&PROBLEM, 400, Some(1.6e9)).unwrap() / at(1.6e9) - 2.0).abs() < 1e-9);
        assert_eq!(u(&PROBLEM, 800, None), None);
        let backward = Problem { pass: Pass::Backward, ..PROBLEM };
        assert_eq!(u(&backward, 2000, Some(1.6e9)), Some(at(1.6e9)), "five products in place of two");
    }

    #[test]
    fn few_queries_give_the_share_of_the_memory_rate() {
        let decode = Problem { num_heads_kv: 4, seqlen_q: 1, causal: Causal::BottomRight, ..PROBLEM };
        let share = 4.0 * 4.0 * 4096.0 * 256.0 * 2.0 / 4.917e12 / 20e-6;
        assert!((u(&decode, 20, None).unwrap() - share).abs() < 1e-9);
        let sliding = Features { window: Window { left: Some(1023), ..Window::default() }, ..Features::NONE };
        assert!((u(&Problem { features: sliding, ..decode }, 20, None).unwrap() - share / 4.0).abs() < 1e-9);
        let prefill_of_pages = Problem { features: Features { paged: Some(16), ..Features::NONE }, ..PROBLEM };
        assert_eq!(u(&prefill_of_pages, 800, None), None, "pages alone do not make the memory the limit");
    }

    #[test]
    fn an_unknown_ceiling_gives_no_utilisation() {
        assert_eq!(u(&Problem { dtype: Dtype::Fp32, ..PROBLEM }, 800, Some(1.6e9)), None);
        let cpu = Device { arch: Arch::Cpu, ..Device::typical(Arch::Sm(9, 0)).unwrap() };
        assert_eq!(Floor::of(&PROBLEM, &cpu), None);
    }
}
