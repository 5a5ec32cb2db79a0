//! The engine on the CPU backend: preparing, tuning, sealing, pinning, and the records that the
//! next process finds.

mod prepare;
mod records;
mod support;
mod tuning;
