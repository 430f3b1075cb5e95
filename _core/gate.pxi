# Gates: where a thread that waits in line sleeps until the one before it says that it is its turn.

import threading

cdef unsigned long main_thread = 0
cdef int main_generation = 0
cdef Linked* gates = NULL           # all of them, guarded by the GIL


cdef inline bint on_main_thread() except -1:
    """Whether this is the thread that runs signal handlers, and so has to look for them."""
    global main_thread, main_generation
    if main_generation != rb_generation:  # in a forked child it is the one that forked
        main_thread = threading.main_thread().ident
        main_generation = rb_generation
    return PyThread_get_thread_ident() == main_thread


cdef class Gate:
    """Where one thread sleeps until another wakes it, or until a time of the library's clock.

    A wake is kept until somebody waits; several at once count as one.
    """

    cdef Linked linked
    cdef int generation

    def __cinit__(self):
        global gates
        rb_gate_init(&self.linked.gate)
        self.generation = rb_generation
        self.linked.next = gates
        if gates != NULL:
            gates.previous = &self.linked
        gates = &self.linked

    def __dealloc__(self):
        global gates
        if self.linked.next != NULL:
            self.linked.next.previous = self.linked.previous
        if self.linked.previous != NULL:
            self.linked.previous.next = self.linked.next
        else:
            gates = self.linked.next

    def wait(self, int64_t until_ns):
        """Sleep until woken, and take the wake: True; or until the clock reads ``until_ns``: False."""
        cdef rb_gate* gate = &self.linked.gate
        cdef int64_t most_ns
        cdef bint woken
        self.renew()
        most_ns = SLICE_NS if on_main_thread() else LONGEST_SLEEP_NS
        while True:
            with nogil:
                woken = gate_wait(gate, until_ns, most_ns)
            if woken:
                return True
            if rb_now_ns() >= until_ns:
                return False
            if PyErr_CheckSignals() != 0:
                rb_raise()
            self.renew()

    def wake(self):
        """Have the `wait` that runs, or else the next one, return."""
        cdef rb_gate* gate = &self.linked.gate
        self.renew()
        if rb_gate_open(gate):
            # With two threads a baton passes in 6 us so, and in 20 with the GIL held, which the woken one then
            # has to sleep for again; with a hundred in 15 and 13.
            with nogil:
                rb_gate_tell(gate, 1)

    cdef void renew(self) noexcept:
        """In a forked child nobody of the parent waits here, though it may look so."""
        if self.generation != rb_generation:
            rb_gate_renew(&self.linked.gate)
            self.generation = rb_generation


cdef bint gate_wait(rb_gate* gate, int64_t until_ns, int64_t most_ns) noexcept nogil:
    """Sleep once. True takes the wake; False: it is late, or something else is to be looked at."""
    cdef uint32_t word = rb_gate_look(gate)  # before the clock: a nudge after it ends the sleep
    cdef int64_t left
    if rb_gate_take(gate):
        return True
    left = until_ns - rb_now_ns()
    if left <= 0:
        return False
    rb_gate_sleep(gate, word, min(left, most_ns))
    return rb_gate_take(gate)


cdef void nudge_gates() noexcept:
    """Have all who wait look at the clock again."""
    cdef Linked* one = gates
    while one != NULL:
        rb_gate_nudge(&one.gate)
        rb_gate_tell(&one.gate, 0x7FFFFFFF)
        one = one.next
