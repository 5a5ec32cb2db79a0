//! The driver: whether libcuda is there, serves, and shows the GPUs that the machine has.
//!
//! The operating system is asked too. A driver that is missing matters only if there is a GPU.

use super::check::Check;
use flashtune::environment::variable;
use flashtune::kernel::{Attempt, Search};
use std::path::{Path, PathBuf};

const NAME: &str = "driver";

/// Folders in which systems keep libcuda without telling the loader: NixOS, WSL, GPU containers.
const FOLDERS: [&str; 3] = ["/run/opengl-driver/lib", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"];

/// The operating system's view of GPUs and drivers.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Where it shows an NVIDIA GPU, whatever the driver says.
    gpu: Option<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES` is set, and may hide GPUs.
    chooses_gpus: bool,
    is_container: bool,
    /// `ID` of /etc/os-release.
    distribution: String,
    /// A folder with a libcuda that the loader does not search.
    folder: Option<&'static str>,
}

impl Host {
    pub fn this() -> Host {
        let exists = |path: &&str| Path::new(path).exists();
        let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        let id = release.lines().find_map(|line| line.strip_prefix("ID=")).unwrap_or_default();
        Host {
            gpu: gpu_of_the_system(),
            chooses_gpus: variable("CUDA_VISIBLE_DEVICES").is_some(),
            is_container: ["/.dockerenv", "/run/.containerenv"].iter().any(exists),
            distribution: id.trim_matches('"').to_owned(),
            folder: FOLDERS.into_iter().find(|folder| Path::new(folder).join("libcuda.so.1").exists()),
        }
    }

    /// Whether there is a GPU that its owner does not hide.
    pub fn has_gpu(&self) -> bool {
        self.gpu.is_some() && !self.chooses_gpus
    }

    fn install(&self) -> String {
        match self.distribution.as_str() {
            _ if self.is_container => "docker run --gpus all IMAGE",
            "ubuntu" | "pop" | "linuxmint" => "sudo ubuntu-drivers install",
            "debian" => "sudo apt install nvidia-driver",
            _ => "install the driver of https://www.nvidia.com/drivers",
        }
        .to_owned()
    }
}

/// A PCI device of NVIDIA's vendor number and of the class of displays and 3D controllers, or the
/// device file of a GPU.
fn gpu_of_the_system() -> Option<PathBuf> {
    let says = |device: &Path, file: &str, begin: &str| {
        std::fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(begin))
    };
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let mut gpus =
        devices.map(|entry| entry.path()).filter(|d| says(d, "vendor", "0x10de") && says(d, "class", "0x03"));
    let file = || ["/dev/nvidia0", "/dev/nvhost-gpu"].map(PathBuf::from).into_iter().find(|file| file.exists());
    gpus.next().or_else(file)
}

/// `gpus` is the number of GPUs that the driver shows.
pub fn check(search: &Search, gpus: usize, host: &Host) -> Check {
    let version = search.version.map_or(String::new(), |(major, minor)| format!(" of CUDA {major}.{minor}"));
    let tried = || search.attempts.iter().map(|a| format!("{}: {}", a.place, a.outcome)).collect::<Vec<_>>().join("; ");
    let is_absent = |attempt: &Attempt| attempt.outcome.contains("No such file");
    let error = search.attempts.iter().find(|attempt| !is_absent(attempt) && attempt.outcome != "in use");
    match (&search.found, error, &host.gpu) {
        (Some(found), _, _) if gpus > 0 => Check::ok(NAME, format_args!("{found}{version} is in use")),
        (Some(_), ..) | (None, Some(_), _)
            if code(error).is_none_or(|code| code == NO_DEVICE) && !version.is_empty() =>
        {
            shows_none(&version, host)
        }
        (None, None, None) => {
            Check::ok(NAME, "there is no libcuda, and this machine shows no NVIDIA GPU that needs it")
        }
        (None, None, Some(gpu)) => {
            let fact = format_args!("there is no libcuda for the GPU {}", gpu.display()).to_string();
            let found = host.folder.map(|folder| format!("export LD_LIBRARY_PATH={folder}"));
            Check::missing(NAME, fact, found.or_else(|| Some(host.install())))
        }
        _ => Check::wrong(NAME, format_args!("libcuda{version} cannot be used: {}", tried()), mend(error, host)),
    }
}

/// CUDA_ERROR_NO_DEVICE
const NO_DEVICE: i32 = 100;

/// The driver works and shows no GPU.
fn shows_none(version: &str, host: &Host) -> Check {
    let driver = format!("the driver{version} shows no GPU");
    match &host.gpu {
        _ if host.chooses_gpus => Check::missing(
            NAME,
            format_args!("{driver}, and CUDA_VISIBLE_DEVICES may hide it"),
            Some("unset CUDA_VISIBLE_DEVICES".to_owned()),
        ),
        None => Check::ok(NAME, format_args!("{driver}, and neither does this machine")),
        Some(gpu) => {
            let mend = if host.is_container { host.install() } else { "sudo modprobe nvidia".to_owned() };
            Check::wrong(NAME, format_args!("{driver}, but this machine has {}", gpu.display()), Some(mend))
        }
    }
}

/// The number of the driver's error, as in "cuInit returned CUDA_ERROR_NO_DEVICE (100)".
fn code(attempt: Option<&Attempt>) -> Option<i32> {
    attempt?.outcome.split_once(" returned ")?.1.split_once(" (")?.1.split(')').next()?.parse().ok()
}

/// The causes of codes: CUDA driver API, CUresult.
fn mend(error: Option<&Attempt>, host: &Host) -> Option<String> {
    let command = match code(error) {
        // A toolkit's stub, and a library of forward compatibility that does not fit the GPU.
        Some(34 | 804) => "unset LD_LIBRARY_PATH",
        // GPUs behind an NVSwitch wait for the fabric manager.
        Some(802) => "sudo systemctl start nvidia-fabricmanager",
        // libcuda was updated under a running kernel module.
        Some(803) => "sudo reboot",
        Some(999) => "sudo modprobe nvidia_uvm",
        Some(_) => return None,
        None => return Some(host.install()),
    };
    Some(command.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn search(version: Option<(u32, u32)>, outcome: &str) -> Search {
        let attempts = vec![Attempt { place: "libcuda.so.1".to_owned(), outcome: outcome.to_owned() }];
        let found = (outcome == "in use").then(|| "libcuda.so.1".to_owned());
        Search { found, version, attempts }
    }

    #[test]
    fn a_missing_driver_matters_only_if_there_is_a_gpu() {
        let absent = search(None, "libcuda.so.1: cannot open shared object file: No such file or directory");
        assert_eq!(check(&absent, 0, &Host::default()).status, Status::Ok);
        let gpu = Host { gpu: Some("/sys/bus/pci/devices/0000:01:00.0".into()), ..Host::default() };
        for (host, mend) in [
            (Host { distribution: "ubuntu".to_owned(), ..gpu.clone() }, "sudo ubuntu-drivers install"),
            (Host { is_container: true, ..gpu.clone() }, "docker run --gpus all IMAGE"),
            (Host { folder: Some(FOLDERS[0]), ..gpu }, "export LD_LIBRARY_PATH=/run/opengl-driver/lib"),
        ] {
            let check = check(&absent, 0, &host);
            assert_eq!((check.status, check.mend.as_deref()), (Status::Missing, Some(mend)));
            assert!(check.fact.contains("0000:01:00.0"), "{check}");
        }
    }

    #[test]
    fn a_gpu_that_the_driver_does_not_show_is_wrong_unless_it_is_hidden_on_request() {
        let outcome = "cuInit returned CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected";
        let none = search(Some((13, 0)), outcome);
        assert_eq!(check(&none, 0, &Host::default()).status, Status::Ok);
        let host = Host { gpu: Some("/dev/nvidia0".into()), ..Host::default() };
        let unloaded = check(&none, 0, &host);
        assert_eq!((unloaded.status, unloaded.mend.as_deref()), (Status::Wrong, Some("sudo modprobe nvidia")));
        let hidden = check(&none, 0, &Host { chooses_gpus: true, ..host });
        assert_eq!((hidden.status, hidden.mend.as_deref()), (Status::Missing, Some("unset CUDA_VISIBLE_DEVICES")));
    }
}
