//! The kernels of every class of every operation, for packs that must hold them before a call
//! names one.

use super::class::{CacheFormat, EightClass, KvAppendClass, MergeClass, OpClass, QuantizeClass, RotaryClass};
use crate::kernel::FixedSpec;
use crate::problem::{Dtype, Eight, Four, Layout};

/// The classes of all operations on tensors of these dtypes, with the kernel of each.
pub fn kernels(dtypes: impl IntoIterator<Item = Dtype>) -> Vec<(OpClass, FixedSpec)> {
    let mut kernels: Vec<(OpClass, FixedSpec)> = Vec::new();
    for access_bytes in [16, 8, 4, 2] {
        for slots in [false, true] {
            append(KvAppendClass { access_bytes, slots, rotary: None, eight: None }, &mut kernels);
        }
    }
    for dtype in dtypes {
        let table_dtypes = if dtype == Dtype::Fp32 { vec![dtype] } else { vec![dtype, Dtype::Fp32] };
        for (table_dtype, interleaved) in table_dtypes.into_iter().flat_map(|of| [(of, false), (of, true)]) {
            let rotary = Some(RotaryClass { dtype, table_dtype, interleaved });
            for access_bytes in [16, 8, 4, 2].into_iter().filter(|bytes| *bytes >= dtype.bytes() as i64) {
                append(KvAppendClass { access_bytes, slots: true, rotary, eight: None }, &mut kernels);
            }
        }
        if dtype != Dtype::Fp32 {
            eight_bits(dtype, &mut kernels);
        }
        let partial_dtypes = if dtype == Dtype::Fp32 { vec![dtype] } else { vec![dtype, Dtype::Fp32] };
        for partial_dtype in partial_dtypes {
            for layout in [Layout::Vec4, Layout::Vec2, Layout::Vec1] {
                let class = MergeClass { dtype, partial_dtype, layout };
                kernels.push((OpClass::Merge(class), class.kernel()));
            }
        }
    }
    kernels
}

/// What quantises tensors of a dtype: accesses of 16 bytes and of 8, which caches have.
fn eight_bits(dtype: Dtype, kernels: &mut Vec<(OpClass, FixedSpec)>) {
    for keys in Eight::ALL {
        for layout in [Layout::Vec8, Layout::Vec4] {
            let eight = Some(EightClass { dtype, keys: CacheFormat::Eight(keys) });
            append(KvAppendClass { access_bytes: 2 * layout.elements(), slots: true, rotary: None, eight }, kernels);
            for (of_rows, rotates) in [(false, false), (false, true), (true, false), (true, true)] {
                quantize(QuantizeClass { dtype, to: Some(keys), layout, of_rows, rotates }, kernels);
            }
        }
    }
    for (four, layout) in Four::ALL.into_iter().flat_map(|four| [(four, Layout::Vec8), (four, Layout::Vec4)]) {
        let eight = Some(EightClass { dtype, keys: CacheFormat::Four(four) });
        append(KvAppendClass { access_bytes: 2 * layout.elements(), slots: true, rotary: None, eight }, kernels);
    }
    for layout in [Layout::Vec8, Layout::Vec4] {
        quantize(QuantizeClass { dtype, to: None, layout, of_rows: true, rotates: true }, kernels);
    }
}

fn quantize(class: QuantizeClass, kernels: &mut Vec<(OpClass, FixedSpec)>) {
    kernels.push((OpClass::Quantize(class), class.kernel()));
}

fn append(class: KvAppendClass, kernels: &mut Vec<(OpClass, FixedSpec)>) {
    kernels.push((OpClass::KvAppend(class), class.kernel()));
}
