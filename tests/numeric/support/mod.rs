//! Shared parts of the numeric tests for any backend: cases, the reference, the error rule, shapes
//! and laws.

pub mod blocks;
pub mod buffer;
pub mod case;
pub mod check;
pub mod eight;
pub mod error_rule;
pub mod extra_buffers;
pub mod extras;
pub mod four;
pub mod grid;
pub mod laws;
pub mod lengths;
pub mod pages;
pub mod per_score;
pub mod reference;
pub mod scores;
pub mod shapes;
pub mod subject;
