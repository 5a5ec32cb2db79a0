//! How much the consumers of an sm90 kernel spill, from a cubin's instructions: ptxas gives totals
//! alone.
//!
//! One thread of the producer works, and mostly waits; it has 24 to 56 registers, and its spills
//! cost nothing. A spill of the consumers stands between two products. Machines that tune have no
//! disassembler, so this file reads three opcodes, as CUDA 13's nvdisasm names them
//! (tests/kernels/instructions.rs compares the two). It knows nothing else of instructions, and
//! answers None for a cubin that is not of the form it knows.

/// Low bits of an instruction, which is 16 bytes from Volta on.
const OPCODE: u128 = 0xfff;
const STL: u128 = 0x387;
const LDL: u128 = 0x983;
const USETMAXREG: u128 = 0x9c8;
const INSTRUCTION_BYTES: usize = 16;

/// Bytes that the warps between `setmaxnreg.inc` and the producer's `setmaxnreg.dec` store to and
/// load from the stack; None where the cubin has no such kernel, or is not understood.
pub fn consumer_spill_bytes(cubin: &[u8]) -> Option<u32> {
    code(cubin)?.find_map(|code| {
        let mut spilled = None;
        for instruction in code.chunks_exact(INSTRUCTION_BYTES) {
            let bits = u128::from_le_bytes(instruction.try_into().ok()?);
            match (bits & OPCODE, spilled) {
                (USETMAXREG, None) => spilled = takes_more(bits)?.then_some(0),
                // Consumers with other numbers of registers have a branch each.
                (USETMAXREG, Some(_)) if takes_more(bits)? => {}
                (USETMAXREG, Some(_)) => return spilled,
                (STL | LDL, Some(bytes)) => spilled = Some(bytes + width(bits)?),
                _ => {}
            }
        }
        spilled
    })
}

/// Whether a `setmaxnreg` takes registers, or gives some up.
fn takes_more(bits: u128) -> Option<bool> {
    match bits >> 72 & 0xff {
        6 => Some(true),
        5 => Some(false),
        _ => None,
    }
}

/// Bytes of a load or store.
fn width(bits: u128) -> Option<u32> {
    match bits >> 73 & 7 {
        0 | 1 => Some(1),
        2 | 3 => Some(2),
        4 => Some(4),
        5 => Some(8),
        6 => Some(16),
        _ => None,
    }
}

/// The `.text.<kernel>` sections of a 64-bit little-endian ELF file.
fn code(elf: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    /// Offsets in the file's header and in a section's: ELF-64 Object File Format, figures 2 and 8.
    const SECTIONS_AT: usize = 0x28;
    const SECTION_BYTES: usize = 0x3a;
    const SECTION_COUNT: usize = 0x3c;
    const NAMES_INDEX: usize = 0x3e;
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(bytes)?)?;
        usize::try_from(bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))).ok()
    };
    let (begin, size, count) = (number(SECTIONS_AT, 8)?, number(SECTION_BYTES, 2)?, number(SECTION_COUNT, 2)?);
    let section = move |index: usize| begin.checked_add(index * size);
    let contents = move |index: usize| {
        let at = section(index)?;
        let (offset, bytes) = (number(at.checked_add(0x18)?, 8)?, number(at.checked_add(0x20)?, 8)?);
        elf.get(offset..offset.checked_add(bytes)?)
    };
    let names = contents(number(NAMES_INDEX, 2)?)?;
    let is_code = move |index: &usize| {
        let name = section(*index).and_then(|at| number(at, 4)).and_then(|at| names.get(at..));
        name.is_some_and(|name| name.starts_with(b".text."))
    };
    Some((0..count).filter(is_code).filter_map(contents))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INC: u128 = USETMAXREG | 6 << 72;
    const DEC: u128 = USETMAXREG | 5 << 72;
    const STORE_4: u128 = STL | 4 << 73;
    const LOAD_8: u128 = LDL | 5 << 73;

    /// A file of two sections: the names, and a kernel of these instructions.
    fn cubin(instructions: &[u128]) -> Vec<u8> {
        let names = b"\0.text.k\0";
        let mut file = vec![0; 64];
        let names_at = file.len();
        file.extend(names);
        let code_at = file.len();
        file.extend(instructions.iter().flat_map(|bits| bits.to_le_bytes()));
        let sections_at = file.len();
        for (name, at, bytes) in [(0u32, names_at, names.len()), (1, code_at, instructions.len() * 16)] {
            let mut section = [0; 64];
            section[..4].copy_from_slice(&name.to_le_bytes());
            section[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
            section[0x20..0x28].copy_from_slice(&(bytes as u64).to_le_bytes());
            file.extend(section);
        }
        file[0x28..0x30].copy_from_slice(&(sections_at as u64).to_le_bytes());
        file[0x3a] = 64;
        file[0x3c] = 2;
        file
    }

    #[test]
    fn only_spills_between_inc_and_dec_are_the_consumers() {
        let spilled = |instructions: &[u128]| consumer_spill_bytes(&cubin(instructions));
        assert_eq!(spilled(&[STORE_4, INC, STORE_4, 0, LOAD_8, DEC, LOAD_8]), Some(12));
        assert_eq!(spilled(&[DEC, STORE_4, INC, LOAD_8]), Some(8), "the producer's code may come first");
        assert_eq!(spilled(&[STORE_4, INC, 0, DEC, LOAD_8]), Some(0));
        assert_eq!(spilled(&[INC, STORE_4, INC, LOAD_8, DEC, LOAD_8]), Some(12), "two kinds of consumers");
    }

    #[test]
    fn a_cubin_of_another_form_gives_no_number() {
        assert_eq!(consumer_spill_bytes(&cubin(&[STORE_4, LOAD_8])), None, "no setmaxnreg");
        assert_eq!(consumer_spill_bytes(&cubin(&[USETMAXREG | 7 << 72, STORE_4])), None);
        assert_eq!(consumer_spill_bytes(&cubin(&[INC, STL | 7 << 73])), None);
        let whole = cubin(&[INC, STORE_4]);
        // Up to the last section's header.
        for length in 0..whole.len() - 64 {
            assert_eq!(consumer_spill_bytes(&whole[..length]), None, "{length} bytes");
        }
    }
}
