/* Fails one of the calls by which a program changes files below a folder. Preloaded into it.
 *
 * FAULT_FOLDER names the folder. Each call that changes something there has a number, from 1.
 * FAULT_AT names the first call that fails; FAULT_KIND says how:
 *   full  this and all later calls that need space fail with ENOSPC, after half of a write
 *   io    this call alone fails with EIO, after half of a write
 *   kill  the process is killed, after half of a write
 * FAULT_DELAY, if set, is how many milliseconds a call takes before it fails.
 * FAULT_COUNT names a file that receives the number of calls when the program ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int calls;

static int is_below(const char *path) {
  const char *folder = getenv("FAULT_FOLDER");
  return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_file_below(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

/* 0, or the error of this call. Before a kill, and before the error of a write, half is written. */
static int fault(int takes_space, int fd, const void *data, size_t bytes, off_t offset) {
  const char *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
  int number = atomic_fetch_add(&calls, 1) + 1;
  if (!at || !kind || number < atoi(at)) return 0;
  if (number > atoi(at) && strcmp(kind, "full")) return 0;
  if (!strcmp(kind, "full") && !takes_space) return 0;
  if (data && number == atoi(at)) {
    static ssize_t (*real)(int, const void *, size_t, off_t), (*append)(int, const void *, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
    if (!append) *(void **)&append = dlsym(RTLD_NEXT, "write");
    ssize_t written = offset < 0 ? append(fd, data, bytes / 2) : real(fd, data, bytes / 2, offset);
    (void)written;
  }
  if (getenv("FAULT_DELAY")) usleep(1000 * atoi(getenv("FAULT_DELAY")));
  if (!strcmp(kind, "kill")) raise(SIGKILL);
  return !strcmp(kind, "full") ? ENOSPC : EIO;
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)
#define FAIL(concerned, takes_space, fd, data, bytes, offset) \
  int error = (concerned) ? fault(takes_space, fd, data, bytes, offset) : 0; \
  if (error) return errno = error, -1

ssize_t write(int fd, const void *data, size_t bytes) {
  REAL(write);
  FAIL(is_file_below(fd), 1, fd, data, bytes, -1);
  return real(fd, data, bytes);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) {
  REAL(pwrite64);
  FAIL(is_file_below(fd), 1, fd, data, bytes, offset);
  return real(fd, data, bytes, offset);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }

int fsync(int fd) {
  REAL(fsync);
  FAIL(is_file_below(fd), 0, -1, NULL, 0, 0);
  return real(fd);
}

int fdatasync(int fd) {
  REAL(fdatasync);
  FAIL(is_file_below(fd), 0, -1, NULL, 0, 0);
  return real(fd);
}

int ftruncate64(int fd, off64_t length) {
  REAL(ftruncate64);
  FAIL(is_file_below(fd), 0, -1, NULL, 0, 0);
  return real(fd, length);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  FAIL(is_below(to), 0, -1, NULL, 0, 0);
  return real(from, to);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  FAIL(is_below(path), 1, -1, NULL, 0, 0);
  return real(path, mode);
}

int unlink(const char *path) {
  REAL(unlink);
  FAIL(is_below(path), 0, -1, NULL, 0, 0);
  return real(path);
}

int open64(const char *path, int flags, ...) {
  REAL(open64);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  FAIL((flags & O_CREAT) && is_below(path), 1, -1, NULL, 0, 0);
  return real(path, flags, mode);
}

__attribute__((destructor)) static void count(void) {
  const char *path = getenv("FAULT_COUNT");
  FILE *file = path ? fopen(path, "w") : NULL;
  if (!file) return;
  fprintf(file, "%d\n", atomic_load(&calls));
  fclose(file);
}
