//! The tuner: the space and its constraints, the search, timing, and the check of candidates.
pub mod space;
