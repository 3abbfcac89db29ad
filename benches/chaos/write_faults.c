/* Preloaded into the program by the soak of saves: after FAULT_BYTES bytes of checkpoint files, writing and flushing them
 * fails with FAULT_ERRNO. Other files are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_long written;

static int is_checkpoint(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strstr(path, "/iter_") != NULL;
}

static int fails(int fd, size_t bytes) {
    const char *limit = getenv("FAULT_BYTES"), *number = getenv("FAULT_ERRNO");
    if (!limit || !number || !is_checkpoint(fd)) return 0;
    if (atomic_fetch_add(&written, (long)bytes) + (long)bytes <= atol(limit)) return 0;
    errno = atoi(number);
    return 1;
}

ssize_t write(int fd, const void *data, size_t bytes) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "write");
    return fails(fd, bytes) ? -1 : next(fd, data, bytes);
}

int fsync(int fd) {
    static int (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "fsync");
    return fails(fd, 0) ? -1 : next(fd);
}
