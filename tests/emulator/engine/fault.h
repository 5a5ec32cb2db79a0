// Faults of kernels: while one of these lives, an access of this thread to memory that is not there
// ends the launch with a report, not the process.

#pragma once

namespace emulator {

struct FaultsAreReported {
    FaultsAreReported();
    ~FaultsAreReported();
};

}  // namespace emulator
