# What a watch is told: events are kept in its channel, in the order in which they came, until it fetches them.

from redbolt import _engine

cdef enum:              # kinds of channels
    ORDINARY = 0
    PLAIN_WATCH = 1
    TRACKING_WATCH = 2

cdef enum:              # flags of a channel
    POKED = 1           # its wait is to return
    LOOK_AGAIN = 2      # it is to look at the clock and its connections again

cdef enum:
    MOST_TOLD = 256     # more than twice the nodes: see `squeeze`

cdef int CHANGED = _engine.CHANGED
cdef int LIFE_TOLD = _engine.LIFE_TOLD
cdef int LOST = _engine.LOST
cdef int READY_TOLD = _engine.READY


cdef void tell(Channel* ch, int what, int node, uint64_t mark, int64_t value) noexcept nogil:
    """Keep an event. The caller is the channel's owner."""
    cdef Told* told
    if ch.tolds == MOST_TOLD:
        squeeze(ch)
    told = &ch.told[(ch.first_told + ch.tolds) % MOST_TOLD]
    told.what = what
    told.node = node
    told.mark = mark
    told.value = value
    ch.tolds += 1


cdef void squeeze(Channel* ch) noexcept nogil:
    """Make room: of each node only the last word on its connection is kept, and that something has changed."""
    cdef Told[2 * MOST_NODES] kept
    cdef int8_t[MOST_NODES] last, changed
    cdef Told* told
    cdef int i, n = 0
    memset(last, -1, sizeof(last))
    memset(changed, 0, sizeof(changed))
    for i in range(ch.tolds):
        told = &ch.told[(ch.first_told + i) % MOST_TOLD]
        if told.what == CHANGED or told.what == LIFE_TOLD:
            changed[told.node] = 1
            continue
        if last[told.node] < 0:
            last[told.node] = <int8_t>n
            n += 1
        kept[last[told.node]] = told[0]
    ch.first_told = ch.tolds = 0
    for i in range(n):
        ch.told[i] = kept[i]
    ch.tolds = n
    for i in range(MOST_NODES):
        if changed[i]:
            tell(ch, CHANGED, i, 0, 0)


cdef inline void forget_told(Channel* ch) noexcept nogil:
    ch.first_told = ch.tolds = 0


cdef inline bint lacks_way(const NodeState* node, int kind) noexcept nogil:
    """Whether the node does not know or permit connections of this kind."""
    return kind != ORDINARY and (node.no_push or (node.no_tracking and kind == TRACKING_WATCH))


cdef void rouse(Channel* ch, int why) noexcept nogil:
    """Wake who waits on this channel. Nobody may close it meanwhile."""
    rb_set_flag(&ch.flags, why)
    if rb_load_now(&ch.sleeps):
        rb_wake(ch.waker[1])


cdef void rouse_all() noexcept nogil:
    """The clock was moved: have all who wait look at it."""
    cdef Engine_* e
    cdef Channel* ch
    pthread_mutex_lock(&agent_mutex)
    e = agent_engines
    while e != NULL:
        pthread_mutex_lock(&e.mutex)
        ch = e.all
        while ch != NULL:
            if ch.kind:
                rouse(ch, LOOK_AGAIN)
            ch = ch.next
        pthread_mutex_unlock(&e.mutex)
        e = e.next
    pthread_mutex_unlock(&agent_mutex)


cdef bint knows_topic(Conn* conn, uint64_t topic) noexcept nogil:
    cdef int i
    for i in range(conn.topics):
        if conn.topic[i] == topic:
            return True
    return False


cdef bint note_topic(Conn* conn, uint64_t topic) noexcept nogil:
    cdef uint64_t* grown
    if conn.topics == conn.topic_room:
        grown = <uint64_t*>realloc(conn.topic, (4 + 2 * conn.topic_room) * sizeof(uint64_t))
        if grown == NULL:
            return False
        conn.topic = grown
        conn.topic_room = 4 + 2 * conn.topic_room
    conn.topic[conn.topics] = topic
    conn.topics += 1
    return True
