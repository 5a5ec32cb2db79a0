//! The call's workspace: LSE in base 2 and delta of each row, then the dQ accumulator's rows.
//!
//! Rows are those of `Sequences::workspace_row`, over all heads.

use crate::call::Call;

#[derive(Clone, Copy)]
pub struct Workspace {
    data: *mut f32,
    rows: usize,
    /// Columns of the dQ accumulator.
    cols: usize,
}

// SAFETY: tasks of one phase write disjoint rows. A task reads rows that it wrote itself or that an
// earlier phase wrote, which has ended.
unsafe impl Send for Workspace {}
// SAFETY: as above.
unsafe impl Sync for Workspace {}

impl Workspace {
    pub fn new(call: &Call) -> Workspace {
        let problem = &call.problem;
        Workspace {
            data: call.workspace.cast(),
            rows: (problem.num_heads_q * problem.workspace_rows_of_head()) as usize,
            cols: problem.workspace_cols() as usize,
        }
    }

    /// Natural; +inf for a row that sees nothing, so that its weights come out as 0.
    pub fn lse(&self, row: usize) -> *mut f32 {
        self.data.wrapping_add(row)
    }

    pub fn delta(&self, row: usize) -> *mut f32 {
        self.data.wrapping_add(self.rows + row)
    }

    pub fn dq_accum(&self, row: usize) -> *mut f32 {
        self.data.wrapping_add(2 * self.rows + row * self.cols)
    }
}
