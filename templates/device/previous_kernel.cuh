// The kernels of a pass follow one another closely: from sm_90 on each but the first is launched while the one before it still
// runs (programmatic dependent launch; PTX ISA, "griddepcontrol"), and waits here until that one has ended and what it
// wrote can be seen. Before, only what reads nothing that a kernel of this pass writes. src/kernel/launch.rs asks for it.

__device__ __forceinline__ void wait_for_previous_kernel() {
    if constexpr (kArch >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}
