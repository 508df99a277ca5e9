/* Makes the files in one folder as slow as on another disk, for programs that know nothing of it.

     cc -shared -fPIC -O2 -o slow-disk.so slow-disk.c
     SLOW_FOLDER=/tmp/runs SLOW_BYTES_PER_S=1e8 SLOW_FSYNC_S=0.01 LD_PRELOAD=./slow-disk.so program

   Each process has this rate for itself. A write returns after the time that its bytes take. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void wait_for(double seconds) {
  struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&time, NULL);
}

static int is_slow(int fd) {
  const char *folder = getenv("SLOW_FOLDER");
  char link[64], path[4096];
  if (!folder) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strncmp(path, folder, strlen(folder)) == 0;
}

static ssize_t slowly(int fd, ssize_t bytes) {
  if (bytes > 0 && is_slow(fd)) wait_for(bytes / atof(getenv("SLOW_BYTES_PER_S")));
  return bytes;
}

ssize_t write(int fd, const void *data, size_t size) {
  static ssize_t (*original)(int, const void *, size_t);
  if (!original) original = dlsym(RTLD_NEXT, "write");
  return slowly(fd, original(fd, data, size));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  static ssize_t (*original)(int, const struct iovec *, int);
  if (!original) original = dlsym(RTLD_NEXT, "writev");
  return slowly(fd, original(fd, parts, count));
}

int fsync(int fd) {
  static int (*original)(int);
  if (!original) original = dlsym(RTLD_NEXT, "fsync");
  if (is_slow(fd)) wait_for(atof(getenv("SLOW_FSYNC_S")));
  return original(fd);
}
