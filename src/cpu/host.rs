//! The host as a Device: its name, last-level cache and memory, as far as the operating system
//! tells.

use crate::device::{Arch, Device};
use std::fs::read_to_string;

/// Assumed if the operating system does not tell: the last-level cache of a common server socket.
const DEFAULT_CACHE_BYTES: u64 = 32 << 20;

/// The last-level cache assumed for each core that a process may use. Few processors have more
/// (some EPYC with 3D V-Cache and few cores). A guest of two cores is shown its host's whole cache,
/// once 480 MiB, which it shares with its neighbours. Emptying that before each cold measurement
/// took nine tenths of a tuning run.
const MAX_CACHE_BYTES_PER_CORE: u64 = 16 << 20;

pub fn describe(num_threads: usize) -> Device {
    Device {
        name: model_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        arch: Arch::Cpu,
        sm_count: num_threads as u32,
        smem_per_block: 0,
        smem_per_sm: 0,
        registers_per_sm: 0,
        threads_per_sm: 0,
        l2_bytes: reachable_cache(last_level_cache(), std::thread::available_parallelism().map_or(1, usize::from)),
        memory_bytes: memory().unwrap_or(0),
        memory_bytes_per_second: 0,
        driver_version: 0,
    }
}

/// The part of the last-level cache, if the operating system tells it, that is taken to hold the
/// data of a process on this many cores.
fn reachable_cache(reported: Option<u64>, cores: usize) -> u64 {
    reported.unwrap_or(DEFAULT_CACHE_BYTES).min(MAX_CACHE_BYTES_PER_CORE * cores as u64)
}

/// Linux: the first processor's name. A machine of mixed cores is named by its first one.
fn model_name() -> Option<String> {
    let text = read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == "model name")?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Linux: the largest cache of the first processor, written like `32768K`.
fn last_level_cache() -> Option<u64> {
    (0..8)
        .map_while(|index| read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok())
        .filter_map(|text| text.trim().strip_suffix('K')?.parse::<u64>().ok())
        .max()
        .map(|kilobytes| kilobytes << 10)
}

/// Linux: `MemTotal:  24689420 kB`.
fn memory() -> Option<u64> {
    let text = read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_of_few_cores_has_a_part_of_its_hosts_cache() {
        assert_eq!(reachable_cache(Some(480 << 20), 2), 32 << 20);
        assert_eq!(reachable_cache(Some(480 << 20), 128), 480 << 20);
        assert_eq!(reachable_cache(Some(8 << 20), 4), 8 << 20);
        assert_eq!(reachable_cache(None, 8), DEFAULT_CACHE_BYTES);
    }
}
