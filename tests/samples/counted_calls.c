/* Preloaded (LD_PRELOAD): counts the calls of a process on files below one folder, and at one of them fails, as a disk
   that is full or breaks, or ends or stops the process. Or counts large allocations, and refuses one.

   Only calls on files below `root` count, so that imports and logs do not move the points. The state is a shared file:
   forks of a process that attached to it, and what they start, count together.

   With `forced`, what a power failure leaves is kept there: of every file that was forced to disk its bytes at that
   time, as INODE, and of every folder its names, as INODE.names. A link keeps the inode of a removed file from use. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LOGGED 16384
#define LINE 160
#define PAGE 4096

struct state {
  int at;         /* the call, counted from 0; negative for none */
  int error;      /* that it fails with; 0 to end the process there */
  int stays_full; /* what needs space fails from there on, half a write may still fit, the rest works */
  int stops;      /* stop (SIGSTOP) there instead, and make the call once continued */
  int everyone;   /* every process ends at its next call afterwards */
  int reads;      /* reads and opens for reading count too */
  int count;      /* calls so far */
  int smallest;   /* bytes; allocations of at least so many count, and nothing else; 0 for calls on files */
  char root[512];
  char forced[512];
  char log[LOGGED][LINE]; /* the calls */
};
enum end { NONE, DIE, FAIL, HALF };

static struct state *shared;

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

void counted_calls_attach(const char *path) {
  int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
  int file = path ? real(path, O_RDWR) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) shared = page;
}

__attribute__((constructor)) static void start(void) { counted_calls_attach(getenv("COUNTED_CALLS")); }

static void die(void) {
  for (;;) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
}

static int is_below(const char *path) {
  size_t length = strlen(shared->root);
  return strncmp(path, shared->root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int of_file(int descriptor, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

static int of_path(int folder, const char *name, char *path) {
  char base[PATH_MAX] = "";
  if (name[0] != '/') {
    if (folder == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      of_file(folder, base);
    }
    strncat(base, "/", sizeof base - strlen(base) - 1);
  }
  snprintf(path, PATH_MAX, "%s%s", base, name);
  return is_below(path);
}

/* Count a call and return how it ends. Only a write, which may come to half, returns to die. */
static enum end count(const char *kind, const char *path, int needs_space, int is_write) {
  if (shared->smallest) return NONE;
  int number = __atomic_fetch_add(&shared->count, 1, __ATOMIC_SEQ_CST);
  if (number < LOGGED) snprintf(shared->log[number], LINE, "%s %s", kind, path + strlen(shared->root));
  if (shared->at < 0 || number < shared->at) return NONE;
  int is_it = number == shared->at;
  if (shared->stops) {
    if (is_it) syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
    return NONE;
  }
  if (shared->error == 0) {
    if (!is_it && !shared->everyone) return NONE;
    if (!is_write) die();
    return DIE;
  }
  if (shared->stays_full ? !needs_space : !is_it) return NONE;
  errno = shared->error;
  return shared->stays_full && is_write && is_it ? HALF : FAIL;
}

static enum end before_open(int folder, const char *name, int flags) {
  char path[PATH_MAX];
  if (!shared || !(shared->reads || flags & (O_CREAT | O_WRONLY | O_RDWR)) || !of_path(folder, name, path)) return NONE;
  struct stat found;
  int is_new = flags & O_CREAT && (fstatat(folder, name, &found, 0) != 0 || (flags & O_TMPFILE) == O_TMPFILE);
  return count("open", path, is_new, 0);
}

#define OPEN(name, parameters, folder, arguments)                                   \
  int name parameters {                                                             \
    REAL(name);                                                                     \
    va_list rest;                                                                   \
    va_start(rest, flags);                                                          \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;         \
    va_end(rest);                                                                   \
    return before_open(folder, path, flags) ? -1 : real arguments;                  \
  }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))

#define FOPEN(name)                                                                 \
  FILE *name(const char *path, const char *mode) {                                  \
    REAL(name);                                                                     \
    int flags = strpbrk(mode, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY;               \
    return before_open(AT_FDCWD, path, flags) ? NULL : real(path, mode);            \
  }
FOPEN(fopen)
FOPEN(fopen64)

static enum end before_write(const char *kind, int file) {
  char path[PATH_MAX];
  return shared && of_file(file, path) ? count(kind, path, 1, 1) : NONE;
}

/* A process that dies in a write leaves half of its pages: less than a page the kernel does not tear. */
#define WRITE(name, parameters, arguments, halved)                                  \
  ssize_t name parameters {                                                         \
    REAL(name);                                                                     \
    enum end end = before_write(#name, file);                                       \
    size_t half = end == DIE ? size / 2 / PAGE * PAGE : size / 2;                   \
    if (end == DIE) {                                                               \
      if (half) real halved;                                                        \
      die();                                                                        \
    }                                                                               \
    if (end == HALF && half) return real halved;                                    \
    return end ? -1 : real arguments;                                               \
  }
WRITE(write, (int file, const void *data, size_t size), (file, data, size), (file, data, half))
WRITE(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), (file, data, half, at))
WRITE(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), (file, data, half, at))
WRITE(writev, (int file, const struct iovec *parts, int size), (file, parts, size), (file, parts, half))
WRITE(pwritev, (int file, const struct iovec *parts, int size, off_t at), (file, parts, size, at), (file, parts, half, at))
WRITE(sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), (file, from, at, half))
WRITE(sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), (file, from, at, half))
WRITE(copy_file_range, (int from, off64_t *from_at, int file, off64_t *at, size_t size, unsigned flags),
      (from, from_at, file, at, size, flags), (from, from_at, file, at, half, flags))

size_t fwrite(const void *data, size_t size, size_t number, FILE *stream) {
  REAL(fwrite);
  int file = shared ? fileno(stream) : -1;
  enum end end = file > 2 ? before_write("fwrite", file) : NONE;
  if (end == DIE) die();
  return end ? 0 : real(data, size, number, stream);
}

static void keep_bytes(const char *path, struct stat *found) {
  char kept[PATH_MAX], data[1 << 16];
  snprintf(kept, sizeof kept, "%s/%lu.link", shared->forced, (unsigned long)found->st_ino);
  if (link(path, kept) && errno != EEXIST) die();
  kept[strlen(kept) - 5] = 0;
  int from = open(path, O_RDONLY), to = open(kept, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  for (ssize_t size; (size = read(from, data, sizeof data)) > 0;)
    if (write(to, data, size) != size) die();
  close(from);
  close(to);
}

static void keep_names(const char *path, struct stat *found) {
  char kept[PATH_MAX];
  snprintf(kept, sizeof kept, "%s/%lu.names", shared->forced, (unsigned long)found->st_ino);
  FILE *names = fopen(kept, "w");
  DIR *folder = opendir(path);
  for (struct dirent *entry; (entry = readdir(folder));)
    if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
      fprintf(names, "%c %lu %s\n", entry->d_type == DT_DIR ? 'd' : 'f', (unsigned long)entry->d_ino, entry->d_name);
  closedir(folder);
  fclose(names);
}

/* The number of a folder, 0 for anything else. */
static unsigned long folder_at(const char *path) {
  struct stat found;
  return shared->forced[0] && !lstat(path, &found) && S_ISDIR(found.st_mode) ? (unsigned long)found.st_ino : 0;
}

static void forget_names(unsigned long folder) {
  char kept[PATH_MAX];
  snprintf(kept, sizeof kept, "%s/%lu.names", shared->forced, folder);
  unlink(kept);
}

#define OF_FILE(name, parameters, arguments, needs_space, forces)                   \
  int name parameters {                                                             \
    REAL(name);                                                                     \
    char path[PATH_MAX];                                                            \
    struct stat found;                                                              \
    int counts = shared && of_file(file, path);                                     \
    if (counts && count(#name, path, needs_space, 0)) return -1;                    \
    int result = real arguments;                                                    \
    if (counts && forces && !result && shared->forced[0] && !stat(path, &found))    \
      (S_ISDIR(found.st_mode) ? keep_names : keep_bytes)(path, &found);             \
    return result;                                                                  \
  }
OF_FILE(fsync, (int file), (file), 1, 1)
OF_FILE(fdatasync, (int file), (file), 1, 1)
OF_FILE(ftruncate, (int file, off_t size), (file, size), 0, 0)
OF_FILE(ftruncate64, (int file, off64_t size), (file, size), 0, 0)

#define OF_PATH(name, parameters, arguments, folder, where, needs_space)            \
  int name parameters {                                                             \
    REAL(name);                                                                     \
    char path[PATH_MAX];                                                            \
    int counts = shared && of_path(folder, where, path);                            \
    if (counts && count(#name, path, needs_space, 0)) return -1;                    \
    unsigned long gone = counts ? folder_at(path) : 0;                              \
    int result = real arguments;                                                    \
    if (gone && !result) forget_names(gone);                                        \
    return result;                                                                  \
  }
OF_PATH(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 0)
OF_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 0)
OF_PATH(renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags), b, to, 0)
OF_PATH(mkdir, (const char *name, mode_t mode), (name, mode), AT_FDCWD, name, 1)
OF_PATH(mkdirat, (int folder, const char *name, mode_t mode), (folder, name, mode), folder, name, 1)
OF_PATH(link, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
OF_PATH(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), b, to, 1)
OF_PATH(symlink, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
OF_PATH(unlink, (const char *name), (name), AT_FDCWD, name, 0)
OF_PATH(unlinkat, (int folder, const char *name, int flags), (folder, name, flags), folder, name, 0)
OF_PATH(rmdir, (const char *name), (name), AT_FDCWD, name, 0)
OF_PATH(truncate, (const char *name, off_t size), (name, size), AT_FDCWD, name, 0)
OF_PATH(truncate64, (const char *name, off64_t size), (name, size), AT_FDCWD, name, 0)

#define READ(name, parameters, arguments)                                           \
  ssize_t name parameters {                                                         \
    REAL(name);                                                                     \
    char path[PATH_MAX];                                                            \
    int counts = shared && shared->reads && of_file(file, path);                    \
    return counts && count(#name, path, 0, 0) ? -1 : real arguments;                \
  }
READ(read, (int file, void *data, size_t size), (file, data, size))
READ(pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
READ(pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
READ(readv, (int file, const struct iovec *parts, int number), (file, parts, number))
READ(preadv, (int file, const struct iovec *parts, int number, off_t at), (file, parts, number, at))

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static int is_refused(const char *kind, size_t size) {
  if (!shared || !shared->smallest || size < (size_t)shared->smallest) return 0;
  int number = __atomic_fetch_add(&shared->count, 1, __ATOMIC_SEQ_CST);
  if (number < LOGGED) snprintf(shared->log[number], LINE, "%s %zu", kind, size);
  if (number == shared->at) errno = ENOMEM;
  return number == shared->at;
}

void *malloc(size_t size) { return is_refused("malloc", size) ? NULL : __libc_malloc(size); }
void *calloc(size_t number, size_t size) {
  return is_refused("calloc", number * size) ? NULL : __libc_calloc(number, size);
}
void *realloc(void *old, size_t size) { return is_refused("realloc", size) ? NULL : __libc_realloc(old, size); }
void *aligned_alloc(size_t at, size_t size) {
  return is_refused("aligned_alloc", size) ? NULL : __libc_memalign(at, size);
}
int posix_memalign(void **place, size_t at, size_t size) {
  if (is_refused("posix_memalign", size)) return ENOMEM;
  return (*place = __libc_memalign(at, size)) ? 0 : ENOMEM;
}
