//! Compiling with NVRTC, the parameter struct in Rust and CUDA, and the cubin cache under faults.
//! No GPU is needed.
//!
//! Without NVRTC the tests that need it say so and pass; `FLASHTUNE_REQUIRE_NVRTC=1` makes that a
//! failure.

use crate::nvrtc::nvrtc;
use flashtune::config::Family;
use flashtune::cuda::nvrtc::Nvrtc;
use flashtune::device::Arch;
use flashtune::error::Status;
use flashtune::kernel::KernelParams;
use flashtune::kernel::compile::{Compiled, EntryResources, compile, options, target};
use flashtune::kernel::cubin_cache::{CubinCache, Key, TextDigest};
use flashtune::kernel::cubin_limit::Limit;
use flashtune::kernel::sources::embedded;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

const KERNEL: &str = "extern \"C\" __global__ void k(float* x) { __shared__ float s[32]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[31 - threadIdx.x]; }\n";

#[test]
fn kernel_text_compiles_for_every_generation_without_headers_or_a_gpu() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in [Arch::Sm(8, 0), Arch::Sm(8, 6), Arch::Sm(8, 9), Arch::Sm(9, 0)] {
        let target = target(arch, Family::Sm80, nvrtc).unwrap();
        assert_eq!(target, arch.to_string());
        let compiled = compile(nvrtc, "k", KERNEL, &target).unwrap();
        assert_eq!(&compiled.cubin[..4], b"\x7fELF");
        assert_eq!(compiled.log, "");
        let used = compiled.resources["k"];
        assert!(used.registers > 0 && used.static_smem_bytes == 128 && used.spill_bytes == 0, "{used:?}");
    }
}

#[test]
fn equal_texts_give_equal_cubins() {
    let Some(nvrtc) = nvrtc() else { return };
    let cubins: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| compile(nvrtc, "k", KERNEL, "sm_80").unwrap().cubin)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(cubins.iter().all(|cubin| *cubin == cubins[0]));
}

#[test]
fn spills_are_reported() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "extern \"C\" __global__ void __launch_bounds__(1024, 2) k(float* x) {\n\
                float a[64];\n#pragma unroll\nfor (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];\n\
                __syncthreads();\n#pragma unroll\nfor (int i = 0; i < 64; ++i) x[(63 - i) * 1024 + threadIdx.x] = a[i] * a[63 - i]; }\n";
    let used = compile(nvrtc, "k", text, "sm_90").unwrap().resources["k"];
    assert!(used.spill_bytes > 0 && used.registers <= 32, "{used:?}");
}

#[test]
fn compile_error_has_a_status_and_the_compilers_message() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = compile(nvrtc, "broken", "extern \"C\" __global__ void k() { undeclared(); }\n", "sm_80").unwrap_err();
    assert_eq!(error.status, Status::CompileFailed);
    assert!(error.message.contains("broken(1)") && error.message.contains("undeclared"), "{error}");
    let error = compile(nvrtc, "k", KERNEL, "sm_1").unwrap_err();
    assert_eq!(error.status, Status::CompileFailed, "{error}");
    let error = compile(nvrtc, "k", "int a;\0", "sm_80").unwrap_err();
    assert_eq!(error.status, Status::CompileFailed, "{error}");
}

#[test]
fn warnings_are_kept() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "extern \"C\" __global__ void k() { int x = 3; if (x = 4) return; }\n";
    let log = compile(nvrtc, "k", text, "sm_80").unwrap().log;
    assert!(log.contains("warning") && !log.contains("ptxas info"), "{log}");
}

/// A wgmma whose accumulator is touched before the next wgmma into it, so ptxas waits after each
/// one.
fn serialised_wgmma() -> String {
    let registers: Vec<String> = (0..32).map(|i| format!("%{i}")).collect();
    let operands: Vec<String> = (0..32).map(|i| format!("\"+f\"(d[{i}])")).collect();
    let product = format!(
        "asm volatile(\"{{wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, %32, %33, 1, 1, 1, 0, 0;}}\" : {} : \"l\"(a), \"l\"(b));",
        registers.join(", "),
        operands.join(", ")
    );
    format!(
        "extern \"C\" __global__ void k(float* x, unsigned long long a, unsigned long long b) {{\n\
         float d[32];\nfor (int i = 0; i < 32; ++i) d[i] = x[i];\nasm volatile(\"wgmma.fence.sync.aligned;\");\n\
         {product}\nd[0] += 1.f;\n{product}\n\
         asm volatile(\"wgmma.commit_group.sync.aligned;\");\nasm volatile(\"wgmma.wait_group.sync.aligned 0;\");\n\
         for (int i = 0; i < 32; ++i) x[i] = d[i];\n}}\n"
    )
}

#[test]
fn kernel_with_serialised_wgmma_is_refused() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = compile(nvrtc, "k", &serialised_wgmma(), "sm_90a").unwrap_err();
    assert_eq!(error.status, Status::CompileFailed);
    assert!(error.message.contains("instructions are serialized due to"), "{error}");
    let pipelined = serialised_wgmma().replace("d[0] += 1.f;", "");
    assert_eq!(compile(nvrtc, "k", &pipelined, "sm_90a").unwrap().log, "");
}

#[test]
fn arch_unknown_to_nvrtc_is_compiled_for_an_older_one_or_refused() {
    let Some(nvrtc) = nvrtc() else { return };
    assert_eq!(target(Arch::Sm(9, 9), Family::Sm80, nvrtc).unwrap(), "sm_90");
    assert_eq!(target(Arch::Sm(77, 0), Family::Sm80, nvrtc).unwrap_err().status, Status::NoCompiler);
}

/// The offset of every field. A struct field that is missing here is a compile error.
macro_rules! offsets {
    ($($field:ident),*) => {{
        let _ = |params: KernelParams| {
            let KernelParams { $($field: _),* } = params;
        };
        vec![$((stringify!($field), std::mem::offset_of!(KernelParams, $field))),*]
    }};
}

#[test]
fn kernel_params_have_the_same_offsets_in_rust_and_cuda() {
    let Some(nvrtc) = nvrtc() else { return };
    let offsets = offsets!(
        q,
        k,
        v,
        out,
        dout,
        dq,
        dk,
        dv,
        lse,
        lse_log2,
        delta,
        dq_accum,
        turns,
        dropout_seed_ptr,
        dropout_offset_ptr,
        dropout_seed,
        dropout_offset,
        batch_size,
        num_heads_q,
        num_heads_kv,
        group_size,
        seqlen_q,
        seqlen_k,
        right_shift,
        workspace_rows,
        softmax_scale,
        softmax_scale_log2,
        dropout_threshold,
        dropout_keep_scale,
        bias,
        dbias,
        mask,
        alibi_slopes,
        alibi_stride_batch,
        sinks,
        dsinks,
        dlse,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        workspace_rows_of_head,
        total_q,
        softcap_factor,
        softcap_log2,
        left_shift,
        aligns_ends,
        block_table,
        block_table_stride,
        partial_o,
        partial_lse,
        num_splits,
        num_pages,
        map_rows_q,
        map_rows_k,
        map_rows_v,
        map_rows_o,
        block_lists,
        cache_batch_idx,
        leftpad_k,
        first_split_key
    );
    // Without headers NVRTC has neither offsetof nor __builtin_offsetof; its front end turns them
    // into this expression.
    let assert = |class: &str, field: &str, offset: usize| {
        format!("static_assert(__INTADDR__(&(({class}*)0)->{field}) == {offset}, \"{field}\");\n")
    };
    let files = embedded();
    let mut text = files["device/types.cuh"].clone();
    text += &files["device/params.cuh"].replace("#include \"device/types.cuh\"", "");
    for (field, offset) in offsets {
        text += &assert("KernelParams", field, offset);
    }
    for (field, offset) in [("data", 0), ("stride_batch", 8), ("stride_seqlen", 16), ("stride_head", 24)] {
        text += &assert("TensorView", field, offset);
    }
    let scores = ["data", "stride_batch", "stride_head", "stride_seqlen_q", "stride_seqlen_k"];
    for (index, field) in scores.into_iter().enumerate() {
        text += &assert("ScoresView", field, 8 * index);
    }
    text += "extern \"C\" __global__ void k(const __grid_constant__ KernelParams p) { *p.lse = p.softmax_scale; }\n";
    compile(nvrtc, "params", &text, "sm_80").unwrap();
}

// ---- the cubin cache

fn compiled() -> Compiled {
    Compiled {
        cubin: (0..5000u32).map(|i| (i * 7) as u8).collect(),
        log: "a warning\n".to_owned(),
        resources: [("k".to_owned(), EntryResources { registers: 128, spill_bytes: 4, ..Default::default() })].into(),
    }
}

fn key(text: &str) -> Key {
    Key::new(&TextDigest::new(text), &options("sm_80", (13, 0)), (13, 0))
}

fn entry(cache_dir: &Path, key: &Key) -> PathBuf {
    cache_dir.join("cubins").join(key.as_str()).join("kernel.cubin")
}

#[test]
fn cache_returns_the_stored_cubin_and_keeps_its_text() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(Some(folder.path()));
    assert_eq!(cache.get(&key("t")), None);
    cache.put(&key("t"), "t", &compiled());
    assert_eq!(cache.get(&key("t")), Some(compiled()));
    assert_eq!(CubinCache::new(Some(folder.path())).get(&key("t")), Some(compiled()));
    let text = entry(folder.path(), &key("t")).with_file_name("kernel.cu");
    assert_eq!(std::fs::read_to_string(text).unwrap(), "t");
}

#[test]
fn key_covers_text_options_and_nvrtc_version() {
    let text = TextDigest::new("t");
    let key = Key::new(&text, &options("sm_80", (13, 0)), (13, 0));
    assert_ne!(key, Key::new(&TextDigest::new("u"), &options("sm_80", (13, 0)), (13, 0)));
    assert_ne!(key, Key::new(&text, &options("sm_86", (13, 0)), (13, 0)));
    assert_ne!(key, Key::new(&text, &options("sm_80", (13, 0)), (12, 9)));
    assert_eq!(key, Key::new(&text, &options("sm_80", (13, 0)), (13, 0)));
}

#[test]
fn damaged_entry_is_a_miss_and_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(Some(folder.path()));
    let file = entry(folder.path(), &key("t"));
    cache.put(&key("t"), "t", &compiled());
    let good = std::fs::read(&file).unwrap();
    let flipped = |index: usize| {
        let mut bytes = good.clone();
        bytes[index] ^= 1;
        bytes
    };
    let mut damaged = vec![Vec::new(), b"garbage".to_vec(), vec![0xff; 10_000], [&good[..], b"more"].concat()];
    damaged.extend([1, 56, good.len() / 2, good.len() - 1].map(|length| good[..length].to_vec()));
    damaged.extend((0..good.len()).step_by(97).chain(good.len() - 80..good.len()).map(flipped));
    for bytes in damaged {
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(cache.get(&key("t")), None, "{} bytes", bytes.len());
    }
    cache.put(&key("t"), "t", &compiled());
    assert_eq!(cache.get(&key("t")), Some(compiled()));
}

#[test]
fn full_cache_drops_the_least_recently_used_entries() {
    let folder = tempfile::tempdir().unwrap();
    // An entry takes about 5.5 kB, so eight fit.
    let cache = CubinCache::with_limit(Some(folder.path()), Limit::of_bytes(44_000));
    let days_ago = |name: &str, days: u64| {
        let file = File::options().append(true).open(entry(folder.path(), &key(name))).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(86400 * days)).unwrap();
        let text = File::options().append(true).open(entry(folder.path(), &key(name)).with_file_name("kernel.cu"));
        text.unwrap().set_modified(SystemTime::now() - Duration::from_secs(86400 * 99)).unwrap();
    };
    for (days, name) in ["a", "b", "c", "d", "e", "f", "g"].into_iter().rev().enumerate() {
        cache.put(&key(name), name, &compiled());
        days_ago(name, days as u64 + 1);
    }
    assert_eq!(std::fs::read_dir(folder.path().join("cubins")).unwrap().count(), 7);
    // A use of the oldest entry makes the next two the oldest.
    assert!(cache.get(&key("a")).is_some());
    for name in ["h", "i"] {
        cache.put(&key(name), name, &compiled());
    }
    let left = "abcdefghi".chars().filter(|name| cache.get(&key(&name.to_string())).is_some());
    assert_eq!(left.collect::<String>(), "adefghi");
}

#[test]
fn concurrent_trims_leave_as_much_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let unlimited = CubinCache::with_limit(Some(folder.path()), Limit::of_bytes(u64::MAX));
    // An entry takes about 5.5 kB.
    (0..400).for_each(|index| unlimited.put(&key(&format!("old {index}")), "t", &compiled()));
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (start, folder) = (&start, folder.path());
            scope.spawn(move || {
                let cache = CubinCache::with_limit(Some(folder), Limit::of_bytes(1_100_000));
                start.wait();
                cache.put(&key(&format!("new {thread}")), "t", &compiled());
            });
        }
    });
    let left = std::fs::read_dir(folder.path().join("cubins")).unwrap().count();
    // About 210 entries fit, and trimming leaves a sixteenth free for later entries.
    assert!((180..=220).contains(&left), "{left} of 408 are left");
}

#[test]
fn entry_that_others_may_write_to_is_a_miss_and_is_replaced_by_a_private_one() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(Some(folder.path()));
    cache.put(&key("t"), "t", &compiled());
    let file = entry(folder.path(), &key("t"));
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    for mode in [0o620, 0o602] {
        set_mode(&file, mode);
        assert_eq!(cache.get(&key("t")), None, "{mode:o}");
        cache.put(&key("t"), "t", &compiled());
        assert_eq!(cache.get(&key("t")), Some(compiled()));
    }
    // Whoever may write to the folder may put another file there.
    set_mode(file.parent().unwrap(), 0o770);
    assert_eq!(cache.get(&key("t")), None);
    cache.put(&key("t"), "t", &compiled());
    assert_eq!(cache.get(&key("t")), None);
    set_mode(file.parent().unwrap(), 0o700);
    assert_eq!(cache.get(&key("t")), Some(compiled()));
}

#[test]
fn entry_under_another_key_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(Some(folder.path()));
    cache.put(&key("t"), "t", &compiled());
    let (from, to) = (entry(folder.path(), &key("t")), entry(folder.path(), &key("u")));
    std::fs::create_dir(to.parent().unwrap()).unwrap();
    std::fs::copy(from, to).unwrap();
    assert_eq!(cache.get(&key("u")), None);
}

#[test]
fn unusable_folder_is_an_empty_cache() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let shared = folder.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o777)).unwrap();
    for cache_dir in [None, Some(file.as_path()), Some(Path::new("/proc/flashtune")), Some(shared.as_path())] {
        let cache = CubinCache::new(cache_dir);
        cache.put(&key("t"), "t", &compiled());
        assert_eq!(cache.get(&key("t")), None, "{cache_dir:?}");
    }
    assert!(!shared.join("cubins").exists());
}

#[test]
fn read_only_folder_still_serves_its_entries() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::new(Some(folder.path()));
    cache.put(&key("t"), "t", &compiled());
    // A file stands where the entry's folder would be, so every user's write fails; permissions
    // would not stop root.
    std::fs::write(folder.path().join("cubins").join(key("u").as_str()), "").unwrap();
    cache.put(&key("u"), "u", &compiled());
    assert_eq!(cache.get(&key("u")), None);
    assert_eq!(cache.get(&key("t")), Some(compiled()));
}

#[test]
fn concurrent_writers_leave_a_whole_entry_and_no_temporary_files() {
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let cache = CubinCache::new(Some(folder.path()));
                for _ in 0..50 {
                    cache.put(&key("t"), "t", &compiled());
                    assert_eq!(cache.get(&key("t")), Some(compiled()));
                }
            });
        }
    });
    let entries = std::fs::read_dir(entry(folder.path(), &key("t")).parent().unwrap()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["kernel.cu", "kernel.cubin"]);
}

// ---- missing libraries

#[test]
fn missing_nvrtc_is_a_status_that_names_the_place_tried() {
    const NOWHERE: &str = "/nowhere/libnvrtc.so.13";
    // A process searches for a library once, so this test runs itself in another process.
    if std::env::var("FLASHTUNE_NVRTC").is_ok_and(|path| path == NOWHERE) {
        let error = Nvrtc::get().err().unwrap();
        assert_eq!(error.status, Status::NoCompiler);
        assert!(error.message.contains(NOWHERE), "{error}");
        assert_eq!(flashtune::kernel::nvrtc_search().attempts.len(), 1);
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["compile::missing_nvrtc_is_a_status_that_names_the_place_tried", "--exact", "--nocapture"])
        .env("FLASHTUNE_NVRTC", NOWHERE)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn missing_libcuda_is_a_status_that_names_the_places_tried() {
    if flashtune::kernel::driver_search().version.is_some() {
        eprintln!("SKIPPED: this machine has libcuda");
        return;
    }
    let error = flashtune::kernel::Gpu::new(0, None, None).err().unwrap();
    assert_eq!(error.status, Status::NoDevice);
    assert!(error.message.contains("libcuda.so.1") && error.message.contains("libcuda.so ("), "{error}");
    assert_eq!(flashtune::kernel::devices().unwrap_err().status, Status::NoDevice);
}
