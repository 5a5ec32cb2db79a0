//! Transposing four rows at a time, from the caller's rows to tiles whose columns are contiguous.
//!
//! An element by element copy took a quarter of a backward pass over 64 tokens.

/// Columns of four rows of the same length into `tile`: element (i, c) to `c * pitch + i`.
pub fn from_rows(rows: [&[f32]; 4], tile: &mut [f32], pitch: usize) {
    let columns = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == columns));
    assert!(columns == 0 || (columns - 1) * pitch + 4 <= tile.len(), "four rows leave their tile");
    let mut c = 0;
    #[cfg(target_arch = "x86_64")]
    while c + 4 <= columns {
        use std::arch::x86_64::{_mm_loadu_ps, _mm_storeu_ps};
        // SAFETY: every x86-64 processor has SSE. The asserts bound four floats of each row and of
        // each column of the tile.
        unsafe {
            let block = transposed(rows.map(|row| _mm_loadu_ps(row.as_ptr().add(c))));
            for (i, column) in block.into_iter().enumerate() {
                _mm_storeu_ps(tile.as_mut_ptr().add((c + i) * pitch), column);
            }
        }
        c += 4;
    }
    while c < columns {
        for (i, row) in rows.iter().enumerate() {
            tile[c * pitch + i] = row[c];
        }
        c += 1;
    }
}

/// Rows of a tile whose columns are contiguous: element (i, c) from `c * pitch + i` to `i * columns
/// + c`. `columns` is a multiple of 4.
pub fn into_rows(tile: &[f32], pitch: usize, [rows, columns]: [usize; 2], out: &mut [f32]) {
    for c in (0..columns).step_by(4) {
        let four = [c, c + 1, c + 2, c + 3].map(|c| &tile[c * pitch..][..rows]);
        from_rows(four, &mut out[c..], columns);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transposed(mut block: [std::arch::x86_64::__m128; 4]) -> [std::arch::x86_64::__m128; 4] {
    let [a, b, c, d] = &mut block;
    // SAFETY: every x86-64 processor has SSE.
    #[allow(unused_unsafe)] // whether it is safe to call depends on the version of Rust
    unsafe {
        std::arch::x86_64::_MM_TRANSPOSE4_PS(a, b, c, d);
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_rows_of_any_length_go_into_a_tile() {
        for columns in 0..14 {
            let pitch = 5;
            let rows: Vec<Vec<f32>> = (0..4).map(|i| (0..columns).map(|c| (10 * c + i) as f32).collect()).collect();
            let mut tile = vec![-1.0; columns * pitch];
            from_rows([0, 1, 2, 3].map(|i| &rows[i][..]), &mut tile, pitch);
            for (at, x) in tile.iter().enumerate() {
                let expected = if at % pitch < 4 { (10 * (at / pitch) + at % pitch) as f32 } else { -1.0 };
                assert_eq!(*x, expected, "column {} row {}", at / pitch, at % pitch);
            }
        }
    }
}
