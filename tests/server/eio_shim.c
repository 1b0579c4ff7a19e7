/* LD_PRELOAD: reads of the file named in Q4_EIO_CONTROL that touch its byte range fail with EIO, while it exists.
 * The control file holds "<path suffix> <first byte> <last byte>". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int poisoned(int fd, off_t offset, size_t bytes) {
  const char *control = getenv("Q4_EIO_CONTROL");
  char suffix[PATH_MAX], link[64], path[PATH_MAX];
  long long first, last;
  FILE *f;
  ssize_t n;
  if (control == NULL || (f = fopen(control, "r")) == NULL) return 0;
  int fields = fscanf(f, "%4095s %lld %lld", suffix, &first, &last);
  fclose(f);
  if (fields != 3 || offset > last || offset + (off_t)bytes <= first) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if ((n = readlink(link, path, sizeof path - 1)) < 0) return 0;
  path[n] = 0;
  size_t end = strlen(suffix);
  return (size_t)n >= end && strcmp(path + n - end, suffix) == 0;
}

static size_t total(const struct iovec *iov, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += iov[i].iov_len;
  return bytes;
}

#define FAIL_OR_CALL(name, type, bytes, ...)                  \
  static type real;                                           \
  if (real == NULL) real = (type)dlsym(RTLD_NEXT, name);      \
  if (poisoned(fd, offset, bytes)) { errno = EIO; return -1; } \
  return real(__VA_ARGS__)

typedef ssize_t (*pread_t)(int, void *, size_t, off_t);
typedef ssize_t (*preadv_t)(int, const struct iovec *, int, off_t);
typedef ssize_t (*preadv2_t)(int, const struct iovec *, int, off_t, int);

ssize_t pread(int fd, void *buf, size_t n, off_t offset) { FAIL_OR_CALL("pread", pread_t, n, fd, buf, n, offset); }
ssize_t pread64(int fd, void *buf, size_t n, off_t offset) { FAIL_OR_CALL("pread64", pread_t, n, fd, buf, n, offset); }
ssize_t preadv(int fd, const struct iovec *iov, int count, off_t offset) {
  FAIL_OR_CALL("preadv", preadv_t, total(iov, count), fd, iov, count, offset);
}
ssize_t preadv64(int fd, const struct iovec *iov, int count, off_t offset) {
  FAIL_OR_CALL("preadv64", preadv_t, total(iov, count), fd, iov, count, offset);
}
ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
  FAIL_OR_CALL("preadv2", preadv2_t, total(iov, count), fd, iov, count, offset, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
  FAIL_OR_CALL("preadv64v2", preadv2_t, total(iov, count), fd, iov, count, offset, flags);
}
