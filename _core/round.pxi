# A round: written to every node before any is read, then one poll over all of them until the votes have
# decided it.

cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF
cdef int64_t SLICE_NS = 50_000_000      # longest poll: signals are looked for in between
cdef int64_t STALE_NS = 2_000_000       # a channel idle for longer may have lost a connection meanwhile
cdef uint64_t last_round = 0


cdef inline void set_fault(Channel* ch, int i, const char* cause) noexcept nogil:
    ch.vote[i] = FAULT
    copy_cause(&ch.cause[i * CAUSE], cause, strlen(cause))


cdef void round_begin(Round* r, Channel* ch) noexcept nogil:
    cdef int n = r.engine.nodes
    r.channel = ch
    ch.round = rb_next(&last_round)
    ch.hits = 0
    memset(ch.vote, OPEN, n)
    memset(ch.sent, 0, n)
    memset(ch.form_packed, 0, sizeof(ch.form_packed))
    r.started_ns = rb_now_ns()


cdef bint round_pack(Round* r, int form) noexcept nogil:
    """Have the command in this form ready in the channel, and what goes along behind it."""
    cdef Channel* ch = r.channel
    if not ch.form_packed[form]:
        ch.form_bytes[form].length = 0
        if not pack(&ch.form_bytes[form], r.program, form, r.arg):
            return False
        ch.form_length[form] = ch.form_bytes[form].length
        if r.mark and not pack(&ch.form_bytes[form], ASK_LIFE, 0, r.arg):
            return False
        ch.form_packed[form] = 1
    return True


cdef void round_send(Round* r, Conn* conn, int form) noexcept nogil:
    """Send the command to one node. The connection's mutex is held."""
    cdef Channel* ch = r.channel
    cdef Slot slot
    memset(&slot, 0, sizeof(slot))
    slot.round = ch.round if r.waits else 0
    slot.tag = r.tag
    slot.sent_ns = r.started_ns
    slot.due_ns = r.started_ns + r.limit_ns
    slot.program = <int8_t>r.program
    slot.form = <uint8_t>form
    slot.spare = r.spare
    cdef bint done = round_pack(r, form)
    if done and r.held:
        done = conn_hold(conn, ch.form_bytes[form].bytes, ch.form_length[form], &slot)
    elif done and r.mark:
        done = put_with_life(r, conn, form, &slot)
    elif done:
        done = conn_put(conn, ch.form_bytes[form].bytes, ch.form_length[form], &slot)
    if done:
        ch.sent[conn.node] = 1
    else:
        set_fault(ch, conn.node, b"too many unanswered commands")


cdef bint put_with_life(Round* r, Conn* conn, int form, Slot* slot) noexcept nogil:
    """Queue the command, and behind it the question for the key's life, in one packet. The mutex is held.

    Each form of it is followed by one, since what the last one writes would end the tracking of an earlier.
    """
    cdef Channel* ch = r.channel
    cdef size_t length = ch.form_length[form]
    cdef size_t all_length = ch.form_bytes[form].length
    cdef Slot life
    if not conn_add(conn, length, slot):
        return False
    memset(&life, 0, sizeof(life))
    life.mark = r.mark
    life.sent_ns = slot.sent_ns
    life.due_ns = slot.due_ns
    life.program = <int8_t>ASK_LIFE
    if not conn_add(conn, all_length - length, &life):
        all_length = length
        tell(ch, LOST, conn.node, 0, 0)
    conn_write(conn, ch.form_bytes[form].bytes, all_length)
    return True


cdef inline void send_if_ready(Round* r, Conn* conn) noexcept nogil:
    cdef int i = conn.node
    cdef int form
    if conn.state == READY and r.channel.vote[i] == OPEN and not r.channel.sent[i]:
        form = r.engine.node[i].form[r.program] if r.waits else safe_form(conn, r.program)
        round_send(r, conn, form)


cdef void run_round(Round* r) noexcept nogil:
    """The whole of it: take a channel, write, wait, judge, undo, put the channel back."""
    cdef Engine_* e = r.engine
    cdef Channel* ch
    cdef int i
    r.generation = rb_load(&rb_generation)
    if prog[r.program].writes:
        i = prog[r.program].undo if prog[r.program].undo >= 0 else r.program
        r.spare = pack_spare(i, r.arg, r.tag, rb_now_ns() + r.undo_life_ns)
    ch = check_out(r)
    if ch == NULL:
        packed_free(r.spare)
        r.verdict = UNDECIDED
        return
    if r.started_ns - ch.used_ns > STALE_NS:
        channel_catch_up(e, ch)
        r.started_ns = rb_now_ns()
    ch.active = 1
    for i in range(e.nodes):
        begin_node(r, e.order[i])
    if r.waits:
        wait_for_votes(r)
        if r.forked:  # this is a child now, and nothing of the round belongs to it
            return
    finish_round(r)
    put_back(r)
    if r.behind:
        undo_behind(r)


cdef void begin_node(Round* r, int i) noexcept nogil:
    cdef Engine_* e = r.engine
    cdef Channel* ch = r.channel
    cdef NodeState* node = e.node[i]
    cdef Conn* conn = &ch.conn[i]
    if not r.asked >> i & 1:
        return
    if ch.vote[i] != OPEN:  # queued behind, elsewhere
        if r.mark:
            arm_node(e, ch, i, &r.arg[0], r.mark, &NO_TOPIC, r.limit_ns)
        return
    if not r.touched >> i & 1:  # the token is not there: what a delete would answer is known
        ch.vote[i] = YES
        return
    if node.suspect and not prog[r.program].deletes:
        set_fault_of(ch, i, node, b"left out until it answers again: ")
        if r.mark:
            tell(ch, LOST, i, 0, 0)
        return
    pthread_mutex_lock(&conn.mutex)
    if conn.state == CLOSED and r.waits:
        if lacks_way(node, ch.kind):
            set_fault(
                ch, i, b"it does not know or permit HELLO 3" if node.no_push
                else b"it does not know or permit CLIENT TRACKING",
            )  # fmt: skip
            tell(ch, LOST, i, 0, 1)
        elif node.next_connect_ns > r.started_ns:
            set_fault_of(ch, i, node, b"")
            if r.mark:
                tell(ch, LOST, i, 0, 0)
        else:
            conn_open(e, ch, conn, r.limit_ns)
    if prog[r.program].tries and conn.state == READY and conn.slots:
        settle_doubts(conn)
    send_if_ready(r, conn)
    pthread_mutex_unlock(&conn.mutex)


cdef void settle_doubts(Conn* conn) noexcept nogil:
    """Have no earlier delete fall back only after a new try, which its token would then refuse.

    Whatever may yet turn out to be unknown to the node is sent in the form that works everywhere, too. The
    mutex is held.
    """
    cdef Slot* slot
    cdef Packed* spare
    cdef uint32_t i, slots = conn.slots
    for i in range(slots):
        slot = slot_at(conn, i)
        spare = slot.spare
        if slot.program < 0 or not prog[slot.program].deletes or spare == NULL:
            continue
        if slot.form + 1 == prog[slot.program].forms or is_proven(conn, slot.program, slot.form):
            continue
        if conn_put_spare(conn, spare, slot.due_ns):
            slot_at(conn, i).spare = NULL
            packed_free(spare)


cdef void set_fault_of(Channel* ch, int i, NodeState* node, const char* head) noexcept nogil:
    """A fault whose cause is what is known of the node."""
    pthread_mutex_lock(&node.mutex)
    ch.vote[i] = FAULT
    snprintf(&ch.cause[i * CAUSE], CAUSE, b"%s%s", head, node.cause)
    pthread_mutex_unlock(&node.mutex)


cdef void count_votes(Round* r) noexcept nogil:
    cdef int i, still_open = 0, asked = 0
    r.yes = r.no = r.faults = 0
    for i in range(r.engine.nodes):
        if not r.asked >> i & 1:
            continue
        asked += 1
        if r.channel.vote[i] == YES:
            r.yes += 1
        elif r.channel.vote[i] == NO:
            r.no += 1
        elif r.channel.vote[i] == OPEN:
            still_open += 1
        else:
            r.faults += 1
    r.verdict = judge(r.yes, r.no, still_open, asked, r.quorum)


cdef void wait_for_votes(Round* r) noexcept nogil:
    cdef Engine_* e = r.engine
    cdef Channel* ch = r.channel
    cdef Conn* conn
    cdef pollfd[MOST_NODES] fds
    cdef int[MOST_NODES] place
    cdef int64_t deadline = r.started_ns + r.limit_ns
    cdef int64_t now, wait_ns
    cdef int i, n, got, last = 0
    cdef short interest, events
    while True:
        count_votes(r)
        if r.verdict != WAITING:
            return
        now = rb_now_ns()
        if now >= deadline:
            return
        wait_ns = min(deadline - now, SLICE_NS)
        n = 0
        for i in range(e.nodes):
            conn = &ch.conn[i]
            place[i] = -1
            if not r.asked >> i & 1:
                continue
            interest = conn_interest(conn)
            if interest and (conn.slots or conn.out.length or conn.state < READY):
                fds[n].fd = conn.fd
                fds[n].events = interest
                fds[n].revents = 0
                place[i] = n
                last = i
                n += 1
            elif CLOSED < conn.state < HANDSHAKE:  # waits for a name, or for room in a socket's backlog
                wait_ns = min(wait_ns, MS)
            if CLOSED < conn.state < HANDSHAKE and e.node[i].connect_ns:
                wait_ns = max(0, min(wait_ns, conn.opened_ns + e.node[i].connect_ns - now))
        if n == 1 and wait_ns == SLICE_NS and fds[0].events == POLLIN:
            got = await_one(r, &ch.conn[last])
        else:
            got = poll(fds, n, <int>((wait_ns + MS - 1) // MS))
        if got <= 0 and (wait_ns == SLICE_NS or got < 0):
            look_for_signals(r)
            if r.interrupted or r.forked:
                return
            if got < 0:
                continue
        for i in range(e.nodes):
            conn = &ch.conn[i]
            events = fds[place[i]].revents if place[i] >= 0 else 0
            if not r.asked >> i & 1:
                continue
            if events or CLOSED < conn.state < HANDSHAKE:
                pthread_mutex_lock(&conn.mutex)
                conn_advance(e, ch, conn, events, r)
                give_up_connecting(r, conn)
                send_if_ready(r, conn)
                pthread_mutex_unlock(&conn.mutex)


cdef void give_up_connecting(Round* r, Conn* conn) noexcept nogil:
    """Wait for a connect no longer than the node's own limit says. The connection's mutex is held."""
    cdef char[CAUSE] cause
    cdef int64_t limit_ns = r.engine.node[conn.node].connect_ns
    if limit_ns and CLOSED < conn.state < HANDSHAKE and rb_now_ns() >= conn.opened_ns + limit_ns:
        snprintf(cause, sizeof(cause), b"no connection within %lld ms", <long long>(limit_ns // MS))
        conn_fail(r.engine, r.channel, conn, cause, True)


cdef int await_one(Round* r, Conn* conn) noexcept nogil:
    """Wait for one slice on a single connection, and deal with what comes; as poll(), but one system call less.

    Sockets have a receive timeout of one slice, which a receive without MSG_DONTWAIT heeds.
    """
    cdef char[CHUNK] chunk
    cdef ssize_t size = recv(conn.fd, chunk, sizeof(chunk), 0)
    cdef int error = errno
    if size < 0 and (error == EAGAIN or error == EINTR):
        return 0 if error == EAGAIN else -1
    pthread_mutex_lock(&conn.mutex)
    conn_take(r.engine, r.channel, conn, r, chunk, size, error)
    send_if_ready(r, conn)
    pthread_mutex_unlock(&conn.mutex)
    return 1


cdef void look_for_signals(Round* r) noexcept nogil:
    with gil:
        if PyErr_CheckSignals() != 0:
            r.interrupted = 1  # the exception stays set until the call returns
    if rb_load(&rb_generation) != r.generation:
        r.forked = 1


cdef void finish_round(Round* r) noexcept nogil:
    """Judge, mark who was silent, and take back what was not granted."""
    cdef Engine_* e = r.engine
    cdef Channel* ch = r.channel
    cdef char[CAUSE] cause
    cdef int i
    r.ended_ns = rb_now_ns()
    if r.waits and not r.interrupted and r.verdict == WAITING:
        for i in range(e.nodes):
            if ch.vote[i] == OPEN and r.asked >> i & 1:
                snprintf(
                    cause, sizeof(cause), b"no %s within %lld ms",
                    b"answer" if ch.sent[i] else b"connection", <long long>(r.limit_ns // MS),
                )  # fmt: skip
                set_fault(ch, i, cause)
                node_suspect(e.node[i], cause)
    count_votes(r)
    if r.verdict == WAITING:
        r.verdict = UNDECIDED
    r.hits = ch.hits
    memcpy(r.vote, ch.vote, e.nodes)
    if r.faults or prog[r.program].decoder == TEXT:
        r.causes = <char*>calloc(e.nodes, CAUSE)
        for i in range(e.nodes if r.causes != NULL else 0):
            if ch.vote[i] == FAULT or prog[r.program].decoder == TEXT:
                memcpy(&r.causes[i * CAUSE], &ch.cause[i * CAUSE], CAUSE)
    for i in range(e.nodes):
        if r.mark and r.asked >> i & 1 and not ch.sent[i] and CLOSED < ch.conn[i].state < READY:
            ch.conn[i].wanted = 1  # it was not waited for, but can be armed when it is there
        if ch.sent[i] and ch.vote[i] != NO:
            r.reached |= (<uint64_t>1) << i
    if prog[r.program].tries and r.waits:  # what was only posted follows a lock that is held: it stays
        if r.verdict == GRANTED and r.ended_ns >= r.started_ns + r.valid_ns:
            r.verdict = UNDECIDED
            r.too_late = 1
        if r.interrupted and r.verdict == GRANTED:
            r.verdict = UNDECIDED
        if r.verdict != GRANTED:
            for i in range(e.nodes):
                if (r.reached & ~r.behind) >> i & 1:
                    undo_on(r, i)
    elif prog[r.program].deletes:
        for i in range(e.nodes):
            if not ch.sent[i] and r.touched >> i & 1:
                owe_delete(e.node[i], r.spare)
    packed_free(r.spare)


cdef void undo_on(Round* r, int i) noexcept nogil:
    """Queue the undo behind the try, on the same connection.

    If that has died, the slot's copy is owed already.
    """
    cdef Conn* conn = &r.channel.conn[i]
    pthread_mutex_lock(&conn.mutex)
    if conn.state == READY and r.spare != NULL and not conn_put_spare(conn, r.spare, r.ended_ns + r.limit_ns):
        owe_delete(r.engine.node[i], r.spare)
    pthread_mutex_unlock(&conn.mutex)


cdef void undo_behind(Round* r) noexcept nogil:
    """Where a try was queued behind a write on another channel, so is its undo."""
    cdef Round undo
    cdef int program = prog[r.program].undo
    if not prog[r.program].tries or not r.waits or r.verdict == GRANTED:
        return
    memset(&undo, 0, sizeof(undo))
    undo.engine = r.engine
    undo.program = program
    undo.args = prog[program].words
    memcpy(undo.arg, r.arg, sizeof(undo.arg))
    undo.tag = r.tag
    undo.quorum = 1
    undo.touched = r.reached & r.behind
    undo.asked = <uint64_t>-1
    undo.limit_ns = r.limit_ns
    undo.undo_life_ns = r.undo_life_ns
    if undo.touched:
        run_round(&undo)
        free(undo.causes)


cdef void owe_delete(NodeState* node, Packed* packed) noexcept nogil:
    """Remember a delete for the next connection to this node."""
    if packed == NULL:
        return
    pthread_mutex_lock(&node.mutex)
    node_add_orphan(node, packed_keep(packed))
    pthread_mutex_unlock(&node.mutex)
