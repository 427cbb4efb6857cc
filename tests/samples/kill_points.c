/* Loaded before libc: counts what a process does to files below one folder, and ends or stops it at one such call.

   Only calls on files whose path begins with the root are counted, so that imports and logs do not move the points. The
   counter is a shared file: all processes that it is armed in count together, and forks inherit it. A write of more than
   a page that the process dies in gets half of its pages into the file; smaller ones the kernel does not tear. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct points {
  _Atomic long count; /* calls so far */
  long at;            /* the call to die in, counted from 0; negative for none */
  long reads;         /* count reads and opens for reading too */
  long all;           /* every process that calls afterwards dies as well */
  long stops;         /* stop there (SIGSTOP) instead, and make the call once continued */
  char what[208];     /* the call that it died in */
};

static struct points *points;
static char root[PATH_MAX];
static const size_t PAGE = 4096;

void kill_points_arm(const char *counter, const char *folder) {
  int file = open(counter, O_RDWR);
  void *shared = mmap(NULL, sizeof(struct points), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  strncpy(root, folder, sizeof(root) - 1);
  points = shared == MAP_FAILED ? NULL : shared;
}

/* Return 1 if this call is one to die in. */
static int is_last(const char *name, int folder, const char *path) {
  char where[PATH_MAX + 64] = "", link[64];
  if (!points) return 0;
  if (!path || path[0] != '/') {
    ssize_t length;
    if (folder == AT_FDCWD) snprintf(link, sizeof(link), "/proc/self/cwd");
    else snprintf(link, sizeof(link), "/proc/self/fd/%d", folder);
    length = readlink(link, where, PATH_MAX - 1);
    if (length < 0) return 0;
    where[length] = 0;
    if (path) snprintf(where + length, sizeof(where) - length, "/%.60s", path);
    path = where;
  }
  if (strncmp(path, root, strlen(root))) return 0;
  long number = atomic_fetch_add(&points->count, 1);
  if (points->at < 0 || number < points->at || (number > points->at && !points->all)) return 0;
  if (number == points->at) snprintf(points->what, sizeof(points->what), "%s %s", name, path + strlen(root));
  if (!points->stops) return 1;
  syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
  return 0;
}

static void die(void) {
  for (;;) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STEP(name, folder, path) \
  do { if (is_last(name, folder, path)) die(); } while (0)

static size_t half_of(size_t size) { return size / 2 / PAGE * PAGE; }

ssize_t write(int file, const void *data, size_t size) {
  static __typeof__(&write) next;
  if (!next) next = NEXT(write);
  if (is_last("write", file, NULL)) { if (half_of(size)) next(file, data, half_of(size)); die(); }
  return next(file, data, size);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
  static __typeof__(&pwrite64) next;
  if (!next) next = NEXT(pwrite64);
  if (is_last("pwrite", file, NULL)) { if (half_of(size)) next(file, data, half_of(size), at); die(); }
  return next(file, data, size, at);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return pwrite64(file, data, size, at); }

ssize_t writev(int file, const struct iovec *parts, int count) {
  STEP("writev", file, NULL);
  return NEXT(writev)(file, parts, count);
}

ssize_t read(int file, void *data, size_t size) {
  static __typeof__(&read) next;
  if (!next) next = NEXT(read);
  if (points && points->reads) STEP("read", file, NULL);
  return next(file, data, size);
}

ssize_t pread64(int file, void *data, size_t size, off64_t at) {
  if (points && points->reads) STEP("pread", file, NULL);
  return NEXT(pread64)(file, data, size, at);
}

static int opens(const char *name, int folder, const char *path, int flags) {
  return ((flags & (O_WRONLY | O_RDWR | O_CREAT)) || (points && points->reads)) && is_last(name, folder, path);
}

#define OPEN(name, prefix_arguments, folder, arguments) \
  int name prefix_arguments { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
      va_list rest; \
      va_start(rest, flags); \
      mode = va_arg(rest, mode_t); \
      va_end(rest); \
    } \
    if (opens("open", folder, path, flags)) die(); \
    return NEXT(name) arguments; \
  }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))

#define CALL(name, parameters, folder, path, arguments) \
  int name parameters { \
    STEP(#name, folder, path); \
    return NEXT(name) arguments; \
  }
CALL(rename, (const char *from, const char *to), AT_FDCWD, from, (from, to))
CALL(renameat, (int a, const char *from, int b, const char *to), a, from, (a, from, b, to))
CALL(unlink, (const char *path), AT_FDCWD, path, (path))
CALL(unlinkat, (int folder, const char *path, int flags), folder, path, (folder, path, flags))
CALL(rmdir, (const char *path), AT_FDCWD, path, (path))
CALL(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
CALL(mkdirat, (int folder, const char *path, mode_t mode), folder, path, (folder, path, mode))
CALL(link, (const char *from, const char *to), AT_FDCWD, from, (from, to))
CALL(linkat, (int a, const char *from, int b, const char *to, int flags), a, from, (a, from, b, to, flags))
CALL(symlink, (const char *from, const char *to), AT_FDCWD, to, (from, to))
CALL(truncate64, (const char *path, off64_t size), AT_FDCWD, path, (path, size))
CALL(ftruncate, (int file, off_t size), file, NULL, (file, size))
CALL(ftruncate64, (int file, off64_t size), file, NULL, (file, size))
CALL(fsync, (int file), file, NULL, (file))
CALL(fdatasync, (int file), file, NULL, (file))
