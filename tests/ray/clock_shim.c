/* A wall clock that can jump: preloaded into a process and all that it starts.

   AUTOPAR_TEST_CLOCK names a file of 8 bytes, the seconds by which the wall clock is ahead. All
   processes map it, so all see a jump at the same moment. Clocks that cannot jump are left alone.
   Waits until a time of the wall clock are given to the kernel in its own time. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;

static int64_t seconds_ahead(void) {
    if (ahead == NULL) {
        static volatile int64_t none = 0;
        const char *path = getenv("AUTOPAR_TEST_CLOCK");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        ahead = mapped == MAP_FAILED ? &none : (volatile int64_t *)mapped;
    }
    return *ahead;
}

static int is_wall_clock(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && is_wall_clock(clock)) now->tv_sec += seconds_ahead();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL) *result = now.tv_sec;
    return now.tv_sec;
}

static struct timespec in_kernel_time(const struct timespec *until) {
    struct timespec real = *until;
    real.tv_sec -= seconds_ahead();
    if (real.tv_sec < 0) real.tv_sec = 0;
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (real == NULL) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec kernel = in_kernel_time(until);
    /* A condition may be on a clock that cannot jump; its times are far from those of the wall. */
    struct timespec steady;
    clock_gettime(CLOCK_MONOTONIC, &steady);
    int is_steady = until->tv_sec < steady.tv_sec + 100000000;
    return real(condition, mutex, is_steady ? until : &kernel);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (real == NULL) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec kernel = in_kernel_time(until);
    return real(semaphore, &kernel);
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (real == NULL) real = dlsym(RTLD_NEXT, "syscall");
    va_list given;
    va_start(given, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
    va_end(given);
    struct timespec kernel;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] != 0) {
        kernel = in_kernel_time((const struct timespec *)a[3]);
        a[3] = (long)&kernel;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
