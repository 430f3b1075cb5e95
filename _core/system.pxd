# Declares what portable.h and the C library give.
from libc.stdint cimport int64_t, uint64_t, uint32_t

cdef extern from "portable.h" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_join(pthread_t, void**)
    void rb_mutex_init(pthread_mutex_t*)

    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd*, unsigned long, int)
    enum: POLLIN, POLLOUT

    enum: EINTR, EAGAIN, EINPROGRESS
    int errno
    char* strerror(int)
    enum: AF_UNIX, AF_UNSPEC, SOCK_STREAM, AI_NUMERICHOST, AI_NUMERICSERV, SHUT_WR, MSG_NOSIGNAL, MSG_DONTWAIT
    ctypedef unsigned int socklen_t
    struct sockaddr:
        pass
    struct sockaddr_storage:
        int ss_family
    struct sockaddr_un:
        int sun_family
        char sun_path[108]
    struct addrinfo:
        int ai_flags
        int ai_family
        int ai_socktype
        socklen_t ai_addrlen
        sockaddr* ai_addr
        addrinfo* ai_next
    int getaddrinfo(const char*, const char*, const addrinfo*, addrinfo**)
    void freeaddrinfo(addrinfo*)
    const char* gai_strerror(int)
    int connect(int, const sockaddr*, socklen_t)
    ssize_t send(int, const void*, size_t, int)
    ssize_t recv(int, void*, size_t, int)
    int shutdown(int, int)
    ssize_t read(int, void*, size_t)
    ssize_t write(int, const void*, size_t)
    int getentropy(void*, size_t)

    int64_t rb_now_ns()
    void rb_set_clock_offset_ns(int64_t)
    int rb_add(int*, int)
    int rb_load(int*)
    void rb_store(int*, int)
    int64_t rb_load64(int64_t*)
    void rb_store64(int64_t*, int64_t)
    uint64_t rb_next(uint64_t*)
    void rb_set_flag(int*, int)
    int rb_take_flags(int*)
    int rb_load_now(int*)
    void rb_store_now(int*, int)
    void rb_close(int)
    int rb_socket(int)
    void rb_no_delay(int)
    void rb_wait_for(int, int64_t)
    int rb_socket_error(int)
    int rb_pipe(int*)
    int rb_waker(int*)
    void rb_wake(int)
    void rb_woken(int)
    void rb_close_waker(int*)
    int rb_poll(pollfd*, int, int64_t)
    int rb_timer()
    void rb_set_timer(int, int64_t, int64_t*)
    int sched_yield()
    int rb_thread(pthread_t*, void* (*)(void*) noexcept nogil, void*, int)
    int rb_generation
    void rb_watch_forks(void (*)() noexcept nogil)
    uint64_t rb_hash(const char*, size_t)
    ctypedef struct rb_gate:
        pass
    void rb_gate_init(rb_gate*)
    void rb_gate_renew(rb_gate*)
    uint32_t rb_gate_look(rb_gate*)
    int rb_gate_take(rb_gate*)
    void rb_gate_sleep(rb_gate*, uint32_t, int64_t)
    int rb_gate_open(rb_gate*)
    void rb_gate_nudge(rb_gate*)
    void rb_gate_rouse(rb_gate*)
    void rb_gate_tell(rb_gate*, int)
    uint32_t rb_random()
    int rb_bits(uint64_t)
    int rb_digits(char*, uint64_t)
    int rb_length_line(char*, size_t)
    void rb_hex(const unsigned char*, int, char*)

cdef extern from "portable.h":
    int rb_raise() except -1

cdef extern from "Python.h":
    int PyErr_CheckSignals()
    unsigned long PyThread_get_thread_ident()
