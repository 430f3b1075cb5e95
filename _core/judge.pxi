# The decisions of redbolt._judge in C; a test compares the two over every case.

cdef enum:
    OPEN = 0
    YES = 1
    NO = 2
    FAULT = 3

cdef enum:
    WAITING = -1
    UNDECIDED = 0
    GRANTED = 1
    REFUSED = 2


cdef inline int judge(int yes, int no, int still_open, int nodes, int quorum) noexcept nogil:
    if yes >= quorum:
        return GRANTED
    if no > nodes - quorum:
        return REFUSED
    if yes + still_open < quorum and no + still_open <= nodes - quorum:
        return UNDECIDED
    return WAITING


cdef inline int64_t validity_end(int64_t started_ns, int64_t lease_ms, int64_t drift_ns) noexcept nogil:
    return started_ns + lease_ms * 1_000_000 - drift_ns


cdef inline int64_t renewal_due(int64_t ends_ns, int64_t lease_ms) noexcept nogil:
    return ends_ns - lease_ms * 2_000_000 // 3


cdef inline int64_t renewed_life(
    int64_t now_ns, int64_t lease_ms, int64_t drift_ns, int64_t until_ns
) noexcept nogil:
    if until_ns - now_ns >= lease_ms * 1_000_000:  # the sum below could be too large for its type
        return lease_ms
    return min(lease_ms, (until_ns - now_ns + drift_ns) // 1_000_000)


cdef inline int64_t give_up(int64_t valid_until_ns, int64_t lease_ms, int64_t limit_ns) noexcept nogil:
    return valid_until_ns - min(limit_ns, lease_ms * 125_000)


cdef inline int64_t renewal_pause(int failures, int64_t lease_ms) noexcept nogil:
    cdef int64_t doubled = <int64_t>10_000_000 << min(failures, 10)
    return min(doubled, min(<int64_t>1_000_000_000, lease_ms * 100_000))


cdef inline bint falls_back_on(const char* text, size_t length) noexcept nogil:
    return (
        starts_with(text, length, b"NOSCRIPT") or starts_with(text, length, b"NOPERM")
        or starts_with(text, length, b"ERR unknown command") or starts_with(text, length, b"ERR syntax error")
        or starts_with(text, length, b"ERR wrong number of arg")
    )


cdef inline bint is_without_hello(const char* text, size_t length) noexcept nogil:
    return not (
        starts_with(text, length, b"WRONGPASS") or starts_with(text, length, b"DENIED")
        or starts_with(text, length, b"ERR max number of clients")
    )


cdef inline bint starts_with(const char* text, size_t length, const char* head) noexcept nogil:
    cdef size_t size = strlen(head)
    return length >= size and memcmp(text, head, size) == 0


cdef bint has_word(const char* text, size_t length, const char* word) noexcept nogil:
    cdef size_t size = strlen(word), at = 0
    while at + size <= length:
        if memcmp(text + at, word, size) == 0:
            return True
        at += 1
    return False


def verdict(int yes, int no, int still_open, int nodes, int quorum):
    """`redbolt._judge.verdict`, for the test that compares the two."""
    return judge(yes, no, still_open, nodes, quorum)


def validity_end_ns(int64_t started_ns, int64_t lease_ms, int64_t drift_ns):
    """`redbolt._judge.validity_end_ns`, for the test that compares the two."""
    return validity_end(started_ns, lease_ms, drift_ns)


def renewal_due_ns(int64_t ends_ns, int64_t lease_ms):
    """`redbolt._judge.renewal_due_ns`, for the test that compares the two."""
    return renewal_due(ends_ns, lease_ms)


def renewed_life_ms(int64_t now_ns, int64_t lease_ms, int64_t drift, int64_t until_ns):
    """`redbolt._judge.renewed_life_ms`, for the test that compares the two."""
    return renewed_life(now_ns, lease_ms, drift, until_ns)


def give_up_ns(int64_t valid_until_ns, int64_t lease_ms, int64_t limit_ns):
    """`redbolt._judge.give_up_ns`, for the test that compares the two."""
    return give_up(valid_until_ns, lease_ms, limit_ns)


def renewal_pause_ns(int failures, int64_t lease_ms):
    """`redbolt._judge.renewal_pause_ns`, for the test that compares the two."""
    return renewal_pause(failures, lease_ms)


def falls_back(bytes error not None):
    """`redbolt._judge.falls_back`, for the test that compares the two."""
    return bool(falls_back_on(error, len(error)))


def lacks_hello(bytes error not None):
    """`redbolt._judge.lacks_hello`, for the test that compares the two."""
    return bool(is_without_hello(error, len(error)))


def is_wrongtype(bytes error not None):
    """`redbolt._judge.is_wrongtype`, for the test that compares the two."""
    return bool(has_word(error, len(error), b"WRONGTYPE"))
