//! Registers: which instruction set the inner loops use, and the few operations that they share.
//!
//! A loop that LLVM does not vectorise well is written against pulp's `Simd` and compiled for each
//! `Level`; the others are plain loops in `vector`. Nothing here knows what a tile is.
//!
//! Every function between `Level::run` and an instruction is `#[inline(always)]`, and none is a
//! closure. LLVM does not inline an instruction of AVX into a function that is compiled without,
//! and each would then be a call: a tenth of the speed.

use pulp::{Simd, WithSimd};
use std::f32::consts::LN_2;

/// The widest instruction set that this machine has of those the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What the target always has (SSE2 on x86-64, NEON on AArch64).
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            if pulp::x86::V4::is_available() {
                return Level::Avx512;
            }
            if pulp::x86::V3::is_available() {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }

    /// The levels that this machine has.
    #[cfg(test)]
    pub fn all() -> Vec<Level> {
        let all = [
            Level::Baseline,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512,
        ];
        all.into_iter().filter(|level| *level <= Level::detect()).collect()
    }

    /// Runs `loops` compiled for this level.
    pub fn run<L: WithSimd>(self, loops: L) -> L::Output {
        match self {
            // SAFETY: every AArch64 processor that runs Rust's std has NEON.
            #[cfg(target_arch = "aarch64")]
            Level::Baseline => Simd::vectorize(unsafe { pulp::aarch64::Neon::new_unchecked() }, loops),
            #[cfg(not(target_arch = "aarch64"))]
            Level::Baseline => Simd::vectorize(pulp::Scalar128b, loops),
            // SAFETY: `detect` has seen the features of the level.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Simd::vectorize(unsafe { pulp::x86::V3::new_unchecked() }, loops),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Simd::vectorize(unsafe { pulp::x86::V4::new_unchecked() }, loops),
        }
    }
}

/// # Safety
/// A register's floats must lie at `from`.
#[inline(always)]
pub unsafe fn load<S: Simd>(_simd: S, from: *const f32) -> S::f32s {
    // SAFETY: the caller's promise; a register is plain floats.
    unsafe { from.cast::<S::f32s>().read_unaligned() }
}

/// # Safety
/// A register's floats must lie at `to`, and nobody else may use them.
#[inline(always)]
pub unsafe fn store<S: Simd>(_simd: S, to: *mut f32, values: S::f32s) {
    // SAFETY: the caller's promise; a register is plain floats.
    unsafe { to.cast::<S::f32s>().write_unaligned(values) }
}

/// Asks for the row's cache lines, which will be read soon.
#[inline(always)]
pub fn prefetch<T>(row: &[T]) {
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
    #[cfg(target_arch = "x86_64")]
    for at in (0..size_of_val(row)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has SSE, and a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast::<i8>().wrapping_add(at)) };
    }
}

/// a * b + c, rounded once where that is one instruction. pulp would call a function elsewhere.
#[inline(always)]
pub fn multiply_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
    let is_fused = S::F32_LANES > 4 || cfg!(target_arch = "aarch64");
    if is_fused { simd.mul_add_e_f32s(a, b, c) } else { simd.add_f32s(simd.mul_f32s(a, b), c) }
}

/// The larger of the two; `b` if either is NaN. pulp's own differs between targets there.
#[inline(always)]
pub fn larger<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
    if cfg!(target_arch = "x86_64") && S::F32_LANES > 4 {
        // maxps returns its second operand.
        return simd.max_f32s(a, b);
    }
    simd.select_f32s(simd.greater_than_f32s(a, b), a, b)
}

/// Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// 2^x within 1 ulp (1.25 without FMA) for x from -126 to 127.5, then inf up to 128.
///
/// Smaller weights of a softmax count for nothing: between -127 and -126 they may be 0, and below
/// -127 they are 0. 2^NaN = NaN.
#[inline(always)]
pub fn exp2_of_weight<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let x = larger(simd, simd.splat_f32s(-127.0), x);
    // The exponent's bias is added along with the rounding: the low bits are the biased exponent,
    // which is 0 for -127. As a factor that is 0.
    let round = simd.splat_f32s(ROUND + 127.0);
    let rounded = simd.add_f32s(x, round);
    let fraction = simd.sub_f32s(x, simd.sub_f32s(rounded, round));
    let mut p = simd.splat_f32s(EXP2[0]);
    for coefficient in &EXP2[1..] {
        p = multiply_add(simd, p, fraction, simd.splat_f32s(*coefficient));
    }
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(rounded), simd.splat_u32s(23));
    simd.mul_f32s(p, simd.transmute_f32s_u32s(bits))
}

/// 2^f for f in [-1/2, 1/2], highest power first: a minimax polynomial, relative error 2e-9 before
/// rounding.
pub const EXP2: [f32; 7] = [0.000_153_533_62, 0.001_339_887_4, 0.009_618_437, 0.055_503_325, 0.240_226_48, LN_2, 1.0];

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp2<'a>(&'a mut [f32]);

    impl WithSimd for Exp2<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (registers, rest) = S::as_mut_simd_f32s(self.0);
            assert!(rest.is_empty());
            registers.iter_mut().for_each(|x| *x = exp2_of_weight(simd, *x));
        }
    }

    /// Units in the last place of the fp32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let exponent = (exact.log2().floor() as i32).max(-126);
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    #[test]
    fn exp2_is_within_about_one_ulp_at_every_level() {
        for level in Level::all() {
            // 4 million arguments, over the whole range and around zero.
            let arguments: Vec<f32> = (0..2_000_000)
                .map(|i| -126.0 + i as f32 * (253.4 / 2_000_000.0))
                .chain((0..2_000_000).map(|i| (i as f32 - 1e6) * 1e-6))
                .collect();
            let mut results = arguments.clone();
            level.run(Exp2(&mut results));
            let worst = arguments.iter().zip(&results).map(|(x, y)| ulps(*y, f64::from(*x).exp2())).fold(0.0, f64::max);
            // Without fused multiply-adds each step of the polynomial rounds once more.
            let bound = if level == Level::Baseline { 1.25 } else { 1.0 };
            assert!(worst <= bound, "{level:?}: {worst} ulp");
        }
    }

    #[test]
    fn exp2_is_exact_at_the_ends() {
        for level in Level::all() {
            let mut x = [f32::NEG_INFINITY, -1e30, -151.0, -127.0, -126.0, -1.0, -0.0, 0.0];
            let mut nan = [f32::NAN, -f32::NAN, 0.0, f32::NAN, 1.0, 1.0, 1.0, 127.0];
            let mut both = [x, nan].concat();
            level.run(Exp2(&mut both));
            x.copy_from_slice(&both[..8]);
            nan.copy_from_slice(&both[8..]);
            assert_eq!(x, [0.0, 0.0, 0.0, 0.0, f32::MIN_POSITIVE, 0.5, 1.0, 1.0], "{level:?}");
            assert_eq!(nan.map(f32::is_nan), [true, true, false, true, false, false, false, false], "{level:?}");
            assert_eq!(nan[7], 2f32.powi(127), "{level:?}");
        }
    }
}
