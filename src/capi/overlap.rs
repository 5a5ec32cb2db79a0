//! Whether two tensors share a byte, and whether one holds two elements in the same place.
//!
//! Comparing byte ranges alone would refuse dq, dk and dv interleaved in one packed buffer. Where
//! ranges meet, the equation "address in a = address in b" is searched for a solution. Tensors that
//! overlap are never accepted. Tensors that do not overlap are refused only where the search
//! exceeds its budget. Equal or nested strides, as in every packed layout in use, take a few steps.

use crate::error::Error;
use std::fmt;

/// Most bytes that a tensor may span. The limit keeps the arithmetic below within an i64.
const MAX_EXTENT: i64 = 1 << 60;

/// One strided dimension: the number of entries, and the bytes from one to the next.
#[derive(Clone, Copy, Debug)]
pub struct Dim {
    pub count: i64,
    pub stride: i64,
}

/// The bytes that a tensor touches: rows of `row` contiguous bytes, at every combination of `dims`.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    pub name: &'static str,
    pub start: u64,
    /// From the first byte to the end of the last, at most MAX_EXTENT.
    pub extent: i64,
    pub row: i64,
    pub dims: [Dim; 4],
}

impl Footprint {
    /// `bytes` > 0 contiguous bytes.
    pub fn contiguous(name: &'static str, start: u64, bytes: i64) -> Self {
        Footprint { name, start, extent: bytes, row: bytes, dims: [Dim { count: 1, stride: 0 }; 4] }
    }

    /// Rows of `row` bytes. Dimensions are (entries, elements from one to the next), with at least
    /// one entry each. The error is the extent, if it exceeds the limit.
    pub fn strided(
        name: &'static str,
        start: u64,
        row: i64,
        element: i64,
        dims: [(i64, i64); 4],
    ) -> Result<Self, i128> {
        // The sizes are below 2^31, so a sum of four products fits an i128.
        let reach = |(count, stride): (i64, i64)| (count - 1) as i128 * stride as i128;
        let extent = dims.into_iter().map(reach).sum::<i128>() * element as i128 + row as i128;
        if extent > MAX_EXTENT as i128 || start.checked_add(extent as u64).is_none() {
            return Err(extent);
        }
        // The stride of a dimension of size 1 may be anything, so it must not be multiplied.
        let dims = dims.map(|(count, stride)| match count {
            1 => Dim { count, stride: 0 },
            _ => Dim { count, stride: stride * element },
        });
        Ok(Footprint { name, start, extent: extent as i64, row, dims })
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.extent as u64)
    }

    /// Whether two of its own rows may share a byte: sorted by stride, each stride must clear all
    /// below it.
    pub fn overlaps_itself(&self) -> bool {
        let mut dims = self.dims;
        dims.sort_unstable_by_key(|dim| dim.stride);
        let mut below = self.row;
        dims.iter().filter(|dim| dim.count > 1).any(|dim| {
            let collides = dim.stride < below;
            below = below.saturating_add((dim.count - 1).saturating_mul(dim.stride));
            collides
        })
    }

    /// Whether some byte may belong to both.
    pub fn touches(&self, other: &Footprint) -> bool {
        if self.end() <= other.start || other.end() <= self.start {
            return false;
        }
        // The ranges meet, so they lie within MAX_EXTENT of each other and the difference fits.
        let distance = other.start.wrapping_sub(self.start) as i64;
        Equation::between(self, other).has_solution(0, distance, &mut SEARCH_BUDGET.clone())
    }
}

/// The error for an argument that would span `extent` bytes. `argument` describes its address and
/// strides.
pub fn overflows(argument: &str, extent: i128) -> Error {
    Error::invalid(format!(
        "{argument} overflows: it would reach over {extent} bytes; at most {MAX_EXTENT} within the address space are allowed"
    ))
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{:#x}, {:#x})", self.name, self.start, self.end())
    }
}

/// Nested strides need at most three tries for each of eight dimensions, and almost always one.
const SEARCH_BUDGET: u32 = 4096;

/// A term `stride * d` with d in `low..=high`: how far the two tensors may move apart along one
/// stride.
#[derive(Clone, Copy)]
struct Term {
    stride: i64,
    low: i64,
    high: i64,
}

/// sum of terms + d = distance, with d in `last`: (row - 1 of a) to -(row - 1 of b).
struct Equation {
    terms: [Term; 8],
    count: usize,
    last: (i64, i64),
}

impl Equation {
    fn between(a: &Footprint, b: &Footprint) -> Self {
        let mut equation =
            Equation { terms: [Term { stride: 0, low: 0, high: 0 }; 8], count: 0, last: (1 - b.row, a.row - 1) };
        for (dims, sign) in [(&a.dims, 1), (&b.dims, -1)] {
            // A broadcast dimension (stride 0) touches nothing new.
            for dim in dims.iter().filter(|dim| dim.count > 1 && dim.stride > 0) {
                equation.add(dim.stride, sign * (dim.count - 1));
            }
        }
        equation.terms[..equation.count].sort_unstable_by_key(|term| std::cmp::Reverse(term.stride));
        equation
    }

    /// Equal strides of the two tensors become one term.
    fn add(&mut self, stride: i64, reach: i64) {
        let found = self.terms[..self.count].iter().position(|term| term.stride == stride);
        let index = found.unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        });
        let term = &mut self.terms[index];
        term.stride = stride;
        term.low += reach.min(0);
        term.high += reach.max(0);
    }

    /// Whether terms from `level` on can make up `distance`; true when the budget runs out.
    fn has_solution(&self, level: usize, distance: i64, budget: &mut u32) -> bool {
        let Some(term) = self.terms[..self.count].get(level) else {
            return (self.last.0..=self.last.1).contains(&distance);
        };
        let below = self.terms[level + 1..self.count].iter();
        let (low, high) = below.fold(self.last, |(low, high), t| (low + t.low * t.stride, high + t.high * t.stride));
        // The rest of the distance must lie within the reach of the smaller strides.
        let first = (distance - high + term.stride - 1).div_euclid(term.stride).max(term.low);
        let last = (distance - low).div_euclid(term.stride).min(term.high);
        (first..=last).any(|d| {
            *budget = budget.saturating_sub(1);
            *budget == 0 || self.has_solution(level + 1, distance - d * term.stride, budget)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn footprint(start: u64, row: i64, [a, b, c]: [(i64, i64); 3]) -> Footprint {
        let dims = [a, b, c, (1, 0)].map(|(count, stride)| Dim { count, stride });
        let extent = dims.iter().map(|dim| (dim.count - 1) * dim.stride).sum::<i64>() + row;
        Footprint { name: "t", start, extent, row, dims }
    }

    fn bytes(f: &Footprint) -> Vec<i64> {
        let [a, b, c, _] = f.dims;
        let mut all = Vec::new();
        for (i, j, k) in (0..a.count).flat_map(|i| (0..b.count).flat_map(move |j| (0..c.count).map(move |k| (i, j, k))))
        {
            let at = f.start as i64 + i * a.stride + j * b.stride + k * c.stride;
            all.extend(at..at + f.row);
        }
        all
    }

    #[test]
    fn packed_qkv_views_do_not_touch() {
        let (batch, seqlen, heads, dim) = (2, 100, 12, 128);
        let interleaved = |slot: i64| {
            let row = 3 * heads * dim;
            footprint((slot * heads * dim) as u64, dim, [(batch, seqlen * row), (seqlen, row), (heads, dim)])
        };
        let by_head = |slot: i64| {
            let row = 3 * heads * dim;
            footprint((slot * dim) as u64, dim, [(batch, seqlen * row), (seqlen, row), (heads, 3 * dim)])
        };
        for (a, b) in [(0, 1), (1, 2), (0, 2)] {
            assert!(!interleaved(a).touches(&interleaved(b)) && !interleaved(b).touches(&interleaved(a)));
            assert!(!by_head(a).touches(&by_head(b)));
        }
        assert!(interleaved(0).touches(&by_head(0)) && interleaved(1).touches(&interleaved(1)));
    }

    #[test]
    fn packed_views_of_different_lengths_and_heads_do_not_touch() {
        // (batch, seqlen_q + seqlen_k, heads, dim), and (batch, seqlen, heads_q + 2 heads_kv, dim).
        let joint = |start: u64, seqlen| footprint(start, 64, [(3, 30 * 256), (seqlen, 256), (4, 64)]);
        assert!(!joint(0, 10).touches(&joint(2560, 20)));
        assert!(joint(0, 11).touches(&joint(2560, 20)));
        let gqa = |start: u64, heads| footprint(start, 64, [(3, 7680), (10, 768), (heads, 64)]);
        assert!(!gqa(0, 8).touches(&gqa(512, 2)) && !gqa(512, 2).touches(&gqa(640, 2)));
    }

    #[test]
    fn the_answer_never_misses_a_shared_byte_and_errs_rarely() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) % n
        };
        let mut disjoint = 0;
        for _ in 0..4000 {
            let mut any = || {
                let dims = [(); 3].map(|()| (1 + random(4) as i64, random(40) as i64));
                footprint(random(60), 1 + random(6) as i64, dims)
            };
            let (a, b) = (any(), any());
            let of_a: HashSet<i64> = bytes(&a).into_iter().collect();
            let shared = bytes(&b).iter().any(|byte| of_a.contains(byte));
            assert_eq!(a.touches(&b), shared, "{a:?} {b:?}");
            disjoint += u32::from(!shared && a.end() > b.start && b.end() > a.start);
            assert!(a.overlaps_itself() || of_a.len() == bytes(&a).len(), "{a:?}");
        }
        assert!(disjoint > 50, "only {disjoint} interleaved pairs: the test tests nothing");
    }

    #[test]
    fn broadcast_and_short_strides_overlap_themselves() {
        assert!(!footprint(0, 64, [(2, 1280), (5, 256), (4, 64)]).overlaps_itself());
        assert!(!footprint(0, 64, [(2, 1280), (5, 64), (4, 320)]).overlaps_itself());
        assert!(footprint(0, 64, [(2, 0), (5, 256), (4, 64)]).overlaps_itself());
        assert!(footprint(0, 64, [(2, 1280), (5, 256), (4, 63)]).overlaps_itself());
        assert!(!footprint(0, 64, [(1, 0), (5, 256), (4, 64)]).overlaps_itself());
    }

    #[test]
    fn extents_at_the_limit_do_not_overflow() {
        let wide = |start: u64| footprint(start, 64, [(2, MAX_EXTENT / 2 - 64), (2, MAX_EXTENT / 2 - 1), (1, 0)]);
        assert!(wide(0).touches(&wide(0)));
        assert!(!wide(0).touches(&wide(1 << 20)));
        assert!(!wide(u64::MAX - 10).touches(&wide(0)));
    }
}
