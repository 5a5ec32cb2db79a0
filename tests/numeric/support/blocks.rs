//! Block masks of a case, made from its seed: which blocks of scores count, and the lists that a
//! launch gets. Unused list entries are traps.

use super::buffer::Array;
use super::case::{Case, Random};
use flashtune::backend::Backend;
use flashtune::call::BlockLists;
use flashtune::problem::{BlockMask, Pass};
use std::fmt;
use std::str::FromStr;

/// Fills list entries that must not be read. It names no block of the case, but a kernel that takes
/// it for one computes a mapped address.
const NO_BLOCK: i32 = 1 << 20;

/// Block sizes, and the dimensions along which the lists differ; the stride of the others is 0.
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
pub enum BlockKind {
    Hidden,
    Partial,
    Full,
}

/// The kind of each block, (batch, heads_q, blocks of queries, blocks of keys). The extent is 1
/// along dimensions where the mask is the same.
pub struct BlockMap {
    blocks: Blocks,
    /// Batch entries, heads, blocks of queries, blocks of keys.
    extents: [usize; 4],
    kinds: Vec<BlockKind>,
}

impl BlockMap {
    /// None for a case without a block mask. Some rows and columns are hidden whole.
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
        let mut kinds = Vec::new();
        for _ in 0..extents[0] * extents[1] * extents[2] {
            let has_blocks = random.between(0, 5) != 0;
            for column in 0..extents[3] {
                use BlockKind::{Full, Hidden, Partial};
                let kind = random.pick(&[Hidden, Hidden, Partial, Full]);
                kinds.push(if has_blocks && column != hidden_column { kind } else { Hidden });
            }
        }
        Some(BlockMap { blocks, extents, kinds })
    }

    /// The kind of the block that holds a score.
    pub fn at_score(&self, [batch, head, row, key]: [usize; 4]) -> BlockKind {
        self.at_block([batch, head, row / self.blocks.q as usize, key / self.blocks.k as usize])
    }

    fn at_block(&self, place: [usize; 4]) -> BlockKind {
        let index =
            (0..4).fold(0, |index, at| index * self.extents[at] + if self.extents[at] == 1 { 0 } else { place[at] });
        self.kinds[index]
    }
}

/// The kind of the block that holds a score. Without a block mask every block is partial.
pub fn block_kind(map: &Option<BlockMap>, place: [usize; 4]) -> BlockKind {
    map.as_ref().map_or(BlockKind::Partial, |map| map.at_score(place))
}

/// The shuffled block lists of one pass, on a backend's device.
pub struct ListBuffers {
    /// The arrays that `lists` points into: num_blocks and indices, then the same for full blocks.
    _arrays: [Array; 4],
    lists: BlockLists,
}

impl ListBuffers {
    pub fn new(backend: &Backend, case: &Case, pass: Pass) -> Option<ListBuffers> {
        let map = BlockMap::new(case)?;
        let [batches, heads, blocks_q, blocks_k] = map.extents;
        let (rows, cols) = if pass == Pass::Forward { (blocks_q, blocks_k) } else { (blocks_k, blocks_q) };
        let mut random = Random::new(case.seed ^ 0x1157);
        // Unused entries after each row, each head and each batch entry.
        let gap = case.seed as usize % 3;
        let (row_stride, head_gap) = (cols + gap, 2 * gap);
        let mut arrays = [(); 4].map(|()| Vec::<i32>::new());
        let all = (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for (batch, head) in all {
            for row in 0..rows {
                for (at, what) in [BlockKind::Partial, BlockKind::Full].into_iter().enumerate() {
                    let of =
                        |col| if pass == Pass::Forward { [batch, head, row, col] } else { [batch, head, col, row] };
                    let mut listed: Vec<i32> =
                        (0..cols as i32).filter(|col| map.at_block(of(*col as usize)) == what).collect();
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
        let has_full = map.kinds.contains(&BlockKind::Full);
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
