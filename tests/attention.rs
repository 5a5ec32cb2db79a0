//! The Rust interface, `flashtune::attention`, on the CPU: its options reach the library, and bad
//! shapes and places get an error. The example runs here too.

use flashtune::attention::{
    Array, ArrayMut, Attention, Backward, Causal, Context, ContextOptions, Element, Forward, Inputs, Launch, Output,
    Status, Tensor, TensorMut,
};
use flashtune::backend::{Backend, Memory};
use flashtune::kernel::Gpu;
use half::{bf16, f16};

#[path = "../examples/rust/attention.rs"]
#[expect(dead_code, reason = "its main runs as a test")]
mod example;

#[test]
fn example_checks_itself() {
    example::run().unwrap();
}

fn context() -> Context {
    ContextOptions::cpu().num_threads(1).cache_dir("").open().unwrap()
}

fn ramp<T: Element>(len: usize, of: fn(f32) -> T) -> Vec<T> {
    (0..len).map(|i| of((i * 37 % 101) as f32 / 50.0 - 1.0)).collect()
}

fn one_sequence<T: Element>(attention: &Attention, x: &[T], [seqlen, heads, dim]: [usize; 3]) -> Output<T> {
    let x = Tensor::new(x, [1, seqlen, heads, dim]).unwrap();
    attention.forward(&context(), &Inputs { q: x, k: x, v: x }).unwrap()
}

/// A causal row does not depend on later keys: out and LSE of a prefix are a prefix, up to the
/// order of sums.
fn prefix_law<T: Element>(of: fn(f32) -> T, to: fn(T) -> f32, step: f32) {
    let x = ramp(12 * 8, of);
    for attention in [
        Attention::new().causal(Causal::TopLeft),
        Attention::new().causal(Causal::BottomRight).window(Some(2), None).softcap(5.0).scale(0.7),
        Attention::new().causal(Causal::TopLeft).dropout(0.3, 5, 6),
    ] {
        let (long, short) =
            (one_sequence(&attention, &x, [12, 1, 8]), one_sequence(&attention, &x[..7 * 8], [7, 1, 8]));
        assert!(long.out.iter().zip(&short.out).all(|(a, b)| (to(*a) - to(*b)).abs() <= step), "{attention:?}");
        assert!(long.lse.iter().zip(&short.lse).all(|(a, b)| (a - b).abs() < 1e-5), "{attention:?}");
        assert!(short.out.len() == 7 * 8 && short.out.iter().any(|x| to(*x) != 0.0));
    }
}

#[test]
fn causal_rows_ignore_later_keys_in_every_dtype() {
    prefix_law(|x| x, |x| x, 1e-6);
    prefix_law(f16::from_f32, f16::to_f32, 2e-3);
    prefix_law(bf16::from_f32, bf16::to_f32, 2e-2);
}

#[test]
fn each_option_changes_the_result() {
    let x = ramp(10 * 2 * 8, |x| x);
    let (slopes, sinks) = ([0.5, 0.25], [1.0, 2.0]);
    let plain = one_sequence(&Attention::new(), &x, [10, 2, 8]).out;
    for (name, attention) in [
        ("causal", Attention::new().causal(Causal::BottomRight)),
        ("scale", Attention::new().scale(0.1)),
        ("softcap", Attention::new().softcap(0.5)),
        ("window", Attention::new().window(Some(1), Some(1))),
        ("dropout", Attention::new().dropout(0.5, 1, 2)),
        ("alibi", Attention::new().alibi(&slopes)),
        ("sinks", Attention::new().sinks(&sinks)),
    ] {
        assert_ne!(one_sequence(&attention, &x, [10, 2, 8]).out, plain, "{name}");
    }
}

#[test]
fn strided_views_give_the_result_of_contiguous_ones() {
    // (batch, seqlen, [q, k, v], heads, dim), and a packed out of the same rows.
    let (shape, row) = ([2, 5, 2, 8], 3 * 2 * 8);
    let qkv = ramp(2 * 5 * row, |x| x);
    let part = |part: usize| Tensor::strided(&qkv[part * 16..], shape, [5 * row, row, 8]).unwrap();
    let copied = |part: usize| qkv.chunks(row).flat_map(|row| row[part * 16..][..16].to_vec()).collect::<Vec<_>>();
    let (q, k, v) = (copied(0), copied(1), copied(2));
    let [tq, tk, tv] = [&q, &k, &v].map(|x| Tensor::new(x, shape).unwrap());
    let (context, attention) = (context(), Attention::new().causal(Causal::BottomRight));
    let packed = attention.forward(&context, &Inputs { q: part(0), k: part(1), v: part(2) }).unwrap();
    let plain = attention.forward(&context, &Inputs { q: tq, k: tk, v: tv }).unwrap();
    assert_eq!(packed.out, plain.out);

    let mut rows = vec![9.0_f32; 2 * 5 * 40];
    let out = TensorMut::strided(&mut rows, shape, [5 * 40, 40, 8]).unwrap();
    let mut pass = Forward { inputs: Inputs { q: tq, k: tk, v: tv }, out, lse: None };
    attention.prepare(&context, &pass).unwrap();
    assert_eq!(attention.workspace_bytes(&context, &pass).unwrap(), 0);
    attention.launch(&context, &mut pass, &Launch::on_host()).unwrap();
    for (written, plain) in rows.chunks(40).zip(plain.out.chunks(16)) {
        assert_eq!((&written[..16], &written[16..]), (plain, &[9.0; 24][..]));
    }
}

#[test]
fn packed_sequences_give_the_result_of_each_alone() {
    let x = ramp(9 * 2 * 8, |x| x);
    let offsets = [0, 4, 4, 9];
    let attention = Attention::new().causal(Causal::BottomRight);
    let packed = one_sequence(&attention.clone().varlen((&offsets, 5), (&offsets, 5)), &x, [9, 2, 8]);
    let (first, last) = x.split_at(4 * 16);
    let alone = [one_sequence(&attention, first, [4, 2, 8]), one_sequence(&attention, last, [5, 2, 8])];
    assert_eq!(packed.out, [&alone[0].out[..], &alone[1].out].concat());
    // (heads, total rows).
    assert_eq!(packed.lse[..4], alone[0].lse[..4]);
    assert_eq!(packed.lse[9 + 4..], alone[1].lse[5..]);
}

/// With grouped heads, dk is the sum over the group of what repeated heads give.
#[test]
fn gradients_of_grouped_heads_are_sums_of_repeated_ones() {
    let (q, kv) = (ramp(6 * 4 * 8, |x| x), ramp(6 * 2 * 8, |x| x));
    let repeated: Vec<f32> = kv.chunks(8).flat_map(|head| [head, head].concat()).collect();
    let (context, attention) = (context(), Attention::new().causal(Causal::BottomRight));
    let gradients = |kv: &[f32], heads| {
        let kv = Tensor::new(kv, [1, 6, heads, 8]).unwrap();
        let inputs = Inputs { q: Tensor::new(&q, [1, 6, 4, 8]).unwrap(), k: kv, v: kv };
        let forward = attention.forward(&context, &inputs).unwrap();
        let out = Tensor::new(&forward.out, [1, 6, 4, 8]).unwrap();
        attention.backward(&context, &inputs, out, &forward.lse, out).unwrap()
    };
    let (grouped, single) = (gradients(&kv, 2), gradients(&repeated, 4));
    let is_near = |a: f32, b: f32| (a - b).abs() < 1e-5;
    assert!(grouped.dq.iter().zip(&single.dq).all(|(a, b)| is_near(*a, *b)));
    for (grouped, single) in [(&grouped.dk, &single.dk), (&grouped.dv, &single.dv)] {
        for (sum, pair) in grouped.chunks(8).zip(single.chunks(16)) {
            assert!((0..8).all(|i| is_near(sum[i], pair[i] + pair[8 + i])));
            assert!(sum.iter().any(|x| *x != 0.0));
        }
    }
}

#[test]
fn shapes_that_do_not_fit_name_the_tensor() {
    let x = ramp(4 * 2 * 8, |x| x);
    let of = |shape| Tensor::new(&x, shape).unwrap();
    let (context, good) = (context(), of([1, 4, 2, 8]));
    let reason = |attention: &Attention, q, k, v| {
        let error = attention.forward(&context, &Inputs { q, k, v }).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        error.message
    };
    let plain = Attention::new();
    assert!(reason(&plain, good, of([2, 2, 2, 8]), good).starts_with("k has the shape"));
    assert!(reason(&plain, good, of([1, 4, 4, 4]), good).starts_with("k has the shape"));
    assert!(reason(&plain, good, good, of([1, 2, 2, 8])).starts_with("v has the shape"));
    assert!(reason(&plain, of([1, 4, 3, 4]), of([1, 4, 2, 4]), of([1, 4, 2, 4])).starts_with("num_heads_q is 3"));
    assert!(reason(&plain.clone().scale(f32::NAN), good, good, good).starts_with("softmax_scale is NaN"));
    assert!(reason(&plain.clone().alibi(&[1.0; 3]), good, good, good).starts_with("alibi has 3 slopes"));
    assert!(reason(&plain.clone().sinks(&[1.0; 1]), good, good, good).starts_with("sinks has 1 elements"));
    let varlen = |q: &'static [i32], k: &'static [i32], longest| plain.clone().varlen((q, longest), (k, longest));
    assert!(reason(&varlen(&[], &[], 4), good, good, good).starts_with("cu_seqlens_q has 0 offsets"));
    assert!(reason(&varlen(&[0, 4], &[0, 2, 4], 4), good, good, good).starts_with("cu_seqlens_k has 3 offsets"));
    let two = of([2, 2, 2, 8]);
    assert!(reason(&varlen(&[0, 4], &[0, 4], 4), two, two, two).contains("(1, total rows, heads, dim)"));
    // Offsets past the tensor's rows, and a sequence that is longer than the longest.
    assert!(reason(&varlen(&[0, 5], &[0, 4], 5), good, good, good).contains("cu_seqlens_q"));
    assert!(reason(&varlen(&[0, 4], &[0, 4], 3), good, good, good).contains("cu_seqlens_q"));
}

#[test]
fn outputs_that_do_not_fit_are_refused_and_untouched() {
    let x = ramp(4 * 2 * 8, |x| x);
    let (context, attention) = (context(), Attention::new());
    let q = Tensor::new(&x, [1, 4, 2, 8]).unwrap();
    let inputs = Inputs { q, k: q, v: q };
    let mut memory = vec![7.0_f32; 64];
    for (shape, strides, expected) in
        [([1, 4, 2, 4], [32, 8, 4], "out has the shape"), ([1, 4, 2, 8], [64, 8, 8], "out is written, but its strides")]
    {
        let out = TensorMut::strided(&mut memory, shape, strides).unwrap();
        let mut pass = Forward { inputs, out, lse: None };
        let error = attention.launch(&context, &mut pass, &Launch::on_host()).unwrap_err();
        assert!(error.message.starts_with(expected), "{error}");
    }
    let (mut out, mut lse) = (vec![7.0_f32; 64], vec![7.0_f32; 7]);
    let written = TensorMut::new(&mut out, [1, 4, 2, 8]).unwrap();
    let mut pass = Forward { inputs, out: written, lse: Some(ArrayMut::from(&mut lse)) };
    let error = attention.launch(&context, &mut pass, &Launch::on_host()).unwrap_err();
    assert!(error.message.starts_with("lse has 7 elements"), "{error}");
    assert!(memory.iter().chain(&out).chain(&lse).all(|x| *x == 7.0));
}

/// Addresses of a GPU that is not there: the library must refuse them unread.
#[test]
fn memory_of_a_gpu_is_refused_on_a_cpu() {
    let x = ramp(4 * 2 * 8, |x| x);
    let (context, attention, shape) = (context(), Attention::new(), [1, 4, 2, 8]);
    let host = Tensor::new(&x, shape).unwrap();
    // SAFETY: the context is a CPU's, which refuses them before any use.
    let (device, slopes, lse, stream) = unsafe {
        let tensor = Tensor::<f32>::from_device(4096, shape, [64, 16, 8]);
        (
            tensor,
            Array::<f32>::from_device(4096, 2),
            Array::<f32>::from_device(4096, 8),
            Launch::on_stream(std::ptr::null_mut(), 4096, 0),
        )
    };
    let inputs = Inputs { q: host, k: host, v: host };
    let refused = |result: Result<Output<f32>, _>, name: &str| {
        let error: flashtune::attention::Error = result.unwrap_err();
        assert!(error.message.starts_with(name) && error.message.contains("a GPU's memory"), "{error}");
    };
    refused(attention.forward(&context, &Inputs { v: device, ..inputs }), "v is");
    refused(Attention::new().alibi(slopes).forward(&context, &inputs), "alibi is");
    assert!(attention.backward(&context, &inputs, host, lse, host).unwrap_err().message.starts_with("lse is"));
    let mut out = vec![0.0_f32; 64];
    let mut pass = Forward { inputs, out: TensorMut::new(&mut out, shape).unwrap(), lse: None };
    let error = attention.launch(&context, &mut pass, &stream).unwrap_err();
    assert!(error.message.contains("must be on_host"), "{error}");
}

#[test]
fn a_sealed_context_prepares_nothing_and_two_threads_may_share_it() {
    let x = ramp(4 * 2 * 8, |x| x);
    let x = x.as_slice();
    let (context, attention) = (context(), Attention::new());
    let q = Tensor::new(x, [1, 4, 2, 8]).unwrap();
    let expected = attention.forward(&context, &Inputs { q, k: q, v: q }).unwrap().out;
    context.seal().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let q = Tensor::new(x, [1, 4, 2, 8]).unwrap();
                assert_eq!(attention.forward(&context, &Inputs { q, k: q, v: q }).unwrap().out, expected);
            });
        }
    });
    let (lse, [mut dq, mut dk, mut dv]) = (vec![0.0; 8], [(); 3].map(|()| vec![0.0_f32; 64]));
    let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|x| TensorMut::new(x, [1, 4, 2, 8]).unwrap());
    let backward = Backward { inputs: Inputs { q, k: q, v: q }, out: q, lse: (&lse).into(), dout: q, dq, dk, dv };
    assert_eq!(attention.supported(&context, &backward), Ok(()));
    assert_eq!(attention.prepare(&context, &backward).unwrap_err().status, Status::NotPrepared);
}

#[test]
fn a_context_without_its_device_says_why() {
    let error = ContextOptions::cuda(-1).cache_dir("").open().unwrap_err();
    assert!(error.status == Status::InvalidArgument && error.message.contains("device_ordinal is -1"), "{error}");
    let error = ContextOptions::cpu().num_threads(5000).open().unwrap_err();
    assert!(error.message.contains("num_threads is 5000"), "{error}");
    assert!(ContextOptions::cpu().cache_dir("a\0b").open().unwrap_err().message.contains("NUL"));
}

/// Both passes in device memory, against the CPU: on a GPU, or on the emulated one by
/// `scripts/emulate.sh cargo test --test attention`.
#[test]
fn a_gpu_gives_the_results_of_the_cpu() {
    let gpu = match ContextOptions::cuda(0).open() {
        Ok(gpu) => gpu,
        Err(error) if std::env::var("FLASHTUNE_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("FLASHTUNE_REQUIRE_GPU=1, but there is no usable GPU: {error}")
        }
        Err(error) => return eprintln!("SKIPPED: no usable GPU: {error}"),
    };
    // Memory for the test alone. It uses the same primary context.
    let memory = Backend::Cuda(Gpu::new(0, None, None).unwrap());
    let upload = |values: &[f32]| {
        let halves: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let on_device = memory.allocate(halves.len()).unwrap();
        memory.upload(&on_device, &halves).unwrap();
        on_device
    };
    let (shape, strides) = ([1, 40, 2, 32], [40 * 64, 64, 32]);
    // SAFETY: tensors of this shape, which live until the work is done.
    let read = |memory: &Memory| unsafe { Tensor::<f16>::from_device(memory.address() as u64, shape, strides) };
    // SAFETY: as above, and each is in one pass alone.
    let written = |memory: &Memory| unsafe { TensorMut::<f16>::from_device(memory.address() as u64, shape, strides) };
    let x = ramp(40 * 64, |x| f16::from_f32(x).to_f32());
    let (input, out) = (upload(&x), upload(&x));
    let gradients = [(); 3].map(|()| upload(&x));
    let lse = memory.allocate(80 * 4).unwrap();
    let attention = Attention::new().causal(Causal::BottomRight);
    let [q, k, v] = [(); 3].map(|()| read(&input));
    let inputs = Inputs { q, k, v };

    // SAFETY: 80 floats, which live until the work is done.
    let written_lse = unsafe { ArrayMut::<f32>::from_device(lse.address() as u64, 80) };
    let mut forward = Forward { inputs, out: written(&out), lse: Some(written_lse) };
    // SAFETY: as above.
    let read_lse = unsafe { Array::<f32>::from_device(lse.address() as u64, 80) };
    let [dq, dk, dv] = gradients.each_ref().map(written);
    let mut backward = Backward { inputs, out: read(&out), lse: read_lse, dout: read(&out), dq, dk, dv };
    let bytes = [attention.workspace_bytes(&gpu, &forward), attention.workspace_bytes(&gpu, &backward)];
    let bytes = bytes.into_iter().map(Result::unwrap).max().unwrap();
    let workspace = memory.allocate(bytes).unwrap();
    // SAFETY: a workspace of this size; the stream and the memory live until the work is done.
    let launch = unsafe { Launch::on_stream(memory.stream(), workspace.address() as u64, bytes) };
    attention.launch(&gpu, &mut forward, &launch).unwrap();
    attention.launch(&gpu, &mut backward, &launch).unwrap();
    let host = Tensor::new(&x, shape).unwrap();
    let error = attention
        .launch(
            &gpu,
            &mut Forward {
                inputs: Inputs { q: host, k: host, v: host },
                out: TensorMut::new(&mut x.clone(), shape).unwrap(),
                lse: None,
            },
            &launch,
        )
        .unwrap_err();
    assert!(error.message.starts_with("q is a slice of the host"), "{error}");

    let expected = one_sequence(&attention, &x, [40, 2, 32]);
    let of_cpu = Tensor::new(&expected.out, shape).unwrap();
    let inputs = Inputs { q: host, k: host, v: host };
    let expected_gradients = attention.backward(&context(), &inputs, of_cpu, &expected.lse, of_cpu).unwrap();
    let near = |name: &str, of_gpu: &Memory, expected: &[f32]| {
        let mut halves = vec![0; 2 * expected.len()];
        memory.download(of_gpu, &mut halves).unwrap();
        for (half, expected) in halves.chunks(2).zip(expected) {
            let got = f16::from_le_bytes([half[0], half[1]]).to_f32();
            assert!((got - expected).abs() <= 0.01 + 0.01 * expected.abs(), "{name}: {got} instead of {expected}");
        }
    };
    near("out", &out, &expected.out);
    near("dq", &gradients[0], &expected_gradients.dq);
    near("dk", &gradients[1], &expected_gradients.dk);
    near("dv", &gradients[2], &expected_gradients.dv);
}
