//! Block masks: which blocks of a case's scores count, made from the case's seed, and the lists that say so, with traps.

use super::buffer::Array;
use super::case::{Case, Random};
use flashtune::backend::Backend;
use flashtune::call::BlockLists;
use flashtune::problem::{BlockMask, Pass};
use std::fmt;
use std::str::FromStr;

/// In the place of entries that nobody may read: no block, but a place that is mapped if it is taken for one.
const NO_BLOCK: i32 = 1 << 20;

/// Sizes of a case's blocks, and along which dimensions its lists differ; along the others their stride is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub q: i64,
    pub k: i64,
    pub of_batch: bool,
    pub of_head: bool,
}

impl Blocks {
    pub const fn new(q: i64, k: i64) -> Blocks {
        Blocks { q, k, of_batch: true, of_head: true }
    }

    pub fn mask(&self) -> BlockMask {
        BlockMask { block_q: self.q, block_k: self.k }
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters =
            [(self.of_batch, "b"), (self.of_head, "h")].map(|(is_on, letter)| if is_on { letter } else { "" });
        write!(f, "{}x{}{}", self.q, self.k, letters.concat())
    }
}

impl FromStr for Blocks {
    type Err = String;

    fn from_str(text: &str) -> Result<Blocks, String> {
        let sizes = text.trim_end_matches(['b', 'h']);
        let parsed = sizes.split_once('x').and_then(|(q, k)| Some((q.parse().ok()?, k.parse().ok()?)));
        let (q, k) = parsed.ok_or(format!("block_mask={text} is not like 128x64bh"))?;
        Ok(Blocks { q, k, of_batch: text.contains('b'), of_head: text.contains('h') })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    Nothing,
    Part,
    Full,
}

/// What each block shows, (batch, heads_q, blocks of queries, blocks of keys); one entry along dimensions where it is the same.
pub struct BlockMap {
    blocks: Blocks,
    /// Of batch entries, heads, blocks of queries and of keys.
    extents: [usize; 4],
    shows: Vec<Shows>,
}

impl BlockMap {
    /// None where the case has no block mask. Some rows and columns show nothing.
    pub fn new(case: &Case) -> Option<BlockMap> {
        let blocks = case.extras.block_mask?;
        let count = |length: i64, size: i64| ((length + size - 1) / size) as usize;
        let own = |is_own, size: i64| if is_own { size as usize } else { 1 };
        let extents = [
            own(blocks.of_batch, case.batch_size),
            own(blocks.of_head, case.num_heads_q),
            count(case.seqlen_q, blocks.q),
            count(case.seqlen_k, blocks.k),
        ];
        let mut random = Random::new(case.seed ^ 0xb10c);
        let hidden_column = random.between(0, 2 * extents[3] as i64) as usize;
        let mut shows = Vec::new();
        for _ in 0..extents[0] * extents[1] * extents[2] {
            let shows_all = random.between(0, 5) != 0;
            for column in 0..extents[3] {
                use Shows::{Full, Nothing, Part};
                let show = random.pick(&[Nothing, Nothing, Part, Full]);
                shows.push(if shows_all && column != hidden_column { show } else { Nothing });
            }
        }
        Some(BlockMap { blocks, extents, shows })
    }

    /// What the block of a score shows.
    pub fn of_score(&self, [batch, head, row, key]: [usize; 4]) -> Shows {
        self.of_block([batch, head, row / self.blocks.q as usize, key / self.blocks.k as usize])
    }

    fn of_block(&self, place: [usize; 4]) -> Shows {
        let index =
            (0..4).fold(0, |index, at| index * self.extents[at] + if self.extents[at] == 1 { 0 } else { place[at] });
        self.shows[index]
    }
}

/// Whether a score's block is listed, and whether its mask is looked at; without a block mask both.
pub fn shows(map: &Option<BlockMap>, place: [usize; 4]) -> Shows {
    map.as_ref().map_or(Shows::Part, |map| map.of_score(place))
}

/// The lists of a pass on a backend's device, shuffled.
pub struct ListBuffers {
    /// num_blocks, indices, and the same of full blocks, which `lists` points into.
    _arrays: [Array; 4],
    lists: BlockLists,
}

impl ListBuffers {
    pub fn new(backend: &Backend, case: &Case, pass: Pass) -> Option<ListBuffers> {
        let map = BlockMap::new(case)?;
        let [batches, heads, blocks_q, blocks_k] = map.extents;
        let (rows, cols) = if pass == Pass::Forward { (blocks_q, blocks_k) } else { (blocks_k, blocks_q) };
        let mut random = Random::new(case.seed ^ 0x1157);
        // Room in a row beyond what is used, in a head, and in a batch entry.
        let gap = case.seed as usize % 3;
        let (row_stride, head_gap) = (cols + gap, 2 * gap);
        let mut arrays = [(); 4].map(|()| Vec::<i32>::new());
        let all = (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for (batch, head) in all {
            for row in 0..rows {
                for (at, what) in [Shows::Part, Shows::Full].into_iter().enumerate() {
                    let of =
                        |col| if pass == Pass::Forward { [batch, head, row, col] } else { [batch, head, col, row] };
                    let mut listed: Vec<i32> =
                        (0..cols as i32).filter(|col| map.of_block(of(*col as usize)) == what).collect();
                    for entry in (1..listed.len()).rev() {
                        listed.swap(entry, random.between(0, entry as i64) as usize);
                    }
                    arrays[2 * at].push(listed.len() as i32);
                    listed.resize(row_stride, NO_BLOCK);
                    arrays[2 * at + 1].extend(listed);
                }
            }
            for (at, array) in arrays.iter_mut().enumerate() {
                array.extend(vec![NO_BLOCK; if at % 2 == 0 { gap } else { head_gap }]);
            }
        }
        let arrays = arrays.map(|array| Array::input_int32(backend, &array));
        let (head_counts, head_entries) = (rows + gap, rows * row_stride + head_gap);
        let own = |is_own: bool, stride: usize| if is_own { stride as i64 } else { 0 };
        let Blocks { of_batch, of_head, .. } = map.blocks;
        let [num_blocks, indices, full_num_blocks, full_indices] =
            arrays.each_ref().map(|array| array.address().cast_const().cast::<i32>());
        let has_full = map.shows.contains(&Shows::Full);
        let full = |list| if has_full { list } else { std::ptr::null() };
        let lists = BlockLists {
            num_blocks,
            indices,
            full_num_blocks: full(full_num_blocks),
            full_indices: full(full_indices),
            num_blocks_stride_batch: own(of_batch, heads * head_counts),
            num_blocks_stride_head: own(of_head, head_counts),
            indices_stride_batch: own(of_batch, heads * head_entries),
            indices_stride_head: own(of_head, head_entries),
            indices_stride_row: row_stride as i64,
            max_blocks: cols as i64,
        };
        Some(ListBuffers { _arrays: arrays, lists })
    }

    pub fn args(&self) -> BlockLists {
        self.lists
    }
}
