/* Preloaded into a program: one call of the C library's, of one kind, fails once. brim_arm says which. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE, PWRITE, RENAME, FSYNC, MMAP, ALLOCATION, KINDS };
static const char *names[KINDS] = {"write", "pwrite", "rename", "fsync", "mmap", "allocation"};
static atomic_long counted[KINDS];
static atomic_int kind = -1;
static atomic_long bad;
static int code;

/* From now on, the number-th call of this kind fails with error; number 0: calls are only counted. */
void brim_arm(const char *name, long number, int error) {
    for (int i = 0; i < KINDS; i++) {
        counted[i] = 0;
        if (!strcmp(names[i], name)) kind = i;
    }
    bad = number;
    code = error;
}

long brim_counted(void) { return kind < 0 ? 0 : counted[kind]; }

static int fails(int which) {
    if (kind != which) return 0;
    if (++counted[which] != bad) return 0;
    errno = code;
    return 1;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* What is said, asked of the kernel or sent is no file. */
static int is_file(int fd) {
    struct statfs found;
    return fd > 2 && !fstatfs(fd, &found) && found.f_type != PROC_SUPER_MAGIC && found.f_type != PIPEFS_MAGIC &&
           found.f_type != SOCKFS_MAGIC && found.f_type != ANON_INODE_FS_MAGIC;
}

ssize_t write(int fd, const void *data, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    return kind == WRITE && is_file(fd) && fails(WRITE) ? -1 : real(fd, data, count);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return fails(PWRITE) ? -1 : real(fd, data, count, at);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return fails(PWRITE) ? -1 : real(fd, data, count, at);
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return fails(RENAME) ? -1 : real(from, to);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    return fails(FSYNC) ? -1 : real(fd);
}

void *mmap(void *where, size_t count, int protection, int flags, int fd, off_t at) {
    REAL(void *, "mmap", void *, size_t, int, int, int, off_t);
    return fails(MMAP) ? MAP_FAILED : real(where, count, protection, flags, fd, at);
}

void *mmap64(void *where, size_t count, int protection, int flags, int fd, off64_t at) {
    REAL(void *, "mmap64", void *, size_t, int, int, int, off64_t);
    return fails(MMAP) ? MAP_FAILED : real(where, count, protection, flags, fd, at);
}

int posix_memalign(void **made, size_t alignment, size_t count) { /* tensors */
    REAL(int, "posix_memalign", void **, size_t, size_t);
    return fails(ALLOCATION) ? ENOMEM : real(made, alignment, count);
}
