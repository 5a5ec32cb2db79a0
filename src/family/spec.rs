//! KernelSpec: one kernel of a pass and its launch, by arithmetic alone: threads, shared memory,
//! arguments and grid.
//!
//! Families make specs from a problem and knobs. `check` discards by them what cannot fit, the
//! renderer gives templates their numbers, which each template asserts (`smem_bytes`) or takes
//! (`threads`, `rows`), and `kernel::launch` launches by them. So the two sides cannot drift apart.

use super::split_rest::SplitRest;
use crate::config::{Config, Family};
use crate::problem::{Pass, Problem};

/// One kernel of a pass, in launch order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// File under `templates/`, without `.cu.tera`.
    pub template: &'static str,
    /// The `extern "C"` name.
    pub entry: &'static str,
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub smem_bytes: u32,
    /// Whether this is the kernel whose registers and spills stand for the pass.
    pub is_main: bool,
    /// Query rows or keys of a CTA, along the axis that `grid` divides; with `Axis::Heads` those
    /// that a warp takes at a time.
    pub rows: u32,
    /// With `Axis::PackedRows`, K/V heads of a CTA.
    pub heads: u32,
    pub axis: Axis,
    /// CTAs that share a tile's rows, each with a slice of V's columns.
    pub slices: u32,
    pub turn: Turn,
    /// Splits of the keys, or backward of a walk, at most; 1 where nothing is split. A launch makes
    /// as many as the workspace has room for.
    pub most_splits: u32,
    /// Only some tiles are split, into `most_splits`; None: all tiles alike.
    pub split_rest: Option<SplitRest>,
    /// Whether the kernel's text has splits although `most_splits` is 1.
    pub may_split: bool,
    /// Backward: waves of tiles up to which tiles share the walk of their keys through the queries;
    /// 0 where they never do.
    pub split_waves: u32,
    /// Backward: a CTA of the main kernel does so many tiles, all of a head, and writes dQ without
    /// an accumulator; 3 for any more, which have one text. 0: it adds to the accumulator.
    pub direct_tiles: u32,
    /// Backward: the main kernel computes dQ's transpose, which orders its accumulator
    /// (device/layout/dq_accum.cuh).
    pub dq_transposed: bool,
    pub schedule: Schedule,
    /// CTAs that are to share an SM.
    pub ctas_per_sm: u32,
    pub arguments: Arguments,
    /// How the kernel shares out the launch's registers among its warpgroups, where it does.
    pub registers: Option<WarpgroupRegisters>,
    /// The kernel takes the sequences with at most this many packed query rows; 0: all.
    pub most_rows: u32,
    /// Set if the kernel belongs to another family than the config: a decode kernel, before the
    /// config's own, and what combines its splits, after them. The config's own kernels neither
    /// read nor write what these do. If the config's own kernel splits keys, its combine kernel may
    /// write the decode kernel's rows, so that the decode kernel comes after it.
    pub lent: Option<Lent>,
    /// The kernel reads K and V widened to 16 bits in the workspace, not those of the call.
    pub reads_widened: bool,
    /// The next kernel may not overlap this one.
    pub ends_alone: bool,
}

/// How a launch splits keys or walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchSplits {
    /// The splits of a tile, 1 where none is split.
    pub count: u32,
    /// The rows of a head whose keys are split where only some are, backward its keys whose walk is
    /// split, else 0.
    pub rows_of_head: i64,
}

/// The family and the knobs of a kernel in a pass of another family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    pub family: Family,
    pub knobs: [(&'static str, u32); Lent::KNOBS],
}

impl Lent {
    /// Knobs of a decode kernel, the only one that is lent.
    pub const KNOBS: usize = 14;
}

/// Registers of a thread after `setmaxnreg`, of the one warpgroup that loads and of each that
/// computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpgroupRegisters {
    pub producer: u32,
    pub consumer: u32,
    /// The last consumer warpgroup may hold more than the others.
    pub last_consumer: u32,
}

impl WarpgroupRegisters {
    /// All consumer warpgroups alike.
    pub const fn alike(producer: u32, consumer: u32) -> WarpgroupRegisters {
        WarpgroupRegisters { producer, consumer, last_consumer: consumer }
    }

    /// The registers of a thread of each warpgroup, added up.
    pub const fn sum(&self, consumers: u32) -> u32 {
        self.producer + (consumers - 1) * self.consumer + self.last_consumer
    }
}

/// The unit that a grid's first dimension counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Tiles of query rows x batch x query heads.
    Queries,
    /// Tiles of keys x batch x key-value heads.
    Keys,
    /// Query heads.
    Heads,
    /// Tiles of keys x batch x key-value heads x slices of `KEY_COLS` columns of dK and dV.
    KeySlices,
    /// Those of `Queries`, then those of `KeySlices`.
    QueriesAndKeys,
    /// Tiles of packed query rows x batch x key-value heads; the second dimension counts splits of
    /// the keys.
    PackedRows,
    /// Packed rows of short sequences (`most_rows`) x batch x key-value heads.
    ShortRows,
}

/// The SMs that deterministic splits are made for: those of an H100 or H200 SXM, since only the
/// sm90 family splits backward.
pub const TYPICAL_SMS: u32 = 132;
/// Columns of a slice of dK or dV, where partial ones are added up.
pub const KEY_COLS: i64 = 32;

/// The launches that a kernel takes, where another kernel takes the others. The number counts the
/// CTAs of a tile and split in the one for few CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Always,
    /// Those whose CTAs have an SM each.
    FewCtas(u32),
    MoreCtas(u32),
    /// Those that cut a tile's keys into runs of segments (`Problem::runs_of_segments`).
    Split,
    Unsplit,
}

/// Which CTA does which tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// One tile each.
    OneTile,
    /// `ctas_per_sm` CTAs per SM for the whole launch, each of which takes tile after tile.
    Persistent,
    /// The same by clusters of two CTAs, which do a tile together.
    PersistentPairs,
}

/// The arguments that a kernel takes by value, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arguments {
    /// KernelParams.
    Params,
    /// KernelParams, and the tensor maps of K and V with boxes of `box_rows` keys. The rows of
    /// `heads` heads are one row of the maps.
    ParamsKeyMaps { box_rows: u32, heads: u32 },
    /// KernelParams, the tensor maps of Q, K, V and O, in the backward pass dO, and the address of
    /// a tile counter: NULL unless it `is_dynamic`.
    ParamsMapsCounter { boxes: Boxes, is_dynamic: bool },
}

/// The boxes in which TMA copies a kernel's tiles, by their rows; their columns are those of the
/// swizzle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boxes {
    /// Rows of the boxes of Q, O and dO.
    pub query_rows: u32,
    /// Rows of the boxes of K and V; 0 where threads copy keys, so that the maps of K and V are not
    /// in use.
    pub key_rows: u32,
}

impl KernelSpec {
    /// A main kernel of one warp, row and tile a CTA; each family says how its own differ.
    pub const MAIN: KernelSpec = KernelSpec {
        template: "",
        entry: "",
        threads: 32,
        smem_bytes: 0,
        is_main: true,
        rows: 1,
        heads: 1,
        axis: Axis::Queries,
        slices: 1,
        turn: Turn::Always,
        most_splits: 1,
        split_rest: None,
        may_split: false,
        split_waves: 0,
        direct_tiles: 0,
        dq_transposed: false,
        schedule: Schedule::OneTile,
        ctas_per_sm: 1,
        arguments: Arguments::Params,
        registers: None,
        most_rows: 0,
        lent: None,
        reads_widened: false,
        ends_alone: false,
    };

    /// The problem as the kernel sees it.
    pub fn problem(&self, problem: &Problem) -> Problem {
        if self.reads_widened { problem.widened() } else { *problem }
    }

    /// The config that the kernel is rendered with in a pass of `config`.
    pub fn config(&self, config: &Config) -> Config {
        self.lent.map_or_else(|| config.clone(), |lent| Config::new(lent.family, lent.knobs))
    }

    pub fn family(&self, config: &Config) -> Family {
        self.lent.map_or(config.family, |lent| lent.family)
    }

    /// The launch grid on a GPU of so many SMs; a dimension is 0 where there is nothing to launch.
    pub fn grid(&self, problem: &Problem, sm_count: u32) -> [u32; 3] {
        self.grid_of(self.splits(problem, sm_count), problem, sm_count)
    }

    /// The same where the launch's splits are known.
    pub fn grid_of(&self, splits: LaunchSplits, problem: &Problem, sm_count: u32) -> [u32; 3] {
        let num_splits = splits.count;
        if !self.has_turn(problem, num_splits, sm_count) {
            return [0, 0, 0];
        }
        let tiles = match self.schedule {
            Schedule::OneTile => match splits.rows_of_head {
                0 => self.tiles(problem),
                keys if problem.pass == Pass::Backward => self.tiles(&Problem { seqlen_k: keys, ..*problem }),
                rows => self.tiles(&Problem { seqlen_q: rows, ..*problem }),
            },
            // Each tile once for each split.
            Schedule::Persistent | Schedule::PersistentPairs => self.tiles(problem) * u64::from(num_splits),
        };
        let ctas = match self.schedule {
            Schedule::OneTile => tiles,
            Schedule::Persistent => tiles.min(u64::from(sm_count * self.ctas_per_sm)),
            Schedule::PersistentPairs => 2 * tiles.min(u64::from(sm_count / 2)),
        };
        let second = match self.axis {
            Axis::PackedRows => num_splits,
            Axis::Queries | Axis::Keys | Axis::Heads | Axis::KeySlices | Axis::QueriesAndKeys | Axis::ShortRows => {
                self.slices
            }
        };
        // A grid holds 2^31 - 1 CTAs in x; a launch refuses more, so this does not truncate.
        [ctas.min(i32::MAX as u64) as u32, second, 1]
    }

    fn has_turn(&self, problem: &Problem, num_splits: u32, sm_count: u32) -> bool {
        let is_few = |ctas: u32| {
            let tiles = self.tiles(problem) / u64::from(self.slices);
            tiles * u64::from(ctas) * u64::from(num_splits) <= u64::from(sm_count)
        };
        match self.turn {
            Turn::Always => true,
            Turn::FewCtas(ctas) => is_few(ctas),
            Turn::MoreCtas(ctas) => !is_few(ctas),
            Turn::Split => problem.runs_of_segments(self.rows) > 1,
            Turn::Unsplit => problem.runs_of_segments(self.rows) == 1,
        }
    }

    /// Whether the tiles fit a launch (2^31 - 1 CTAs in x) and the integers that kernels count them
    /// in.
    pub fn fits_grid(&self, problem: &Problem) -> bool {
        self.tiles(problem) < i32::MAX as u64
    }

    /// Into how many splits a launch cuts the keys or, backward, the walk of a tile's keys through
    /// the queries: the config's number, as far as the problem's workspace has room for them.
    /// Short sequences beside long chunks are not split (`Problem::leaves_short_whole`).
    /// Problems that differ a little share a config, so the two may differ.
    pub fn num_splits(&self, problem: &Problem, sm_count: u32) -> u32 {
        self.splits(problem, sm_count).count
    }

    /// The same, with the rows that are split.
    pub fn splits(&self, problem: &Problem, sm_count: u32) -> LaunchSplits {
        let rows_of_head = self.split_rest.map_or(0, |rest| rest.rows(problem, sm_count, self.most_splits));
        let wanted = match self.split_waves {
            0 => self.most_splits.into(),
            waves => {
                // The same bits on all GPUs of an architecture.
                let sm_count = if problem.deterministic { TYPICAL_SMS } else { sm_count };
                u64::from(waves * self.places(sm_count)) / self.tiles(problem).max(1)
            }
        };
        let most = match self.most_rows {
            _ if self.turn == Turn::Split && problem.runs_of_segments(self.rows) == 1 => 1,
            _ if self.turn == Turn::Split => problem.places_of_runs(self.rows).into(),
            0 if self.split_rest.is_some() && rows_of_head == 0 => 1,
            0 if self.split_rest.is_some() => self.most_splits.into(),
            0 => problem.max_splits(),
            _ if problem.leaves_short_whole() => 1,
            rows => problem.max_short_splits(rows.into()),
        };
        LaunchSplits { count: wanted.clamp(1, most as u64) as u32, rows_of_head }
    }

    /// Tiles that run at a time under a persistent schedule.
    fn places(&self, sm_count: u32) -> u32 {
        if self.schedule == Schedule::PersistentPairs { sm_count / 2 } else { sm_count }
    }

    fn tiles_of(&self, axis: Axis, problem: &Problem) -> u64 {
        KernelSpec { axis, ..*self }.tiles(problem)
    }

    /// Tiles over all heads.
    fn tiles(&self, problem: &Problem) -> u64 {
        let (length, heads) = match self.axis {
            Axis::Queries => (problem.seqlen_q, problem.batch_size * problem.num_heads_q),
            Axis::Keys => (problem.seqlen_k, problem.batch_size * problem.num_heads_kv),
            Axis::Heads => return problem.num_heads_q as u64,
            Axis::KeySlices => {
                let slices = |dim: i64| (dim as u64).div_ceil(KEY_COLS as u64);
                return self.tiles_of(Axis::Keys, problem) * (slices(problem.head_dim) + slices(problem.head_dim_v));
            }
            Axis::QueriesAndKeys => {
                return self.tiles_of(Axis::Queries, problem) + self.tiles_of(Axis::KeySlices, problem);
            }
            Axis::PackedRows => {
                let rows = if self.most_rows > 0 { i64::from(self.most_rows) } else { problem.packed_rows() };
                let groups = (problem.num_heads_kv as u64).div_ceil(self.heads.into()) as i64;
                (rows, problem.batch_size * groups * i64::from(self.slices))
            }
            Axis::ShortRows => (self.most_rows.into(), problem.batch_size * problem.num_heads_kv),
        };
        (length as u64).div_ceil(u64::from(self.rows)) * heads as u64
    }
}
