// A stand-in for libnvrtc of one architecture. With FAKE_NVRTC_COMPILES it makes a file of every
// text that the stand-in for libcuda loads; else it compiles nothing.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, COMPILATION = 6 };
static const char cubin[] = "\x7f" "ELF and so on";

static int setting(const char *name, int otherwise) { const char *value = getenv(name); return value ? atoi(value) : otherwise; }
int nvrtcVersion(int *major, int *minor) {
    int version = setting("FAKE_NVRTC_VERSION", 12000);
    *major = version / 1000;
    *minor = version % 1000 / 10;
    return SUCCESS;
}
int nvrtcGetNumSupportedArchs(int *count) { *count = 1; return SUCCESS; }
int nvrtcGetSupportedArchs(int *archs) { *archs = setting("FAKE_NVRTC_ARCH", 80); return SUCCESS; }
int nvrtcCreateProgram(void **program, const char *text, const char *name, int count, const char *const *headers, const char *const *names) {
    (void)text, (void)name, (void)count, (void)headers, (void)names;
    *program = program;
    return SUCCESS;
}
int nvrtcDestroyProgram(void **program) { *program = NULL; return SUCCESS; }
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return setting("FAKE_NVRTC_COMPILES", 0) ? SUCCESS : COMPILATION;
}
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { (void)program; *bytes = 0; return SUCCESS; }
int nvrtcGetProgramLog(void *program, char *log) { (void)program, (void)log; return SUCCESS; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { (void)program; *bytes = sizeof cubin; return SUCCESS; }
int nvrtcGetCUBIN(void *program, char *bytes) { (void)program; memcpy(bytes, cubin, sizeof cubin); return SUCCESS; }
