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
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn subnormals_stay_where_the_caller_flushes_them() {
        const FLUSHES: Word = DEFAULT | 0x8040;
        let half = || black_box(f32::MIN_POSITIVE) * black_box(0.5);
        let (outside, inside, after) = with_default(|| {
            write(FLUSHES);
            let outside = half();
            let inside = with_default(half);
            (outside, inside, read())
        });
        assert_eq!((outside, inside), (0.0, f32::MIN_POSITIVE / 2.0));
        // Bits of exceptions that happened stay set.
        assert_eq!(after & !0x3f, FLUSHES);
    }
}
