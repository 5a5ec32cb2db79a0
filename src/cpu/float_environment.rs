//! The floating-point environment that the passes need, whatever a thread has: rounding to nearest,
//! subnormals as they are. Programs set others, as `torch.set_flush_denormal` does, and a new
//! thread inherits its creator's. Rust's own code is compiled for this one alone.

use std::arch::asm;

/// Runs `work` in the default environment and gives the thread its own back.
pub fn with_default<R>(work: impl FnOnce() -> R) -> R {
    let _restored = Restored(read());
    write(DEFAULT);
    work()
}

struct Restored(Word);

impl Drop for Restored {
    fn drop(&mut self) {
        write(self.0);
    }
}

#[cfg(target_arch = "x86_64")]
type Word = u32;
#[cfg(target_arch = "aarch64")]
type Word = u64;

/// MXCSR of a new process: all exceptions masked.
#[cfg(target_arch = "x86_64")]
const DEFAULT: Word = 0x1f80;
/// FPCR of a new process.
#[cfg(target_arch = "aarch64")]
const DEFAULT: Word = 0;

fn read() -> Word {
    let mut word: Word = 0;
    // SAFETY: it stores a register of floating-point control into `word`.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
        #[cfg(target_arch = "aarch64")]
        asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags));
    }
    word
}

/// The compiler moves no access to memory across it, so what the passes compute stays between.
fn write(word: Word) {
    // SAFETY: `word` is the default or what the register held.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
        #[cfg(target_arch = "aarch64")]
        asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags));
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
pub mod tests {
    use super::*;
    use std::hint::black_box;

    const FLUSHES: Word = DEFAULT | 0x8040;
    /// Half of the least normal number.
    pub const SUBNORMAL: f32 = f32::from_bits(0x0040_0000);

    /// Runs `work` with subnormals that the processor flushes to 0.
    pub fn with_flushed_subnormals<R>(work: impl FnOnce() -> R) -> R {
        let _restored = Restored(read());
        write(FLUSHES);
        work()
    }

    /// `SUBNORMAL`, or 0 where subnormals are flushed.
    pub fn computed_subnormal() -> f32 {
        black_box(f32::MIN_POSITIVE) * black_box(0.5)
    }

    #[test]
    fn subnormals_stay_where_the_caller_flushes_them() {
        let (outside, inside, after) =
            with_flushed_subnormals(|| (computed_subnormal(), with_default(computed_subnormal), read()));
        assert_eq!((outside.to_bits(), inside.to_bits()), (0, SUBNORMAL.to_bits()));
        // Bits of exceptions that happened stay set.
        assert_eq!(after & !0x3f, FLUSHES);
    }
}
