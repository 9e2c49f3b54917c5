/* Sets the wall clock of a process back by two hours once a file exists, whose name is in the
   environment variable CLOCK_IS_BACK. To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(id, now);
    const char *path = getenv("CLOCK_IS_BACK");
    int of_wall = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    if (of_wall && path && access(path, F_OK) == 0) now->tv_sec -= 7200;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
