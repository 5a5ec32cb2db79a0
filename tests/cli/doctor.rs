//! `doctor`: what it finds on machines that lack something, and the command that mends it.
//!
//! The machines are stand-ins for libcuda and libnvrtc, so no GPU is needed, and none is used.

use crate::{fake_cuda, flashtune, stderr, write};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// A folder with the stand-ins, and a cache folder below it.
struct Machine(tempfile::TempDir);

/// An NVRTC for the stand-in's GPU.
const COMPILES: [(&str, &str); 3] =
    [("FAKE_NVRTC_VERSION", "12080"), ("FAKE_NVRTC_ARCH", "90"), ("FAKE_NVRTC_COMPILES", "1")];

/// What a check says.
type Line = (String, String, String, Option<String>);

impl Machine {
    fn new() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        fake_cuda::driver(folder.path());
        fake_cuda::nvrtc(folder.path());
        Machine(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, args: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = flashtune(&self.path().join("cache"));
        command.args(args).env("LD_LIBRARY_PATH", self.path()).env_remove("CUDA_VISIBLE_DEVICES");
        command.env("FLASHTUNE_NVRTC", self.path().join("libnvrtc.so")).envs(variables.iter().copied());
        command
    }

    /// The lines of `doctor --json` and its exit code.
    fn doctor(&self, variables: &[(&str, &str)]) -> (Vec<Line>, Option<i32>) {
        read(&self.command(&["doctor", "--json"], variables).output().unwrap())
    }
}

fn read(output: &Output) -> (Vec<Line>, Option<i32>) {
    let text = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line.as_object().unwrap().len(), 4, "{line}");
        let mend = line["mend"].as_str().map(str::to_owned);
        (text(&line, "check"), text(&line, "status"), text(&line, "fact"), mend)
    });
    (lines.collect(), output.status.code())
}

/// The only line of a check: its status, fact and mending command.
fn of<'a>(lines: &'a [Line], check: &str) -> (&'a str, &'a str, Option<&'a str>) {
    let mut found = lines.iter().filter(|line| line.0 == check);
    let (Some((_, status, fact, mend)), None) = (found.next(), found.next()) else { panic!("{check}: {lines:?}") };
    (status, fact, mend.as_deref())
}

#[test]
fn a_machine_that_runs_kernels_has_nothing_wrong() {
    let machine = Machine::new();
    let (lines, code) = machine.doctor(&COMPILES);
    assert_eq!(code, Some(0), "{lines:?}");
    for check in ["library", "driver", "gpu", "nvrtc", "pack", "cache", "variable"] {
        assert_eq!((of(&lines, check).0, of(&lines, check).2), ("ok", None), "{lines:?}");
    }
    assert!(of(&lines, "driver").1.contains("CUDA 13.0"), "{lines:?}");
    assert!(of(&lines, "gpu").1.contains("GPU 0, Fake GPU (sm_90) is ready: a kernel was built"), "{lines:?}");
    assert!(of(&lines, "nvrtc").1.contains("libnvrtc 12.8") && of(&lines, "nvrtc").1.ends_with("sm_90"), "{lines:?}");
    // Records are no condition.
    let (status, _, mend) = of(&lines, "records");
    assert_eq!((status, mend), ("missing", Some("flashtune autotune --preset llama-3-8b")));

    let text = machine.command(&["doctor"], &COMPILES).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert_eq!(text.lines().count(), lines.len(), "{text}");
    assert!(text.lines().all(|line| line.starts_with("ok      ") || line.starts_with("missing ")), "{text}");
    assert!(text.contains("; mend: flashtune autotune --preset llama-3-8b\n"), "{text}");
}

#[test]
fn records_of_the_gpu_are_counted() {
    let machine = Machine::new();
    let record = crate::h200_records().swap_remove(0);
    let own = record.to_line().unwrap().replace("NVIDIA H200", "Fake GPU");
    std::fs::create_dir_all(machine.path().join("db/sm_90")).unwrap();
    write(&machine.path().join("db/sm_90"), "fake.jsonl", &format!("{own}\n{}\n", record.to_line().unwrap()));
    let database = machine.path().join("db");
    let (lines, _) = machine.doctor(&[&COMPILES[..], &[("FLASHTUNE_TUNING_DB", database.to_str().unwrap())]].concat());
    let (status, fact, _) = of(&lines, "records");
    assert_eq!(status, "ok", "{lines:?}");
    assert!(fact.contains("0 of this machine and 1 that were shipped"), "{fact}");
}

#[test]
fn a_gpu_that_no_kernel_reaches_is_a_failure() {
    let machine = Machine::new();
    // The NVRTC does not know the GPU.
    let (lines, code) = machine.doctor(&[]);
    let (status, fact, mend) = of(&lines, "nvrtc");
    assert_eq!((code, status, mend), (Some(1), "wrong", Some("unset FLASHTUNE_NVRTC")), "{lines:?}");
    assert!(fact.contains("NVRTC 12.0") && fact.contains("sm_90"), "{fact}");
    assert_eq!((of(&lines, "gpu").0, of(&lines, "gpu").2), ("wrong", Some("unset FLASHTUNE_NVRTC")));
    // It knows the GPU and fails.
    let (lines, code) = machine.doctor(&COMPILES[..2]);
    assert_eq!((code, of(&lines, "nvrtc").0, of(&lines, "gpu").0), (Some(1), "ok", "wrong"), "{lines:?}");
    assert!(of(&lines, "gpu").1.contains("cannot run kernels: NVRTC refused"), "{lines:?}");
    // The NVRTC is of a newer major version than the driver.
    let (lines, code) = machine.doctor(&[("FAKE_NVRTC_VERSION", "13000"), ("FAKE_DRIVER_VERSION", "12080")]);
    assert_eq!((code, of(&lines, "nvrtc").0), (Some(1), "wrong"), "{lines:?}");
    assert!(of(&lines, "nvrtc").1.contains("13 is newer than the driver's CUDA 12.8"), "{lines:?}");
    // The GPU is too old.
    let (lines, code) = machine.doctor(&[&COMPILES[..], &[("FAKE_ARCH", "75")]].concat());
    assert_eq!((code, of(&lines, "gpu").0), (Some(1), "missing"), "{lines:?}");
    assert!(of(&lines, "gpu").1.contains("(sm_75) is not served; the kernels need sm_80"), "{lines:?}");
}

#[test]
fn a_driver_that_cannot_be_used_is_wrong() {
    let machine = Machine::new();
    for (result, mend) in [("803", "sudo reboot"), ("802", "sudo systemctl start nvidia-fabricmanager")] {
        let (lines, code) = machine.doctor(&[("FAKE_INIT_RESULT", result)]);
        assert_eq!((code, of(&lines, "driver").0, of(&lines, "driver").2), (Some(1), "wrong", Some(mend)), "{lines:?}");
        assert!(of(&lines, "driver").1.contains(&format!("({result})")), "{lines:?}");
    }
    let source =
        write(machine.path(), "old.c", "int cuDriverGetVersion(int *version) { *version = 11040; return 0; }\n");
    fake_cuda::library(&machine.path().join("libcuda.so.1"), &source, &[]);
    let (lines, code) = machine.doctor(&COMPILES);
    assert_eq!((code, of(&lines, "driver").0), (Some(1), "wrong"), "{lines:?}");
    assert!(of(&lines, "driver").1.contains("of CUDA 11.4; the library needs 12.0 or later"), "{lines:?}");
    assert!(of(&lines, "driver").2.is_some());
}

#[test]
fn a_cache_folder_that_is_refused_is_mended_by_its_mode() {
    let machine = Machine::new();
    let folder = machine.path().join("open cache");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
    let with =
        |folder: &Path| machine.doctor(&[&COMPILES[..], &[("FLASHTUNE_CACHE_DIR", folder.to_str().unwrap())]].concat());
    let (lines, code) = with(&folder);
    let (status, fact, mend) = of(&lines, "cache");
    assert_eq!((code, status), (Some(1), "wrong"), "{lines:?}");
    assert!(fact.contains("has mode 0777"), "{fact}");
    let mended = Command::new("sh").args(["-c", mend.unwrap()]).status().unwrap();
    assert!(mended.success() && of(&with(&folder).0, "cache").0 == "ok", "{mend:?}");
    // A folder in another's place, and none at all.
    let (lines, _) = with(Path::new("/dev/null/cache"));
    assert_eq!(of(&lines, "cache").0, "wrong", "{lines:?}");
    let mut command = machine.command(&["doctor", "--json"], &COMPILES);
    let (lines, code) = read(&command.env_remove("FLASHTUNE_CACHE_DIR").output().unwrap());
    assert_eq!((code, of(&lines, "cache").0), (Some(0), "missing"), "{lines:?}");
    for lines in [with(Path::new("/dev/null/cache")).0, lines] {
        assert!(of(&lines, "cache").2.unwrap().starts_with("export FLASHTUNE_CACHE_DIR="), "{lines:?}");
    }
}

#[test]
fn variables_that_name_nothing_are_unset() {
    let machine = Machine::new();
    let names = ["FLASHTUNE_NVRTC", "FLASHTUNE_TUNING_DB", "FLASHTUNE_TEMPLATES", "FLASHTUNE_LIBRARY"];
    let variables: Vec<(&str, &str)> = names.map(|name| (name, "/no where")).to_vec();
    let (lines, code) = machine.doctor(&[&variables[..], &[("FLASHTUNE_CACHE_LIMIT_MB", "much")]].concat());
    assert_eq!(code, Some(1));
    for name in [&names[..], &["FLASHTUNE_CACHE_LIMIT_MB"]].concat() {
        let unset = format!("unset {name}");
        let named = |line: &&Line| line.0 == "variable" && line.1 == "wrong" && line.3.as_deref() == Some(&unset);
        let [line] = &lines.iter().filter(named).collect::<Vec<_>>()[..] else { panic!("{name}: {lines:?}") };
        assert!(line.2.starts_with(name), "{line:?}");
    }
    // A folder of templates that do not render is as wrong as none.
    write(machine.path(), "merge.cu.tera", "@[ if ]@");
    let templates = ("FLASHTUNE_TEMPLATES", machine.path().to_str().unwrap());
    let (lines, code) = machine.doctor(&[&COMPILES[..], &[templates]].concat());
    assert_eq!((code, of(&lines, "variable").0), (Some(1), "wrong"), "{lines:?}");
}

#[test]
fn a_pack_serves_without_nvrtc_and_a_damaged_one_is_made_anew() {
    let machine = Machine::new();
    let problem = r#"{"pass":"forward","num_heads_q":2,"seqlen_q":512,"head_dim":64}"#;
    let (problems, pack) = (write(machine.path(), "problems.jsonl", problem), machine.path().join("a.pack"));
    let [problems, path] = [&problems, &pack].map(|path| path.to_str().unwrap());
    let args = ["pack", "--arch", "sm_90", "--problems", problems, "--output", path];
    let made = machine.command(&args, &COMPILES).output().unwrap();
    assert!(made.status.success(), "{}", stderr(&made));
    // The NVRTC of these runs knows no GPU after sm_80.
    let old_nvrtc = &[("FLASHTUNE_PACK", path)];
    let (lines, code) = machine.doctor(old_nvrtc);
    assert_eq!((code, of(&lines, "pack").0, of(&lines, "gpu").0), (Some(0), "ok", "ok"), "{lines:?}");
    assert!(of(&lines, "nvrtc").1.ends_with("the pack serves without it"), "{lines:?}");
    assert_eq!(of(&lines, "nvrtc").0, "missing", "{lines:?}");

    let mut bytes = std::fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&pack, &bytes).unwrap();
    let (lines, code) = machine.doctor(old_nvrtc);
    let (status, fact, mend) = of(&lines, "pack");
    assert_eq!((code, status), (Some(1), "wrong"), "{lines:?}");
    assert!(fact.contains("is not used: it is damaged"), "{fact}");
    assert_eq!(mend.unwrap(), format!("flashtune pack --arch sm_90 --preset all --output {path}"));
    std::fs::set_permissions(&pack, PermissionsExt::from_mode(0o666)).unwrap();
    assert_eq!(of(&machine.doctor(old_nvrtc).0, "pack").2, Some(&*format!("chmod go-w {path}")));
    std::fs::remove_file(&pack).unwrap();
    let (lines, code) = machine.doctor(old_nvrtc);
    assert_eq!((code, of(&lines, "pack").0, of(&lines, "pack").2), (Some(1), "wrong", Some("unset FLASHTUNE_PACK")));
}

/// A wheel's pack has kernels for few architectures and lies on machines with any GPU.
#[test]
fn a_pack_beside_the_program_that_lacks_the_architecture_is_not_wrong_unless_it_is_named() {
    let machine = Machine::new();
    let bin = machine.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let [program, pack] = ["flashtune", "libflashtune.pack"].map(|name| bin.join(name));
    std::fs::copy(machine.command(&[], &[]).get_program(), &program).unwrap();
    let problem = r#"{"pass":"forward","num_heads_q":2,"seqlen_q":512,"head_dim":64}"#;
    let (problems, path) = (write(machine.path(), "problems.jsonl", problem), pack.to_str().unwrap());
    let args = ["pack", "--arch", "sm_90", "--problems", problems.to_str().unwrap(), "--output", path];
    let made = machine.command(&args, &COMPILES).output().unwrap();
    assert!(made.status.success(), "{}", stderr(&made));
    let doctor = |variables: &[(&str, &str)]| {
        let command = machine.command(&[], &[&COMPILES[..], variables].concat());
        let mut beside = Command::new(&program);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => beside.env(name, value),
                None => beside.env_remove(name),
            };
        }
        read(&beside.args(["doctor", "--json"]).output().unwrap())
    };
    let (lines, code) = doctor(&[]);
    assert_eq!((code, of(&lines, "pack").0), (Some(0), "ok"), "{lines:?}");
    let another = [("FAKE_ARCH", "86"), ("FAKE_NVRTC_ARCH", "86")];
    let (lines, code) = doctor(&another);
    assert_eq!((code, of(&lines, "pack").0, of(&lines, "pack").2), (Some(0), "missing", None), "{lines:?}");
    assert!(of(&lines, "pack").1.contains("(its place beside the library) is not used: it has no kernels for"));
    let (lines, code) = doctor(&[&another[..], &[("FLASHTUNE_PACK", path)]].concat());
    assert_eq!((code, of(&lines, "pack").0), (Some(1), "wrong"), "{lines:?}");
}
