# The Python face of the core: Engine and Votes, as `redbolt._engine` describes them.

import atexit

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from redbolt import _clock
from redbolt._engine import MAX_KEY, common_order

cdef Py_ssize_t longest = MAX_KEY
cdef int64_t DELETE_LIFE_NS = 60_000_000_000
cdef int64_t ENDLESS_NS = 86_400_000_000_000    # so long the undo of a key without an end is remembered
cdef unsigned char[256] entropy
cdef int entropy_used = 256
cdef int entropy_generation = 0


cdef bytes fresh_token():
    """128 random bits from the operating system in hexadecimal; the buffer does not survive a fork."""
    cdef bytes token = PyBytes_FromStringAndSize(NULL, 32)
    global entropy_used, entropy_generation
    if entropy_used + 16 > 256 or entropy_generation != rb_generation:
        if getentropy(entropy, 256) != 0:
            raise OSError("the operating system gives no random bytes")
        entropy_used = 0
        entropy_generation = rb_generation
    rb_hex(&entropy[entropy_used], 16, PyBytes_AS_STRING(token))
    entropy_used += 16
    return token


cdef class Votes:
    """What one round came to; see `redbolt._engine.Votes`."""

    cdef readonly int verdict, yes, no, hits
    cdef readonly bytes token
    cdef readonly int64_t started_ns, ended_ns, valid_until_ns, touched
    cdef int nodes
    cdef bint too_late
    cdef uint8_t[MOST_NODES] vote
    cdef char* causes

    def __cinit__(self):
        self.token = b""

    def __dealloc__(self):
        free(self.causes)

    def outcomes(self):
        """Per node: OPEN, YES, NO or FAULT, and the cause of a fault or the text of a reply."""
        cdef int i
        cdef bytes cause
        told = []
        for i in range(self.nodes):
            cause = b"" if self.causes == NULL else self.causes + i * CAUSE
            if self.too_late and self.vote[i] == YES:
                told.append((FAULT, "granted, but so late that no validity was left"))
            else:
                told.append((<int>self.vote[i], cause.decode("utf-8", "replace")))
        return told

    cdef int fill(self, Round* r) except -1:
        """Take over the result; raise what a signal handler raised meanwhile."""
        self.yes = r.yes
        self.no = r.no
        self.hits = r.hits
        self.touched = <int64_t>r.reached
        self.started_ns = r.started_ns
        self.ended_ns = r.ended_ns
        self.nodes = r.engine.nodes
        self.too_late = r.too_late
        memcpy(self.vote, r.vote, sizeof(self.vote))
        free(self.causes)
        self.causes = r.causes
        if r.interrupted:
            rb_raise()
        if r.forked:
            raise RuntimeError("the process was forked by a signal handler in the middle of a round")
        self.verdict = r.verdict
        return 0


cdef class Engine:
    """Rounds on a fixed tuple of nodes; see `redbolt._engine.Engine`."""

    cdef object __weakref__
    cdef Engine_* e
    cdef int generation
    cdef readonly tuple nodes
    cdef readonly str kind

    def __cinit__(self, tuple nodes not None):
        if not 0 < len(nodes) <= MOST_NODES:
            raise ValueError(f"an engine has from 1 to {MOST_NODES} nodes, not {len(nodes)}")
        self.nodes = nodes
        self.kind = "native"
        self.set_up()

    cdef int set_up(self) except -1:
        """Make all of its data; after a fork, anew."""
        cdef Engine_* e = engine_new(<int>len(self.nodes))
        cdef int i
        if e == NULL:
            raise MemoryError()
        for i, node in enumerate(self.nodes):
            e.node[i] = node_new(node)
        for i, place in enumerate(reversed(common_order(self.nodes))):
            e.order[i] = place
        self.e = e
        self.generation = rb_generation
        with nogil:
            pthread_mutex_lock(&agent_mutex)
            enlist(e)
            pthread_mutex_unlock(&agent_mutex)
        return 0

    def __dealloc__(self):
        cdef int i
        if self.e == NULL or self.generation != rb_generation:
            return
        with nogil:
            pthread_mutex_lock(&agent_mutex)
            delist(self.e)
            end_keeper(self.e)
            pthread_mutex_unlock(&agent_mutex)
            close_idle(self.e)
            for i in range(self.e.nodes):
                node_free(self.e.node[i])
            free(self.e.node)
            free(self.e)

    def votes(self):
        """An empty result."""
        return Votes.__new__(Votes)

    def attempt(
        self,
        Votes votes not None,
        bytes key not None,
        bytes token,
        int64_t lease_ms,
        int quorum,
        int64_t drift_ns,
        int64_t limit_ns,
        program=None,
        tuple extra not None=(),
        int64_t nodes=-1,
    ):
        """Try once to take a lock, and undo what was done if it was not granted."""
        cdef Round r
        if self.generation != rb_generation:
            self.set_up()
        memset(&r, 0, sizeof(r))
        r.engine = self.e
        r.asked = <uint64_t>nodes
        run_try(&r, votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra)
        return votes.verdict == GRANTED

    def round(
        self,
        Votes votes not None,
        program,
        bytes key not None,
        tuple args not None,
        int quorum,
        int64_t limit_ns,
        int64_t touched=-1,
    ):
        """Ask the nodes to run ``program``."""
        cdef Round r
        if self.generation != rb_generation:
            self.set_up()
        memset(&r, 0, sizeof(r))
        r.program = program.index
        votes.verdict = UNDECIDED
        set_argument(&r, key)
        for argument in args:
            set_argument(&r, argument)
        check_words(&r)
        if program.writes:
            votes.token = args[0]
            r.tag = rb_hash(r.arg[1].bytes, r.arg[1].length)
        r.undo_life_ns = DELETE_LIFE_NS
        r.engine = self.e
        r.asked = <uint64_t>-1
        r.touched = <uint64_t>touched
        run_and_wait(&r, quorum, limit_ns)
        votes.fill(&r)

    def discard(
        self,
        bytes key not None,
        bytes token not None,
        int64_t touched=-1,
        program=None,
        tuple extra not None=(),
    ):
        """Queue a token-checked delete, and wait for nobody."""
        self.queue(DROP if program is None else program.index, key, (token, *extra), touched, False)

    def post(self, program, bytes key not None, tuple args not None, int64_t touched=-1):
        """Have a program go along with the next command to each ready node, or a little later alone."""
        self.queue(program.index, key, args, touched, True)

    cdef int queue(self, int program, bytes key, tuple args, int64_t touched, bint held) except -1:
        cdef Round r
        if self.generation != rb_generation:
            self.set_up()
        memset(&r, 0, sizeof(r))
        set_argument(&r, key)
        for argument in args:
            set_argument(&r, argument)
        r.program = program
        check_words(&r)
        if prog[program].writes:
            r.tag = rb_hash(r.arg[1].bytes, r.arg[1].length)
        r.undo_life_ns = DELETE_LIFE_NS
        r.held = held
        r.engine = self.e
        r.quorum = 1
        r.limit_ns = 1000 * MS
        r.asked = <uint64_t>-1
        r.touched = <uint64_t>touched
        with nogil:
            run_round(&r)
        free(r.causes)
        return 0

    def renew(
        self,
        bytes key not None,
        bytes token not None,
        int64_t touched,
        int64_t lease_ms,
        int quorum,
        int64_t drift_ns,
        int64_t limit_ns,
        int64_t started_ns,
        int64_t valid_until_ns,
        int64_t until_ns,
        program=_programs.EXTEND,
        back=_programs.TAKE,
        Gate gate=None,
    ):
        """Have the agent look after a lease that was just granted."""
        cdef Kept* k
        if self.generation != rb_generation:
            self.set_up()
        k = new_kept(self.e, key, token, program, back)
        k.touched = <uint64_t>touched
        k.lease_ms = k.length_ms = lease_ms
        k.quorum = quorum
        k.drift_ns = drift_ns
        k.limit_ns = limit_ns
        k.started_ns = started_ns
        k.valid_until_ns = valid_until_ns
        k.until_ns = until_ns
        return new_renewal(self, k, gate)

    def pending(self, bytes token not None):
        """Say whether some write of this token was not answered yet and may still be executed."""
        cdef uint64_t tag = rb_hash(token, len(token))
        cdef bint found
        if self.generation != rb_generation:
            return False
        with nogil:
            found = is_pending(self.e, tag)
        return found

    def absent(self):
        """A bit for each node that is suspect, or whose next connect has to wait."""
        cdef uint64_t away = 0
        cdef int64_t now = rb_now_ns()
        cdef int i
        if self.generation != rb_generation:
            return 0
        for i in range(self.e.nodes):
            if self.e.node[i].suspect or self.e.node[i].next_connect_ns > now:
                away |= (<uint64_t>1) << i
        return away

    def mark(self, bytes key not None):
        """What the events of a watch call a key; never 0."""
        return rb_hash(key, len(key))

    def gate(self):
        """A new gate."""
        return Gate.__new__(Gate)

    def watch(self, bint tracking=True):
        """A channel to wait on."""
        if self.generation != rb_generation:
            self.set_up()
        return new_watch(self, TRACKING_WATCH if tracking else PLAIN_WATCH)

    def close(self):
        """Retire the connections of all idle channels, also of those that watches have left."""
        if self.generation == rb_generation:
            with nogil:
                close_idle(self.e)


cdef int run_try(
    Round* r, Votes votes, bytes key, bytes token, int64_t lease_ms, int quorum, int64_t drift_ns,
    int64_t limit_ns, program, tuple extra,
) except -1:  # fmt: skip
    """One try, of which the engine and the nodes to ask are set; fills the votes."""
    cdef char[24] digits
    prepare_try(r, digits, votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra)
    if PyErr_CheckSignals() != 0:  # before anything is sent
        rb_raise()
    with nogil:
        run_round(r)
    votes.valid_until_ns = r.started_ns + r.valid_ns
    votes.fill(r)
    return 0


cdef int prepare_try(
    Round* r, char* digits, Votes votes, bytes key, bytes token, int64_t lease_ms, int quorum,
    int64_t drift_ns, int64_t limit_ns, program, tuple extra,
) except -1:  # fmt: skip
    """Have all that a try is made of; ``digits`` has room for the lease, and lives as long as the round."""
    votes.verdict = UNDECIDED
    if token is None:
        token = fresh_token()
        r.fresh = True
    votes.token = token
    set_argument(r, key)
    set_argument(r, token)
    for argument in extra:
        set_argument(r, argument)
    if lease_ms:
        if r.args == MOST_ARGS:
            raise ValueError("a program has too many arguments")
        r.arg[r.args].bytes = digits
        r.arg[r.args].length = rb_digits(digits, <uint64_t>lease_ms)
        r.args += 1
        r.valid_ns = validity_end(0, lease_ms, drift_ns)
        r.undo_life_ns = lease_ms * MS
    else:
        r.valid_ns = NEVER >> 1
        r.undo_life_ns = ENDLESS_NS
    r.program = TAKE if program is None else program.index
    check_words(r)
    r.tag = rb_hash(r.arg[1].bytes, r.arg[1].length)
    r.touched = <uint64_t>-1
    r.quorum = quorum
    r.limit_ns = limit_ns
    r.waits = True
    return 0


cdef int run_and_wait(Round* r, int quorum, int64_t limit_ns) except -1:
    r.quorum = quorum
    r.limit_ns = limit_ns
    r.waits = True
    if PyErr_CheckSignals() != 0:  # before anything is sent
        rb_raise()
    with nogil:
        run_round(r)
    return 0


cdef int set_argument(Round* r, bytes argument) except -1:
    if argument is None:
        raise TypeError("the words of a command are bytes")
    if r.args == MOST_ARGS:
        raise ValueError("a program has too many arguments")
    if PyBytes_GET_SIZE(argument) > longest:
        raise ValueError(f"a key or token has at most {longest} bytes, not {len(argument)}")
    r.arg[r.args].bytes = PyBytes_AS_STRING(argument)
    r.arg[r.args].length = PyBytes_GET_SIZE(argument)
    r.args += 1
    return 0


cdef int check_words(Round* r) except -1:
    """What the forms of a program ask for has to be there."""
    if r.args < prog[r.program].words:
        raise ValueError(f"the program lacks words: it needs {prog[r.program].words}, not {r.args}")
    return 0


cdef void enlist(Engine_* e) noexcept nogil:
    global agent_engines
    e.next = agent_engines
    agent_engines = e


cdef void delist(Engine_* e) noexcept nogil:
    cdef Engine_** link = &agent_engines
    while link[0] != NULL and link[0] != e:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = e.next


cdef void close_idle(Engine_* e) noexcept nogil:
    cdef int i
    cdef bint keeps
    pthread_mutex_lock(&e.mutex)
    e.closings += 1
    close_stack(e, &e.idle)
    for i in range(2):
        close_stack(e, &e.idle_watch[i])
    keeps = e.keeper != NULL
    pthread_mutex_unlock(&e.mutex)
    if keeps:  # its connections are the agent's to close
        agent_wake()


cdef void close_stack(Engine_* e, Channel** stack) noexcept nogil:
    cdef Channel* ch
    while stack[0] != NULL:
        ch = stack[0]
        stack[0] = ch.next_idle
        forget_channel(e, ch)
        channel_close(e, ch, b"closed")


cdef bint is_pending(Engine_* e, uint64_t tag) noexcept nogil:
    """Look for the token on all connections, among the deletes owed, and on what is being retired."""
    cdef Channel* ch
    cdef Retired* one
    cdef bint found = False
    cdef int i, k
    pthread_mutex_lock(&agent_mutex)
    pthread_mutex_lock(&e.mutex)
    look_for_answers(e, e.idle, tag)
    for i in range(2):
        look_for_answers(e, e.idle_watch[i], tag)
    ch = e.all
    while ch != NULL and not found:
        found = channel_has_tag(e, ch, tag)
        ch = ch.next
    pthread_mutex_unlock(&e.mutex)
    for i in range(e.nodes):
        pthread_mutex_lock(&e.node[i].mutex)
        node_expire_orphans(e.node[i], rb_now_ns())
        for k in range(e.node[i].orphans):
            found = found or e.node[i].orphan[k].tag == tag
        pthread_mutex_unlock(&e.node[i].mutex)
    take_retired()
    one = agent_retired
    while one != NULL and not found:
        for k in range(one.orphans):
            found = found or one.orphan[k].tag == tag
        one = one.next
    pthread_mutex_unlock(&agent_mutex)
    return found


cdef void look_for_answers(Engine_* e, Channel* ch, uint64_t tag) noexcept nogil:
    """The answer may be there already, on one of these idle channels. The engine's mutex is held."""
    while ch != NULL:
        if channel_has_tag(e, ch, tag):
            channel_catch_up(e, ch)
        ch = ch.next_idle


def _offset_moved(offset_ns):
    set_clock_offset_ns(offset_ns)


_clock.on_offset(_offset_moved)
atexit.register(stop_agent)
