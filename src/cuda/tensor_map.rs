//! Tensor maps: the description from which TMA copies boxes of a tensor in device memory to shared
//! memory.
//!
//! The driver encodes a map by arithmetic on the host, without device memory. A launch may
//! therefore make one anew and pass it to the kernel by value, in a stream capture too. The
//! comments of `Tensor` say what TMA demands of addresses and strides.

use super::driver::Driver;
use crate::error::Result;
use cudarc::driver::sys::{
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use std::ffi::{c_int, c_uint, c_void};

/// CUtensorMap: opaque, with the alignment that the driver and `const __grid_constant__` require.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    Fp16,
    Bf16,
}

/// A tensor of 16-bit elements in device memory, and the box of it that one copy takes. The
/// innermost dimension comes first; its elements are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub element: Element,
    /// A multiple of 16, in mapped memory. Otherwise a copy may end in an illegal address, wherever
    /// the box lies.
    pub address: u64,
    /// The number of dimensions; array elements beyond it are ignored.
    pub rank: usize,
    /// From 1 to 2^32 each.
    pub extents: [u64; MAX_RANK],
    /// In bytes, for the dimensions after the innermost: multiples of 16, below `STRIDE_LIMIT`.
    /// Places are added up modulo 2^64.
    pub strides: [u64; MAX_RANK - 1],
    /// From 1 to 256 each; the innermost at most the 128 bytes of the swizzle. Elements of a box
    /// outside the tensor arrive as zeros.
    pub box_extents: [u32; MAX_RANK],
    pub fetch: Fetch,
}

/// The bytes that L2 reads from memory for any part that a copy wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    Bytes128,
    Bytes256,
}

/// The most dimensions of a tensor that TMA copies.
pub const MAX_RANK: usize = 5;

/// The limit of a stride: TMA's strides have 40 bits.
pub const STRIDE_LIMIT: u64 = 1 << 40;

impl TensorMap {
    /// Rows of a box are 128 bytes apart in shared memory, with their 16-byte chunks swizzled over
    /// them.
    pub fn encode(driver: &Driver, tensor: &Tensor) -> Result<TensorMap> {
        let element = match tensor.element {
            Element::Fp16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let fetch = match tensor.fetch {
            Fetch::Bytes128 => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Fetch::Bytes256 => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        let mut map = TensorMap([0; 16]);
        // SAFETY: the map has the size and the alignment of a CUtensorMap, which is all that is
        // written; the arrays hold no fewer numbers than the rank says. The tensor's address is not
        // followed.
        unsafe {
            driver.tensor_map_encode_tiled(
                (&raw mut map).cast::<c_void>(),
                element as c_int,
                tensor.rank as c_uint,
                tensor.address as *mut c_void,
                tensor.extents.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.box_extents.as_ptr(),
                [1; MAX_RANK].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as c_int,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as c_int,
                fetch as c_int,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_int,
            )
        }
        .map_err(|error| error.context(format_args!("the tensor map of {tensor:?}")))?;
        Ok(map)
    }
}
