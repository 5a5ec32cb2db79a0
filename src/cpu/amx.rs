//! Products of tiles of bf16 pairs by AMX: 16 rows of 64 bytes each, on Intel Xeons from Sapphire
//! Rapids on.
//!
//! A word is a pair of bf16 numbers, the first in its lower half, in the memory of an fp32. This
//! file knows the instructions and the permission for them, and no matrix larger than a block. The
//! tests have the same sums in plain arithmetic.

use crate::family::cpu::scratch::LANES;
use std::marker::PhantomData;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::sync::LazyLock;

/// Rows and columns of a block: two tiles each way, so that each tile that is loaded is used twice.
pub const BLOCK: usize = 2 * LANES;

/// Where the sums of a block go: element (i, j) at `j * pitch + i`.
#[derive(Clone, Copy)]
pub struct Sums {
    pub data: *mut f32,
    pub pitch: usize,
    /// Whether the sums start from the values in memory, and not from 0.
    pub are_begun: bool,
}

/// What multiplies tiles.
#[derive(Clone, Copy, Debug)]
pub enum TileUnit {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
    /// Plain arithmetic, for the tests.
    #[cfg(any(test, not(all(target_arch = "x86_64", target_os = "linux"))))]
    #[cfg_attr(not(test), allow(dead_code))] // no machine detects it
    Emulated,
}

/// Words at `data`, `pitch` of them from one row of a tile to the next.
#[derive(Clone, Copy)]
pub struct Words {
    pub data: *const f32,
    pub pitch: usize,
}

/// The thread's tiles are configured while this lives. It stays on its thread.
pub struct Configured(TileUnit, PhantomData<*const ()>);

impl TileUnit {
    /// AMX, if the processor has it for bf16 and the system lets this process use it.
    pub fn detect() -> Option<TileUnit> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        {
            static IS_USABLE: LazyLock<bool> =
                LazyLock::new(|| instructions::is_there() && instructions::is_permitted());
            if *IS_USABLE {
                return Some(TileUnit::Amx);
            }
        }
        None
    }

    /// Before the first block of a task. Tiles are state of the thread that calls leave undefined.
    pub fn configure(self) -> Configured {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: `detect` has seen AMX and the permission.
            TileUnit::Amx => unsafe { instructions::configure() },
            #[cfg(any(test, not(all(target_arch = "x86_64", target_os = "linux"))))]
            TileUnit::Emulated => {}
        }
        Configured(self, PhantomData)
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: `detect` has seen AMX.
            TileUnit::Amx => unsafe { instructions::release() },
            #[cfg(any(test, not(all(target_arch = "x86_64", target_os = "linux"))))]
            TileUnit::Emulated => {}
        }
    }
}

impl Configured {
    /// The sums of a block of `tiles` (1 or 2 along i and along j): over `steps` of 16 pairs each,
    /// and in each step over the parts of the right factor and, for each, over those of the left.
    ///
    /// A tile of a left part has the words of a pair in a row, 16 columns i. A tile of a right part
    /// has a column j in a row, 16 pairs.
    ///
    /// # Safety
    /// All words of these tiles and all sums must lie there, and nobody else may use the sums
    /// meanwhile.
    pub unsafe fn multiply(&self, tiles: [usize; 2], steps: usize, left: &[Words], right: &[Words], sums: Sums) {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: the caller's promise; the tiles are configured.
            TileUnit::Amx => unsafe {
                match tiles {
                    [1, 1] => instructions::multiply::<1, 1>(steps, left, right, sums),
                    [1, _] => instructions::multiply::<1, 2>(steps, left, right, sums),
                    [_, 1] => instructions::multiply::<2, 1>(steps, left, right, sums),
                    _ => instructions::multiply::<2, 2>(steps, left, right, sums),
                }
            },
            #[cfg(any(test, not(all(target_arch = "x86_64", target_os = "linux"))))]
            // SAFETY: the caller's promise.
            TileUnit::Emulated => unsafe { emulation::multiply(tiles, steps, left, right, sums) },
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod instructions {
    use crate::cpu::amx::{Sums, Words};
    use crate::family::cpu::scratch::{LANES, WORDS};
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    /// Whether the processor has AMX-TILE and AMX-BF16.
    pub fn is_there() -> bool {
        const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
        // SAFETY: every x86-64 processor has CPUID.
        #[allow(unused_unsafe)] // whether it is safe to call depends on the version of Rust
        unsafe {
            __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_BF16 == TILE_AND_BF16
        }
    }

    /// Linux lets a process use tiles once it has asked for their state. The state makes the
    /// frames of signals 8 KB larger.
    pub fn is_permitted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: a system call without pointers; one that the system does not know gives an error.
        let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0 };
        if refused {
            let error = std::io::Error::last_os_error();
            log::info!("bf16 runs without AMX, which Linux refuses to this process: {error}");
        }
        !refused
    }

    /// Palette 1: eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_of_row: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_of_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// Starts using the tiles as the products want them.
    ///
    /// # Safety
    /// The processor has AMX, and the process has its permission.
    pub unsafe fn configure() {
        // SAFETY: the caller's promise; the configuration is one of palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags, readonly));
        }
    }

    /// # Safety
    /// The processor has AMX.
    pub unsafe fn release() {
        // SAFETY: the caller's promise.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }

    /// Tiles 0 to 3 are the sums of (i, j) = (0, 0), (1, 0), (0, 1) and (1, 1), 4 and 5 the left
    /// tiles, 6 and 7 the right ones. The compiler uses no tile, so they hold from one instruction
    /// to the next.
    ///
    /// # Safety
    /// As `Configured::multiply`, on a processor with AMX whose tiles are configured.
    #[inline(always)]
    pub unsafe fn multiply<const I: usize, const J: usize>(steps: usize, left: &[Words], right: &[Words], sums: Sums) {
        let [second_i, second_j] = [I == 2, J == 2];
        let [at_00, at_10] = [sums.data, sums.data.wrapping_add(LANES)];
        let [at_01, at_11] = [at_00, at_10].map(|at| at.wrapping_add(LANES * sums.pitch));
        // SAFETY: the caller's promise. Only sums of the block's tiles are used.
        unsafe {
            begin::<0>(at_00, sums);
            if second_i {
                begin::<1>(at_10, sums);
            }
            if second_j {
                begin::<2>(at_01, sums);
            }
            if second_i && second_j {
                begin::<3>(at_11, sums);
            }
            for step in 0..steps {
                for part in right {
                    let of_right = part.data.add(step * WORDS);
                    load::<6>(of_right, part.pitch);
                    if second_j {
                        load::<7>(of_right.add(LANES * part.pitch), part.pitch);
                    }
                    for part in left {
                        let of_left = part.data.add(step * WORDS * part.pitch);
                        load::<4>(of_left, part.pitch);
                        add_product::<0, 6, 4>();
                        if second_j {
                            add_product::<2, 7, 4>();
                        }
                        if second_i {
                            load::<5>(of_left.add(LANES), part.pitch);
                            add_product::<1, 6, 5>();
                            if second_j {
                                add_product::<3, 7, 5>();
                            }
                        }
                    }
                }
            }
            store::<0>(at_00, sums.pitch);
            if second_i {
                store::<1>(at_10, sums.pitch);
            }
            if second_j {
                store::<2>(at_01, sums.pitch);
            }
            if second_i && second_j {
                store::<3>(at_11, sums.pitch);
            }
        }
    }

    /// # Safety
    /// As `zero`, and the rows of a tile lie at `data`, as far apart as those of the sums.
    #[inline(always)]
    unsafe fn begin<const TILE: usize>(data: *const f32, sums: Sums) {
        // SAFETY: the caller's promise.
        unsafe {
            match sums.are_begun {
                true => load::<TILE>(data, sums.pitch),
                false => zero::<TILE>(),
            }
        }
    }

    /// # Safety
    /// The processor has AMX and the tiles are configured.
    #[inline(always)]
    unsafe fn zero<const TILE: usize>() {
        // SAFETY: the caller's promise.
        unsafe { asm!("tilezero tmm{}", const TILE, options(nostack, preserves_flags, nomem)) };
    }

    /// # Safety
    /// As `zero`, and 16 rows of 16 words lie there.
    #[inline(always)]
    unsafe fn load<const TILE: usize>(from: *const f32, pitch: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tileloadd tmm{}, [{} + {}*4]", const TILE, in(reg) from, in(reg) pitch,
                options(nostack, preserves_flags, readonly));
        }
    }

    /// Adds the product of a right tile and a left tile to the sums of a tile.
    ///
    /// # Safety
    /// As `zero`.
    #[inline(always)]
    unsafe fn add_product<const SUMS: usize, const RIGHT: usize, const LEFT: usize>() {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const SUMS, const RIGHT, const LEFT,
                options(nostack, preserves_flags, nomem));
        }
    }

    /// # Safety
    /// As `zero`, and the rows of a tile lie there, `pitch` floats apart. Nobody else may use them.
    #[inline(always)]
    unsafe fn store<const TILE: usize>(to: *mut f32, pitch: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("tilestored [{} + {}*4], tmm{}", in(reg) to, in(reg) pitch, const TILE,
                options(nostack, preserves_flags));
        }
    }
}

/// The sums of AMX in plain arithmetic.
#[cfg(any(test, not(all(target_arch = "x86_64", target_os = "linux"))))]
mod emulation {
    use crate::cpu::amx::{Sums, Words};
    use crate::family::cpu::scratch::{LANES, WORDS};

    /// # Safety
    /// As `Configured::multiply`.
    pub unsafe fn multiply(tiles: [usize; 2], steps: usize, left: &[Words], right: &[Words], sums: Sums) {
        for (j, i) in (0..tiles[1] * LANES).flat_map(|j| (0..tiles[0] * LANES).map(move |i| (j, i))) {
            let out = sums.data.wrapping_add(j * sums.pitch + i);
            // SAFETY: the caller's promise.
            let mut sum = if sums.are_begun { flushed(unsafe { out.read() }) } else { 0.0 };
            for step in 0..steps {
                for (right, left) in right.iter().flat_map(|right| left.iter().map(move |left| (right, left))) {
                    let pair = |p| {
                        // SAFETY: the caller's promise.
                        unsafe { (*left.data.add(p * left.pitch + i), *right.data.add(j * right.pitch + p)) }
                    };
                    sum = add_step(sum, (step * WORDS..(step + 1) * WORDS).map(pair));
                }
            }
            // SAFETY: the caller's promise.
            unsafe { out.write(sum) };
        }
    }

    /// The first numbers of all pairs are one chain of sums and the second ones another. The two
    /// are added, then the result to the sum of earlier steps.
    fn add_step(sum: f32, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
        let (mut first, mut second) = (0.0, 0.0);
        for (a, b) in pairs {
            let ([a0, a1], [b0, b1]) = (numbers(a), numbers(b));
            first = flushed(a0.mul_add(b0, first));
            second = flushed(a1.mul_add(b1, second));
        }
        flushed(sum + flushed(first + second))
    }

    fn numbers(word: f32) -> [f32; 2] {
        let bits = word.to_bits();
        [bits << 16, bits & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)))
    }

    /// AMX takes subnormal numbers as 0 and makes none, as Intel's manual says.
    fn flushed(x: f32) -> f32 {
        if x.is_subnormal() { 0.0 * x } else { x }
    }
}
