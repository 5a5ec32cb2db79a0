// A handler of SIGSEGV and SIGBUS that turns a fault inside of a launch into the launch's failure.
// It goes on behind the fault in `report`, on a stack of its own.

#include "fault.h"
#include "engine.h"

#include <csignal>
#include <cstdlib>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulator {

namespace {

thread_local bool in_launch;
thread_local const void* fault_at;
// The space of thread-local variables is small in a library that is opened late.
thread_local char* report_stack;
constexpr size_t kReportBytes = 32 << 10;
struct sigaction before_segv, before_bus;

void report() {
    // Pages without access surround each allocation (memory.cpp) and end each stack (launch.cpp).
    fail("an access to memory at %p, where no allocation is", fault_at);
}

void handle(int signal, siginfo_t* info, void* context) {
    if (!in_launch) {
        // Not ours. The access is made again under the handler that was there before.
        sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
        return;
    }
    in_launch = false;
    fault_at = info->si_addr;
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    registers[REG_RIP] = reinterpret_cast<greg_t>(report);
    registers[REG_RSP] = (reinterpret_cast<greg_t>(report_stack + kReportBytes) & ~greg_t(15)) - 8;
}

void install() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    // The signal stays open, since the handler's frame is left at once for good.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
}

// Fibers' stacks may be what overflowed, so the handler needs one of its own.
void give_stack() {
    stack_t present;
    sigaltstack(nullptr, &present);
    if (!(present.ss_flags & SS_DISABLE)) return;
    static thread_local char* stack = static_cast<char*>(malloc(64 << 10));
    stack_t own = {};
    own.ss_sp = stack, own.ss_size = 64 << 10;
    sigaltstack(&own, nullptr);
}

}  // namespace

FaultsAreReported::FaultsAreReported() {
    static std::once_flag once;
    std::call_once(once, install);
    give_stack();
    if (!report_stack) report_stack = static_cast<char*>(malloc(kReportBytes));
    in_launch = true;
}
FaultsAreReported::~FaultsAreReported() { in_launch = false; }

}  // namespace emulator
