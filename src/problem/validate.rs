//! Validation: the problems that are legal on every backend. Each refusal names the field and its
//! legal values.
//!
//! The C face, the command line and the tuner each call it once, before anything else sees the
//! problem. Backends and kernel families refuse for themselves what only they cannot do.

use super::{
    BlockMask, Causal, Features, MASK_BLOCK_STEP, MAX_HEAD_DIM, MAX_MASK_BLOCK, MAX_SEQLEN, Pass, Problem, Varlen,
    Window,
};
use crate::error::{Error, Result};

/// Refuses a number outside `low..=high`.
pub fn check_range(name: &str, value: i64, low: i64, high: i64) -> Result<()> {
    match (low..=high).contains(&value) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} is {value}; it must be from {low} to {high}"))),
    }
}

impl Problem {
    /// Checks what holds for every backend: ranges, the head ratio, and that products of sizes fit
    /// into 63 bits.
    pub fn validate(&self) -> Result<()> {
        check_range("batch_size", self.batch_size, 0, i32::MAX as i64)?;
        check_range("num_heads_q", self.num_heads_q, 1, i32::MAX as i64)?;
        check_range("num_heads_kv", self.num_heads_kv, 1, i32::MAX as i64)?;
        check_range("seqlen_q", self.seqlen_q, 0, MAX_SEQLEN)?;
        check_range("seqlen_k", self.seqlen_k, 0, MAX_SEQLEN)?;
        check_range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)?;
        check_range("head_dim_v", self.head_dim_v, 1, MAX_HEAD_DIM)?;
        if self.num_heads_q % self.num_heads_kv != 0 {
            return Err(Error::invalid(format!(
                "num_heads_q is {}; it must be a multiple of num_heads_kv, which is {}",
                self.num_heads_q, self.num_heads_kv
            )));
        }
        if self.deterministic && self.pass == Pass::Forward {
            return Err(Error::invalid(
                "deterministic is true in a forward pass; forward passes always are, so it must be false",
            ));
        }
        if self.batch_invariant && self.pass == Pass::Backward {
            return Err(Error::invalid(
                "batch_invariant is true in a backward pass; it exists for forward passes only and must be false",
            ));
        }
        if self.batch_invariant && self.dropout {
            return Err(Error::invalid(
                "batch_invariant is true and dropout_p is not 0; dropout depends on a sequence's place in the batch",
            ));
        }
        self.validate_features()?;
        let heads = self.batch_size.checked_mul(self.num_heads_q).filter(|n| *n <= i32::MAX as i64);
        let Varlen { total_q, total_k, .. } = self.features.varlen.unwrap_or_default();
        let total = total_q.max(total_k).unwrap_or(0);
        let elements = heads.and_then(|n| {
            // Twice the size covers both the rows of the batch and those that lie end to end.
            let rows =
                (n.checked_mul(self.seqlen_q.max(self.seqlen_k) + 4096)?).max(self.num_heads_q.checked_mul(total)?);
            rows.checked_mul(2 * 4 * MAX_HEAD_DIM)
        });
        if elements.is_none() {
            return Err(Error::invalid(format!(
                "batch_size {} x num_heads_q {} x seqlen {} (or num_heads_q x {total} rows) overflows: batch_size * num_heads_q must be below 2^31 and the bytes of a tensor below 2^62",
                self.batch_size,
                self.num_heads_q,
                self.seqlen_q.max(self.seqlen_k)
            )));
        }
        Ok(())
    }

    fn validate_features(&self) -> Result<()> {
        let Features { window, dbias, bias, mask, mask_bits, dlse, varlen, .. } = self.features;
        for (name, side) in [("window_left", window.left), ("window_right", window.right)] {
            side.map_or(Ok(()), |keys| check_range(name, keys, 0, MAX_SEQLEN))?;
        }
        if self.causal != Causal::None && window != Window::default() {
            if let Some(right) = window.right {
                return Err(Error::invalid(format!(
                    "window_right is {right}, and causal hides every key after the diagonal; with causal leave it out"
                )));
            }
            window.check_corner(self.causal)?;
        }
        if window != Window::default() && self.seqlen_q + self.seqlen_k > MAX_SEQLEN {
            return Err(Error::invalid(format!(
                "with a window seqlen_q + seqlen_k is {}; it must be at most {MAX_SEQLEN}",
                self.seqlen_q + self.seqlen_k
            )));
        }
        if dbias && !bias {
            return Err(Error::invalid("dbias is asked for without a bias; the gradient of a bias needs the bias"));
        }
        if mask_bits && !mask {
            return Err(Error::invalid(
                "mask_bits is true without a mask; it selects the element type of a mask, so it needs one",
            ));
        }
        if self.pass == Pass::Forward && (dbias || dlse) {
            return Err(Error::invalid(
                "dbias or dlse is asked for in a forward pass; both belong to the backward pass and must be off",
            ));
        }
        if let Some(varlen) = varlen {
            for (name, total) in [("total_q", varlen.total_q), ("total_k", varlen.total_k)] {
                total.map_or(Ok(()), |rows| check_range(name, rows, 0, MAX_SEQLEN))?;
            }
        }
        self.validate_block_mask()?;
        self.validate_eight_bits()?;
        self.validate_four_bits()?;
        self.validate_key_starts()?;
        self.validate_pages()
    }

    fn validate_block_mask(&self) -> Result<()> {
        let Some(BlockMask { block_q, block_k }) = self.features.block_mask else { return Ok(()) };
        for (name, size) in [("block_q", block_q), ("block_k", block_k)] {
            if !(MASK_BLOCK_STEP..=MAX_MASK_BLOCK).contains(&size) || size % MASK_BLOCK_STEP != 0 {
                return Err(Error::invalid(format!(
                    "block_mask.{name} is {size}; it must be a multiple of {MASK_BLOCK_STEP} from {MASK_BLOCK_STEP} to {MAX_MASK_BLOCK}"
                )));
            }
        }
        if self.features.varlen.is_some() || self.features.paged.is_some() {
            return Err(Error::unsupported(
                "a block mask goes with sequences of one length alone: leave out cu_seqlens, seqused, cache_batch_idx, leftpad_k and pages, or the block mask",
            ));
        }
        Ok(())
    }

    fn validate_key_starts(&self) -> Result<()> {
        let Features { key_starts, varlen, paged, .. } = self.features;
        if !key_starts {
            return Ok(());
        }
        if self.pass == Pass::Backward {
            return Err(Error::invalid(
                "cache_batch_idx or leftpad_k is used; the backward pass takes neither, so it must be off",
            ));
        }
        if paged.is_some() {
            return Err(Error::unsupported(
                "k and v are paged and cache_batch_idx or leftpad_k is used: block_table already says where a sequence's keys lie, so leave them out",
            ));
        }
        match varlen {
            Some(Varlen { total_k: None, .. }) => Ok(()),
            _ => Err(Error::invalid(
                "cache_batch_idx or leftpad_k is used; k and v must then be (batch, seqlen_k, heads, dim), without cu_seqlens_k",
            )),
        }
    }

    fn validate_pages(&self) -> Result<()> {
        let Some(page_size) = self.features.paged else { return Ok(()) };
        check_range("page_size", page_size, 1, MAX_SEQLEN)?;
        if self.pass == Pass::Backward {
            return Err(Error::invalid("k and v are paged; the backward pass does not take pages"));
        }
        if self.dropout {
            return Err(Error::invalid("k and v are paged and dropout_p is not 0; dropout_p must be 0 with pages"));
        }
        if self.features.varlen.is_some_and(|varlen| varlen.total_k.is_some()) {
            return Err(Error::invalid(
                "k and v are both paged and packed end to end; with pages, give the lengths by seqused_k alone",
            ));
        }
        if self.packed_rows() > MAX_SEQLEN {
            return Err(Error::invalid(format!(
                "seqlen_q {} x num_heads_q {} / num_heads_kv {} is {}; with pages it must be at most {MAX_SEQLEN}",
                self.seqlen_q,
                self.num_heads_q,
                self.num_heads_kv,
                self.packed_rows()
            )));
        }
        Ok(())
    }
}
