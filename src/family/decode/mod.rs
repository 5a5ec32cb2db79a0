//! The decode family: few query rows over many keys, bound by the reading of K and V, forward with
//! sm80's instructions.
//!
//! The rate follows from the bytes in flight on each SM, from an equal share for every SM, and from
//! TMA where the GPU has it. A CTA's warps form teams, each of which walks its own keys through a
//! ring of tiles; a launch may split the keys among CTAs, and a second kernel combines the partial
//! states. Constraints stand here with their reason and once more as static asserts in
//! `templates/decode.cu.tera`.

mod geometry;
mod heuristic;
mod space;
#[cfg(test)]
mod tests;

pub use geometry::DecodeKnobs;
pub use space::of_short_sequences;

use crate::problem::Problem;

/// The family's place among those that serve a problem.
pub enum Rank {
    Preferred,
    Last,
    Unserved,
}

/// The family is preferred where there are few queries, and enough keys for each that reading the
/// keys takes the time. In pages, whose lengths the device alone knows, few queries suffice. With
/// more queries over pages the family comes last: it reads the keys once for each 64 packed rows.
pub fn rank(problem: &Problem) -> Rank {
    // All families sum in one order, so other families may serve many queries.
    if problem.batch_invariant && !problem.has_few_queries_in_any_batch() {
        return Rank::Unserved;
    }
    let is_paged = problem.may_decode() && problem.features.paged.is_some();
    match is_bound_by_keys(problem) || is_paged && problem.has_few_rows() {
        true => Rank::Preferred,
        false if is_paged => Rank::Last,
        false => Rank::Unserved,
    }
}

/// Whether the reading of keys takes the time, with pages or without.
pub fn is_bound_by_keys(problem: &Problem) -> bool {
    problem.may_decode() && problem.has_few_rows() && problem.seqlen_k >= KEYS_OF_A_QUERY * problem.seqlen_q
}

/// The least number of keys for each query. With fewer, the other families are faster: they are
/// made for tiles of queries of a short sequence.
const KEYS_OF_A_QUERY: i64 = 4;
