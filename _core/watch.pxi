# Watches: a channel of its own for a thread that waits, see `redbolt._engine.Watch`. Its connections speak RESP3,
# so that nodes can tell what has changed; the thread that waits reads that itself, without the GIL.

from cpython.exc cimport PyErr_SetFromErrno
from cython cimport no_gc


cdef struct Sleep:              # one call of wait
    Engine_* engine
    Channel* channel
    int64_t until_ns
    uint64_t mark               # of the key whose change is answered by a try
    int on_main                 # signals are looked for in between
    int64_t looked_ns           # when they were
    int64_t next_ns             # when something has to be done without an event
    int generation
    int interrupted
    int forked


cdef Watch new_watch(Engine engine, int kind):
    cdef Watch watch = Watch.__new__(Watch)
    cdef Engine_* e = engine.e
    cdef Channel* ch
    with nogil:
        ch = take_watch(e, kind)
    if ch == NULL:
        raise MemoryError()
    watch.engine = engine
    watch.e = e
    watch.ch = ch
    watch.generation = rb_generation
    return watch


cdef Channel* take_watch(Engine_* e, int kind) noexcept nogil:
    """An idle channel of this kind, without what it was told before, or a new one."""
    cdef Channel** stack = &e.idle_watch[kind - 1]
    cdef Channel* ch
    cdef int64_t now = rb_now_ns()
    pthread_mutex_lock(&e.mutex)
    ch = stack[0]
    if ch != NULL:
        stack[0] = ch.next_idle
        ch.next_idle = NULL
    else:
        ch = channel_new(e, kind)
        if ch != NULL:
            ch.next = e.all
            e.all = ch
    if ch != NULL:
        e.watches += 1
        ch.taken_at = e.closings
    pthread_mutex_unlock(&e.mutex)
    if ch != NULL:
        if now - ch.used_ns > STALE_NS:
            channel_catch_up(e, ch)
            ch.used_ns = now
        forget_told(ch)
        rb_take_flags(&ch.flags)
    return ch


cdef void leave_watch(Engine_* e, Channel* ch) noexcept nogil:
    """Keep the channel for the next watch, unless it would hear what that one did not subscribe to, or the engine
    was closed.
    """
    cdef int64_t due
    cdef uint64_t late
    cdef int i, taken_at = ch.taken_at
    for i in range(e.nodes):
        ask_for_nothing(&ch.conn[i])
    due = look_at_rest(e, ch, False, rb_now_ns(), SILENT_NS, &late)
    pthread_mutex_lock(&e.mutex)
    e.watches -= 1
    e.used_ns = ch.used_ns = rb_now_ns()
    if ch.subscribed or taken_at != e.closings:
        forget_channel(e, ch)
        channel_close(e, ch, b"closed")
        if taken_at != e.closings and not e.watches and e.used_at != e.closings:
            close_stack(e, &e.idle)  # which the agent has made meanwhile
    else:
        ch.late |= late
        ch.next_idle = e.idle_watch[ch.kind - 1]
        e.idle_watch[ch.kind - 1] = ch
        due = min(due, ch.used_ns + IDLE_NS)
    pthread_mutex_unlock(&e.mutex)
    if due != NEVER:
        agent_due(due)


cdef void ask_for_nothing(Conn* conn) noexcept nogil:
    """What is still answered here is no event for the next watch."""
    cdef uint32_t i
    pthread_mutex_lock(&conn.mutex)
    conn.wanted = 0
    for i in range(conn.slots):
        slot_at(conn, i).mark = 0
    pthread_mutex_unlock(&conn.mutex)


# ---- asking ----

cdef char* SUBSCRIBE = b"*2\r\n$9\r\nSUBSCRIBE\r\n"
cdef Bytes NO_TOPIC
memset(&NO_TOPIC, 0, sizeof(NO_TOPIC))


cdef bint put_life(
    Conn* conn, const Bytes* key, uint64_t mark, const Bytes* topic, int64_t limit_ns
) noexcept nogil:
    """Ask for the life of a key, after subscribing to the topic, if there is a new one. The mutex is held."""
    cdef Text text
    cdef Slot slot
    cdef Bytes[1] arg
    cdef char[24] head
    cdef uint64_t topic_mark
    cdef size_t subscribing = 0
    cdef bint done = True
    memset(&text, 0, sizeof(text))
    memset(&slot, 0, sizeof(slot))
    slot.sent_ns = rb_now_ns()
    slot.due_ns = slot.sent_ns + limit_ns
    if topic.length:
        topic_mark = rb_hash(topic.bytes, topic.length)
        if not knows_topic(conn, topic_mark):
            done = (
                text_add(&text, SUBSCRIBE, strlen(SUBSCRIBE))
                and text_add(&text, head, rb_length_line(head, topic.length))
                and text_add(&text, topic.bytes, topic.length)
                and text_add(&text, b"\r\n", 2)
            )
            subscribing = text.length
            slot.program = SUBSCRIPTION
            done = done and note_topic(conn, topic_mark) and conn_add(conn, subscribing, &slot)
    arg[0] = key[0]
    slot.program = <int8_t>ASK_LIFE
    slot.mark = mark
    if done and pack(&text, ASK_LIFE, 0, arg) and conn_add(conn, text.length - subscribing, &slot):
        conn_write(conn, text.bytes, text.length)
    elif done and subscribing:  # its slot is there already
        conn_write(conn, text.bytes, subscribing)
        done = False
    else:
        done = False
    text_free(&text)
    return done


cdef void arm_node(
    Engine_* e, Channel* ch, int i, const Bytes* key, uint64_t mark, const Bytes* topic, int64_t limit_ns
) noexcept nogil:
    cdef NodeState* node = e.node[i]
    cdef Conn* conn = &ch.conn[i]
    pthread_mutex_lock(&conn.mutex)
    if conn.state == CLOSED and lacks_way(node, ch.kind):
        tell(ch, LOST, i, 0, 1)
    elif node.suspect:
        tell(ch, LOST, i, 0, 0)
    elif conn.state == READY:
        if topic.length:
            ch.subscribed = 1
        if not put_life(conn, key, mark, topic, limit_ns):
            tell(ch, LOST, i, 0, 0)
    elif conn.state == CLOSED and node.next_connect_ns > rb_now_ns():
        tell(ch, LOST, i, 0, 0)
    else:
        conn.wanted = 1
        if conn.state == CLOSED:
            conn_open(e, ch, conn, limit_ns)
    pthread_mutex_unlock(&conn.mutex)


# ---- waiting ----

cdef void sleep_on(Sleep* s) noexcept nogil:
    """Read what comes until there is an event, somebody pokes, or it is time."""
    cdef Engine_* e = s.engine
    cdef Channel* ch = s.channel
    cdef pollfd[MOST_NODES + 1] fds
    cdef int[MOST_NODES] place
    cdef int64_t[MOST_NODES] quiet_ns  # since when nothing more has come from a node
    cdef int64_t now
    cdef uint64_t late = 0
    cdef bint looked = False
    cdef int i, n, got
    cdef short events
    memset(quiet_ns, 0, sizeof(quiet_ns))
    s.looked_ns = rb_now_ns()
    while True:
        if rb_take_flags(&ch.flags) & POKED or ch.tolds:
            break
        now = rb_now_ns()
        s.next_ns = min(s.until_ns, now + (SLICE_NS if s.on_main else LONGEST_SLEEP_NS))
        fds[0].fd = ch.waker[0]
        fds[0].events = POLLIN
        fds[0].revents = 0
        n = 1
        for i in range(e.nodes):
            place[i] = 0
            if ch.conn[i].state == CLOSED:
                continue
            pthread_mutex_lock(&ch.conn[i].mutex)
            look_at_limits(s, &ch.conn[i], now, quiet_ns[i])
            events = conn_interest(&ch.conn[i])
            if events:
                fds[n].fd = ch.conn[i].fd
                fds[n].events = events
                fds[n].revents = 0
                place[i] = n
                n += 1
            pthread_mutex_unlock(&ch.conn[i].mutex)
        if ch.tolds or (looked and now >= s.until_ns):  # what is there is told, also where the time is over
            break
        rb_store_now(&ch.sleeps, 1)
        got = -1
        if rb_load_now(&ch.flags) == 0:
            got = rb_poll(fds, n, max(0, s.next_ns - now))
            looked = True
        rb_store_now(&ch.sleeps, 0)
        if got > 0 and fds[0].revents:
            rb_woken(ch.waker[0])
        for i in range(e.nodes):
            events = fds[place[i]].revents if place[i] and got > 0 else 0
            quiet_ns[i] = 0 if events or got < 0 else now
            if events or CLOSED < ch.conn[i].state < HANDSHAKE:
                late |= advance_one(e, ch, &ch.conn[i], events)
        ch.used_ns = rb_now_ns()
        if s.on_main and (got < 0 or ch.used_ns - s.looked_ns >= SLICE_NS):
            look_for_signals_asleep(s)
            if s.interrupted or s.forked:
                break
    if s.forked:  # this is a child now, and the channel is the parent's
        return
    rb_store64(&e.used_ns, rb_now_ns())
    if late:
        pthread_mutex_lock(&e.mutex)
        ch.late |= late
        pthread_mutex_unlock(&e.mutex)


cdef uint64_t advance_one(Engine_* e, Channel* ch, Conn* conn, short events) noexcept nogil:
    """Go on with one connection; gives the tokens of the deletes that it took over when it became ready."""
    cdef uint64_t late = 0
    cdef int before = conn.state
    pthread_mutex_lock(&conn.mutex)
    conn_advance(e, ch, conn, events, NULL)
    if before < READY and conn.state == READY:
        late = late_tags(conn)
    pthread_mutex_unlock(&conn.mutex)
    return late


cdef void look_at_limits(Sleep* s, Conn* conn, int64_t now, int64_t quiet_ns) noexcept nogil:
    """Give up connecting where that takes too long, and tell of a node that leaves a reply open. The mutex is
    held.

    The thread may not have listened for long: a node is late if nothing is there that could be read.
    """
    cdef NodeState* node = s.engine.node[conn.node]
    cdef char[CAUSE] cause
    cdef Slot* oldest
    cdef int64_t due
    cdef long long silent_ms
    if conn.state < READY:
        due = conn.opened_ns + conn.limit_ns
        if now >= due and quiet_ns < due:
            s.next_ns = now
            return
        if now >= due:
            snprintf(cause, sizeof(cause), b"no connection within %lld ms", <long long>(conn.limit_ns // MS))
            node_suspect(node, cause)
            conn_fail(s.engine, s.channel, conn, cause, conn.state < HANDSHAKE)
            agent_due(now)
            return
        if node.connect_ns and conn.state < HANDSHAKE:
            due = min(due, conn.opened_ns + node.connect_ns)
            if now >= due and quiet_ns < due:
                s.next_ns = now
                return
            if now >= due:
                snprintf(cause, sizeof(cause), b"no connection within %lld ms", <long long>(node.connect_ns // MS))
                conn_fail(s.engine, s.channel, conn, cause, True)
                return
        if conn.state < HANDSHAKE and conn.fd < 0:  # waits for a name, or for room in a socket's backlog
            due = min(due, now + MS)
        s.next_ns = min(s.next_ns, due)
        return
    if conn.slots == 0:
        return
    oldest = slot_at(conn, 0)
    if now < oldest.due_ns:
        s.next_ns = min(s.next_ns, oldest.due_ns)
        return
    if quiet_ns < oldest.due_ns:
        s.next_ns = now
        return
    silent_ms = (oldest.due_ns - oldest.sent_ns) // MS
    snprintf(cause, sizeof(cause), b"no answer within %lld ms", silent_ms)
    if not conn.silent:
        node_suspect(node, cause)
        tell(s.channel, LOST, conn.node, 0, 0)
        conn.silent = 1
        agent_due(now)
    due = oldest.sent_ns + max(SILENT_NS, 4 * (oldest.due_ns - oldest.sent_ns))
    if now >= due:
        conn_fail(s.engine, s.channel, conn, cause, False)
    else:
        s.next_ns = min(s.next_ns, due)


cdef void look_for_signals_asleep(Sleep* s) noexcept nogil:
    with gil:
        if PyErr_CheckSignals() != 0:
            s.interrupted = 1  # the exception stays set until the call returns
    if rb_load(&rb_generation) != s.generation:
        s.forked = 1
    s.looked_ns = rb_now_ns()


@no_gc  # it is part of no cycle, and its end needs the engine
cdef class Watch:
    """A channel of its own for somebody who waits; see `redbolt._engine.Watch`."""

    cdef Engine engine
    cdef Engine_* e
    cdef Channel* ch            # NULL: closed
    cdef int generation
    cdef bint busy, ends

    def __dealloc__(self):
        self.end()

    cdef int begin(self) except -1:
        """Only one call at a time, and none in a forked child."""
        if self.ch == NULL:
            raise RuntimeError("the watch is closed")
        if self.generation != rb_generation:
            raise RuntimeError("the watch belongs to the parent of this process")
        if self.busy:
            raise RuntimeError("somebody else uses the watch")
        self.busy = True
        return 0

    cdef void finish(self) noexcept:
        self.busy = False
        if self.ends:
            self.end()

    cdef void end(self) noexcept:
        cdef Channel* ch = self.ch
        cdef Engine_* e = self.e
        self.ch = NULL
        if ch != NULL and self.generation == rb_generation:
            with nogil:
                leave_watch(e, ch)

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
        """As `Engine.attempt`, on this channel; and each node is asked for the life of the key."""
        cdef Round r
        self.begin()
        try:
            memset(&r, 0, sizeof(r))
            r.engine = self.e
            r.channel = self.ch
            r.mark = rb_hash(key, len(key))
            r.asked = <uint64_t>nodes
            run_try(&r, votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra)
        finally:
            self.finish()
        return votes.verdict == GRANTED

    def arm(self, bytes key not None, int64_t nodes, int64_t limit_ns, bytes topic not None=b""):
        """Ask nodes how long a key lives; wait for nobody."""
        cdef Bytes key_bytes, topic_bytes
        cdef uint64_t mark
        cdef int i
        if len(key) > longest or len(topic) > longest:
            raise ValueError(f"a key or topic has at most {longest} bytes")
        self.begin()
        key_bytes.bytes = key
        key_bytes.length = len(key)
        topic_bytes.bytes = topic
        topic_bytes.length = len(topic)
        with nogil:
            mark = rb_hash(key_bytes.bytes, key_bytes.length)
            for i in range(self.e.nodes):
                if <uint64_t>nodes >> i & 1:
                    arm_node(self.e, self.ch, i, &key_bytes, mark, &topic_bytes, limit_ns)
        self.finish()

    def wait(self, int64_t until_ns, tuple attempt=None):
        """Wait for events, for somebody who pokes, or until the clock reads ``until_ns``; with an ``attempt`` make
        it as soon as its key has changed.
        """
        cdef Sleep s
        cdef Round r
        cdef char[24] digits
        cdef Votes votes = None
        cdef bint tried = False
        cdef list events
        self.begin()
        try:
            memset(&s, 0, sizeof(s))
            if attempt is not None:
                memset(&r, 0, sizeof(r))
                votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra, nodes = attempt
                r.engine = self.e
                s.mark = rb_hash(<bytes?>key, len(key))
                if self.e.nodes == 1:
                    r.channel = self.ch
                    r.mark = s.mark
                r.asked = <uint64_t><int64_t>nodes
                prepare_try(
                    &r, digits, votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra
                )
            s.engine = self.e
            s.channel = self.ch
            s.until_ns = until_ns
            s.generation = rb_generation
            s.on_main = on_main_thread()
            if self.ch.waker[0] < 0 and rb_waker(self.ch.waker) != 0:
                PyErr_SetFromErrno(OSError)
            if s.on_main and PyErr_CheckSignals() != 0:
                rb_raise()
            if rb_generation != s.generation:
                s.forked = 1
            else:
                with nogil:
                    sleep_on(&s)
                    if not (s.interrupted or s.forked) and votes is not None and has_changed(&s, r.asked):
                        tried = True
                        run_round(&r)
            if tried:
                votes.valid_until_ns = r.started_ns + r.valid_ns
                votes.fill(&r)
            if s.interrupted:
                rb_raise()
            if s.forked:
                raise RuntimeError("the process was forked by a signal handler in the middle of a wait")
            events = take_told(self.ch)
        finally:
            self.finish()
        return events

    def poke(self):
        """Have the `wait` that runs, or else the next one, return at once."""
        if self.ch != NULL and self.generation == rb_generation:
            rouse(self.ch, POKED)

    def close(self):
        """End its use."""
        if self.busy and self.generation == rb_generation:
            self.ends = True
            self.poke()
        else:
            self.end()


cdef bint has_changed(Sleep* s, uint64_t asked) noexcept nogil:
    """Whether a node that a try will ask has told that its key has changed."""
    cdef Channel* ch = s.channel
    cdef Told* told
    cdef int i
    for i in range(ch.tolds):
        told = &ch.told[(ch.first_told + i) % MOST_TOLD]
        if told.what == CHANGED and asked >> told.node & 1 and (told.mark == 0 or told.mark == s.mark):
            return True
    return False


cdef list take_told(Channel* ch):
    cdef list events = []
    cdef Told* told
    while ch.tolds:
        told = &ch.told[ch.first_told]
        events.append((told.what, told.node, told.mark, told.value))
        ch.first_told = (ch.first_told + 1) % MOST_TOLD
        ch.tolds -= 1
    return events
