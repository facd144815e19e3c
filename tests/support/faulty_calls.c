/* This library is preloaded into a process. The n-th system call on the files of a folder fails or
 * kills the process.
 *
 * Only calls on paths below $FAULTY_FOLDER, and on files opened there, are counted. The process
 * sets a fault with faulty_calls_arm. $FAULTY_CALL (n) and $FAULTY_ERROR set a fault at the start.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES = 4096, CALLS = 4096, KILL = -1 };

static const char *folder;
static int is_ours[FILES], error;
static long count, target;
static const char *names[CALLS];

__attribute__((constructor)) static void begin(void)
{
    const char *call = getenv("FAULTY_CALL"), *code = getenv("FAULTY_ERROR");
    folder = getenv("FAULTY_FOLDER");
    target = call ? atol(call) : 0;
    error = code ? atoi(code) : 0;
}

/* Count calls from 1, and let call `n` fail with `code`, or kill the process if `code` is KILL.
 * If `n` is negative, all calls from call -n on fail.
 */
void faulty_calls_arm(const char *where, long n, int code)
{
    folder = where;
    count = 0;
    target = n;
    error = code;
}

long faulty_calls_count(void) { return count; }

const char *faulty_calls_name(long n) { return n >= 1 && n < CALLS ? names[n] : 0; }

static int hits(const char *name)
{
    if (++count < CALLS)
        names[count] = name;
    return count == target || (target < 0 && count >= -target);
}

static int fails(void)
{
    if (error == KILL)
        kill(getpid(), SIGKILL);
    errno = error;
    return -1;
}

static int below(const char *path) { return folder && !strncmp(path, folder, strlen(folder)); }

static int ours(int fd) { return fd >= 0 && fd < FILES && is_ours[fd]; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...)                            \
    {                                                                     \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest);                                                     \
        if (below(path) && hits("open"))                                  \
            return fails();                                               \
        int fd = REAL(name)(path, flags, mode);                           \
        if (fd >= 0 && fd < FILES)                                        \
            is_ours[fd] = below(path);                                    \
        return fd;                                                        \
    }

OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size)
{
    if (ours(fd) && hits("write")) {
        if (error == KILL)
            REAL(write)(fd, data, size / 2);
        return fails();
    }
    return REAL(write)(fd, data, size);
}

ssize_t read(int fd, void *data, size_t size)
{
    return ours(fd) && hits("read") ? fails() : REAL(read)(fd, data, size);
}

int fsync(int fd) { return ours(fd) && hits("fsync") ? fails() : REAL(fsync)(fd); }

int close(int fd)
{
    int is_hit = ours(fd) && hits("close");
    if (fd >= 0 && fd < FILES)
        is_ours[fd] = 0;
    int code = REAL(close)(fd);
    return is_hit ? fails() : code;
}

int rename(const char *from, const char *to)
{
    return below(from) && hits("rename") ? fails() : REAL(rename)(from, to);
}

int link(const char *from, const char *to)
{
    return below(from) && hits("link") ? fails() : REAL(link)(from, to);
}

int unlink(const char *path)
{
    return below(path) && hits("unlink") ? fails() : REAL(unlink)(path);
}
