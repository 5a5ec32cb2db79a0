//! Resources: what the tuner, the records and the C face report of a built kernel.

/// What the main kernel of a built pass uses. All are 0 on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Resources {
    pub registers: u32,
    /// All spilled bytes that ptxas reports.
    pub spill_bytes: u32,
    /// Spilled bytes that products wait for. In a warp-specialised kernel these are the consumers'
    /// (`sass`), else all.
    pub costly_spill_bytes: u32,
    pub smem_bytes: u32,
    pub threads: u32,
}
