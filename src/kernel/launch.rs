//! Executable: the loaded kernels of a pass, and the launch.
//!
//! A launch fills one parameter struct on the stack, and tensor maps where a kernel takes them, and
//! enqueues each kernel with them. It allocates nothing, takes no lock, reads no file and waits for
//! nothing, so it is legal in a stream capture; everything else is done when the executable is
//! built. Grids and arguments follow from each kernel's `KernelSpec`; no knob is named here.

use super::launch_maps::{KeyMaps, LaunchMaps};
use super::modules::Loaded;
use super::params::{KernelParams, SplitRows};
use super::resources::Resources;
use super::tile_counters::TileCounters;
use crate::call::{Call, Stream};
use crate::cuda::context::{Context, Current};
use crate::cuda::module::Function;
use crate::device::{Arch, Device};
use crate::error::{Error, Result, Status};
use crate::family::spec::{Arguments, KernelSpec, Turn};
use crate::family::{COMBINE, COMBINE_ROWS, COMBINE_RUNS, COMBINE_SEGMENTS, SINKS};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// The driver from which on a stream's capture keeps programmatic dependent launches: 12.3.
const CAPTURES_OVERLAPS: u32 = 12030;

pub struct Executable {
    context: Arc<Context>,
    kernels: Box<[Kernel]>,
    /// None where no kernel takes its tiles from a counter, or there was no memory for any.
    tile_counters: Option<Arc<TileCounters>>,
    sm_count: u32,
    /// Whether a kernel may start while the one before it ends: from sm_90 on, and by drivers that
    /// can capture it.
    overlaps: bool,
    resources: Resources,
    name: &'static str,
}

struct Kernel {
    spec: KernelSpec,
    function: Function,
    /// Keeps the module found by those who build the same text later.
    _loaded: Arc<Loaded>,
}

impl Executable {
    /// `kernels` in launch order.
    pub(super) fn new(
        context: &Arc<Context>,
        kernels: Vec<(KernelSpec, Arc<Loaded>)>,
        tile_counters: Option<Arc<TileCounters>>,
        device: &Device,
    ) -> Result<Executable> {
        let mut resources = Resources::default();
        let mut name = "";
        let kernels = kernels
            .into_iter()
            .map(|(spec, loaded)| {
                let entry = CString::new(spec.entry).map_err(|_| {
                    Error::new(Status::Internal, format!("the kernel name {:?} holds a NUL", spec.entry))
                })?;
                let function = loaded.module.function(&entry, spec.smem_bytes)?;
                check_registers(&spec, function.registers()?)?;
                if spec.is_main {
                    name = spec.entry;
                    let spill_bytes = loaded.resources.get(spec.entry).map_or(0, |entry| entry.spill_bytes);
                    resources = Resources {
                        registers: function.registers()?,
                        spill_bytes,
                        costly_spill_bytes: loaded.consumer_spill_bytes.unwrap_or(spill_bytes),
                        smem_bytes: spec.smem_bytes + function.static_smem_bytes()?,
                        threads: spec.threads,
                    };
                }
                Ok(Kernel { spec, function, _loaded: loaded })
            })
            .collect::<Result<_>>()?;
        let context = context.clone();
        let overlaps = matches!(device.arch, Arch::Sm(9.., _)) && device.driver_version >= CAPTURES_OVERLAPS;
        let sm_count = device.sm_count;
        Ok(Executable { context, kernels, tile_counters, sm_count, overlaps, resources, name })
    }

    /// Enqueues the pass on `stream`. The call's pointers and the stream are as `capi` has checked
    /// and documented.
    pub fn launch(&self, call: &Call, stream: Stream) -> Result<()> {
        // Kernels that split some tiles and those that combine them have the same splits.
        let of_some = self.kernels.iter().find(|kernel| kernel.spec.split_rest.is_some());
        let of_some = of_some.map(|kernel| limited(&kernel.spec, call).splits(&call.problem, self.sm_count));
        let splits_of = |spec: &KernelSpec| match of_some {
            Some(splits) if spec.split_rest.is_some() => splits,
            _ => spec.splits(&call.problem, self.sm_count),
        };
        let splits = self.kernels.iter().map(|kernel| {
            let spec = limited(&kernel.spec, call);
            let splits = splits_of(&spec);
            let rows = match (spec.most_rows, splits.rows_of_head) {
                (0, 0) => SplitRows::All,
                (0, rows) => SplitRows::OfHead(rows),
                (rows, _) => SplitRows::Short(rows),
            };
            (splits.count, rows)
        });
        // Kernels that split keys and those that combine them agree in both. Others do not split.
        let (num_splits, rows) = splits.max_by_key(|(num_splits, _)| *num_splits).unwrap_or((1, SplitRows::All));
        let of_runs = self.kernels.iter().find(|kernel| kernel.spec.turn == Turn::Split);
        let runs = of_runs.map_or(0, |kernel| call.problem.runs_of_segments(kernel.spec.rows));
        let of_call = |call: &Call| KernelParams::new(call).with_splits(call, num_splits, rows).with_runs(runs);
        let own_params = of_call(call);
        let reads_widened = self.kernels.iter().any(|kernel| kernel.spec.reads_widened);
        if reads_widened && !call.problem.keeps_widened_kv() {
            let why = "the config widens K and V, for which this problem's workspace has no room";
            return Err(Error::new(Status::Internal, why.to_owned()));
        }
        let widened = reads_widened.then(|| {
            let call = call.widened();
            (call, of_call(&call))
        });
        let current = self.context.enter()?;
        let mut overlaps = false;
        for kernel in &self.kernels {
            let spec = &limited(&kernel.spec, call);
            let grid = spec.grid_of(splits_of(spec), &call.problem, self.sm_count);
            let is_wanted = match spec.template {
                SINKS => !call.features.dsinks.is_null(),
                // One split leaves no partial states.
                COMBINE | COMBINE_ROWS | COMBINE_RUNS | COMBINE_SEGMENTS => num_splits > 1,
                _ => true,
            };
            // The sequences are not known to have more rows.
            let has_rows = spec.most_rows == 0 || call.problem.may_be_short(spec.most_rows.into());
            if grid.contains(&0) || !is_wanted || !has_rows {
                continue;
            }
            // The config was checked against a problem that stands for this one in the records, and
            // that problem may be smaller.
            if !spec.fits_grid(&call.problem) {
                return Err(Error::unsupported(format!(
                    "batch_size {} with num_heads_q {}, seqlen_q {} and seqlen_k {} has more tiles than one launch of {} can hold; split it into two calls",
                    call.problem.batch_size,
                    call.problem.num_heads_q,
                    call.problem.seqlen_q,
                    call.problem.seqlen_k,
                    spec.entry
                )));
            }
            // Whether the kernel may start before the end of the one before it, whose results it
            // then waits for. A decode kernel that is lent waits for none.
            let follows = overlaps && (spec.lent.is_none() || spec.template == COMBINE);
            let (call, params) = match &widened {
                Some((widened, params)) if spec.reads_widened => (widened, params),
                _ => (call, &own_params),
            };
            let enqueued = match spec.arguments {
                Arguments::Params => kernel.enqueue(&current, grid, stream, follows, &mut [pointer(params)]),
                Arguments::ParamsKeyMaps { box_rows, heads } => {
                    let KeyMaps { k, v } = KeyMaps::encode(current.driver(), call, box_rows, heads)?;
                    let mut arguments = [pointer(params), pointer(&k), pointer(&v)];
                    kernel.enqueue(&current, grid, stream, follows, &mut arguments)
                }
                Arguments::ParamsMapsCounter { boxes, is_dynamic } => {
                    let maps = LaunchMaps::encode(current.driver(), call, &boxes)?;
                    let counter = self.tile_counter(&current, is_dynamic, stream)?;
                    let [q, k, v, o] = [&maps.q, &maps.k, &maps.v, &maps.o].map(pointer);
                    let mut arguments = [pointer(params), q, k, v, o, pointer(&counter)];
                    kernel.enqueue(&current, grid, stream, follows, &mut arguments)
                }
            };
            enqueued.map_err(|error| {
                error.context(format_args!(
                    "launching {} with grid {grid:?}, {} threads, {} bytes of shared memory",
                    spec.entry, spec.threads, spec.smem_bytes
                ))
            })?;
            overlaps = self.overlaps && !spec.ends_alone;
        }
        Ok(())
    }

    /// NULL where the kernel needs none, or none is left.
    fn tile_counter(&self, current: &Current<'_>, is_dynamic: bool, stream: Stream) -> Result<*mut c_void> {
        match &self.tile_counters {
            // SAFETY: that the stream is of this context is the caller's contract with the C face.
            Some(counters) if is_dynamic => unsafe { counters.next(current, stream) },
            _ => Ok(std::ptr::null_mut()),
        }
    }

    /// The resources of the pass's main kernel.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// The main kernel's `extern "C"` name.
    pub fn kernel_name(&self) -> &str {
        self.name
    }
}

impl Kernel {
    /// `arguments` are as the kernel's spec says.
    fn enqueue(
        &self,
        current: &Current<'_>,
        grid: [u32; 3],
        stream: Stream,
        waits: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let spec = &self.spec;
        // SAFETY: the templates assert the size of KernelParams and declare what the spec says;
        // that the call's pointers hold until the work is done, and that the stream is of this
        // context, is the caller's contract with the C face.
        unsafe { self.function.launch(current, grid, spec.threads, spec.smem_bytes, stream, waits, arguments) }
    }
}

/// The spec with at most as many splits of the keys as the caller allows.
fn limited(spec: &KernelSpec, call: &Call) -> KernelSpec {
    match call.most_splits {
        0 => *spec,
        most => KernelSpec { most_splits: spec.most_splits.min(most), ..*spec },
    }
}

/// Refuses a kernel whose warpgroups ask by `setmaxnreg` for more registers than the launch has:
/// they would wait for ever.
fn check_registers(spec: &KernelSpec, launched: u32) -> Result<()> {
    let Some(shared) = spec.registers else { return Ok(()) };
    let consumers = spec.threads / 128 - 1;
    let (wanted, present) = (shared.sum(consumers), launched * (consumers + 1));
    match wanted <= present {
        true => Ok(()),
        false => Err(Error::new(
            Status::CompileFailed,
            format!("{}: its warpgroups ask for {wanted} registers, but it was compiled for {present}", spec.entry),
        )),
    }
}

/// A kernel's argument, where the driver finds it.
fn pointer<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}
