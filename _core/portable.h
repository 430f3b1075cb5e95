/* What the core needs from the operating system and the compiler, where Linux and macOS differ or Cython has
 * no word for it. */
#ifndef REDBOLT_PORTABLE_H
#define REDBOLT_PORTABLE_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <sys/random.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#endif

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* macOS: SO_NOSIGPIPE is set on the socket instead */
#endif

/* ---- clock: nanoseconds that also count while the machine is suspended ---- */

static int64_t rb_clock_offset_ns;

static inline int64_t rb_now_ns(void) {
    struct timespec t;
#if defined(CLOCK_BOOTTIME)
    clock_gettime(CLOCK_BOOTTIME, &t);
#elif defined(__APPLE__)
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
#else
    clock_gettime(CLOCK_MONOTONIC, &t);
#endif
    int64_t offset = __atomic_load_n(&rb_clock_offset_ns, __ATOMIC_RELAXED);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + offset;
}

static inline void rb_set_clock_offset_ns(int64_t offset) {
    __atomic_store_n(&rb_clock_offset_ns, offset, __ATOMIC_RELAXED);
}

/* ---- atomics ---- */

static inline int rb_add(int *value, int by) { return __atomic_add_fetch(value, by, __ATOMIC_ACQ_REL); }
static inline int rb_load(int *value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
static inline void rb_store(int *value, int to) { __atomic_store_n(value, to, __ATOMIC_RELEASE); }
static inline int64_t rb_load64(int64_t *value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
static inline void rb_store64(int64_t *value, int64_t to) { __atomic_store_n(value, to, __ATOMIC_RELEASE); }
static inline uint64_t rb_next(uint64_t *value) { return __atomic_add_fetch(value, 1, __ATOMIC_RELAXED); }

/* For a flag that is set before another is read, on both sides. */
static inline void rb_set_flag(int *flags, int flag) { __atomic_fetch_or(flags, flag, __ATOMIC_SEQ_CST); }
static inline int rb_take_flags(int *flags) { return __atomic_exchange_n(flags, 0, __ATOMIC_SEQ_CST); }
static inline int rb_load_now(int *value) { return __atomic_load_n(value, __ATOMIC_SEQ_CST); }
static inline void rb_store_now(int *value, int to) { __atomic_store_n(value, to, __ATOMIC_SEQ_CST); }

/* ---- descriptors: every open one is marked, so that a forked child can close what it inherited ---- */

#define RB_MOST_FDS (1 << 20)
static uint64_t rb_open_fds[RB_MOST_FDS / 64];

static inline int rb_mark(int fd) {
    if (fd < 0) return fd;
    if (fd >= RB_MOST_FDS) {
        close(fd);
        errno = EMFILE;
        return -1;
    }
    __atomic_fetch_or(&rb_open_fds[fd / 64], (uint64_t)1 << (fd % 64), __ATOMIC_RELAXED);
    return fd;
}

static inline void rb_close(int fd) {
    if (fd < 0) return;
    __atomic_fetch_and(&rb_open_fds[fd / 64], ~((uint64_t)1 << (fd % 64)), __ATOMIC_RELAXED);
    close(fd);
}

static void rb_close_all(void) {
    for (int word = 0; word < RB_MOST_FDS / 64; word++)
        while (rb_open_fds[word]) rb_close(word * 64 + __builtin_ctzll(rb_open_fds[word]));
}

static inline void rb_prepare_fd(int fd) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static int rb_socket(int family) {
#if defined(SOCK_CLOEXEC)
    return rb_mark(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
#else
    int fd = socket(family, SOCK_STREAM, 0), yes = 1;
    if (fd >= 0) {
        rb_prepare_fd(fd);
        setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &yes, sizeof yes);
    }
    return rb_mark(fd);
#endif
}

static inline void rb_no_delay(int fd) {
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

/* Let a plain recv() on a connected socket block, for so long; MSG_DONTWAIT is for all other calls. */
static inline void rb_wait_for(int fd, int64_t nanoseconds) {
    struct timeval limit = {nanoseconds / 1000000000, nanoseconds % 1000000000 / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
}

static inline int rb_socket_error(int fd) {
    int error = 0;
    socklen_t size = sizeof error;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) ? errno : error;
}

static int rb_pipe(int *ends) {
    if (pipe(ends)) return -1;
    for (int i = 0; i < 2; i++) {
        rb_prepare_fd(ends[i]);
        rb_mark(ends[i]);
    }
    return 0;
}

/* What wakes a poll: a pipe, or on Linux one descriptor that is both of its ends. */
static int rb_waker(int *ends) {
#if defined(__linux__)
    ends[0] = ends[1] = rb_mark(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    return ends[0] < 0 ? -1 : 0;
#else
    return rb_pipe(ends);
#endif
}

static inline void rb_wake(int end) {
    uint64_t one = 1;
    if (write(end, &one, sizeof one) < 0) return; /* it is full, so it will wake anyway */
}

static inline void rb_woken(int end) {
    char drain[64];
    if (read(end, drain, sizeof drain) < 0) return;
}

static inline void rb_close_waker(int *ends) {
    if (ends[1] != ends[0]) rb_close(ends[1]);
    rb_close(ends[0]);
    ends[0] = ends[1] = -1;
}

/* What ends a poll at a time of our clock, also one that comes while the machine is suspended; -1 where the
 * system has no such thing. */
static int rb_timer(void) {
#if defined(__linux__)
    return rb_mark(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC));
#else
    return -1;
#endif
}

/* Set it, if it is not set to that already: `armed` says to what it is; INT64_MAX for no time at all. */
static void rb_set_timer(int fd, int64_t when, int64_t *armed) {
#if defined(__linux__)
    struct itimerspec at = {{0, 0}, {0, 0}};
    if (when != INT64_MAX) {
        when -= __atomic_load_n(&rb_clock_offset_ns, __ATOMIC_RELAXED);
        if (when <= 0) when = 1; /* zero would mean never */
        at.it_value.tv_sec = when / 1000000000;
        at.it_value.tv_nsec = when % 1000000000;
    }
    if (fd < 0 || when == *armed) return;
    if (timerfd_settime(fd, TFD_TIMER_ABSTIME, &at, NULL) == 0) *armed = when;
#else
    (void)fd, (void)when, (void)armed;
#endif
}

/* poll() with a limit as fine as the system has it; rounded up where that is milliseconds. */
static inline int rb_poll(struct pollfd *fds, int n, int64_t nanoseconds) {
#if defined(__linux__)
    struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    return ppoll(fds, (nfds_t)n, &limit, NULL);
#else
    return poll(fds, (nfds_t)n, (int)((nanoseconds + 999999) / 1000000));
#endif
}

/* ---- threads of our own: no signal is ever delivered to them ---- */

static int rb_thread(pthread_t *thread, void *(*body)(void *), void *argument, int detached) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 * 1024);
    if (detached) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &attributes, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* ---- fork: a generation that grows in every child ---- */

static int rb_generation = 1;
static void (*rb_child_hook)(void);

static void rb_in_child(void) {
    rb_close_all();
    rb_add(&rb_generation, 1);
    if (rb_child_hook) rb_child_hook();
}

static void rb_watch_forks(void (*hook)(void)) {
    rb_child_hook = hook;
    pthread_atfork(NULL, NULL, rb_in_child);
}

static inline void rb_mutex_init(pthread_mutex_t *mutex) { pthread_mutex_init(mutex, NULL); }

/* ---- a gate: one word that somebody may sleep on ---- */

#define RB_OPEN 1u /* beside it, the word counts how often all had to look again */

typedef struct {
    uint32_t word;
    int waiters;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t moved;
#endif
} rb_gate;

/* Nobody waits here, whatever it says. */
static inline void rb_gate_renew(rb_gate *gate) {
    gate->waiters = 0;
#if !defined(__linux__)
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_cond_init(&gate->moved, NULL);
#endif
}

static inline void rb_gate_init(rb_gate *gate) {
    gate->word = 0;
    rb_gate_renew(gate);
}

static inline uint32_t rb_gate_look(rb_gate *gate) { return __atomic_load_n(&gate->word, __ATOMIC_SEQ_CST); }

/* Take the wake, if there is one. */
static inline int rb_gate_take(rb_gate *gate) {
    if (!(rb_gate_look(gate) & RB_OPEN)) return 0;
    return __atomic_fetch_and(&gate->word, ~RB_OPEN, __ATOMIC_SEQ_CST) & RB_OPEN;
}

/* Sleep for so long, unless the word is another by now. May return for no reason. */
static void rb_gate_sleep(rb_gate *gate, uint32_t word, int64_t nanoseconds) {
    __atomic_fetch_add(&gate->waiters, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    struct timespec limit = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    syscall(SYS_futex, &gate->word, FUTEX_WAIT_PRIVATE, word, &limit, NULL, 0);
#else
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    nanoseconds += until.tv_nsec;
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    pthread_mutex_lock(&gate->mutex);
    if (rb_gate_look(gate) == word) pthread_cond_timedwait(&gate->moved, &gate->mutex, &until);
    pthread_mutex_unlock(&gate->mutex);
#endif
    __atomic_fetch_sub(&gate->waiters, 1, __ATOMIC_SEQ_CST);
}

/* Open it; says whether somebody has to be told. */
static inline int rb_gate_open(rb_gate *gate) {
    __atomic_fetch_or(&gate->word, RB_OPEN, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&gate->waiters, __ATOMIC_SEQ_CST) > 0;
}

/* Have all who sleep here look again. */
static inline void rb_gate_nudge(rb_gate *gate) { __atomic_fetch_add(&gate->word, 2, __ATOMIC_SEQ_CST); }

static void rb_gate_tell(rb_gate *gate, int how_many) {
#if defined(__linux__)
    syscall(SYS_futex, &gate->word, FUTEX_WAKE_PRIVATE, how_many, NULL, NULL, 0);
#else
    (void)how_many;
    pthread_mutex_lock(&gate->mutex); /* or it could fall between the look and the sleep of a waiter */
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->mutex);
#endif
}

/* Have all who sleep here look again, and wake them. */
static inline void rb_gate_rouse(rb_gate *gate) {
    rb_gate_nudge(gate);
    if (__atomic_load_n(&gate->waiters, __ATOMIC_SEQ_CST) > 0) rb_gate_tell(gate, INT_MAX);
}

/* ---- small things ---- */

static inline uint64_t rb_hash(const char *bytes, size_t size) { /* FNV-1a */
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (unsigned char)bytes[i]) * 1099511628211u;
    return hash ? hash : 1;
}

static inline uint32_t rb_random(void) { /* for jitter only; tokens come from the operating system */
    static __thread uint64_t state;
    if (!state) state = (uint64_t)rb_now_ns() ^ (uint64_t)(uintptr_t)&state;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static inline int rb_bits(uint64_t mask) { return __builtin_popcountll(mask); }

static inline void rb_hex(const unsigned char *bytes, int size, char *out) {
    for (int i = 0; i < size; i++) {
        out[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
    }
}

/* Decimal digits; returns how many. */
static inline int rb_digits(char *out, uint64_t value) {
    char reversed[20];
    int size = 0;
    do reversed[size++] = (char)('0' + value % 10);
    while (value /= 10);
    for (int i = 0; i < size; i++) out[i] = reversed[size - 1 - i];
    return size;
}

/* "$17\r\n", which goes before a word of 17 bytes; snprintf would take a tenth of packing a command. */
static inline int rb_length_line(char *out, size_t length) {
    out[0] = '$';
    int size = 1 + rb_digits(out + 1, length);
    out[size++] = '\r';
    out[size++] = '\n';
    return size;
}

static inline int rb_raise(void) { return -1; } /* lets an exception that is set already go on */

#endif
