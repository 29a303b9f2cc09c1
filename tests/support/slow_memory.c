/* Reads or writes of another process's memory, as slow as the environment says: see slow_memory.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>

typedef ssize_t (*mover)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                         unsigned long);

/* Sleep for what so many bytes take; the variable has megabytes a second. */
static void take(ssize_t moved, const char *variable)
{
    const char *rate = getenv(variable);
    if (rate == NULL || moved <= 0)
        return;
    double seconds = moved / (atof(rate) * 1e6);
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&left, NULL);
}

#define SLOWED(name, variable)                                                                                      \
    ssize_t name(pid_t pid, const struct iovec *here, unsigned long here_count, const struct iovec *there,         \
                 unsigned long there_count, unsigned long flags)                                                    \
    {                                                                                                               \
        mover moves = (mover)dlsym(RTLD_NEXT, #name);                                                               \
        ssize_t moved = moves(pid, here, here_count, there, there_count, flags);                                    \
        take(moved, variable);                                                                                      \
        return moved;                                                                                               \
    }

SLOWED(process_vm_readv, "PDRELAY_TEST_READ_MB_PER_S")
SLOWED(process_vm_writev, "PDRELAY_TEST_WRITE_MB_PER_S")
