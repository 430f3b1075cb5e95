# Channels: one connection to each node of an engine, used by one thread for one round at a time.


cdef Engine_* engine_new(int nodes) noexcept nogil:
    cdef Engine_* e = <Engine_*>calloc(1, sizeof(Engine_))
    if e == NULL:
        return NULL
    rb_mutex_init(&e.mutex)
    e.nodes = nodes
    e.node = <NodeState**>calloc(nodes, sizeof(NodeState*))
    if e.node == NULL:
        free(e)
        return NULL
    return e


cdef Channel* channel_new(Engine_* e, int kind) noexcept nogil:
    cdef Channel* ch = <Channel*>calloc(1, sizeof(Channel))
    cdef int i
    if ch == NULL:
        return NULL
    ch.kind = kind
    ch.waker[0] = ch.waker[1] = -1
    if kind:
        ch.told = <Told*>calloc(MOST_TOLD, sizeof(Told))
        if ch.told == NULL:
            free(ch)
            return NULL
    ch.conn = <Conn*>calloc(e.nodes, sizeof(Conn))
    ch.vote = <uint8_t*>calloc(e.nodes, 1)
    ch.sent = <uint8_t*>calloc(e.nodes, 1)
    ch.cause = <char*>calloc(e.nodes, CAUSE)
    if ch.conn == NULL or ch.vote == NULL or ch.sent == NULL or ch.cause == NULL:
        channel_free_memory(ch)
        return NULL
    for i in range(e.nodes):
        rb_mutex_init(&ch.conn[i].mutex)
        ch.conn[i].fd = -1
        ch.conn[i].node = i
        ch.conn[i].kind = kind
    return ch


cdef void channel_free_memory(Channel* ch) noexcept nogil:
    cdef int i
    for i in range(MOST_FORMS):
        text_free(&ch.form_bytes[i])
    free(ch.conn)
    free(ch.vote)
    free(ch.sent)
    free(ch.cause)
    free(ch.told)
    rb_close_waker(ch.waker)
    free(ch)


cdef void channel_close(Engine_* e, Channel* ch, const char* cause) noexcept nogil:
    """Retire its connections, and free it. It is idle, or its thread is gone, and on no list."""
    cdef int i
    cdef Conn* conn
    for i in range(e.nodes):
        conn = &ch.conn[i]
        pthread_mutex_lock(&conn.mutex)
        conn_fail(e, NULL, conn, cause, False)
        pthread_mutex_unlock(&conn.mutex)
        text_free(&conn.out)
        free(conn.slot)
        free(conn.reply.text)
        free(conn.topic)
    channel_free_memory(ch)


cdef bint channel_has_tag(Engine_* e, Channel* ch, uint64_t tag) noexcept nogil:
    """Say whether a write of this token is unanswered here. The engine's mutex is held."""
    cdef int i
    if not ch.late & late_bit(tag):
        return False
    for i in range(e.nodes):
        if conn_waits_for(&ch.conn[i], tag):
            return True
    return False


cdef inline uint64_t late_bit(uint64_t tag) noexcept nogil:
    return (<uint64_t>1) << (tag & 63)


cdef bint conn_waits_for(Conn* conn, uint64_t tag) noexcept nogil:
    cdef bint found
    pthread_mutex_lock(&conn.mutex)
    found = conn_has_tag(conn, tag)
    pthread_mutex_unlock(&conn.mutex)
    return found


cdef uint64_t late_tags(Conn* conn) noexcept nogil:
    """The bits of the tokens whose writes are unanswered on this connection. Its mutex is held."""
    cdef uint64_t late = 0
    cdef uint32_t i
    for i in range(conn.slots):
        if slot_at(conn, i).tag:
            late |= late_bit(slot_at(conn, i).tag)
    return late


cdef bint may_fall_back(Conn* conn) noexcept nogil:
    """Say whether some unanswered write may have to be repeated in another form, and so wants to be read at
    once. The mutex is held.
    """
    cdef Slot* slot
    cdef uint32_t i
    for i in range(conn.slots):
        slot = slot_at(conn, i)
        if slot.tag and slot.program >= 0 and slot.form + 1 < prog[slot.program].forms:
            if not is_proven(conn, slot.program, slot.form):
                return True
    return False


cdef void channel_catch_up(Engine_* e, Channel* ch) noexcept nogil:
    """Read what has come since the channel was used last. It is idle, or not yet used by its round."""
    cdef Conn* conn
    cdef int i
    for i in range(e.nodes):
        conn = &ch.conn[i]
        if conn.state >= HANDSHAKE:
            pthread_mutex_lock(&conn.mutex)
            conn_read(e, ch, conn, NULL)
            pthread_mutex_unlock(&conn.mutex)


cdef Channel* check_out(Round* r) noexcept nogil:
    """Take an idle channel for a round, or make one; or that of a watch, if it is for one.

    A later write of a token must follow the earlier ones on the same connection, and so must one that puts a new
    token in its place. So the channel that still waits for one is preferred; on channels that other threads use, the command is queued behind it here, and
    nobody waits for its reply.
    """
    cdef Engine_* e = r.engine
    cdef Channel* ch
    cdef Channel* best = r.channel
    cdef Channel** link
    r.follows = 0 if r.fresh else r.tag
    if prog[r.program].after:
        r.follows = rb_hash(r.arg[prog[r.program].after].bytes, r.arg[prog[r.program].after].length)
    pthread_mutex_lock(&e.mutex)
    if best == NULL and r.follows:
        ch = e.idle
        while ch != NULL and best == NULL:
            if channel_has_tag(e, ch, r.follows):
                best = ch
            ch = ch.next_idle
    if best == NULL:
        best = e.idle
    if best != NULL and best.kind:
        pass
    elif best != NULL:
        link = &e.idle
        while link[0] != best:
            link = &link[0].next_idle
        link[0] = best.next_idle
    else:
        best = channel_new(e, ORDINARY)
        if best == NULL:
            pthread_mutex_unlock(&e.mutex)
            return NULL
        best.next = e.all
        e.all = best
    best.next_idle = NULL
    round_begin(r, best)
    if r.tag:
        best.late |= late_bit(r.tag)
    if r.follows:
        ch = e.all
        while ch != NULL:
            if ch != best and ch.late & late_bit(r.follows):
                queue_behind(r, ch)
            ch = ch.next
    pthread_mutex_unlock(&e.mutex)
    return best


cdef inline bint is_asked(const Round* r, int i) noexcept nogil:
    """Whether the command is for this node. A delete follows an unanswered write wherever there is one."""
    if not r.asked >> i & 1:
        return False
    return prog[r.program].deletes or r.touched >> i & 1


cdef void queue_behind(Round* r, Channel* other) noexcept nogil:
    cdef Engine_* e = r.engine
    cdef Conn* conn
    cdef Slot slot
    cdef int i, form
    for i in range(e.nodes):
        if not is_asked(r, i):
            continue
        conn = &other.conn[i]
        pthread_mutex_lock(&conn.mutex)
        if conn_has_tag(conn, r.follows):
            memset(&slot, 0, sizeof(slot))
            slot.tag = r.tag
            other.late |= late_bit(r.tag)
            other.late_since |= late_bit(r.tag)
            r.behind |= (<uint64_t>1) << i
            slot.sent_ns = r.started_ns
            slot.due_ns = r.started_ns + r.limit_ns
            slot.program = <int8_t>r.program
            form = safe_form(conn, r.program)
            slot.form = <uint8_t>form
            slot.spare = r.spare
            if round_pack(r, form):
                r.channel.sent[i] = conn_put(
                    conn, r.channel.form_bytes[form].bytes, r.channel.form_length[form], &slot
                )
            set_fault(r.channel, i, b"queued behind an unanswered write")
            if other.kind:
                rouse(other, LOOK_AGAIN)
            elif other == e.keeper and conn.out.length:
                agent_wake()
        pthread_mutex_unlock(&conn.mutex)


cdef int safe_form(Conn* conn, int program) noexcept nogil:
    """A form that needs no fallback: plain and answered on this connection before, or the last."""
    cdef int form
    for form in range(prog[program].native):
        if is_proven(conn, program, form):
            return form
    return prog[program].forms - 1


cdef void put_back(Round* r) noexcept nogil:
    """Return the channel, and have the agent look after what is left open on it."""
    cdef Engine_* e = r.engine
    cdef Channel* ch = r.channel
    cdef int64_t due
    cdef uint64_t late
    ch.active = 0
    ch.used_ns = r.ended_ns
    due = look_at_rest(e, ch, ch.kind != ORDINARY, r.ended_ns, r.limit_ns, &late)
    pthread_mutex_lock(&e.mutex)
    e.used_ns = r.ended_ns
    ch.late = late | ch.late_since  # somebody may have queued something since we looked
    ch.late_since = 0
    if not ch.kind:
        e.used_at = e.closings
        ch.next_idle = e.idle
        e.idle = ch
    pthread_mutex_unlock(&e.mutex)
    if due != NEVER:
        agent_due(due)


cdef int64_t look_at_rest(
    Engine_* e, Channel* ch, bint in_use, int64_t now, int64_t limit_ns, uint64_t* late
) noexcept nogil:
    """When the agent has to look after what is left open on a channel, and the tokens that are.

    What is open on a channel in use it leaves to the owner; silent nodes and owed deletes it does not.
    """
    cdef Conn* conn
    cdef NodeState* node
    cdef int64_t soon = now + min(limit_ns, 50 * MS)
    cdef int64_t due = NEVER
    cdef int i
    late[0] = 0
    for i in range(e.nodes):
        conn = &ch.conn[i]
        node = e.node[i]
        if node.orphans:
            due = min(due, max(now, node.next_connect_ns))
        if conn.slots and in_use:
            pthread_mutex_lock(&conn.mutex)
            late[0] |= late_tags(conn)
            pthread_mutex_unlock(&conn.mutex)
        if in_use:
            if node.suspect:
                due = min(due, soon)
            continue
        if conn.held_ns:
            due = min(due, conn.held_ns)
        elif conn.out.length or node.suspect or CLOSED < conn.state < READY:
            due = min(due, soon)
        elif conn.slots:
            due = min(due, now + limit_ns)
        if conn.slots:
            pthread_mutex_lock(&conn.mutex)
            late[0] |= late_tags(conn)
            if not node.suspect and may_fall_back(conn):
                due = now
            pthread_mutex_unlock(&conn.mutex)
    return due
