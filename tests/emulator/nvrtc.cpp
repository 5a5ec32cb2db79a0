// A stand-in for NVRTC: g++ makes a shared library of a kernel's text, which stands for the cubin.
// The emulator's libcuda (engine/) loads and runs it.
//
// Libraries are kept under their text's hash in FLASHTUNE_EMULATOR_CACHE, or beside this file in
// `kernels`, with the text that g++ saw.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kCompilation = 6, kInvalidInput = 3;
constexpr int kArchs[] = {80, 86, 89, 90, 100, 120};
// Without an optimisation by value of NaN: the kernels compute with infinities and NaN. Most
// kernels run for less time than g++ takes, which is a quarter less than with -O1.
const std::string kFlags = "-std=c++20 -Og -march=native -w -fPIC -shared -fno-exceptions -fno-rtti -fno-strict-aliasing -fpermissive -fvisibility=hidden";

struct Program {
    std::string text, log;
    std::vector<char> cubin;
};

// The folder of this library, where libcuda.so.1 and the headers lie too.
std::string own_folder() {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&own_folder), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    return all.str();
}

std::string hash_of(const std::string& text) {
    // FNV-1a, twice with different starts.
    uint64_t hash[2] = {0xcbf29ce484222325u, 0x9e3779b97f4a7c15u};
    for (const unsigned char c : text) for (uint64_t& h : hash) h = (h ^ c) * 0x100000001b3u;
    char name[40];
    snprintf(name, sizeof name, "%016llx%016llx", (unsigned long long)hash[0], (unsigned long long)hash[1]);
    return name;
}

// The text up to the parenthesis that closes the one before `at`, cut at commas outside of inner
// ones.
std::vector<std::string> arguments_at(const std::string& text, size_t at) {
    std::vector<std::string> arguments(1);
    for (int depth = 0; at < text.size(); ++at) {
        const char c = text[at];
        if (c == ')' && depth == 0) break;
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        if (c == ',' && depth == 0) arguments.emplace_back(); else arguments.back() += c;
    }
    return arguments;
}

// For each kernel of the text the lines by which the driver finds it, and its names.
std::string kernel_table(const std::string& text, std::vector<std::string>& names) {
    static const std::string kMark = "extern \"C\" __global__ void ", kBounds = "__launch_bounds__(", kCluster = "__cluster_dims__(";
    // Those of dynamic shared memory have been replaced.
    const std::string has_static = text.find("__shared__ ") != std::string::npos ? "true" : "false";
    std::string table;
    for (size_t at = text.find(kMark); at != std::string::npos; at = text.find(kMark, at + 1)) {
        const size_t bounds = text.find(kBounds, at), name = text.find("flashtune_", at);
        if (bounds == std::string::npos || name == std::string::npos || bounds > name) continue;
        const std::vector<std::string> limits = arguments_at(text, bounds + kBounds.size());
        const size_t cluster = text.find(kCluster, at);
        const std::string size = cluster < name ? arguments_at(text, cluster + kCluster.size())[0] : "1";
        const std::string entry = text.substr(name, text.find('(', name) - name);
        names.push_back(entry);
        table += "static void emulator_call_" + entry + "(void** arguments) { emulator::call(&" + entry + ", arguments); }\n";
        table += "extern \"C\" __attribute__((visibility(\"default\"))) const emulator::Kernel emulator_" + entry +
                 " = {emulator_call_" + entry + ", int(" + limits[0] + "), int(" + (limits.size() > 1 ? limits[1] : "0") + "), " + size + ", " + has_static + "};\n";
    }
    return table;
}

// Declarations such as `extern __shared__ __align__(128) uint8 shared[];` become pointers to the
// memory of the CTA that runs.
std::string host_text(const std::string& text, std::vector<std::string>& names) {
    static const std::string kDynamic = "extern __shared__ ";
    std::string changed = text;
    for (size_t at = changed.find(kDynamic); at != std::string::npos; at = changed.find(kDynamic, at)) {
        const size_t end = changed.find("[];", at), name = changed.rfind(' ', end) + 1;
        if (end == std::string::npos) break;
        const std::string pointer = "unsigned char* const " + changed.substr(name, end - name) +
                                    " = reinterpret_cast<unsigned char*>(emulator::self->shared);";
        changed.replace(at, end + 3 - at, pointer);
    }
    return "#include \"prelude.h\"\n#line 1\n" + changed + "\n" + kernel_table(changed, names);
}

// Runs g++ and returns its messages.
bool compile_file(const std::string& source, const std::string& target, std::string& log) {
    const std::string folder = own_folder();
    const std::string command = "g++ " + kFlags + " -I'" + folder + "' -x c++ '" + source + "' -nostdlib -x none -L'" + folder +
                                "' -l:libcuda.so.1 -o '" + target + "' 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) return log = "error: g++ cannot be run", false;
    char buffer[4096];
    while (const size_t count = fread(buffer, 1, sizeof buffer, pipe)) log.append(buffer, count);
    return pclose(pipe) == 0;
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = sizeof kArchs / sizeof *kArchs, 0; }
int nvrtcGetSupportedArchs(int* archs) { return memcpy(archs, kArchs, sizeof kArchs), 0; }
int nvrtcCreateProgram(Program** program, const char* text, const char*, int headers, const char* const*, const char* const*) {
    if (headers) return kInvalidInput;
    return *program = new Program{text, {}, {}}, 0;
}
int nvrtcDestroyProgram(Program** program) {
    delete *program;
    return *program = nullptr, 0;
}
int nvrtcCompileProgram(Program* program, int, const char* const*) {
    const char* given = getenv("FLASHTUNE_EMULATOR_CACHE");
    const std::string folder = own_folder(), cache = given && *given ? given : folder + "/kernels";
    std::vector<std::string> names;
    const std::string text = host_text(program->text, names);
    const std::string base = cache + "/" + hash_of(text + kFlags + read_file(folder + "/prelude.h") + read_file(folder + "/device.h"));
    const std::string library = base + ".so";
    if (access(library.c_str(), R_OK) != 0) {
        mkdir(cache.c_str(), 0777);
        const std::string source = base + ".cu", temporary = library + "." + std::to_string(getpid()) + "." + std::to_string(uintptr_t(program));
        std::ofstream(source, std::ios::binary) << text;
        if (!compile_file(source, temporary, program->log) || rename(temporary.c_str(), library.c_str()) != 0) return kCompilation;
    }
    const std::string bytes = read_file(library);
    program->cubin.assign(bytes.begin(), bytes.end());
    // What ptxas says of kernels that do not spill.
    for (const std::string& name : names) {
        program->log += "ptxas info    : Compiling entry function '" + name + "' for 'emulator'\nptxas info    : Used 0 registers\n";
    }
    return 0;
}
int nvrtcGetProgramLogSize(Program* program, size_t* bytes) { return *bytes = program->log.size() + 1, 0; }
int nvrtcGetProgramLog(Program* program, char* log) { return memcpy(log, program->log.c_str(), program->log.size() + 1), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* bytes) { return *bytes = program->cubin.size(), 0; }
int nvrtcGetCUBIN(Program* program, char* cubin) { return memcpy(cubin, program->cubin.data(), program->cubin.size()), 0; }

}  // extern "C"
