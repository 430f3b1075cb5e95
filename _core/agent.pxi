# The agent: one C thread per process that never needs the GIL. It reads what rounds have left open, tells
# which nodes are silent, connects to them again, renews leases, and sees retired connections to their end. It
# sleeps while there is nothing of that kind.

cdef pthread_mutex_t agent_mutex    # the list of engines, and what is retired
cdef pthread_mutex_t keep_mutex     # see data.pxd
cdef int keep_wanted = 0            # how many wait for it
cdef pthread_mutex_t start_mutex    # starting and stopping; a leaf
cdef Engine_* agent_engines = NULL
cdef Retired* agent_retired = NULL  # the agent's own
cdef pthread_t agent_thread
cdef int agent_runs = 0
cdef int agent_stops = 0
cdef int[2] agent_pipe
cdef int64_t agent_wakes_ns = NEVER # when it will look again by itself
cdef int agent_timer = -1           # ends its sleep then, also if the machine is suspended meanwhile
cdef int64_t agent_timer_ns         # what that is set to

cdef int64_t LONGEST_SLEEP_NS = 3_600_000_000_000
cdef int64_t IDLE_NS = 30_000_000_000       # surplus channels idle for longer are closed
cdef int64_t SILENT_NS = 1_000_000_000      # a connection silent for longer (or 4 node limits) is replaced
cdef int64_t CARES_NS = 5_000_000_000       # nodes of an engine unused for longer are not reconnected
cdef int64_t UNTIMED_NS = 1_000_000_000     # so long it sleeps at most where leases are kept without a timer


cdef void agent_due(int64_t due) noexcept nogil:
    """Make sure that the agent looks no later than ``due``. Costs nothing if it does so anyway."""
    if due >= rb_load64(&agent_wakes_ns):
        return
    if not rb_load(&agent_runs) and not agent_start():
        return
    agent_wake()


cdef void agent_wake() noexcept nogil:
    if rb_load(&agent_runs):
        poke()
    else:
        agent_start()


cdef void poke() noexcept nogil:
    if write(agent_pipe[1], b"!", 1) < 0:
        return  # the pipe is full, so it will wake anyway


cdef bint agent_start() noexcept nogil:
    cdef bint ok
    global agent_runs, agent_timer, agent_timer_ns
    pthread_mutex_lock(&start_mutex)
    ok = agent_runs
    if not ok and not agent_stops and rb_pipe(agent_pipe) == 0:
        agent_timer = rb_timer()
        agent_timer_ns = NEVER
        ok = rb_thread(&agent_thread, agent_body, NULL, 0) == 0
        if ok:
            rb_store(&agent_runs, 1)
        else:
            rb_close(agent_timer)
            rb_close(agent_pipe[0])
            rb_close(agent_pipe[1])
    pthread_mutex_unlock(&start_mutex)
    return ok


cdef void* agent_body(void* nothing) noexcept nogil:
    cdef pollfd* fds = NULL
    cdef int room = 0, n, i
    cdef int64_t due, kept_due, now, wait_ns
    cdef char[64] drain
    cdef Engine_* e
    cdef pollfd* grown
    global agent_timer_ns
    while not rb_load(&agent_stops):
        rb_store64(&agent_wakes_ns, NEVER)  # first: whoever wants it from here on will wake it
        due = kept_due = NEVER
        pthread_mutex_lock(&agent_mutex)
        n = 2
        e = agent_engines
        while e != NULL:
            n += most_descriptors(e)
            e = e.next
        n += take_retired()
        if n > room:
            grown = <pollfd*>realloc(fds, n * sizeof(pollfd))
            if grown != NULL:
                fds = grown
                room = n
        if room == 0:
            pthread_mutex_unlock(&agent_mutex)
            return NULL
        n = 2
        e = agent_engines
        while e != NULL:
            n = look_after(e, fds, n, room, &due)
            e = e.next
        e = agent_engines
        while e != NULL:  # after what rounds have left open: what is written for a lease follows that
            n = look_after_kept(e, fds, n, room, &due, &kept_due)
            e = e.next
        due = min(due, kept_due)
        n = see_off_retired(fds, n, room, &due)
        pthread_mutex_unlock(&agent_mutex)
        fds[0].fd = agent_pipe[0]
        fds[0].events = POLLIN
        fds[1].fd = agent_timer  # below 0 it is passed over
        fds[1].events = POLLIN
        for i in range(n):
            fds[i].revents = 0
        now = rb_now_ns()
        if agent_timer < 0 and kept_due != NEVER:
            due = min(due, now + UNTIMED_NS)
        rb_store64(&agent_wakes_ns, due)
        rb_set_timer(agent_timer, due, &agent_timer_ns)
        wait_ns = min(due - now, LONGEST_SLEEP_NS)
        poll(fds, n, -1 if due == NEVER else <int>((wait_ns + MS - 1) // MS) if wait_ns > 0 else 0)
        while read(agent_pipe[0], drain, sizeof(drain)) > 0:
            pass
        if fds[1].revents and read(agent_timer, drain, sizeof(drain)) > 0:
            agent_timer_ns = NEVER
    free(fds)
    return NULL


cdef int most_descriptors(Engine_* e) noexcept nogil:
    cdef Channel* ch
    cdef int n = 0
    pthread_mutex_lock(&e.mutex)
    ch = e.all
    while ch != NULL:
        n += e.nodes
        ch = ch.next
    if e.keeper == NULL and rb_load(&e.kepts):
        n += e.nodes  # it may be made in this turn
    pthread_mutex_unlock(&e.mutex)
    return n


cdef int look_after(Engine_* e, pollfd* fds, int n, int room, int64_t* due) noexcept nogil:
    """Service the idle channels of one engine; they stay out of every thread's hands meanwhile."""
    cdef Channel* ch
    cdef bint first = True
    cdef bint others
    cdef int kind
    cdef int64_t now = rb_now_ns()
    pthread_mutex_lock(&e.mutex)
    others = e.watches or e.idle_watch[0] != NULL or e.idle_watch[1] != NULL or rb_load(&e.kepts)
    if e.idle == NULL and others:
        have_a_channel(e, now)
    elif not others and e.used_at != e.closings:
        close_stack(e, &e.idle)  # it was made since the engine was closed, for them
    ch = e.idle
    while ch != NULL:
        n = look_after_channel(e, ch, first, fds, n, room, now, due)
        first = False
        ch = ch.next_idle
    if e.idle != NULL:
        close_surplus(e, &e.idle.next_idle, now, due)
    for kind in range(2):
        ch = e.idle_watch[kind]
        while ch != NULL:
            n = look_after_channel(e, ch, False, fds, n, room, now, due)
            ch = ch.next_idle
        close_surplus(e, &e.idle_watch[kind], now, due)
    pthread_mutex_unlock(&e.mutex)
    return n


cdef void have_a_channel(Engine_* e, int64_t now) noexcept nogil:
    """Make a channel if only watches and the keeper are in use, and some node is to be asked whether it is
    there, or is owed something. The engine's mutex is held.
    """
    cdef Channel* ch = e.all
    cdef int i
    while ch != NULL:
        if not ch.kind and ch != e.keeper:  # a round has it, and will give it back
            return
        ch = ch.next
    for i in range(e.nodes):
        if e.node[i].orphans or (e.node[i].suspect and is_cared_for(e, now)):
            ch = channel_new(e, ORDINARY)
            if ch != NULL:
                ch.used_ns = now
                ch.next = e.all
                e.all = e.idle = ch
            return


cdef inline bint is_cared_for(Engine_* e, int64_t now) noexcept nogil:
    """Whether anybody would like to hear that a silent node is back."""
    return e.watches or rb_load(&e.kepts) or now - e.used_ns < CARES_NS


cdef int look_after_channel(
    Engine_* e, Channel* ch, bint first, pollfd* fds, int n, int room, int64_t now, int64_t* due
) noexcept nogil:
    cdef Conn* conn
    cdef int i
    for i in range(e.nodes):
        conn = &ch.conn[i]
        pthread_mutex_lock(&conn.mutex)
        look_after_conn(e, conn, first, now, due)
        ch.late |= late_tags(conn)
        if n < room and (conn.slots or conn.out.length or conn.state < READY) and conn_interest(conn):
            if (
                e.node[i].suspect or conn.state < READY or (conn.out.length and not conn.held_ns)
                or may_fall_back(conn)
            ):  # fmt: skip
                fds[n].fd = conn.fd
                fds[n].events = conn_interest(conn)
                n += 1
        pthread_mutex_unlock(&conn.mutex)
    return n


cdef void look_after_conn(Engine_* e, Conn* conn, bint first, int64_t now, int64_t* due) noexcept nogil:
    cdef NodeState* node = e.node[conn.node]
    cdef char[CAUSE] cause
    cdef int64_t replace_ns
    cdef long long silent_ms
    cdef Slot* oldest
    if conn.state == READY or conn.state == HANDSHAKE:
        if conn.held_ns > now:
            due[0] = min(due[0], conn.held_ns)
        else:
            conn_flush(conn)
        if conn.slots:
            conn_read(e, NULL, conn, NULL)
    elif conn.state != CLOSED:
        conn_advance(e, NULL, conn, settled(conn), NULL)
    if CLOSED < conn.state < READY:
        replace_ns = conn.opened_ns + max(conn.limit_ns, SILENT_NS)
        if now >= replace_ns:
            silent_ms = (now - conn.opened_ns) // MS
            snprintf(cause, sizeof(cause), b"no connection within %lld ms", silent_ms)
            conn_fail(e, NULL, conn, cause, conn.state < HANDSHAKE)
        else:
            due[0] = min(due[0], replace_ns)
            if conn.state < HANDSHAKE and conn.fd < 0:
                due[0] = min(due[0], now + MS)
    if conn.state == READY and first and node.orphans:
        pay_orphans(node, conn, now)
    if conn.state == READY and first and node.suspect and not conn.slots and is_cared_for(e, now):
        ask_whether_there(e, conn, now)
    if conn.state == READY and conn.slots:
        oldest = slot_at(conn, 0)
        if now < oldest.due_ns:
            due[0] = min(due[0], oldest.due_ns)
        else:
            silent_ms = (oldest.due_ns - oldest.sent_ns) // MS
            snprintf(cause, sizeof(cause), b"no answer within %lld ms", silent_ms)
            node_suspect(node, cause)
            replace_ns = oldest.sent_ns + max(SILENT_NS, 4 * (oldest.due_ns - oldest.sent_ns))
            if now >= replace_ns:
                conn_fail(e, NULL, conn, cause, False)
            else:
                due[0] = min(due[0], replace_ns)
    if conn.state == CLOSED and first:
        pthread_mutex_lock(&node.mutex)
        node_expire_orphans(node, now)
        pthread_mutex_unlock(&node.mutex)
        if node.orphans or (node.suspect and is_cared_for(e, now)):
            if now >= node.next_connect_ns:
                conn_open(e, NULL, conn, SILENT_NS)
                due[0] = min(due[0], now + MS)
            else:
                due[0] = min(due[0], node.next_connect_ns)


cdef void ask_whether_there(Engine_* e, Conn* conn, int64_t now) noexcept nogil:
    """A node that became suspect on another connection, of a watch say: this one has nothing to wait for, and
    so could never tell. Its mutex is held.
    """
    cdef Slot slot
    if e.node[conn.node].no_ping:
        conn_fail(e, NULL, conn, b"silent on another connection", False)
        return
    memset(&slot, 0, sizeof(slot))
    slot.sent_ns = now
    slot.due_ns = now + SILENT_NS
    slot.program = HANDSHAKE_PING
    conn_put(conn, PING, strlen(PING), &slot)


cdef short settled(Conn* conn) noexcept nogil:
    """Whether a connect has come to something, without waiting."""
    cdef pollfd one
    one.fd = conn.fd
    one.events = POLLOUT
    one.revents = 0
    if conn.fd >= 0:
        poll(&one, 1, 0)
    return one.revents


cdef void pay_orphans(NodeState* node, Conn* conn, int64_t now) noexcept nogil:
    """Send the deletes that a node is owed on a connection that is ready."""
    cdef int i, kept = 0
    pthread_mutex_lock(&node.mutex)
    node_expire_orphans(node, now)
    for i in range(node.orphans):
        if conn_put_spare(conn, node.orphan[i], now + SILENT_NS):
            packed_free(node.orphan[i])
        else:
            node.orphan[kept] = node.orphan[i]
            kept += 1
    node.orphans = kept
    pthread_mutex_unlock(&node.mutex)


cdef void close_surplus(Engine_* e, Channel** link, int64_t now, int64_t* due) noexcept nogil:
    """Close those channels of an idle stack, from here on, that nobody has used for long. The engine's mutex is
    held.
    """
    cdef Channel* ch
    while link[0] != NULL:
        ch = link[0]
        if now - ch.used_ns < IDLE_NS:
            due[0] = min(due[0], ch.used_ns + IDLE_NS)
            link = &ch.next_idle
            continue
        link[0] = ch.next_idle
        forget_channel(e, ch)
        channel_close(e, ch, b"closed after a long time without use")


cdef void forget_channel(Engine_* e, Channel* ch) noexcept nogil:
    """Take it off the list of all. The engine's mutex is held."""
    cdef Channel** link = &e.all
    while link[0] != ch:
        link = &link[0].next
    link[0] = ch.next


cdef int take_retired() noexcept nogil:
    """Take over what was retired since the last look; returns how many there are."""
    cdef Retired* one
    cdef int n = 0
    global retired_new, agent_retired
    pthread_mutex_lock(&retired_mutex)
    while retired_new != NULL:
        one = retired_new
        retired_new = one.next
        one.next = agent_retired
        agent_retired = one
    pthread_mutex_unlock(&retired_mutex)
    one = agent_retired
    while one != NULL:
        n += 1
        one = one.next
    return n


cdef int see_off_retired(pollfd* fds, int n, int room, int64_t* due) noexcept nogil:
    """Send the rest, end our side, read to the end of theirs; then its deletes may go elsewhere."""
    cdef Retired** link = &agent_retired
    cdef Retired* one
    cdef int64_t now = rb_now_ns()
    cdef int i, alive = 0
    while link[0] != NULL:
        one = link[0]
        if alive < MOST_RETIRED and now < one.until_ns and not retired_ended(one):
            alive += 1
            due[0] = min(due[0], one.until_ns)
            if n < room:
                fds[n].fd = one.fd
                fds[n].events = POLLIN | POLLOUT if one.out.length else POLLIN
                n += 1
            link = &one.next
            continue
        link[0] = one.next
        pthread_mutex_lock(&one.node.mutex)
        for i in range(one.orphans):
            node_add_orphan(one.node, one.orphan[i])
        pthread_mutex_unlock(&one.node.mutex)
        if one.orphans:
            due[0] = min(due[0], now)
        rb_close(one.fd)
        node_free(one.node)
        free(one.orphan)
        text_free(&one.out)
        free(one)
    return n


cdef bint retired_ended(Retired* one) noexcept nogil:
    cdef char[CHUNK] discard
    cdef ssize_t size
    cdef int chunks = 0
    while one.out.length:
        size = send(one.fd, one.out.bytes, one.out.length, MSG_NOSIGNAL | MSG_DONTWAIT)
        if size < 0:
            if errno == EINTR:
                continue
            if errno == EAGAIN:
                break
            return True
        text_drop(&one.out, size)
    if one.out.length == 0 and not one.shut:
        shutdown(one.fd, SHUT_WR)
        one.shut = 1
    while chunks < MOST_CHUNKS_READ:
        chunks += 1
        size = recv(one.fd, discard, sizeof(discard), MSG_DONTWAIT)
        if size == 0:
            return True
        if size < 0:
            if errno == EINTR:
                continue
            return errno != EAGAIN
    return False


cdef void in_child() noexcept nogil:
    """After a fork: no agent, no engines, fresh mutexes. What the parent had is left where it is."""
    global agent_runs, agent_engines, agent_retired, agent_timer, keep_wanted, retired_new
    rb_mutex_init(&agent_mutex)
    rb_mutex_init(&keep_mutex)
    rb_mutex_init(&start_mutex)
    rb_mutex_init(&retired_mutex)
    agent_runs = 0
    agent_timer = -1
    memset(keep_text, 0, sizeof(keep_text))  # the agent may have been in the middle of it
    memset(keep_text_round, 0, sizeof(keep_text_round))
    keep_wanted = 0
    agent_engines = NULL
    agent_retired = retired_new = NULL
    rb_store64(&agent_wakes_ns, NEVER)


def stop_agent():
    """Stop and join the agent, for the end of the interpreter. It does not start again."""
    cdef int runs
    with nogil:
        pthread_mutex_lock(&start_mutex)
        rb_store(&agent_stops, 1)
        runs = agent_runs
        rb_store(&agent_runs, 0)
        pthread_mutex_unlock(&start_mutex)
        if runs:
            poke()
            pthread_join(agent_thread, NULL)


def set_clock_offset_ns(int64_t offset_ns):
    """Move the clock, for tests; see `redbolt._clock.set_offset_ns`."""
    rb_set_clock_offset_ns(offset_ns)
    nudge_gates()
    with nogil:
        rouse_all()
        rouse_keepers()
        if rb_load(&agent_runs):
            agent_wake()


rb_mutex_init(&agent_mutex)
rb_mutex_init(&keep_mutex)
rb_mutex_init(&start_mutex)
rb_mutex_init(&retired_mutex)
rb_watch_forks(in_child)
