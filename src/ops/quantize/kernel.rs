//! The quantising kernel: what its text is rendered from, its argument and its grid.

use super::call::Quantize;
use super::rotation::SIGN_WORDS;
use crate::call::TensorRef;
use crate::error::Result;
use crate::kernel::{FixedSpec, Value};
use crate::ops::class::QuantizeClass;
use crate::ops::op::{Launch, Op};
use crate::problem::Eight;

const THREADS: u32 = 256;
const LANES_OF_WARP: u64 = 32;
/// Columns that a lane has of a row, at most: two chunks of 8.
const COLS_OF_LANE: i64 = 16;
/// Rows of a tile that a lane has a share of.
const ROWS_OF_LANE: i64 = 4;
/// Tiles of a unit up to which a CTA takes the whole unit. It reads what it cannot keep again, soon
/// enough to find it in L1 or L2.
const TILES_OF_CTA: i64 = 2;
/// The most CTAs of a launch. They loop over further tiles.
const MAX_CTAS: i64 = 1 << 20;

impl QuantizeClass {
    /// The kernel of this class.
    pub fn kernel(&self) -> FixedSpec {
        FixedSpec {
            name: Quantize::NAME,
            threads: THREADS,
            class: vec![
                ("dtype", Value::Name(self.dtype.name().to_owned())),
                ("vec", Value::Integer(self.layout.elements() as u32)),
            ],
            knobs: vec![
                ("key_format", Value::Integer(self.to.map_or(0, Eight::number))),
                ("of_rows", Value::Flag(self.of_rows)),
                ("rotates", Value::Flag(self.rotates)),
            ],
        }
    }
}

/// What a launch does, the twin of the numbers in `templates/quantize.cu.tera`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(i32)]
enum Pass {
    /// Quantises by the scales that are there.
    ReadsScales = 0,
    /// Computes the scale of each unit, which is one tile, and quantises.
    KeepsRows = 1,
    /// Makes all scales 0.
    Clears = 2,
    /// Raises each scale to those of the largest magnitudes of its tiles.
    RaisesScales = 3,
    /// Quantises rows whose scales are those of one position.
    TakesPositions = 4,
}

/// From a row of a lane to its next one, in elements.
#[repr(C)]
struct RowStep {
    step: i64,
    carry: i64,
}

impl RowStep {
    /// So many rows on, among units of `group` heads.
    fn new(tensor: &TensorRef, rows: i64, group: i64) -> RowStep {
        let TensorRef { stride_seqlen, stride_head, .. } = *tensor;
        let step = (rows / group).wrapping_mul(stride_seqlen).wrapping_add((rows % group).wrapping_mul(stride_head));
        RowStep { step, carry: stride_seqlen.wrapping_sub(group.wrapping_mul(stride_head)) }
    }
}

/// The kernel's argument, the twin of `QuantizeParams` in `templates/quantize.cu.tera`.
#[repr(C)]
pub struct QuantizeParams {
    x: TensorRef,
    out: TensorRef,
    scales: TensorRef,
    x_step: RowStep,
    out_step: RowStep,
    scales_step: RowStep,
    tiles: i64,
    tiles_of_unit: i64,
    seqlen: i32,
    head_dim: i32,
    block: i32,
    group: i32,
    blocks: i32,
    groups: i32,
    tile: i32,
    step_heads: i32,
    lane_bits: i32,
    scale_bits: i32,
    pass: Pass,
    computes: i32,
    rotation_factor: f32,
    signs: [u32; SIGN_WORDS],
}

const _: () = assert!(size_of::<QuantizeParams>() == 3 * 32 + 3 * 16 + 2 * 8 + 13 * 4 + 16 * 4 + 4);

impl QuantizeParams {
    /// The argument of the last launch. Each size fits an i32, since `capi` bounds them.
    pub fn new(quantize: &Quantize) -> QuantizeParams {
        let rotation = quantize.rotation();
        let lane_bits = lane_bits(quantize.head_dim);
        let takes_positions = takes_positions(quantize);
        // A unit is then a batch entry, which only serves addresses.
        let is_unit_an_entry = quantize.class.of_rows || takes_positions;
        let [block, group] = match is_unit_an_entry {
            true => [quantize.seqlen, quantize.num_heads],
            false => [quantize.rows_per_scale.min(quantize.seqlen.max(1)), quantize.heads_per_scale],
        };
        let units = if is_unit_an_entry { quantize.batch_size } else { quantize.units() };
        let rows_at_once = i64::from(THREADS >> lane_bits);
        let mut tile = rows_at_once * ROWS_OF_LANE;
        let keeps_rows = !is_unit_an_entry && quantize.computes && block * group <= tile * TILES_OF_CTA;
        if keeps_rows {
            tile *= TILES_OF_CTA;
        }
        let tiles_of_unit = ceil_div(block * group, tile);
        QuantizeParams {
            x: quantize.x,
            out: quantize.out,
            scales: quantize.scales,
            x_step: RowStep::new(&quantize.x, rows_at_once, group),
            out_step: RowStep::new(&quantize.out, rows_at_once, group),
            scales_step: RowStep::new(&quantize.scales, rows_at_once, group),
            tiles: units * tiles_of_unit,
            tiles_of_unit,
            seqlen: quantize.seqlen as i32,
            head_dim: quantize.head_dim as i32,
            block: block as i32,
            group: group as i32,
            blocks: ceil_div(quantize.seqlen, block) as i32,
            groups: (quantize.num_heads / group) as i32,
            tile: tile as i32,
            step_heads: (rows_at_once % group) as i32,
            lane_bits,
            scale_bits: lane_bits + (quantize.heads_per_scale.max(1) as u64).ilog2() as i32,
            pass: match (takes_positions, keeps_rows) {
                (true, _) => Pass::TakesPositions,
                (false, true) => Pass::KeepsRows,
                (false, false) => Pass::ReadsScales,
            },
            computes: quantize.computes.into(),
            rotation_factor: rotation.map_or(0.0, |rotation| rotation.factor),
            signs: rotation.map_or([0; SIGN_WORDS], |rotation| rotation.signs),
        }
    }
}

/// Whether neighbouring lanes hold what shares a scale: some heads of one position, as in a step of
/// decoding.
fn takes_positions(quantize: &Quantize) -> bool {
    let heads = quantize.heads_per_scale.max(1) as u64;
    !quantize.class.of_rows
        && quantize.rows_per_scale.min(quantize.seqlen) <= 1
        && heads.is_power_of_two()
        && heads << lane_bits(quantize.head_dim) <= LANES_OF_WARP
}

/// Neighbouring lanes that share a row, as a power of 2: the fewest that hold its columns.
fn lane_bits(head_dim: i64) -> i32 {
    (ceil_div(head_dim, COLS_OF_LANE) as u64).next_power_of_two().ilog2() as i32
}

fn ceil_div(count: i64, of_each: i64) -> i64 {
    (count + of_each - 1) / of_each
}

/// A CTA for each of so many tiles.
fn grid(tiles: i64) -> [u32; 3] {
    [tiles.clamp(1, MAX_CTAS) as u32, 1, 1]
}

/// The launches of a call. Scales of units that no CTA takes alone are cleared and raised by
/// launches that go before.
pub fn launches(quantize: &Quantize, launch: &mut Launch<'_, QuantizeParams>) -> Result<()> {
    let mut params = QuantizeParams::new(quantize);
    if !quantize.class.of_rows && quantize.computes && params.pass == Pass::ReadsScales {
        params.pass = Pass::Clears;
        launch(grid(ceil_div(quantize.units(), THREADS.into())), &params)?;
        params.pass = Pass::RaisesScales;
        launch(grid(params.tiles), &params)?;
        params.pass = Pass::ReadsScales;
    }
    launch(grid(params.tiles), &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dtype, Layout};

    /// The CTAs and the pass of each launch of x (16, seqlen, 8, head_dim) in e4m3.
    fn launched(seqlen: i64, head_dim: i64, rows_per_scale: i64, computes: bool) -> Vec<(u32, Pass)> {
        launched_of_heads(1, seqlen, head_dim, rows_per_scale, computes)
    }

    /// The same where so many heads share a scale.
    fn launched_of_heads(
        heads_per_scale: i64,
        seqlen: i64,
        head_dim: i64,
        rows_per_scale: i64,
        computes: bool,
    ) -> Vec<(u32, Pass)> {
        let (to, of_rows) = (Some(Eight::E4m3), rows_per_scale == 1);
        let quantize = Quantize {
            class: QuantizeClass { dtype: Dtype::Bf16, to, layout: Layout::Vec8, of_rows, rotates: false },
            batch_size: 16,
            seqlen,
            num_heads: 8,
            head_dim,
            rows_per_scale,
            heads_per_scale,
            computes,
            rotation_seed: 0,
            x: TensorRef::NULL,
            out: TensorRef::NULL,
            scales: TensorRef::NULL,
        };
        let mut all = Vec::new();
        launches(&quantize, &mut |[ctas, _, _], params| {
            all.push((ctas, params.pass));
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn a_cta_takes_a_unit_that_it_can_keep_and_others_take_three_launches() {
        use Pass::*;
        assert_eq!(launched(4096, 128, 128, true), [(16 * 32 * 8, KeepsRows)]);
        assert_eq!(launched(4096, 256, 128, true), [(16 * 32 * 8, KeepsRows)]);
        let tiles = 16 * 8 * 4096 / 128;
        assert_eq!(launched(4096, 128, 4096, true), [(1, Clears), (tiles, RaisesScales), (tiles, ReadsScales)]);
        assert_eq!(launched(4096, 128, 4096, false), [(tiles, ReadsScales)]);
        assert_eq!(launched(4096, 128, 1, true), [(tiles, ReadsScales)]);
        assert_eq!(launched(129, 512, 129, true).len(), 3);
        assert_eq!(launched(64, 512, 64, true), [(16 * 8, KeepsRows)]);
    }

    #[test]
    fn lanes_of_a_warp_take_a_position_that_they_hold() {
        assert_eq!(launched(1, 128, 1024, true), [(16, Pass::TakesPositions)]);
        assert_eq!(launched(1, 128, 128, false), [(16, Pass::TakesPositions)]);
        assert_eq!(launched(2, 128, 128, true), [(16 * 8, Pass::KeepsRows)]);
        assert_eq!(launched_of_heads(2, 1, 128, 128, true), [(16, Pass::TakesPositions)]);
        assert_eq!(launched_of_heads(4, 1, 256, 128, true), [(16 * 2, Pass::KeepsRows)], "128 lanes");
    }

    #[test]
    fn lanes_of_a_row_hold_its_columns() {
        for head_dim in 1..=512 {
            let cols = COLS_OF_LANE << lane_bits(head_dim);
            assert!(cols >= head_dim && (cols / 2 < head_dim || cols == COLS_OF_LANE), "{head_dim}: {cols}");
        }
    }
}
