//! Accesses: the bytes that a call reads and writes. A written byte must belong to one tensor only.
//! `args`, `merge` and `kv_append` collect the footprints of their checked tensors here.

use super::memory::{Memory, refuse_foreign_memory};
use super::operand::{Access, Data};
use super::overlap::Footprint;
use crate::error::{Error, Result};

/// The longest lists: q, k, v, out, dout, lse, two dropout words, twelve tensors of the features
/// and three of scales are read. An append writes k_cache, v_cache, seqused, q_rotated and two
/// tensors of scales; a backward pass writes dq, dk, dv, dbias and dsinks.
#[derive(Default)]
pub struct Accesses {
    read: Footprints<23>,
    written: Footprints<6>,
}

impl Accesses {
    pub fn add(&mut self, access: Access, more: impl IntoIterator<Item = Footprint>) {
        match access {
            Access::Read => self.read.extend(more),
            Access::Written => self.written.extend(more),
        }
    }

    /// Refuses outputs that share a byte with another tensor and, at a launch on a CPU that the
    /// caller did not ask for, tensors that the host cannot read.
    pub fn check(&self, data: Data, memory: Memory) -> Result<()> {
        self.refuse_overlaps()?;
        match (memory, data) {
            (Memory::Fallback, Data::Required) => refuse_foreign_memory(self.read.iter().chain(self.written.iter())),
            _ => Ok(()),
        }
    }

    fn refuse_overlaps(&self) -> Result<()> {
        let Accesses { read, written } = self;
        for (index, output) in written.iter().enumerate() {
            read.iter().chain(written.iter().skip(index + 1)).try_for_each(|other| refuse_overlap(output, other))?;
        }
        Ok(())
    }

    /// Refuses one more output that shares a byte with any tensor of the call.
    pub fn refuse_overlap_with(&self, output: &Footprint) -> Result<()> {
        self.read.iter().chain(self.written.iter()).try_for_each(|other| refuse_overlap(output, other))
    }
}

fn refuse_overlap(output: &Footprint, other: &Footprint) -> Result<()> {
    match output.touches(other) {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "{} overlaps {}: {output} and {other} share bytes; an output must share no byte with another tensor",
            output.name, other.name
        ))),
    }
}

/// Up to N footprints, without the heap: a launch allocates nothing.
struct Footprints<const N: usize> {
    items: [Option<Footprint>; N],
    count: usize,
}

impl<const N: usize> Default for Footprints<N> {
    fn default() -> Self {
        Footprints { items: [None; N], count: 0 }
    }
}

impl<const N: usize> Footprints<N> {
    fn extend(&mut self, more: impl IntoIterator<Item = Footprint>) {
        for item in more {
            self.items[self.count] = Some(item);
            self.count += 1;
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Footprint> {
        self.items.iter().flatten()
    }
}
