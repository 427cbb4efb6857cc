/* A disk that fails at one of its operations: preloaded (LD_PRELOAD) into a process and all its children.

   Operations on files below `prefix` are numbered in the shared page of FAILING_DISK_STATE. Number `at` fails with
   `error`; with `stays_full` the disk is full from there on: what needs space fails, half a write may still fit, and
   files can be opened, renamed and removed. With `reads` it is reads that are numbered. Only processes of the group `group` take part (0 for all). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define LOGGED 16384
#define LINE 160

struct state {
    int armed, at, error, stays_full, reads, group, count, failed;
    char prefix[512];
    char log[LOGGED][LINE];
};

static struct state *shared;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAILING_DISK_STATE");
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = path ? real(path, O_RDWR) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) shared = page;
}

static int takes_part(void) {
    return shared && shared->armed && (shared->group == 0 || shared->group == getpgrp());
}

static int is_below(const char *path) {
    size_t length = strlen(shared->prefix);
    return strncmp(path, shared->prefix, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int of_descriptor(int descriptor, char *path) {
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
            of_descriptor(folder, base);
        }
        strncat(base, "/", sizeof base - strlen(base) - 1);
    }
    snprintf(path, PATH_MAX, "%s%s", base, name);
    return is_below(path);
}

/* Return the error of this operation, 0 for none; -1 for half of a write. */
static int step(const char *kind, const char *path, int needs_space, int is_write) {
    int is_read = strncmp(kind, "read", 4) == 0 || strncmp(kind, "pread", 5) == 0;
    if (is_read != shared->reads) return 0;
    int number = __atomic_fetch_add(&shared->count, 1, __ATOMIC_SEQ_CST);
    if (number < LOGGED) snprintf(shared->log[number], LINE, "%s %s", kind, path + strlen(shared->prefix));
    if (shared->at < 0 || number < shared->at) return 0;
    if (shared->stays_full ? !needs_space : number != shared->at) return 0;
    __atomic_fetch_add(&shared->failed, 1, __ATOMIC_SEQ_CST);
    return shared->stays_full && is_write && number == shared->at ? -1 : shared->error;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static int before_open(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!takes_part() || !(flags & (O_CREAT | O_WRONLY | O_RDWR)) || !of_path(folder, name, path)) return 0;
    struct stat found;
    int is_new = fstatat(folder, name, &found, 0) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
    return step("open", path, is_new, 0);
}

#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        REAL(name);                                                                 \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;     \
        va_end(rest);                                                               \
        int error = before_open(AT_FDCWD, path, flags);                             \
        if (error) { errno = error; return -1; }                                    \
        return real(path, flags, mode);                                             \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                \
    int name(int folder, const char *path, int flags, ...) {                        \
        REAL(name);                                                                 \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;     \
        va_end(rest);                                                               \
        int error = before_open(folder, path, flags);                               \
        if (error) { errno = error; return -1; }                                    \
        return real(folder, path, flags, mode);                                     \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                 \
    FILE *name(const char *path, const char *mode) {                                \
        REAL(name);                                                                 \
        int writes = strpbrk(mode, "wa+") != NULL;                                  \
        int error = writes ? before_open(AT_FDCWD, path, O_WRONLY | O_CREAT) : 0;   \
        if (error) { errno = error; return NULL; }                                  \
        return real(path, mode);                                                    \
    }
FOPEN(fopen)
FOPEN(fopen64)

static int before_write(const char *kind, int file) {
    char path[PATH_MAX];
    return takes_part() && of_descriptor(file, path) ? step(kind, path, 1, 1) : 0;
}

#define WRITE(name, arguments, call, halved, is_small)                              \
    ssize_t name arguments {                                                        \
        REAL(name);                                                                 \
        int error = before_write(#name, file);                                      \
        if (error < 0) {                                                            \
            if (!(is_small)) return real halved;                                    \
            error = shared->error;                                                  \
        }                                                                           \
        if (error) { errno = error; return -1; }                                    \
        return real call;                                                           \
    }
WRITE(write, (int file, const void *data, size_t size), (file, data, size), (file, data, size / 2), size < 2)
WRITE(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at), (file, data, size / 2, at), size < 2)
WRITE(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at), (file, data, size / 2, at), size < 2)
WRITE(writev, (int file, const struct iovec *parts, int count), (file, parts, count), (file, parts, 1), count < 2)
WRITE(pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at), (file, parts, 1, at), count < 2)
WRITE(sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), (file, from, at, size / 2), size < 2)
WRITE(sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), (file, from, at, size / 2), size < 2)

ssize_t copy_file_range(int from, off64_t *from_at, int file, off64_t *at, size_t size, unsigned flags) {
    REAL(copy_file_range);
    int error = before_write("copy_file_range", file);
    if (error) { errno = error < 0 ? shared->error : error; return -1; }
    return real(from, from_at, file, at, size, flags);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    REAL(fwrite);
    int file = shared && shared->armed ? fileno(stream) : -1;
    int error = file > 2 ? before_write("fwrite", file) : 0;
    if (error) { errno = error < 0 ? shared->error : error; return 0; }
    return real(data, size, count, stream);
}

#define OF_FILE(name, arguments, call, needs_space)                                 \
    int name arguments {                                                            \
        REAL(name);                                                                 \
        char path[PATH_MAX];                                                        \
        int error = takes_part() && of_descriptor(file, path) ? step(#name, path, needs_space, 0) : 0; \
        if (error) { errno = error; return -1; }                                    \
        return real call;                                                           \
    }
OF_FILE(fsync, (int file), (file), 1)
OF_FILE(fdatasync, (int file), (file), 1)
OF_FILE(ftruncate, (int file, off_t size), (file, size), 0)
OF_FILE(ftruncate64, (int file, off64_t size), (file, size), 0)

#define OF_PATH(name, arguments, call, folder, where, needs_space)                  \
    int name arguments {                                                            \
        REAL(name);                                                                 \
        char path[PATH_MAX];                                                        \
        int error = takes_part() && of_path(folder, where, path) ? step(#name, path, needs_space, 0) : 0; \
        if (error) { errno = error; return -1; }                                    \
        return real call;                                                           \
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

/* With `reads`, these are numbered and fail in place of all others. */
static int before_read(const char *kind, int file) {
    char path[PATH_MAX];
    return takes_part() && of_descriptor(file, path) ? step(kind, path, 1, 0) : 0;
}

#define READ(name, arguments, call)                                                 \
    ssize_t name arguments {                                                        \
        REAL(name);                                                                 \
        int error = before_read(#name, file);                                       \
        if (error) { errno = error; return -1; }                                    \
        return real call;                                                           \
    }
READ(read, (int file, void *data, size_t size), (file, data, size))
READ(pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
READ(pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
READ(readv, (int file, const struct iovec *parts, int count), (file, parts, count))
READ(preadv, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
