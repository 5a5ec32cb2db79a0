//! `--device`: a GPU by its number, the CPU, or the default, and the engine on it with this user's
//! cache folder.

use flashtune::backend::Backend;
use flashtune::cpu::Cpu;
use flashtune::error::Result;
use flashtune::kernel::pack::{Place, Setting, place};
use flashtune::kernel::{Gpu, cache_dir};
use flashtune::plan::{Engine, EngineOptions};
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceArg {
    /// GPU 0 if it and a compiler for it exist, else the CPU.
    #[default]
    Auto,
    Gpu(i32),
    Cpu,
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "cpu" => Ok(DeviceArg::Cpu),
            _ => match text.parse() {
                Ok(ordinal) if ordinal >= 0 => Ok(DeviceArg::Gpu(ordinal)),
                _ => Err("it must be cpu or the number of a GPU, counted from 0".to_owned()),
            },
        }
    }
}

impl DeviceArg {
    pub fn open(self) -> Result<Backend> {
        match self {
            DeviceArg::Cpu => Cpu::new(0).map(Backend::Cpu),
            DeviceArg::Gpu(ordinal) => {
                let gpu = Gpu::new(ordinal, None, cache_folder())?;
                Ok(Backend::Cuda(gpu.with_pack(pack_place())))
            }
            DeviceArg::Auto => Backend::open_auto(0, cache_folder(), pack_place(), 0),
        }
    }

    /// The engine on this device, with this machine's records.
    pub fn engine(self) -> Result<Engine> {
        Ok(Engine::new(self.open()?, EngineOptions { cache_dir: cache_folder(), ..EngineOptions::default() }))
    }

    /// The number by which a worker opens the same GPU.
    pub const fn ordinal(self) -> i32 {
        match self {
            DeviceArg::Gpu(ordinal) => ordinal,
            DeviceArg::Auto | DeviceArg::Cpu => 0,
        }
    }
}

/// The folder of records and cubins. Only the environment sets it; the command line has no option
/// for it.
pub fn cache_folder() -> Option<PathBuf> {
    cache_dir::resolve(None)
}

/// The pack. Only the environment, or a file beside this program, names it.
pub fn pack_place() -> Option<Place> {
    place(&Setting::Default)
}
