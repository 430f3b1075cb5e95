# Kept leases: the agent renews them, on a channel of its own in each engine, the keeper; see
# `redbolt._engine.Renewal`. All of it is done under keep_mutex, and nothing of it by the agent needs the GIL.

from cython cimport freelist, no_gc

cdef enum:
    MOST_AT_ONCE = 256          # leases that are begun before somebody else gets keep_mutex
    WORDS = 3                   # of what renews a lease and of what puts it back: key, token, life

cdef int LEASE_GONE = _engine.GONE
cdef int LEASE_UNANSWERED = _engine.UNANSWERED
cdef int LEASE_HELD_TOO_LONG = _engine.HELD_TOO_LONG
cdef int LEASE_RAN_OUT = _engine.RAN_OUT

cdef int64_t MOST_SLACK_NS = 500_000_000
cdef int64_t FULL_NS = 10_000_000       # a lease waits so long where too much is unanswered already
cdef int64_t LATE_NS = 500_000_000      # so late the agent may be on a machine that is busy
cdef Text[MOST_FORMS] keep_text         # the renewal that is just being sent
cdef uint64_t[MOST_FORMS] keep_text_round   # which one that is


cdef inline uint64_t bit_of(int i) noexcept nogil:
    return (<uint64_t>1) << i


cdef inline bint is_over(const Kept* k) noexcept nogil:
    return k.stopped or k.lost


cdef inline Bytes token_of(Kept* k) noexcept nogil:
    cdef Bytes token
    token.bytes = k.bytes + k.key_length
    token.length = k.token_length
    return token


cdef void words_of(Kept* k, int64_t life_ms, char* digits, Bytes* arg) noexcept nogil:
    """The words of its commands; ``digits`` has room for the life."""
    arg[0].bytes = k.bytes
    arg[0].length = k.key_length
    arg[1] = token_of(k)
    arg[2].bytes = digits
    arg[2].length = rb_digits(digits, <uint64_t>life_ms)


cdef inline void kept_free(Kept* k) noexcept nogil:
    """Give up one reference."""
    k.refs -= 1
    if k.refs == 0:
        free(k)


cdef void make_way() noexcept nogil:
    """Let those have keep_mutex who wait for it: whoever takes it again at once would mostly get it."""
    cdef int i
    if not rb_load(&keep_wanted):
        return
    pthread_mutex_unlock(&keep_mutex)
    for i in range(100):
        if not rb_load(&keep_wanted):
            break
        sched_yield()
    pthread_mutex_lock(&keep_mutex)


# ---- the heap ----

cdef inline void heap_set(Engine_* e, int place, Kept* k) noexcept nogil:
    e.kept[place] = k
    k.place = place


cdef void heap_move(Engine_* e, Kept* k) noexcept nogil:
    """Find the place for it, from where it is."""
    cdef int place = k.place, other
    while place and e.kept[(place - 1) // 2].due_ns > k.due_ns:
        heap_set(e, place, e.kept[(place - 1) // 2])
        place = (place - 1) // 2
    while True:
        other = 2 * place + 1
        if other + 1 < e.kepts and e.kept[other + 1].due_ns < e.kept[other].due_ns:
            other += 1
        if other >= e.kepts or e.kept[other].due_ns >= k.due_ns:
            break
        heap_set(e, place, e.kept[other])
        place = other
    heap_set(e, place, k)


cdef bint heap_add(Engine_* e, Kept* k) noexcept nogil:
    cdef Kept** grown
    cdef int room
    if e.kepts == e.kept_room:
        room = max(8, 2 * e.kept_room)
        grown = <Kept**>realloc(e.kept, room * sizeof(Kept*))
        if grown == NULL:
            return False
        e.kept = grown
        e.kept_room = room
    heap_set(e, e.kepts, k)
    rb_store(&e.kepts, e.kepts + 1)
    heap_move(e, k)
    return True


cdef void heap_remove(Engine_* e, Kept* k) noexcept nogil:
    cdef Kept* last
    cdef Kept** shrunk
    if k.place < 0:
        return
    last = e.kept[e.kepts - 1]
    rb_store(&e.kepts, e.kepts - 1)
    if last != k:
        heap_set(e, k.place, last)
        heap_move(e, last)
    k.place = -1
    if e.kept_room > 64 and e.kepts < e.kept_room // 4:
        shrunk = <Kept**>realloc(e.kept, e.kept_room // 2 * sizeof(Kept*))
        if shrunk != NULL:
            e.kept = shrunk
            e.kept_room //= 2


# ---- when ----

cdef inline int64_t too_late_ns(const Kept* k) noexcept nogil:
    """When it is lost, if nothing happens until then."""
    if k.program < 0:
        return k.valid_until_ns
    return give_up(k.valid_until_ns, k.lease_ms, k.limit_ns)


cdef inline int64_t surely_valid(const Kept* k, int64_t started_ns, int64_t valid_until_ns) noexcept nogil:
    """An end of validity, as far as nothing that may yet be executed ends it earlier."""
    return started_ns + min(valid_until_ns - started_ns, k.surely_ns)


cdef bint gains(const Kept* k, int64_t now) noexcept nogil:
    """Whether a renewal that begins then would make it valid for longer."""
    cdef int64_t life_ms = renewed_life(now, k.lease_ms, k.drift_ns, k.until_ns)
    cdef int64_t end = surely_valid(k, now, validity_end(now, life_ms, k.drift_ns))
    return life_ms > 0 and end >= k.valid_until_ns + MS


cdef int64_t gains_from_ns(const Kept* k) noexcept nogil:
    """From when on it would; NEVER if it is valid for as long as it may be held."""
    if k.until_ns - 2 * MS < k.valid_until_ns:
        return NEVER
    return k.valid_until_ns + MS - min(k.surely_ns, validity_end(0, k.lease_ms, k.drift_ns))


cdef int64_t usually_due_ns(const Kept* k) noexcept nogil:
    """When to renew it: earlier than by its life, if validity ends before that."""
    cdef int64_t ends_ns = k.started_ns + k.length_ms * MS
    cdef int64_t due = renewal_due(ends_ns, k.lease_ms)
    cdef int64_t sure_ns = k.valid_until_ns + max(k.drift_ns, (k.drift_ns // k.lease_ms + 1) * k.length_ms)
    if sure_ns < ends_ns:
        due = min(due, k.started_ns + (sure_ns - k.started_ns) // 3)
    return due


cdef void set_due(Engine_* e, Kept* k, int64_t due_ns, int64_t slack_ns) noexcept nogil:
    k.due_ns = due_ns
    k.slack_ns = slack_ns
    heap_move(e, k)


cdef void plan(Engine_* e, Kept* k) noexcept nogil:
    """Find out what is due next for it, and when."""
    cdef int64_t end = too_late_ns(k)
    cdef int64_t due = end
    cdef int64_t slack = 0
    cdef int64_t from_ns
    if k.place < 0:
        return
    if k.program >= 0 and not k.paused:
        from_ns = gains_from_ns(k)
        due = max(k.retry_ns if k.failures else usually_due_ns(k), from_ns)
        if not k.failures:
            slack = min(k.lease_ms * MS // 20, min(MOST_SLACK_NS, due - from_ns))
    if k.running or (k.open and due > k.round_ends_ns):  # then the rest of its nodes are silent
        due = k.round_ends_ns
        slack = 0
    if due >= end:
        due = end
        slack = 0
    set_due(e, k, due, slack)


# ---- the end ----

cdef int why_over(const Kept* k) noexcept nogil:
    """Why it is lost when it is too late."""
    if k.program < 0:
        return LEASE_RAN_OUT
    if not gains(k, too_late_ns(k)):
        return LEASE_HELD_TOO_LONG
    return LEASE_UNANSWERED if k.running or k.failures else LEASE_RAN_OUT


cdef void lose(Engine_* e, Kept* k, int why) noexcept nogil:
    heap_remove(e, k)
    if k.running:
        k.running = 0
        rb_add(&k.failed, 1)
    k.granted = 0
    forget_waiting(k)
    rb_store(&k.lost, why)
    rb_store64(&k.valid_until_ns, 0)
    if k.gate != NULL and rb_gate_open(k.gate):
        rb_gate_tell(k.gate, 1)
    rb_gate_rouse(&k.moved)


cdef inline void forget_waiting(Kept* k) noexcept nogil:
    """Nodes that are not connected to yet do not get it any more."""
    rb_store64(<int64_t*>&k.open, <int64_t>(k.open & ~k.waiting))
    k.waiting = 0


cdef void forget_token(Engine_* e, Kept* k) noexcept nogil:
    """It is gone on so many nodes that it is lost: delete it on the others."""
    cdef Round r
    cdef char[24] digits
    cdef int undo = prog[k.back].undo if k.back >= 0 else -1
    if undo < 0:
        return
    memset(&r, 0, sizeof(r))
    words_of(k, 0, digits, r.arg)
    r.args = 2
    r.engine = e
    r.program = undo
    r.tag = k.tag
    r.quorum = 1
    r.asked = <uint64_t>-1
    r.touched = k.touched & ~k.no
    r.limit_ns = k.limit_ns
    r.undo_life_ns = DELETE_LIFE_NS
    if r.touched:
        run_round(&r)
        free(r.causes)


# ---- votes ----

cdef void vote_on(Engine_* e, Kept* k, int node, int vote) noexcept nogil:
    if not k.open & bit_of(node):
        return
    rb_store64(<int64_t*>&k.open, <int64_t>(k.open & ~bit_of(node)))
    if vote == YES:
        k.yes |= bit_of(node)
    elif vote == NO:
        k.no |= bit_of(node)
    if not k.voted and not is_over(k):
        k.voted = 1
        k.next_voted = e.voted
        e.voted = k


cdef void take_vote(Engine_* e, int node, Slot* slot, int vote) noexcept nogil:
    """What came of a renewal that was sent. Takes the slot's reference."""
    cdef Kept* k = slot.kept
    slot.kept = NULL
    if slot.round == k.round:
        vote_on(e, k, node, vote)
    kept_free(k)


cdef void count_voted(Engine_* e) noexcept nogil:
    """Judge what has been voted on. No connection's mutex is held."""
    cdef Kept* k
    while e.voted != NULL:
        k = e.voted
        e.voted = k.next_voted
        k.voted = 0
        if k.running and not is_over(k):
            judge_renewal(e, k)
        if k.granted and not is_over(k) and k.no & ~k.restored:
            put_token_back(e, k)
        if not k.open and not k.running and k.due_ns == k.round_ends_ns:
            plan(e, k)  # nobody is left to be late


cdef void judge_renewal(Engine_* e, Kept* k) noexcept nogil:
    cdef int verdict = judge(rb_bits(k.yes), rb_bits(k.no), rb_bits(k.open), e.nodes, k.quorum)
    if verdict == GRANTED:
        renewal_granted(e, k)
    elif verdict == REFUSED:
        lose(e, k, LEASE_GONE)
        forget_token(e, k)
    elif verdict == UNDECIDED:
        renewal_failed(e, k)


cdef void renewal_granted(Engine_* e, Kept* k) noexcept nogil:
    cdef int64_t now = rb_now_ns()
    cdef int64_t valid_until_ns = validity_end(k.round_started_ns, k.life_ms, k.drift_ns)
    valid_until_ns = surely_valid(k, k.round_started_ns, valid_until_ns)
    if now >= k.valid_until_ns or now >= valid_until_ns:
        lose(e, k, why_over(k))
        return
    k.running = 0
    k.granted = 1
    k.failures = 0
    rb_add(&k.renewed, 1)
    if not is_outdated(k):
        rb_store64(&k.started_ns, k.round_started_ns)
        rb_store64(&k.length_ms, k.life_ms)
        rb_store64(&k.valid_until_ns, valid_until_ns)
    plan(e, k)


cdef void renewal_failed(Engine_* e, Kept* k) noexcept nogil:
    cdef int64_t pause_ns = renewal_pause(k.failures, k.lease_ms)
    k.running = 0
    k.failures += 1
    rb_add(&k.failed, 1)
    forget_waiting(k)
    if k.sent:  # it may yet be executed
        k.surely_ns = min(k.surely_ns, validity_end(0, k.life_ms, k.drift_ns))
    k.retry_ns = rb_now_ns() + pause_ns // 2 + rb_random() % (pause_ns // 2 + 1)
    await_quorum(e, k)
    plan(e, k)


cdef void await_quorum(Engine_* e, Kept* k) noexcept nogil:
    """Where too few nodes could be asked, it is repeated when the next one may be connected to."""
    cdef int64_t soonest = NEVER
    cdef int i, there = 0
    for i in range(e.nodes):
        if e.node[i].suspect:
            continue
        if e.node[i].next_connect_ns <= k.retry_ns:
            there += 1
        else:
            soonest = min(soonest, e.node[i].next_connect_ns)
    if there < k.quorum and soonest != NEVER:
        k.retry_ns = soonest


cdef void time_is_over(Engine_* e, Kept* k, int64_t now) noexcept nogil:
    """The round's time is over, and some node has not answered."""
    cdef char[CAUSE] cause
    cdef int i
    for i in range(e.nodes if now >= k.round_started_ns + k.limit_ns else 0):
        if k.open & bit_of(i):
            snprintf(
                cause, sizeof(cause), b"no %s within %lld ms",
                b"connection" if k.waiting & bit_of(i) else b"answer", <long long>(k.limit_ns // MS),
            )  # fmt: skip
            node_suspect(e.node[i], cause)
    rb_store64(<int64_t*>&k.open, 0)
    k.waiting = 0
    if k.running:
        renewal_failed(e, k)
    else:
        plan(e, k)


# ---- sending ----

cdef inline bint is_outdated(const Kept* k) noexcept nogil:
    """Whether the holder has given the key another life since this round began."""
    return k.started_ns > k.round_started_ns


cdef bint may_be_sent(const Kept* k, int64_t now) noexcept nogil:
    """Whether a node that comes late may still get the renewal of the round."""
    if is_over(k) or is_outdated(k) or not (k.running or k.granted):
        return False
    return now < k.round_ends_ns and now < too_late_ns(k)


cdef Text* packed_renewal(Kept* k, int form) noexcept nogil:
    cdef Bytes[WORDS] arg
    cdef char[24] digits
    if keep_text_round[form] != k.round:
        keep_text_round[form] = 0
        keep_text[form].length = 0
        words_of(k, k.life_ms, digits, arg)
        if not pack(&keep_text[form], k.program, form, arg):
            return NULL
        keep_text_round[form] = k.round
    return &keep_text[form]


cdef Slot renewal_slot(const Kept* k, int form) noexcept nogil:
    cdef Slot slot
    memset(&slot, 0, sizeof(slot))
    slot.tag = k.tag
    slot.sent_ns = k.round_started_ns
    slot.due_ns = k.round_started_ns + k.limit_ns
    slot.program = <int8_t>k.program
    slot.form = <uint8_t>form
    return slot


cdef bint put_renewal(Kept* k, Conn* conn, int form) noexcept nogil:
    """Queue the renewal on a connection of the keeper; it is flushed later. Its mutex is held."""
    cdef Text* text = packed_renewal(k, form)
    cdef Slot slot = renewal_slot(k, form)
    slot.round = k.round
    slot.kept = k
    if text == NULL or not conn_add(conn, text.length, &slot):
        return False
    text_add(&conn.out, text.bytes, text.length)
    k.refs += 1
    k.sent |= bit_of(conn.node)
    return True


cdef void renew_again(Engine_* e, Conn* conn, Slot* slot) noexcept nogil:
    """The node does not know this form: it gets the next one, unless the token was written since. The
    connection's mutex is held.
    """
    cdef Kept* k = slot.kept
    if (
        k.round == slot.round and may_be_sent(k, rb_now_ns()) and not conn_has_tag(conn, slot.tag)
        and put_renewal(k, conn, slot.form + 1)
    ):  # fmt: skip
        slot.kept = NULL
        kept_free(k)
    else:
        take_vote(e, conn.node, slot, FAULT)


cdef uint64_t writes_elsewhere(Engine_* e, Kept* k, bint follow) noexcept nogil:
    """A bit for each node that has an unanswered write of the token on another channel; with ``follow`` the
    renewal is queued behind it, with nobody waiting for the reply. From here on others look for the token on
    the keeper, too.
    """
    cdef uint64_t bit = late_bit(k.tag)
    cdef uint64_t found = 0
    cdef Channel* ch
    cdef Conn* conn
    cdef int i
    pthread_mutex_lock(&e.mutex)
    e.keeper.late |= bit
    look_for_answers(e, e.idle, k.tag)
    ch = e.all
    while ch != NULL:
        for i in range(e.nodes if ch != e.keeper and ch.late & bit else 0):
            conn = &ch.conn[i]
            pthread_mutex_lock(&conn.mutex)
            if conn_has_tag(conn, k.tag):
                found |= bit_of(i)
                if follow and not e.node[i].suspect:
                    renew_behind(k, ch, conn)
            pthread_mutex_unlock(&conn.mutex)
        ch = ch.next
    pthread_mutex_unlock(&e.mutex)
    return found


cdef void renew_behind(Kept* k, Channel* ch, Conn* conn) noexcept nogil:
    """The engine's and the connection's mutexes are held."""
    cdef int form = safe_form(conn, k.program)
    cdef Text* text = packed_renewal(k, form)
    cdef Slot slot = renewal_slot(k, form)
    if text == NULL or not conn_put(conn, text.bytes, text.length, &slot):
        return
    k.sent |= bit_of(conn.node)
    ch.late_since |= late_bit(k.tag)
    if ch.kind:
        rouse(ch, LOOK_AGAIN)


cdef void begin_renewal(Engine_* e, Kept* k, int64_t now) noexcept nogil:
    """Send a renewal to all nodes that can have it; it goes out with the next flush."""
    cdef uint64_t elsewhere
    cdef Conn* conn
    cdef int i
    cdef bint opened
    k.round = rb_next(&last_round)
    k.round_started_ns = now
    k.life_ms = renewed_life(now, k.lease_ms, k.drift_ns, k.until_ns)
    rb_store64(&k.round_ends_ns, min(now + k.limit_ns, too_late_ns(k)))
    k.running = 1
    k.granted = 0
    k.yes = k.no = k.restored = k.sent = k.waiting = 0
    rb_store64(<int64_t*>&k.open, <int64_t>(bit_of(e.nodes - 1) * 2 - 1))
    e.keeper.used_ns = now
    elsewhere = writes_elsewhere(e, k, True)
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        opened = False
        if not (e.node[i].suspect or elsewhere & bit_of(i)):
            if conn.state == READY:
                pthread_mutex_lock(&conn.mutex)
                opened = put_renewal(k, conn, e.node[i].form[k.program])
                pthread_mutex_unlock(&conn.mutex)
            elif conn.state != CLOSED:
                k.waiting |= bit_of(i)
                e.waiting |= bit_of(i)
                e.owed[i] += most_bytes(k)
                opened = True
        if not opened:
            vote_on(e, k, i, FAULT)
    plan(e, k)


cdef void put_token_back(Engine_* e, Kept* k) noexcept nogil:
    """The token is gone on some nodes, but a quorum has it: these get it back."""
    cdef Text text
    cdef Bytes[WORDS] arg
    cdef char[24] digits
    cdef Slot slot
    cdef Conn* conn
    cdef int64_t now = rb_now_ns()
    cdef int64_t life_ms = (k.round_started_ns + k.life_ms * MS - now) // MS
    cdef uint64_t nodes = k.no & ~k.restored
    cdef int i, form
    k.restored |= nodes
    if k.back < 0 or life_ms <= 0 or now >= k.valid_until_ns or not may_be_sent(k, now):
        return
    words_of(k, life_ms, digits, arg)
    memset(&text, 0, sizeof(text))
    memset(&slot, 0, sizeof(slot))
    slot.tag = k.tag
    slot.sent_ns = now
    slot.due_ns = now + k.limit_ns
    slot.program = <int8_t>k.back
    slot.spare = pack_spare(prog[k.back].undo, arg, k.tag, now + life_ms * MS)
    if slot.spare != NULL:
        nodes &= ~writes_elsewhere(e, k, False)
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        if slot.spare == NULL or not nodes & bit_of(i) or conn.state != READY:
            continue
        pthread_mutex_lock(&conn.mutex)
        form = safe_form(conn, k.back)
        slot.form = <uint8_t>form
        text.length = 0
        if pack(&text, k.back, form, arg) and conn_put(conn, text.bytes, text.length, &slot):
            rb_store64(<int64_t*>&k.touched, <int64_t>(k.touched | bit_of(i)))
        pthread_mutex_unlock(&conn.mutex)
    packed_free(slot.spare)
    text_free(&text)


# ---- the agent's turn ----

cdef int look_after_kept(
    Engine_* e, pollfd* fds, int n, int room, int64_t* due, int64_t* kept_due
) noexcept nogil:
    """Read what the keeper's nodes have answered, judge it, and do what is due."""
    cdef int batches
    cdef uint64_t suspects
    if e.keeper == NULL and not rb_load(&e.kepts):
        return n
    suspects = suspects_of(e)
    pthread_mutex_lock(&keep_mutex)
    if e.keeper != NULL:
        hear_nodes(e, due)
    batches = 2 + e.kepts // MOST_AT_ONCE
    while do_what_is_due(e) and batches:
        batches -= 1
        make_way()
    if e.keeper != NULL:
        retire_keeper(e, due)
    if e.keeper != NULL:
        n = listen_to_keeper(e, fds, n, room, due)
    if e.kepts:
        kept_due[0] = min(kept_due[0], e.kept[0].due_ns)
    pthread_mutex_unlock(&keep_mutex)
    if suspects_of(e) & ~suspects:  # the idle channel has to look whether they are back
        due[0] = min(due[0], rb_now_ns())
    return n


cdef uint64_t suspects_of(Engine_* e) noexcept nogil:
    cdef uint64_t suspects = 0
    cdef int i
    for i in range(e.nodes):
        if e.node[i].suspect:
            suspects |= bit_of(i)
    return suspects


cdef void hear_nodes(Engine_* e, int64_t* due) noexcept nogil:
    cdef int64_t now = rb_now_ns()
    cdef Conn* conn
    cdef int i, orphans
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        orphans = e.node[i].orphans
        if conn.state != CLOSED:
            advance_keeper(e, conn, now, due)
        if e.waiting & bit_of(i) and (conn.state == READY or conn.state == CLOSED):
            renew_waiting(e, i)
        flush_keeper(conn)
        count_voted(e)
        if e.node[i].orphans > orphans:
            due[0] = min(due[0], now)  # the idle channel pays them
        make_way()


cdef void advance_keeper(Engine_* e, Conn* conn, int64_t now, int64_t* due) noexcept nogil:
    """As with idle channels. What becomes ready takes over deletes, which nobody may miss: so the engine's
    mutex is held until their tokens are noted.
    """
    cdef char[CAUSE] cause
    cdef int64_t limit_ns = e.node[conn.node].connect_ns
    cdef bint shaky = conn.state < READY
    if shaky:
        pthread_mutex_lock(&e.mutex)
    pthread_mutex_lock(&conn.mutex)
    look_after_conn(e, conn, False, now, due)
    if limit_ns and CLOSED < conn.state < HANDSHAKE:
        if now >= conn.opened_ns + limit_ns:
            snprintf(cause, sizeof(cause), b"no connection within %lld ms", <long long>(limit_ns // MS))
            conn_fail(e, NULL, conn, cause, True)
        else:
            due[0] = min(due[0], conn.opened_ns + limit_ns)
    if shaky:
        e.keeper.late |= late_tags(conn)
    pthread_mutex_unlock(&conn.mutex)
    if shaky:
        pthread_mutex_unlock(&e.mutex)


cdef void flush_keeper(Conn* conn) noexcept nogil:
    if conn.out.length and conn.state == READY:
        pthread_mutex_lock(&conn.mutex)
        conn_flush(conn)
        pthread_mutex_unlock(&conn.mutex)


cdef void renew_waiting(Engine_* e, int node) noexcept nogil:
    """A node is connected to now, or cannot be."""
    cdef Conn* conn = &e.keeper.conn[node]
    cdef int64_t now = rb_now_ns()
    cdef Kept* k
    cdef bint done
    cdef int i
    e.waiting &= ~bit_of(node)
    e.owed[node] = 0
    for i in range(e.kepts):
        k = e.kept[i]
        if not k.waiting & bit_of(node):
            continue
        k.waiting &= ~bit_of(node)
        done = False
        if conn.state == READY and not e.node[node].suspect and may_be_sent(k, now):
            if not writes_elsewhere(e, k, False) & bit_of(node):
                pthread_mutex_lock(&conn.mutex)
                done = put_renewal(k, conn, e.node[node].form[k.program])
                pthread_mutex_unlock(&conn.mutex)
        if not done:
            vote_on(e, k, node, FAULT)


cdef bint do_what_is_due(Engine_* e) noexcept nogil:
    """Together with what could as well be done a little later. True: there is more."""
    cdef int64_t now = rb_now_ns()
    cdef int done = 0, i
    cdef bint prepared = False
    cdef Kept* k
    if e.kepts == 0 or e.kept[0].due_ns > now:
        return False
    while done < MOST_AT_ONCE and e.kepts and e.kept[0].due_ns - e.kept[0].slack_ns <= now:
        k = e.kept[0]
        done += 1
        now = rb_now_ns()
        if now >= too_late_ns(k):
            lose(e, k, why_over(k))
        elif k.open and now >= k.round_ends_ns:
            time_is_over(e, k, now)
        elif not is_due(e, k, now):
            continue
        else:
            if not prepared:
                prepare_keeper(e, k)
                prepared = True
            if e.keeper == NULL or is_full(e, k):
                set_due(e, k, min(now + FULL_NS, too_late_ns(k)), 0)
            else:
                begin_renewal(e, k, now)
    if prepared and e.keeper != NULL:
        for i in range(e.nodes):
            flush_keeper(&e.keeper.conn[e.order[i]])
    count_voted(e)
    return done == MOST_AT_ONCE


cdef bint is_due(Engine_* e, Kept* k, int64_t now) noexcept nogil:
    """Whether a renewal really is: it may have been put off, or something else was due that has happened."""
    plan(e, k)
    return k.due_ns - k.slack_ns <= now


cdef bint is_full(Engine_* e, Kept* k) noexcept nogil:
    """Whether so much is unanswered on some connection that it has to wait. A node that does not answer at
    all is suspect before long, and then holds up nothing.
    """
    cdef Conn* conn
    cdef size_t bytes
    cdef int i
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        if conn.state == CLOSED or e.node[i].suspect:
            continue
        pthread_mutex_lock(&conn.mutex)
        bytes = conn.backlog + e.owed[i]
        pthread_mutex_unlock(&conn.mutex)
        if bytes and bytes + most_bytes(k) > MOST_BACKLOG:
            return True
    return False


cdef inline size_t most_bytes(const Kept* k) noexcept nogil:
    """The length of its longest command, and some more."""
    return k.key_length + 2 * k.token_length + 1024


cdef void prepare_keeper(Engine_* e, const Kept* k) noexcept nogil:
    """See which connections have ended since they were used, and begin to connect where there is none."""
    cdef Conn* conn
    cdef NodeState* node
    cdef int i
    if e.keeper == NULL and not make_keeper(e):
        return
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        node = e.node[i]
        if conn.state == READY and conn.slots == 0:
            pthread_mutex_lock(&conn.mutex)
            conn_read(e, NULL, conn, NULL)
            pthread_mutex_unlock(&conn.mutex)
        if conn.state == CLOSED and not node.suspect and node.next_connect_ns <= rb_now_ns():
            pthread_mutex_lock(&e.mutex)
            pthread_mutex_lock(&conn.mutex)
            conn_open(e, NULL, conn, k.limit_ns)
            e.keeper.late |= late_tags(conn)
            pthread_mutex_unlock(&conn.mutex)
            pthread_mutex_unlock(&e.mutex)


cdef bint make_keeper(Engine_* e) noexcept nogil:
    cdef Channel* ch = channel_new(e, ORDINARY)
    if ch == NULL:
        return False
    ch.used_ns = rb_now_ns()
    pthread_mutex_lock(&e.mutex)
    ch.taken_at = e.closings
    ch.next = e.all
    e.all = e.keeper = ch
    pthread_mutex_unlock(&e.mutex)
    return True


cdef void retire_keeper(Engine_* e, int64_t* due) noexcept nogil:
    """After the engine was closed, or a long time without use."""
    cdef int64_t idle_ns = e.keeper.used_ns + IDLE_NS
    cdef bint stays
    cdef int i
    pthread_mutex_lock(&e.mutex)
    stays = e.keeper.taken_at == e.closings and (e.kepts or e.used_at == e.closings)
    pthread_mutex_unlock(&e.mutex)
    if stays and rb_now_ns() < idle_ns:
        due[0] = min(due[0], idle_ns)
        return
    close_keeper(e)
    for i in range(e.kepts):
        fail_waiting(e, e.kept[i])
    e.waiting = 0
    memset(e.owed, 0, sizeof(e.owed))
    count_voted(e)


cdef void fail_waiting(Engine_* e, Kept* k) noexcept nogil:
    """Its connections are not made any more."""
    cdef int i
    for i in range(e.nodes):
        if k.waiting & bit_of(i):
            k.waiting &= ~bit_of(i)
            vote_on(e, k, i, FAULT)


cdef void end_keeper(Engine_* e) noexcept nogil:
    """The engine ends. The agent does not look meanwhile, and no lease is kept."""
    pthread_mutex_lock(&keep_mutex)
    if e.keeper != NULL:
        close_keeper(e)
    free(e.kept)
    pthread_mutex_unlock(&keep_mutex)


cdef void close_keeper(Engine_* e) noexcept nogil:
    pthread_mutex_lock(&e.mutex)
    forget_channel(e, e.keeper)
    channel_close(e, e.keeper, b"closed")
    e.keeper = NULL
    pthread_mutex_unlock(&e.mutex)


cdef int listen_to_keeper(Engine_* e, pollfd* fds, int n, int room, int64_t* due) noexcept nogil:
    """Have the poll wait for its connections, and note for which tokens others have to look there."""
    cdef Conn* conn
    cdef uint64_t late = 0
    cdef int i
    pthread_mutex_lock(&e.mutex)
    for i in range(e.nodes):
        conn = &e.keeper.conn[i]
        if conn.state == CLOSED:
            continue
        pthread_mutex_lock(&conn.mutex)
        late |= late_tags(conn)
        if conn.slots and conn.state == READY:
            due[0] = min(due[0], slot_at(conn, 0).due_ns if not e.node[i].suspect else NEVER)
        if n < room and (conn.slots or conn.out.length or conn.state < READY) and conn_interest(conn):
            fds[n].fd = conn.fd
            fds[n].events = conn_interest(conn)
            n += 1
        elif conn.state < HANDSHAKE:
            due[0] = min(due[0], rb_now_ns() + MS)
        pthread_mutex_unlock(&conn.mutex)
    e.keeper.late = late
    e.keeper.late_since = 0
    pthread_mutex_unlock(&e.mutex)
    return n


cdef void rouse_keepers() noexcept nogil:
    """The clock was moved: have all who wait for a loss look at it."""
    cdef Engine_* e
    cdef int i
    pthread_mutex_lock(&agent_mutex)
    pthread_mutex_lock(&keep_mutex)
    e = agent_engines
    while e != NULL:
        for i in range(e.kepts):
            rb_gate_rouse(&e.kept[i].moved)
        e = e.next
    pthread_mutex_unlock(&keep_mutex)
    pthread_mutex_unlock(&agent_mutex)


# ---- what a Renewal does ----

cdef enum:
    BEGIN
    STOP
    DROP_IT
    PAUSE
    RESUME
    NOTE
    SHORTEN
    DOUBT
    BOUND
    LOSE
    LOOK


cdef int64_t change(Kept* k, int what, int64_t a, int64_t b, int64_t c) noexcept nogil:
    """Do one thing with a lease, under keep_mutex. Gives when the agent has to look; below 0: it failed."""
    cdef Engine_* e = k.engine
    if what == BEGIN:
        if not heap_add(e, k):
            return -1
        plan(e, k)
        return k.due_ns if agent_timer >= 0 else min(k.due_ns, rb_now_ns() + UNTIMED_NS)
    if what == STOP or what == DROP_IT:
        return stop_kept(e, k, what == DROP_IT)
    if is_over(k):
        return NEVER
    if rb_now_ns() >= k.valid_until_ns:
        lose(e, k, why_over(k))
        return NEVER
    if what == PAUSE:
        k.paused = 1
    elif what == RESUME:
        k.paused = 0
    elif what == NOTE:
        c = surely_valid(k, a, c)
        if k.sent and k.round_started_ns > a:  # a renewal came after it
            c = min(c, validity_end(k.round_started_ns, k.life_ms, k.drift_ns))
        rb_store64(&k.started_ns, a)
        rb_store64(&k.length_ms, b)
        rb_store64(&k.valid_until_ns, c)
        k.failures = 0
    elif what == SHORTEN:
        rb_store64(&k.valid_until_ns, min(k.valid_until_ns, a))
    elif what == DOUBT:
        k.surely_ns = min(k.surely_ns, a)
    elif what == BOUND:
        k.until_ns = a
    elif what == LOSE:
        lose(e, k, <int>a)
        return NEVER
    plan(e, k)
    return k.due_ns


cdef int64_t stop_kept(Engine_* e, Kept* k, bint drop) noexcept nogil:
    """From here on nothing is sent for it."""
    cdef int64_t due = NEVER
    k.gate = NULL
    if not k.stopped:
        rb_store(&k.stopped, 1)
        forget_waiting(k)
        heap_remove(e, k)
        rb_gate_rouse(&k.moved)
        if e.kepts == 0 and e.used_at != e.closings:
            due = 0  # connections may have been made since the engine was closed
    if drop:
        kept_free(k)
    return due


cdef int64_t change_waiting(Kept* k, int what, int64_t a, int64_t b, int64_t c) noexcept nogil:
    cdef int64_t due
    rb_add(&keep_wanted, 1)
    pthread_mutex_lock(&keep_mutex)
    rb_add(&keep_wanted, -1)
    due = change(k, what, a, b, c)
    pthread_mutex_unlock(&keep_mutex)
    return due


cdef int64_t change_now(Kept* k, int what, int64_t a=0, int64_t b=0, int64_t c=0) noexcept:
    """Nobody waits for keep_mutex with the GIL, nor for the GIL with keep_mutex: the agent needs the one."""
    cdef int64_t due
    if pthread_mutex_trylock(&keep_mutex) == 0:
        due = change(k, what, a, b, c)
        pthread_mutex_unlock(&keep_mutex)
    else:
        with nogil:
            due = change_waiting(k, what, a, b, c)
    if due >= 0 and due != NEVER:
        agent_due(due)
    return due


cdef Kept* new_kept(Engine_* e, bytes key, bytes token, program, back) except NULL:
    cdef Kept* k
    cdef size_t key_length = PyBytes_GET_SIZE(key), token_length = PyBytes_GET_SIZE(token)
    cdef int renews = -1, restores = -1
    if key_length > <size_t>longest or token_length > <size_t>longest:
        raise ValueError(f"a key or token has at most {longest} bytes")
    if program is not None:
        renews = program.index
        if prog[renews].words > WORDS:
            raise ValueError(f"what renews a lease needs {WORDS} words at most, not {prog[renews].words}")
    if back is not None:
        restores = back.index
        if prog[restores].words > WORDS or not prog[restores].tries or prog[restores].undo < 0:
            raise ValueError(f"what puts a lease back is a try of {WORDS} words at most, with an undo")
    k = <Kept*>malloc(sizeof(Kept) + key_length + token_length)
    if k == NULL:
        raise MemoryError()
    memset(k, 0, sizeof(Kept))
    k.refs = 1
    k.engine = e
    k.program = renews
    k.back = restores
    k.surely_ns = NEVER
    k.place = -1
    k.key_length = key_length
    k.token_length = token_length
    memcpy(k.bytes, PyBytes_AS_STRING(key), key_length)
    memcpy(k.bytes + key_length, PyBytes_AS_STRING(token), token_length)
    k.tag = rb_hash(k.bytes + key_length, token_length)
    rb_gate_init(&k.moved)
    return k


cdef Renewal new_renewal(Engine engine, Kept* k, Gate gate):
    """Takes over the reference."""
    cdef Renewal renewal = Renewal.__new__(Renewal)
    renewal.k = k
    renewal.generation = rb_generation
    renewal.engine = engine
    if gate is not None:
        gate.renew()
        renewal.gate = gate
        k.gate = &gate.linked.gate
    if change_now(k, BEGIN) < 0:
        raise MemoryError()
    return renewal


@no_gc  # it is part of no cycle, and its end needs the engine
@freelist(8)
cdef class Renewal:
    """What the agent does for one lease; see `redbolt._engine.Renewal`."""

    cdef Engine engine
    cdef Gate gate
    cdef Kept* k
    cdef int generation

    def __dealloc__(self):
        if self.k != NULL and self.generation == rb_generation:
            change_now(self.k, DROP_IT)

    cdef inline bint is_ours(self) noexcept:
        """Not in a forked child, where all of it is left where it is."""
        return self.generation == rb_generation

    @property
    def valid_until_ns(self):
        """End of validity by the clock; 0 once it is lost."""
        return rb_load64(&self.k.valid_until_ns) if self.is_ours() else 0

    @property
    def started_ns(self):
        """The clock just before the first byte of what last gave the key its life."""
        return rb_load64(&self.k.started_ns)

    @property
    def length_ms(self):
        """That life."""
        return rb_load64(&self.k.length_ms)

    @property
    def touched(self):
        """A bit for each node that may have the token."""
        return rb_load64(<int64_t*>&self.k.touched)

    @property
    def lost(self):
        """0, or why it was lost. The agent may not have had the time to say so."""
        if self.is_ours() and not is_over(self.k) and rb_now_ns() >= rb_load64(&self.k.valid_until_ns):
            change_now(self.k, LOOK)
        return rb_load(&self.k.lost)

    @property
    def renewed(self):
        """How many renewals were granted."""
        return rb_load(&self.k.renewed)

    @property
    def failed(self):
        """How many were not."""
        return rb_load(&self.k.failed)

    @property
    def busy(self):
        """Whether a renewal is under way that some node has not answered yet, within its time."""
        cdef int64_t ends_ns
        if not self.is_ours() or not rb_load64(<int64_t*>&self.k.open):
            return False
        ends_ns = rb_load64(&self.k.round_ends_ns)
        if not is_over(self.k):  # the agent will say so, when it has noted who is silent
            ends_ns += LATE_NS
        return rb_now_ns() < ends_ns

    def stop(self):
        """Renew no more, and say no more that it is lost."""
        if self.is_ours():
            change_now(self.k, STOP)

    def pause(self):
        """Begin no renewal until `resume`."""
        if self.is_ours():
            change_now(self.k, PAUSE)

    def resume(self):
        """Go on; a renewal that is due is made."""
        if self.is_ours():
            change_now(self.k, RESUME)

    def note(self, int64_t started_ns, int64_t length_ms, int64_t valid_until_ns):
        """The holder itself has given the key a new life."""
        if self.is_ours():
            change_now(self.k, NOTE, started_ns, length_ms, valid_until_ns)

    def shorten(self, int64_t valid_until_ns):
        """Validity ends then, if that is earlier."""
        if self.is_ours():
            change_now(self.k, SHORTEN, valid_until_ns)

    def doubt(self, int64_t surely_ns):
        """No later renewal, and no `note`, is good for longer than ``surely_ns`` from its start."""
        if self.is_ours():
            change_now(self.k, DOUBT, surely_ns)

    def bound(self, int64_t until_ns):
        """The lease may be held until then, from now on."""
        if self.is_ours():
            change_now(self.k, BOUND, until_ns)

    def lose(self, int reason):
        """The holder itself has found out that it is lost."""
        if self.is_ours():
            change_now(self.k, LOSE, reason)

    def wait(self, int64_t until_ns):
        """Block until it is lost (True), or until it was stopped or the clock reads ``until_ns`` (False)."""
        cdef int64_t most_ns
        while self.is_ours():
            most_ns = SLICE_NS if on_main_thread() else LONGEST_SLEEP_NS
            with nogil:
                wait_for_loss(self.k, until_ns, most_ns)
            if not self.is_ours():
                break
            if rb_load(&self.k.lost):
                return True
            if rb_load(&self.k.stopped) or rb_now_ns() >= until_ns:
                return False
            if PyErr_CheckSignals() != 0:
                rb_raise()
        return False


cdef void wait_for_loss(Kept* k, int64_t until_ns, int64_t most_ns) noexcept nogil:
    """Sleep once."""
    cdef uint32_t word = rb_gate_look(&k.moved)  # before the rest: what changes after it ends the sleep
    cdef int64_t left = until_ns - rb_now_ns()
    if left > 0 and not rb_load(&k.lost) and not rb_load(&k.stopped):
        rb_gate_sleep(&k.moved, word, min(left, most_ns))
