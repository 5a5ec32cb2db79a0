//! The space of configs: each knob with its values, each constraint with its reason, and the heuristic choice.

use crate::config::Config;
use crate::device::Device;
use crate::problem::Problem;

/// Every config that passes `check`, the heuristic's first, in a fixed order.
pub fn candidates(_problem: &Problem, _device: &Device) -> Vec<Config> {
    unimplemented!()
}

/// Whether the config can run this problem on this device; if not, the violated constraint in one sentence.
pub fn check(_problem: &Problem, _config: &Config, _device: &Device) -> Result<(), String> {
    unimplemented!()
}

/// The config that is right for any problem without any measurement; it always passes `check`.
pub fn heuristic(_problem: &Problem, _device: &Device) -> Config {
    unimplemented!()
}
