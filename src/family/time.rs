//! Time: what a config is expected to take on a shape, from tiles and waves.
//!
//! A family says what the tiles of a launch are (`Work`); this file lays them on the SMs. The
//! result is in microseconds of no GPU in particular: the lookup scales it by measured records
//! (`plan::predicted`), so only ratios count. docs/tuning/choice.md says where the constants come
//! from and how far the model is off. Nothing here knows a record.

use crate::device::Device;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Cycles of an SM in a microsecond under load.
const CYCLES_PER_US: f64 = 1650.0;
/// The share of the memory rate that the passes reach.
const MEMORY_RATE: f64 = 0.72;
/// Tiles run while L2 loads others' operands: both together take the root of the sum of these
/// powers.
const LOAD_POWER: f64 = 4.0;
/// Tiles for each slot up to which they are laid on the slots one by one.
const FEW_TILES: f64 = 6.0;
/// Tiles of one head that are looked at; others are as long as those beside them.
pub const MOST_KINDS: i64 = 64;

/// So many tiles that take equally long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiles {
    pub count: f64,
    /// Cycles from a tile's start to the start of the next one in the same slot.
    pub cycles: f64,
    /// The same of a tile that has an SM for itself. Slots that share an SM slow each other.
    pub alone: f64,
}

/// Heads whose tiles are drawn together, the longest first, before those of the next group. Groups
/// are as equal as possible, the larger ones first (`templates/device/schedule/tile_order.cuh`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Groups {
    pub count: i64,
    pub heads: i64,
}

impl Groups {
    pub const ONE: Groups = Groups { count: 1, heads: 1 };

    /// The shares of all tiles that the last so many groups have, in the order in which they start.
    fn last_shares(self, groups: i64) -> impl Iterator<Item = f64> {
        let of_group = move |nth: i64| self.heads / self.count + i64::from(nth < self.heads % self.count);
        (self.count - groups..self.count).map(move |nth| of_group(nth) as f64 / self.heads as f64)
    }
}

/// The work of a pass with one config.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    pub tiles: Vec<Tiles>,
    pub groups: Groups,
    /// Tiles that run at a time.
    pub slots: f64,
    /// Slots that share an SM.
    pub slots_per_sm: f64,
    /// Cycles that L2 takes to load the tiles' operands into all SMs.
    pub load_cycles: f64,
    /// Bytes that the main kernel moves while it computes.
    pub bytes_under: f64,
    /// Bytes that other kernels of the pass move.
    pub bytes_beside: f64,
    /// Launches, the combining of splits, and what a measurement adds.
    pub launch_us: f64,
}

impl Work {
    pub fn us(&self, device: &Device) -> f64 {
        self.us_of_span(self.span(Work::span_of_few), device)
    }

    /// No more than `us`, and near it. It lays no tiles on slots one by one, which takes up to a
    /// hundred times as long as the rest.
    pub fn least_us(&self, device: &Device) -> f64 {
        self.us_of_span(self.span(Work::least_span_of_few), device)
    }

    fn us_of_span(&self, span: f64, device: &Device) -> f64 {
        let rate = MEMORY_RATE * device.memory_bytes_per_second as f64 / 1e6;
        let moved = |bytes: f64| if rate > 0.0 { bytes / rate } else { 0.0 };
        let span = (span.powf(LOAD_POWER) + self.load_cycles.powf(LOAD_POWER)).powf(1.0 / LOAD_POWER);
        let main = (span / CYCLES_PER_US).hypot(moved(self.bytes_under));
        self.launch_us + main + moved(self.bytes_beside)
    }

    /// Cycles until the last tile ends. Equal tiles run in whole waves. Tiles that differ are drawn
    /// one by one, so that all SMs end within about half of the shortest tile. `of_few` gives the
    /// cycles of few such tiles.
    fn span(&self, of_few: impl Fn(&Work) -> f64) -> f64 {
        let count: f64 = self.tiles.iter().map(|tiles| tiles.count).sum();
        let total: f64 = self.tiles.iter().map(|tiles| tiles.count * tiles.cycles).sum();
        let longest = self.tiles.iter().map(|tiles| tiles.cycles).fold(0.0, f64::max);
        let shortest = self.tiles.iter().map(|tiles| tiles.cycles).fold(longest, f64::min);
        let longest_alone = self.tiles.iter().map(|tiles| tiles.alone).fold(0.0, f64::max);
        let sms = self.slots / self.slots_per_sm;
        if count <= sms {
            longest_alone
        } else if longest == shortest {
            let waves = (count / self.slots).floor();
            let last_wave = match count - waves * self.slots {
                rest if rest < 0.5 => 0.0,
                // Between a tile alone and one among as many as share an SM.
                rest => {
                    let others = (rest / sms).ceil() - 1.0;
                    longest_alone + (longest - longest_alone) * others / (self.slots_per_sm - 1.0).max(1.0)
                }
            };
            waves * longest + last_wave
        } else if self.last_groups(count) > 0 {
            of_few(self)
        } else {
            longest.max(total / self.slots + 0.5 * shortest)
        }
    }

    /// How many of the last groups have few tiles: all groups, or 0 where one has too many.
    fn last_groups(&self, count: f64) -> i64 {
        let Groups { count: groups, heads } = self.groups;
        let of_larger = count * ((heads + groups - 1) / groups) as f64 / heads as f64;
        let all = if count <= FEW_TILES * self.slots { groups } else { 0 };
        all.max((FEW_TILES * self.slots / of_larger) as i64).min(groups)
    }

    fn span_of_few(&self) -> f64 {
        if self.slots_per_sm == 1.0 { self.span_of_drawn() } else { self.span_of_shared() }
    }

    /// No more than `span_of_few`: the longest tile, or all tiles' share of the SMs. A tile takes
    /// an SM alone, or a slot's share of it while the other slots are busy. Tiles are drawn in
    /// whole numbers and cycles, which may leave out a tile of each group and a cycle of each tile.
    fn least_span_of_few(&self) -> f64 {
        let (mut total, mut most, mut longest) = (0.0, 0.0f64, 0.0f64);
        for &Tiles { count, cycles, alone } in &self.tiles {
            let (of_sm, whole) = match self.slots_per_sm {
                1.0 => (cycles, cycles),
                slots => (alone.min(cycles / slots), alone.min(cycles)),
            };
            total += count * (of_sm - 1.0);
            most = most.max(of_sm);
            longest = if count >= 1.0 { longest.max(whole - 1.0) } else { longest };
        }
        longest.max((total - most * self.groups.count as f64) * self.slots_per_sm / self.slots)
    }

    /// Two and a half causal tiles for each slot take a tenth longer than their share of the slots;
    /// twice as many tiles as slots run in pairs, a long one with a short one. Each tile goes to
    /// the slot that ends first. Slots that end at the same time and tiles of one length are
    /// counted, not walked: a lookup predicts some hundred configs. The longest tiles of a group
    /// wait for the groups before it. If there are many groups, only the last ones are laid on the
    /// slots, after the others' share of the slots.
    fn span_of_drawn(&self) -> f64 {
        let (count, total) =
            self.tiles.iter().fold((0.0, 0.0), |(n, sum), tiles| (n + tiles.count, sum + tiles.count * tiles.cycles));
        let shares: Vec<f64> = self.groups.last_shares(self.last_groups(count).max(1)).collect();
        let before = (total * (1.0 - shares.iter().sum::<f64>()).max(0.0) / self.slots) as u64;
        // The number of slots that end at a time.
        let mut ends: BTreeMap<u64, u64> =
            [(before, self.slots as u64)].into_iter().filter(|(_, slots)| *slots > 0).collect();
        let (mut last, mut due, tiles) = (0, 0.5, self.longest_first());
        for (share, Tiles { count, cycles, .. }) in
            shares.iter().flat_map(|share| tiles.iter().map(|tiles| (*share, *tiles)))
        {
            due += count * share;
            let mut drawn = due.floor() as u64;
            due -= due.floor();
            while drawn > 0 {
                let Some(mut first) = ends.first_entry() else { return cycles };
                let (end, free) = (*first.key(), *first.get());
                let taken = free.min(drawn);
                if taken == free {
                    first.remove();
                } else {
                    *first.get_mut() -= taken;
                }
                drawn -= taken;
                last = last.max(end + cycles as u64);
                *ends.entry(end + cycles as u64).or_insert(0) += taken;
            }
        }
        last as f64
    }

    /// As `span_of_drawn`, of tiles that share an SM: they run faster once others of it have ended.
    fn span_of_shared(&self) -> f64 {
        let mut due = 0.5;
        let mut drawn = self.longest_first().into_iter().flat_map(|tiles| {
            due += tiles.count;
            let whole = f64::floor(due);
            due -= whole;
            std::iter::repeat_n(tiles, whole as usize)
        });
        let idle = |_| Sm { cycles: 0.0, running: Vec::new(), other_slots: self.slots_per_sm - 1.0 };
        let mut sms: Vec<Sm> = (0..(self.slots / self.slots_per_sm) as usize).map(idle).collect();
        for _ in 0..self.slots_per_sm as usize {
            sms.iter_mut().for_each(|sm| sm.running.extend(drawn.next().map(|tiles| (1.0, tiles))));
        }
        // The first end of each SM, the SM, and the tile that ends.
        let end_of = |(index, sm): (usize, &Sm)| sm.first_end().map(|(end, tile)| Reverse((end, index, tile)));
        let mut ends: BinaryHeap<Reverse<(u64, usize, usize)>> = sms.iter().enumerate().filter_map(end_of).collect();
        let mut last = 0;
        while let Some(Reverse((end, index, tile))) = ends.pop() {
            last = end;
            sms[index].end_first(end, tile, drawn.next());
            ends.extend(end_of((index, &sms[index])));
        }
        f64::from_bits(last)
    }

    fn longest_first(&self) -> Vec<Tiles> {
        let mut tiles = self.tiles.clone();
        tiles.sort_by(|a, b| b.cycles.total_cmp(&a.cycles));
        tiles
    }

    /// The share of the slots that get no tile at all.
    pub fn idle(&self) -> f64 {
        let count: f64 = self.tiles.iter().map(|tiles| tiles.count).sum();
        (1.0 - count / self.slots).max(0.0)
    }
}

/// An SM at some time of a launch.
struct Sm {
    cycles: f64,
    /// The tiles that it runs, each with the share that is left.
    running: Vec<(f64, Tiles)>,
    /// Slots beside a tile's own one.
    other_slots: f64,
}

impl Sm {
    /// The bits of the time at which the first of its tiles ends, which are ordered as times are,
    /// and its index.
    fn first_end(&self) -> Option<(u64, usize)> {
        let cycles_of = self.cycles_of();
        let end = |(left, tiles): &(f64, Tiles)| self.cycles + left * cycles_of(tiles);
        self.running.iter().enumerate().map(|(index, tile)| (end(tile).to_bits(), index)).min()
    }

    /// Goes on to the time at which the first tile ends, as `first_end` has it. The next tile takes
    /// its slot.
    fn end_first(&mut self, end: u64, first: usize, next: Option<Tiles>) {
        let (cycles_of, passed) = (self.cycles_of(), f64::from_bits(end) - self.cycles);
        for (left, tiles) in &mut self.running {
            *left = (*left - passed / cycles_of(tiles)).max(0.0);
        }
        self.cycles += passed;
        match next {
            Some(tiles) => self.running[first] = (1.0, tiles),
            None => {
                self.running.swap_remove(first);
            }
        }
    }

    /// Cycles of a whole tile beside as many others as run now.
    fn cycles_of(&self) -> impl Fn(&Tiles) -> f64 + use<> {
        let others = (self.running.len() as f64 - 1.0) / self.other_slots.max(1.0);
        move |tiles| tiles.alone + (tiles.cycles - tiles.alone) * others
    }
}

/// The tiles of all heads, each of which has `of_one_head` of them; `cycles` tells how long the
/// tile of an index takes: in its slot, and alone on an SM.
pub fn tiles_of_heads(heads: i64, of_one_head: i64, cycles: impl Fn(i64) -> [f64; 2]) -> Vec<Tiles> {
    let kinds = of_one_head.clamp(1, MOST_KINDS);
    let index = |kind: i64| kind * (of_one_head - 1) / (kinds - 1).max(1);
    let count = heads as f64 * of_one_head as f64 / kinds as f64;
    let tiles = |kind| {
        let [cycles, alone] = cycles(index(kind));
        Tiles { count, cycles, alone }
    };
    (0..kinds).map(tiles).collect()
}

/// Blocks of a length that `from..to` meets.
pub fn blocks(from: i64, to: i64, block: u32) -> f64 {
    let block = i64::from(block);
    if to <= from { 0.0 } else { ((to + block - 1) / block - from / block) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(tiles: &[(f64, f64)]) -> Work {
        let tiles = tiles.iter().map(|&(count, cycles)| Tiles { count, cycles, alone: cycles }).collect();
        Work {
            tiles,
            groups: Groups::ONE,
            slots: 100.0,
            slots_per_sm: 1.0,
            load_cycles: 0.0,
            bytes_under: 0.0,
            bytes_beside: 0.0,
            launch_us: 0.0,
        }
    }

    /// Random numbers below a limit.
    fn generator(mut state: u64) -> impl FnMut(u64) -> u64 {
        move |below| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        }
    }

    fn span(work: &Work) -> f64 {
        work.span(Work::span_of_few)
    }

    #[test]
    fn equal_tiles_run_in_whole_waves() {
        assert_eq!(span(&work(&[(100.0, 10.0)])), 10.0);
        assert_eq!(span(&work(&[(101.0, 10.0)])), 20.0);
    }

    #[test]
    fn tiles_that_differ_take_the_longest_or_their_share() {
        assert_eq!(span(&work(&[(50.0, 10.0), (50.0, 30.0)])), 30.0);
        assert_eq!(span(&work(&[(1000.0, 10.0), (1000.0, 30.0)])), 405.0);
        assert_eq!(span(&work(&[(200.0, 1.0), (1.0, 30.0)])), 30.0);
    }

    #[test]
    fn few_drawn_tiles_end_unevenly() {
        let drawn = |kinds: &[f64], of_each| {
            let tiles = kinds.iter().map(|cycles| (of_each, *cycles)).collect::<Vec<_>>();
            span(&work(&tiles))
        };
        assert_eq!(drawn(&[40.0, 30.0, 20.0, 10.0], 50.0), 50.0, "the longest with the shortest");
        assert_eq!(drawn(&[50.0, 40.0, 30.0, 20.0, 10.0], 50.0), 80.0, "the share of the slots is 75");
        assert_eq!(drawn(&[2.0, 1.0], 1000.0), 30.5, "many, by formula");
        assert_eq!(drawn(&[2.0, 1.0], 75.5), 3.0, "counts of tiles that are not all looked at");
    }

    #[test]
    fn the_longest_tiles_of_a_group_wait_for_the_groups_before_it() {
        let of_heads = |heads: i64| -> Vec<(f64, f64)> {
            [40.0, 30.0, 20.0, 10.0].iter().map(|cycles| (heads as f64, *cycles)).collect()
        };
        let grouped =
            |heads: i64, count: i64| span(&Work { groups: Groups { count, heads }, ..work(&of_heads(heads)) });
        assert_eq!(grouped(75, 1), 80.0);
        assert_eq!(grouped(75, 3), 90.0, "the third group's longest begin at 50");
        let shares: Vec<f64> = Groups { count: 3, heads: 8 }.last_shares(3).collect();
        assert_eq!(shares, [3.0 / 8.0, 3.0 / 8.0, 2.0 / 8.0]);
        // 800 tiles of 100 slots: the first group has its share, the second one is laid.
        assert_eq!(grouped(200, 1), 205.0, "many, by formula");
        assert_eq!(grouped(200, 2), 200.0, "a group of 400 fills the slots");
    }

    #[test]
    fn drawn_tiles_are_laid_as_one_by_one() {
        let one_by_one = |work: &Work| {
            let mut ends = vec![0; work.slots as usize];
            let mut due = 0.5;
            for Tiles { count, cycles, .. } in work.longest_first() {
                due += count;
                while due >= 1.0 {
                    due -= 1.0;
                    *ends.iter_mut().min().unwrap() += cycles as u64;
                }
            }
            *ends.iter().max().unwrap() as f64
        };
        let mut random = generator(1);
        for _ in 0..300 {
            let kinds = 1 + random(12);
            let tiles: Vec<(f64, f64)> =
                (0..kinds).map(|_| (random(4000) as f64 / 16.0, (1 + random(500)) as f64)).collect();
            let work = Work { slots: (1 + random(140)) as f64, ..work(&tiles) };
            assert_eq!(work.span_of_drawn(), one_by_one(&work), "{work:?}");
        }
    }

    #[test]
    fn a_bound_of_the_time_is_no_longer_than_the_time_and_near_it() {
        let mut random = generator(7);
        let (mut ratios, device) = (Vec::new(), Device::typical(crate::device::Arch::Sm(9, 0)).unwrap());
        for _ in 0..1000 {
            let slots_per_sm = 1 + random(3);
            let slots = slots_per_sm * (1 + random(140));
            let kinds = 1 + random(64);
            let heads = (1 + random(6 * slots)).div_ceil(kinds);
            let (block, of_others) = (1000.0 + random(3000) as f64, random(120) as f64 / 100.0);
            let tile = |nth: u64| {
                let alone = 2000.0 + block * nth as f64;
                let others = if slots_per_sm == 1 { 0.0 } else { of_others * (slots_per_sm - 1) as f64 };
                Tiles { count: heads as f64, cycles: alone * (1.0 + others), alone }
            };
            let tiles = (0..kinds).map(tile).collect();
            let groups = Groups { count: (1 + random(8)).min(heads) as i64, heads: heads as i64 };
            let (slots, slots_per_sm) = (slots as f64, slots_per_sm as f64);
            let work = Work { tiles, groups, slots, slots_per_sm, ..work(&[]) };
            let (least, us) = (work.least_us(&device), work.us(&device));
            assert!(least <= us * (1.0 + 1e-12), "{least} {us} {work:?}");
            ratios.push(us / least);
        }
        ratios.sort_by(f64::total_cmp);
        assert!(ratios[ratios.len() / 2] < 1.1, "{}", ratios[ratios.len() / 2]);
    }

    #[test]
    fn slots_that_share_an_sm_run_faster_alone() {
        let shared = |tiles: &[(f64, f64, f64)]| {
            let tiles = tiles.iter().map(|&(count, cycles, alone)| Tiles { count, cycles, alone }).collect();
            span(&Work { tiles, slots_per_sm: 2.0, ..work(&[]) })
        };
        assert_eq!(shared(&[(50.0, 10.0, 6.0)]), 6.0, "a tile on each SM");
        assert_eq!(shared(&[(51.0, 10.0, 6.0)]), 10.0);
        assert_eq!(shared(&[(250.0, 10.0, 6.0)]), 26.0, "the last wave has one on each SM");
        assert_eq!(shared(&[(251.0, 10.0, 6.0)]), 30.0);
        assert_eq!(shared(&[(50.0, 20.0, 15.0), (50.0, 10.0, 6.0)]), 17.5, "a long one beside a short one");
        assert_eq!(shared(&[(50.0, 20.0, 15.0), (100.0, 10.0, 6.0)]), 20.0, "a long one beside two short ones");
        assert_eq!(shared(&[(75.0, 30.0, 16.0), (25.0, 10.0, 6.0)]), 30.0, "two long ones");
    }

    #[test]
    fn loads_of_all_sms_bound_the_time() {
        let loaded = Work { load_cycles: 1650.0 * 20.0, ..work(&[(100.0, 1650.0)]) };
        let (device, us) = (Device::typical(crate::device::Arch::Sm(9, 0)).unwrap(), 20.0);
        assert!((loaded.us(&device) / us - 1.0).abs() < 0.001);
    }

    #[test]
    fn tiles_that_are_not_looked_at_are_counted() {
        let tiles = tiles_of_heads(3, 1000, |index| [index as f64; 2]);
        assert_eq!(tiles.len(), MOST_KINDS as usize);
        assert!((tiles.iter().map(|tiles| tiles.count).sum::<f64>() - 3000.0).abs() < 1e-6);
        let total: f64 = tiles.iter().map(|tiles| tiles.count * tiles.cycles).sum();
        assert!((total / (3.0 * 1000.0 * 499.5) - 1.0).abs() < 0.01);
    }

    #[test]
    fn blocks_are_those_that_a_range_meets() {
        assert_eq!([blocks(0, 64, 64), blocks(63, 65, 64), blocks(64, 64, 64), blocks(0, 65, 64)], [1., 2., 0., 2.]);
    }
}
