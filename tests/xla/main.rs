//! The handlers for XLA's foreign function interface, called with frames made by hand.
//!
//! Both passes run on random tensors and are compared with fp64. The GPU's handlers run on the
//! emulator of tests/emulator. test_jax.py of the Python package calls the same
//! handlers from JAX.

#[path = "../source_tree/mod.rs"]
mod source_tree;

mod frame;
mod reference;

use flashtune::backend::{Backend, Memory};
use flashtune::capi::types::{
    FLASHTUNE_FEATURE_CU_SEQLENS_K, FLASHTUNE_FEATURE_CU_SEQLENS_Q, FLASHTUNE_FEATURE_DBIAS, FLASHTUNE_FEATURE_PAGED,
};
use flashtune::cpu::Cpu;
use flashtune::device::Arch;
use flashtune::kernel::Gpu;
use flashtune::xla::c_api::*;
use flashtune::xla::handlers::{
    flashtune_xla_cpu_backward, flashtune_xla_cpu_forward, flashtune_xla_cpu_quantize, flashtune_xla_cuda_backward,
    flashtune_xla_cuda_forward, flashtune_xla_cuda_quantize,
};
use frame::{Call, Handler, Short, Tensor, Value, XLA, api, metadata, metadata_of};
use source_tree::root;
use std::process::Command;

const BATCH: i64 = 2;
const SEQLEN_Q: i64 = 5;
const SEQLEN_K: i64 = 8;
const HEADS: i64 = 2;
const DIM: i64 = 16;
const OF_Q: &[i64] = &[BATCH, SEQLEN_Q, HEADS, DIM];
const OF_K: &[i64] = &[BATCH, SEQLEN_K, 1, DIM];
const OF_LSE: &[i64] = &[BATCH, HEADS, SEQLEN_Q];

fn backend_of_cpu() -> Backend {
    Backend::Cpu(Cpu::new(1).unwrap())
}

struct Tensors {
    backend: Backend,
    memories: Vec<(Memory, &'static [i64])>,
}

impl Tensors {
    fn new(backend: Backend) -> Self {
        Tensors { backend, memories: Vec::new() }
    }

    /// A tensor of fp32 that holds one value.
    fn full(&mut self, shape: &'static [i64], value: f32) -> Tensor<'static> {
        self.of(shape, &vec![value; shape.iter().product::<i64>() as usize])
    }

    fn of(&mut self, shape: &'static [i64], values: &[f32]) -> Tensor<'static> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.of_dtype(DTYPE_F32, shape, &bytes)
    }

    fn of_dtype(&mut self, dtype: i32, shape: &'static [i64], bytes: &[u8]) -> Tensor<'static> {
        assert_eq!(bytes.len() as i64 % shape.iter().product::<i64>(), 0);
        let memory = self.backend.allocate(bytes.len()).unwrap();
        self.backend.upload(&memory, bytes).unwrap();
        self.memories.push((memory, shape));
        (dtype, self.memories.last().unwrap().0.address(), shape)
    }

    fn download(&self, tensor: Tensor) -> Vec<u8> {
        let (memory, _) = self.memories.iter().find(|(memory, _)| memory.address() == tensor.1).unwrap();
        let mut bytes = vec![0; memory.bytes()];
        self.backend.download(memory, &mut bytes).unwrap();
        bytes
    }

    fn assert_full(&self, tensor: Tensor, value: f32) {
        let count = tensor.2.iter().product::<i64>() as usize;
        self.assert_close(tensor, &vec![f64::from(value); count]);
    }

    /// The results are sums of at most 80 products of size 1 in fp32.
    fn assert_close(&self, tensor: Tensor, expected: &[f64]) {
        let bytes = self.download(tensor);
        assert_eq!(bytes.len(), 4 * expected.len());
        for (index, (bytes, value)) in bytes.chunks(4).zip(expected).enumerate() {
            let actual = f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
            assert!((actual - value).abs() <= 1e-5, "element {index} is {actual}, expected {value}");
        }
    }
}

/// The last of two attributes of one name counts.
fn attributes<'a>(more: &[(&'a str, Value)]) -> Vec<(&'a str, Value)> {
    [&[("causal", Value::Integer(0)), ("softmax_scale", Value::Real(0.5)), ("features", Value::Integer(0))], more]
        .concat()
}

/// Both passes on random tensors.
fn both_passes_are_right(backend: Backend, forward: Handler, backward: Handler) {
    let mut tensors = Tensors::new(backend);
    let shapes = [OF_Q, OF_K, OF_K, OF_Q];
    let mut seed = 0;
    let values = shapes.map(|shape| {
        seed += 1;
        reference::random(shape.iter().product::<i64>() as usize, seed)
    });
    let expected = reference::attention(&values[0], &values[1], &values[2], &values[3], 0.5);
    let [q, k, v, dout] = [0, 1, 2, 3].map(|index| tensors.of(shapes[index], &values[index]));
    let [out, lse] = [tensors.full(OF_Q, -1.0), tensors.full(OF_LSE, -1.0)];
    let mut call =
        Call { stage: STAGE_EXECUTE, args: vec![q, k, v], results: vec![out, lse], attributes: attributes(&[]) };
    call.run(forward).unwrap();
    tensors.assert_close(out, &expected.out);
    tensors.assert_close(lse, &expected.lse);
    // Without an lse too.
    let alone = tensors.full(OF_Q, -1.0);
    call.results = vec![alone];
    call.run(forward).unwrap();
    tensors.assert_close(alone, &expected.out);

    let [dq, dk, dv] = [tensors.full(OF_Q, -1.0), tensors.full(OF_K, -1.0), tensors.full(OF_K, -1.0)];
    let gradients = Call { args: vec![q, k, v, out, lse, dout], results: vec![dq, dk, dv], ..call };
    gradients.run(backward).unwrap();
    tensors.assert_close(dq, &expected.dq);
    tensors.assert_close(dk, &expected.dk);
    tensors.assert_close(dv, &expected.dv);
}

#[test]
fn cpu_handlers_run_both_passes() {
    both_passes_are_right(backend_of_cpu(), flashtune_xla_cpu_forward, flashtune_xla_cpu_backward);
}

/// Packed sequences of one length in e4m3, with a scale for each sequence.
fn e4m3_is_right(backend: Backend, forward: Handler) {
    const OF_Q: &[i64] = &[BATCH * SEQLEN_Q, HEADS, DIM];
    const OF_K: &[i64] = &[BATCH * SEQLEN_K, 1, DIM];
    let mut tensors = Tensors::new(backend);
    let scales = [[0.5, 0.25], [0.75, 0.5], [1.0, 2.0]];
    let mut made = Vec::new();
    for (seed, (shape, scales)) in [OF_Q, OF_K, OF_K].into_iter().zip(&scales).enumerate() {
        let count = shape.iter().product::<i64>() as usize;
        let random = reference::random(count, seed as u32 + 1);
        // Numbers from 0.5 to 1.875 of both signs: two exponents, three bits of mantissa.
        let bytes: Vec<u8> =
            random.iter().map(|x| (x.to_bits() >> 24) as u8 & 0x80 | 0x30 | (x.abs() * 16.0) as u8).collect();
        let of = |byte: u8| (1.0 + f32::from(byte & 7) / 8.0) * if byte & 8 == 0 { 0.5 } else { 1.0 };
        let sign = |byte: u8| if byte & 0x80 == 0 { 1.0 } else { -1.0 };
        let wide = bytes.iter().enumerate().map(|(at, byte)| sign(*byte) * of(*byte) * scales[2 * at / count]);
        made.push((tensors.of_dtype(DTYPE_F8E4M3FN, shape, &bytes), wide.collect::<Vec<f32>>()));
    }
    let expected = reference::attention(&made[0].1, &made[1].1, &made[2].1, &made[0].1, 0.5);
    let offsets = [SEQLEN_Q, SEQLEN_K].map(|rows| {
        let bytes: Vec<u8> = (0..=BATCH).flat_map(|b| ((b * rows) as i32).to_le_bytes()).collect();
        tensors.of_dtype(DTYPE_S32, &[BATCH + 1], &bytes)
    });
    let scales = scales.map(|values| tensors.of(&[BATCH, 1, 1], &values));
    let out = tensors.of_dtype(DTYPE_BF16, OF_Q, &[0xff; 2 * (BATCH * SEQLEN_Q * HEADS * DIM) as usize]);
    let tensors_of_call: Vec<Tensor> = made.iter().map(|(tensor, _)| *tensor).chain(offsets).chain(scales).collect();
    let bits = FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;
    let more = [
        ("features", Value::Integer(bits as i64)),
        ("seqlen_q", Value::Integer(SEQLEN_Q)),
        ("seqlen_k", Value::Integer(SEQLEN_K)),
    ];
    let call = Call { stage: STAGE_EXECUTE, args: tensors_of_call, results: vec![out], attributes: attributes(&more) };
    call.run(forward).unwrap();
    let bytes = tensors.download(out);
    let actual = bytes.chunks(2).map(|pair| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut actual.zip(&expected.out).map(|(actual, exact)| f64::from(actual) - exact));
    let relative = error / norm(&mut expected.out.iter().copied());
    // Weights are rounded to 3 bits of mantissa, and many of them are summed.
    assert!(relative < 0.0625, "{relative}");
}

#[test]
fn cpu_handler_runs_packed_e4m3() {
    e4m3_is_right(backend_of_cpu(), flashtune_xla_cpu_forward);
}

/// int8 with a scale of each row and pair of heads, which are 1/4, then by these scales again.
fn quantising_is_right(backend: Backend, handler: Handler) {
    const OF_X: &[i64] = &[BATCH, SEQLEN_Q, HEADS, DIM];
    const OF_SCALES: &[i64] = &[BATCH, SEQLEN_Q, 1];
    let mut tensors = Tensors::new(backend);
    let count = (BATCH * SEQLEN_Q * HEADS * DIM) as usize;
    // 31.75 is 127 / 4, once in each row of both heads.
    let values: Vec<f32> = (0..count).map(|i| if i % 32 == 5 { -31.75 } else { i as f32 % 20.0 - 7.25 }).collect();
    let halves: Vec<u8> = values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let x = tensors.of_dtype(DTYPE_BF16, OF_X, &halves);
    let out = tensors.of_dtype(DTYPE_S8, OF_X, &vec![99; count]);
    let scales = tensors.full(OF_SCALES, -1.0);
    let attributes = vec![("keys_per_descale", Value::Integer(1)), ("heads_per_descale", Value::Integer(HEADS))];
    let computes =
        Call { stage: STAGE_EXECUTE, args: vec![x], results: vec![out, scales], attributes: attributes.clone() };
    let given = Call { stage: STAGE_EXECUTE, args: vec![x, scales], results: vec![out], attributes };
    for call in [&computes, &given] {
        call.run(handler).unwrap();
        tensors.assert_full(scales, 0.25);
        let numbers: Vec<i8> = tensors.download(out).iter().map(|byte| *byte as i8).collect();
        let expected: Vec<i8> = values.iter().map(|x| (x * 4.0) as i8).collect();
        assert_eq!(numbers, expected);
    }
    let with = |args, results, attributes| Call { stage: STAGE_EXECUTE, args, results, attributes };
    let groups = |group| vec![("keys_per_descale", Value::Integer(1)), ("heads_per_descale", Value::Integer(group))];
    let cases = [
        (with(vec![x], vec![out, scales], groups(3)), "the latter must divide 2"),
        (with(vec![x], vec![out, scales], groups(1)), "descale has shape [2, 5, 1]; it must be [2, 5, 2]"),
        (with(vec![x], vec![scales, out], groups(2)), "out is float32; it must be bfloat16"),
        (with(vec![scales], vec![scales], groups(2)), "x has shape [2, 5, 1]"),
        (with(vec![x, scales], vec![out, scales], groups(2)), "the call has 2 arguments; it must have 1"),
        (with(vec![x], vec![x], vec![("rotation", Value::Integer(9))]), "rotation is 9"),
    ];
    for (call, expected) in &cases {
        let (code, message) = call.run(handler).expect_err(expected);
        assert!(message.contains(expected), "{message}; expected {expected}");
        assert_eq!(code, CODE_INVALID_ARGUMENT, "{message}");
    }
}

#[test]
fn cpu_handler_quantises_by_computed_and_by_given_scales() {
    quantising_is_right(backend_of_cpu(), flashtune_xla_cpu_quantize);
}

#[test]
fn leading_dimensions_belong_to_the_batch() {
    let mut tensors = Tensors::new(backend_of_cpu());
    let args = vec![
        tensors.full(&[3, BATCH, SEQLEN_Q, HEADS, DIM], 0.0),
        tensors.full(&[3, BATCH, SEQLEN_K, 1, DIM], 1.0),
        tensors.full(&[3, BATCH, SEQLEN_K, 1, DIM], 2.0),
    ];
    let out = tensors.full(&[3, BATCH, SEQLEN_Q, HEADS, DIM], -1.0);
    let call = Call { stage: STAGE_EXECUTE, args, results: vec![out], attributes: attributes(&[]) };
    call.run(flashtune_xla_cpu_forward).unwrap();
    tensors.assert_full(out, 2.0);
}

/// XLA refuses a handler of another version, and records no handler without the trait.
#[test]
fn handlers_answer_the_version_of_xla_and_cannot_be_captured() {
    for handler in [
        flashtune_xla_cpu_forward as Handler,
        flashtune_xla_cpu_backward,
        flashtune_xla_cpu_quantize,
        flashtune_xla_cuda_forward,
        flashtune_xla_cuda_backward,
        flashtune_xla_cuda_quantize,
    ] {
        assert_eq!(metadata(handler, Some(&api(size_of::<Api>()))), (0, 3, 0));
        assert_eq!(metadata(handler, None), (0, 1, 0));
    }
}

/// A struct of XLA that is too short for a field is not read there, and not written.
#[test]
fn structs_that_are_too_short_are_neither_read_nor_written() {
    for short in [Short::Metadata, Short::MetadataExtension, Short::Extension, Short::Frame] {
        let (code, message) = metadata_of(flashtune_xla_cpu_forward, short);
        assert_eq!(code, CODE_INVALID_ARGUMENT);
        assert!(message.contains("jaxlib 0.7 or later"), "{message}");
    }
    let mut tensors = Tensors::new(backend_of_cpu());
    let [q, k, v] = [tensors.full(OF_Q, 0.0), tensors.full(OF_K, 1.0), tensors.full(OF_K, 3.0)];
    let out = tensors.full(OF_Q, -1.0);
    let call = Call { stage: STAGE_EXECUTE, args: vec![q, k, v], results: vec![out], attributes: attributes(&[]) };
    let (_, message) = call.run_with(flashtune_xla_cpu_forward, api(size_of::<Api>()), 40).unwrap_err();
    assert!(message.contains("argument 0 has a struct that is shorter"), "{message}");
    tensors.assert_full(out, -1.0);
}

/// NULL would tell XLA that the results are there.
#[test]
fn a_failure_that_xla_makes_no_error_of_ends_the_process() {
    const CHILD: &str = "FLASHTUNE_TEST_XLA_WITHOUT_ERRORS";
    let makers: [Function<ErrorCreateArgs>; 2] = [None, Some(no_error)];
    if let Ok(which) = std::env::var(CHILD) {
        let api = Api { error_create: makers[which.parse::<usize>().unwrap()], ..api(size_of::<Api>()) };
        let call = Call { stage: STAGE_EXECUTE, args: vec![], results: vec![], attributes: vec![] };
        let _ = call.run_with(flashtune_xla_cpu_forward, api, size_of::<Buffer>());
        return;
    }
    for which in ["0", "1"] {
        let mut command = Command::new(std::env::current_exe().expect("this program's path"));
        command.args(["--exact", "a_failure_that_xla_makes_no_error_of_ends_the_process", "--nocapture"]);
        let output = command.env(CHILD, which).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("so the process ends"), "{}: {text}", output.status);
    }
}

unsafe extern "C" fn no_error(_: *mut ErrorCreateArgs) -> *mut std::ffi::c_void {
    std::ptr::null_mut()
}

#[test]
fn wrong_calls_get_an_error_and_write_nothing() {
    let mut tensors = Tensors::new(backend_of_cpu());
    let [q, k, v] = [tensors.full(OF_Q, 0.0), tensors.full(OF_K, 1.0), tensors.full(OF_K, 3.0)];
    let [out, lse] = [tensors.full(OF_Q, -1.0), tensors.full(OF_LSE, -1.0)];
    let right =
        || Call { stage: STAGE_EXECUTE, args: vec![q, k, v], results: vec![out, lse], attributes: attributes(&[]) };
    let with = |more: &[(&'static str, Value)]| Call { attributes: attributes(more), ..right() };
    let features = |bits: u64| with(&[("features", Value::Integer(bits as i64))]);
    let integers = (DTYPE_S32, q.1, OF_Q);
    let cases: Vec<(Call, &str)> = vec![
        (Call { stage: 1, ..right() }, "stage 1 of XLA"),
        (Call { args: vec![q, k], ..right() }, "the call has 2 arguments; v must be argument 2"),
        (Call { args: vec![q, k, v, out], ..right() }, "argument 3 must be the initial value of result 1 and alias it"),
        (Call { args: vec![q, k, v, q, q, q], ..right() }, "the call has 6 arguments; it must have 3"),
        (Call { args: vec![integers, k, v], ..right() }, "q has XLA's dtype 4"),
        (Call { args: vec![q, k, q], ..right() }, "v has shape [2, 5, 2, 16]; it must be [2, 8, 1, 16]"),
        (Call { results: vec![out, out], ..right() }, "lse has shape"),
        (Call { results: vec![out, lse, lse], ..right() }, "the call has 3 results; it must have 2"),
        (Call { results: vec![], ..right() }, "the call has 0 results; out must be result 0"),
        (with(&[("causal", Value::Real(1.0))]), "attribute causal is unknown to this version of flashtune, or"),
        (with(&[("colour", Value::Integer(1))]), "attribute colour is unknown"),
        (with(&[("causal", Value::Integer(1 << 40))]), "attribute causal is 1099511627776; it must fit in 32 bits"),
        (with(&[("causal", Value::Integer(9))]), "causal is 9"),
        (features(FLASHTUNE_FEATURE_PAGED), "the call has 3 arguments; block_table must be argument 3"),
        (features(1 << 20), "attribute features has bits 0x100000"),
        (features(FLASHTUNE_FEATURE_DBIAS), "which the backward pass alone has"),
    ];
    for (call, expected) in &cases {
        let (code, message) = call.run(flashtune_xla_cpu_forward).expect_err(expected);
        assert!(message.contains(expected), "{message}; expected {expected}");
        assert_eq!(code, CODE_INVALID_ARGUMENT, "{message}");
    }
    let (_, message) = right().run_with(flashtune_xla_cpu_forward, api(100), size_of::<Buffer>()).unwrap_err();
    assert!(message.contains("jaxlib 0.7 or later"), "{message}");
    tensors.assert_full(out, -1.0);
    tensors.assert_full(lse, -1.0);
    let (code, message) = right().run(flashtune_xla_cuda_forward_without_a_device).unwrap_err();
    assert!(code != 0 && !message.is_empty());
}

/// No machine has so many GPUs.
unsafe extern "C" fn flashtune_xla_cuda_forward_without_a_device(
    frame: *mut std::ffi::c_void,
) -> *mut std::ffi::c_void {
    XLA.with_borrow_mut(|xla| xla.ordinal = 1000);
    // SAFETY: the caller gives a call frame.
    unsafe { flashtune_xla_cuda_forward(frame) }
}

/// Runs where there is a GPU, and on the emulator by the next test.
#[test]
fn cuda_handlers_run_both_passes() {
    let gpu = match Gpu::new(0, None, None) {
        Ok(gpu) => gpu,
        Err(error) => {
            assert!(std::env::var_os("FLASHTUNE_REQUIRE_GPU").is_none(), "FLASHTUNE_REQUIRE_GPU=1, but {error}");
            eprintln!("SKIPPED: no GPU: {error}");
            return;
        }
    };
    XLA.with_borrow_mut(|xla| xla.backend = Some(Backend::Cuda(gpu)));
    // Before XLA has chosen the GPU nothing is prepared. Addresses mean nothing then.
    let nowhere = |shape| (DTYPE_F32, std::ptr::without_provenance_mut(16), shape);
    let args = vec![nowhere(OF_Q), nowhere(OF_K), nowhere(OF_K)];
    let call = Call { stage: STAGE_INITIALIZE, args, results: vec![nowhere(OF_Q)], attributes: attributes(&[]) };
    for ordinal in [-1, 0] {
        XLA.with_borrow_mut(|xla| xla.ordinal = ordinal);
        call.run(flashtune_xla_cuda_forward).unwrap();
    }
    let gpu = || Gpu::new(0, None, None).unwrap();
    both_passes_are_right(Backend::Cuda(gpu()), flashtune_xla_cuda_forward, flashtune_xla_cuda_backward);
    if gpu().device().arch == Arch::Sm(9, 0) {
        e4m3_is_right(Backend::Cuda(gpu()), flashtune_xla_cuda_forward);
    }
    quantising_is_right(Backend::Cuda(gpu()), flashtune_xla_cuda_quantize);
    // The backward pass has a workspace.
    XLA.with_borrow(|xla| assert!(xla.freed > 0 && xla.freed == xla.allocations.len()));
}

#[test]
fn cuda_handlers_run_both_passes_on_an_emulated_gpu() {
    if std::env::var_os("FLASHTUNE_EMULATED").is_some() {
        return;
    }
    if let Err(error) = Command::new("g++").arg("--version").output() {
        assert!(std::env::var_os("FLASHTUNE_REQUIRE_GXX").is_none(), "FLASHTUNE_REQUIRE_GXX=1, but g++: {error}");
        eprintln!("SKIPPED: no g++, so no kernel was emulated: {error}");
        return;
    }
    let mut command = Command::new(root().join("scripts/emulate.sh"));
    command.args(["--arch", "sm_90", "--"]).arg(std::env::current_exe().expect("this program's path"));
    command.args(["--exact", "cuda_handlers_run_both_passes", "--nocapture"]);
    let output = command.output().expect("scripts/emulate.sh runs");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).join("\n");
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
