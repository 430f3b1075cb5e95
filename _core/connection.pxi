# One connection: opened without blocking, written under its mutex, read by its owner, given up without
# losing what was sent.

cdef enum:
    CHUNK = 16_384
    MOST_BACKLOG = 262_144      # bytes of unanswered commands
    MOST_FED = 1_048_576        # bytes of one reply; redbolt._engine.MAX_REPLY
    MOST_CHUNKS_READ = 8        # before somebody else gets a turn
    MOST_RETIRED = 32
    HANDSHAKE_LOGIN = -1        # an error ends the connection
    HANDSHAKE_PING = -2         # any reply will do
    HANDSHAKE_HELLO = -3        # an error ends the connection, and the next one goes without
    HANDSHAKE_NAME = -4         # an error is remembered
    HANDSHAKE_TRACKING = -5     # an error is remembered, and ends the connection
    SUBSCRIPTION = -6           # answered by a push, or by an error

cdef int64_t HELD_NS = 50_000_000
cdef int64_t RETIRE_NS = 1_000_000_000
cdef int64_t LONGEST_RETIRE_NS = 30_000_000_000
cdef char* PING = b"*1\r\n$4\r\nPING\r\n"


cdef inline bint is_proven(const Conn* conn, int program, int form) noexcept nogil:
    """Say whether this form of a program was answered on this connection."""
    return conn.proven[program] >> form & 1


cdef inline Slot* slot_at(Conn* conn, uint32_t i) noexcept nogil:
    return &conn.slot[(conn.first + i) & (conn.room - 1)]


cdef bint conn_has_tag(Conn* conn, uint64_t tag) noexcept nogil:
    """Say whether a write of this token is unanswered here. The mutex is held."""
    cdef uint32_t i
    for i in range(conn.slots):
        if slot_at(conn, i).tag == tag:
            return True
    return False


cdef bint conn_push(Conn* conn, const Slot* slot) noexcept nogil:
    cdef Slot* grown
    cdef uint32_t i, room
    if conn.slots == conn.room:
        room = max(8, 2 * conn.room)
        grown = <Slot*>malloc(room * sizeof(Slot))
        if grown == NULL:
            return False
        for i in range(conn.slots):
            grown[i] = slot_at(conn, i)[0]
        free(conn.slot)
        conn.slot = grown
        conn.room = room
        conn.first = 0
    conn.slots += 1
    slot_at(conn, conn.slots - 1)[0] = slot[0]
    conn.backlog += slot.size
    return True


cdef bint conn_put(Conn* conn, const char* bytes, size_t length, Slot* slot) noexcept nogil:
    """Queue a whole command and its slot, and send what the socket takes. The mutex is held.

    On False nothing was queued.
    """
    if not conn_add(conn, length, slot):
        return False
    conn_write(conn, bytes, length)
    return True


cdef void conn_write(Conn* conn, const char* bytes, size_t length) noexcept nogil:
    """Send whole commands whose slots are noted, as far as the socket takes them. The mutex is held.

    A socket that fails here is left to its reader, who sees the same.
    """
    cdef ssize_t sent
    if conn.out.length == 0:
        sent = send(conn.fd, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT)
        if sent < 0:
            sent = 0
        bytes += sent
        length -= sent
    if length:
        text_add(&conn.out, bytes, length)
        conn_flush(conn)


cdef bint conn_hold(Conn* conn, const char* bytes, size_t length, Slot* slot) noexcept nogil:
    """Queue a whole command and its slot, to go out with the next one or when the agent looks."""
    if not conn_add(conn, length, slot):
        return False
    if conn.out.length == 0:
        conn.held_ns = rb_now_ns() + HELD_NS
    text_add(&conn.out, bytes, length)
    return True


cdef bint conn_add(Conn* conn, size_t length, Slot* slot) noexcept nogil:
    """Note a slot, and make room for its command; False if that is too much."""
    if conn.slots and conn.backlog + length > MOST_BACKLOG:
        return False
    slot.size = <uint32_t>length
    if not text_reserve(&conn.out, length) or not conn_push(conn, slot):
        return False
    packed_keep(slot.spare)
    return True


cdef void conn_flush(Conn* conn) noexcept nogil:
    """Send what is queued, as far as the socket takes it. The mutex is held."""
    cdef ssize_t sent
    conn.held_ns = 0
    while conn.out.length:
        sent = send(conn.fd, conn.out.bytes, conn.out.length, MSG_NOSIGNAL | MSG_DONTWAIT)
        if sent <= 0:
            return
        text_drop(&conn.out, sent)


cdef void conn_reset(Conn* conn) noexcept nogil:
    """Forget all of it but its mutex and place; the descriptor is somebody else's business by now."""
    if conn.reader != NULL:
        redisReaderFree(conn.reader)
    conn.reader = NULL
    conn.fd = -1
    conn.state = CLOSED
    conn.out.length = 0
    conn.first = conn.slots = 0
    conn.backlog = conn.fed = 0
    memset(conn.proven, 0, sizeof(conn.proven))
    conn.shaking = 0
    conn.heard = 0
    conn.degraded = 0
    conn.wanted = conn.silent = conn.topics = 0
    conn.again_ns = conn.held_ns = 0


cdef void distrust_form(NodeState* node, int program, int form) noexcept nogil:
    """The node does not seem to know a plain command: use the next form. The node's mutex is held."""
    if form < prog[program].native and form + 1 < prog[program].forms and node.form[program] == form:
        node.form[program] = <uint8_t>(form + 1)


cdef void conn_fail(Engine_* e, Channel* ch, Conn* conn, const char* cause, bint gone) noexcept nogil:
    """Give a connection up; its node's vote in the running round becomes a fault. The mutex is held.

    ``gone``: the other side has ended it, so nothing more comes of it. Otherwise it is retired: its deletes
    go on a new connection only after the old one was read to its end, or a paused server would run them
    before the writes they undo.
    """
    cdef NodeState* node = e.node[conn.node]
    cdef Slot* slot
    cdef int state = conn.state
    cdef uint32_t i
    cdef int64_t now = rb_now_ns()
    cdef int64_t until = now + RETIRE_NS
    cdef Retired* retired
    cdef int orphans = 0
    cdef bint waited, again = False
    if state == CLOSED:
        return
    waited = ch != NULL and ch.active and ch.vote[conn.node] == OPEN
    retired = NULL if gone or state < HANDSHAKE else <Retired*>calloc(1, sizeof(Retired))
    if retired != NULL and conn.slots:
        retired.orphan = <Packed**>malloc(conn.slots * sizeof(Packed*))
    pthread_mutex_lock(&node.mutex)
    if conn.slots and gone:
        # Proxies hang up on commands that they do not know.
        slot = slot_at(conn, 0)
        if slot.program == HANDSHAKE_PING:
            node.no_ping = 1
        elif slot.program < 0:
            do_without(node, conn, slot.program)
        elif slot.program >= 0 and not is_proven(conn, slot.program, slot.form):
            distrust_form(node, slot.program, slot.form)
    for i in range(conn.slots):
        slot = slot_at(conn, i)
        if slot.kept != NULL:
            take_vote(e, conn.node, slot, FAULT)
        if slot.spare == NULL:
            continue
        if slot.spare.expires_ns <= now or not prog[slot.spare.program].deletes:
            packed_free(slot.spare)
        elif retired != NULL and retired.orphan != NULL:
            retired.orphan[orphans] = slot.spare
            orphans += 1
            until = max(until, min(slot.spare.expires_ns, now + LONGEST_RETIRE_NS))
        else:
            node_add_orphan(node, slot.spare)
    if conn.degraded or (state == READY and conn.heard):
        copy_cause(node.cause, cause, strlen(cause))
        node.next_connect_ns = now
    else:
        node_failed(node, cause, now)
        if state != READY:
            node.away = 1
        else:  # it took the connection and ended it unheard, as servers do that are ending themselves
            node.no_push = node.no_tracking = 0
    pthread_mutex_unlock(&node.mutex)
    again = waited and conn.degraded and not lacks_way(node, conn.kind)
    if ch != NULL and ch.kind and not again and not conn.silent:
        tell(ch, LOST, conn.node, 0, lacks_way(node, conn.kind))
    if state != READY and not conn.degraded:
        node_resolve(node)
    if waited and not again:
        ch.vote[conn.node] = FAULT
        copy_cause(&ch.cause[conn.node * CAUSE], cause, strlen(cause))
    if retired != NULL:
        retired.fd = conn.fd
        retired.until_ns = until
        retired.orphans = orphans
        retired.node = node
        rb_add(&node.refs, 1)
        retired.out = conn.out
        memset(&conn.out, 0, sizeof(conn.out))
        retire(retired)
    else:
        rb_close(conn.fd)
    conn_reset(conn)
    if again:  # at once, without what the node does not know
        conn_open(e, ch, conn, conn.limit_ns)


cdef void do_without(NodeState* node, Conn* conn, int program) noexcept nogil:
    """The node does not know or permit a command of the handshake: connections get along without, if they
    can.
    """
    if program == HANDSHAKE_HELLO and conn.kind:
        node.no_push = 1
    elif program == HANDSHAKE_HELLO:
        node.no_hello = 1
    elif program == HANDSHAKE_TRACKING:
        node.no_tracking = 1
    elif program == HANDSHAKE_NAME:
        node.no_name = 1
    else:
        return
    conn.degraded = 1


# ---- opening ----

cdef void conn_open(Engine_* e, Channel* ch, Conn* conn, int64_t limit_ns) noexcept nogil:
    """Begin to connect, with the first address. The mutex is held."""
    conn.address = 0
    conn.opened_ns = rb_now_ns()
    conn.limit_ns = limit_ns
    conn_try_address(e, ch, conn)


cdef void conn_try_address(Engine_* e, Channel* ch, Conn* conn) noexcept nogil:
    cdef NodeState* node = e.node[conn.node]
    cdef sockaddr_storage address
    cdef sockaddr_un* local
    cdef socklen_t size
    cdef int addresses, error
    conn.again_ns = 0
    memset(&address, 0, sizeof(address))
    if node.is_unix:
        local = <sockaddr_un*>&address
        local.sun_family = AF_UNIX
        memcpy(local.sun_path, node.path, sizeof(node.path))
        size = sizeof(sockaddr_un)
    else:
        pthread_mutex_lock(&node.mutex)
        addresses = node.addresses
        if addresses:
            memcpy(&address, &node.address[conn.address % addresses], sizeof(address))
            size = node.address_size[conn.address % addresses]
        pthread_mutex_unlock(&node.mutex)
        if addresses == 0:
            if conn.state != RESOLVING:
                conn.state = RESOLVING
                node_resolve(node)
            return
    conn.fd = rb_socket(address.ss_family)
    conn.state = CONNECTING
    if conn.fd < 0:
        conn_fail(e, ch, conn, strerror(errno), True)
        return
    if connect(conn.fd, <sockaddr*>&address, size) == 0:
        conn_connected(e, ch, conn)
        return
    error = errno
    if error == EINPROGRESS or error == EINTR:
        return
    if error == EAGAIN and node.is_unix:  # the backlog of the listening socket is full; this is no connection
        rb_close(conn.fd)
        conn.fd = -1
        conn.again_ns = rb_now_ns() + MS
        return
    conn_next_address(e, ch, conn, error)


cdef void conn_next_address(Engine_* e, Channel* ch, Conn* conn, int error) noexcept nogil:
    cdef NodeState* node = e.node[conn.node]
    if conn.address + 1 < node.addresses:
        rb_close(conn.fd)
        conn.fd = -1
        conn.address += 1
        conn_try_address(e, ch, conn)
    else:
        conn_fail(e, ch, conn, strerror(error), True)


cdef void conn_connected(Engine_* e, Channel* ch, Conn* conn) noexcept nogil:
    """The socket is open: log in, or be ready at once if there is nothing to say."""
    cdef NodeState* node = e.node[conn.node]
    cdef Slot slot
    cdef int i, form = handshake_form(node, conn.kind)
    if not node.is_unix:
        rb_no_delay(conn.fd)
    rb_wait_for(conn.fd, SLICE_NS)
    conn.reader = rb_reader(&conn.reply)
    if conn.reader == NULL:
        conn_fail(e, ch, conn, b"out of memory", True)
        return
    conn.state = HANDSHAKE
    memset(&slot, 0, sizeof(slot))
    slot.sent_ns = rb_now_ns()
    slot.due_ns = conn.opened_ns + conn.limit_ns
    if node.handshakes[form]:
        conn.shaking = node.handshakes[form]
        slot.program = handshake_step(node, conn, 0)
        if not conn_put(conn, node.handshake[form].bytes, node.handshake[form].length, &slot):
            conn_fail(e, ch, conn, b"out of memory", True)
            return
        slot.size = 0
        for i in range(1, conn.shaking):
            slot.program = handshake_step(node, conn, i)
            conn_push(conn, &slot)
    elif node.suspect and not node.no_ping:
        slot.program = HANDSHAKE_PING
        conn.shaking = 1
        conn_put(conn, PING, strlen(PING), &slot)
    else:
        conn_ready(e, ch, conn)


cdef inline int handshake_form(const NodeState* node, int kind) noexcept nogil:
    """Which of the packed handshakes suits a node and the kind of a channel."""
    if kind:
        return 4 + (kind == TRACKING_WATCH) + (2 if node.no_name else 0)
    return (1 if node.no_hello else 0) + (2 if node.no_name else 0)


cdef int8_t handshake_step(const NodeState* node, const Conn* conn, int i) noexcept nogil:
    """What the answer to one command of the handshake means."""
    cdef int last = conn.shaking - 1
    if i == 0 and (conn.kind or (node.says_hello and not node.no_hello)):
        return HANDSHAKE_HELLO
    if conn.kind == TRACKING_WATCH:
        if i == last:
            return HANDSHAKE_TRACKING
        last -= 1
    if i == last and node.says_name and not node.no_name:
        return HANDSHAKE_NAME
    return HANDSHAKE_LOGIN


cdef void conn_ready(Engine_* e, Channel* ch, Conn* conn) noexcept nogil:
    """The node may vote now; first it gets the deletes that earlier connections owe it."""
    cdef NodeState* node = e.node[conn.node]
    cdef int64_t now = rb_now_ns()
    cdef Packed** orphan
    cdef int i, orphans
    conn.state = READY
    pthread_mutex_lock(&node.mutex)
    node_expire_orphans(node, now)
    orphan = node.orphan
    orphans = node.orphans
    node.orphan = NULL
    node.orphans = node.orphan_room = 0
    node.suspect = 0
    node.back_off_ns = 0
    node.next_connect_ns = 0
    if node.away:  # it may be another server by now
        node.away = 0
        memset(node.form, 0, sizeof(node.form))
        node.no_hello = node.no_name = node.no_push = node.no_tracking = 0
    pthread_mutex_unlock(&node.mutex)
    for i in range(orphans):
        if not conn_put_spare(conn, orphan[i], now + conn.limit_ns):
            pthread_mutex_lock(&node.mutex)
            node_add_orphan(node, packed_keep(orphan[i]))
            pthread_mutex_unlock(&node.mutex)
        packed_free(orphan[i])
    free(orphan)
    if conn.wanted and ch != NULL:
        tell(ch, READY_TOLD, conn.node, 0, 0)
    conn.wanted = 0


cdef bint conn_put_spare(Conn* conn, Packed* packed, int64_t due_ns) noexcept nogil:
    """Queue a packed command whose reply nobody waits for. The mutex is held."""
    cdef Slot slot
    memset(&slot, 0, sizeof(slot))
    slot.tag = packed.tag
    slot.sent_ns = rb_now_ns()
    slot.due_ns = due_ns
    slot.program = <int8_t>packed.program
    slot.form = <uint8_t>(prog[packed.program].forms - 1)
    slot.spare = packed
    return conn_put(conn, packed.bytes, packed.length, &slot)


# ---- what poll() told ----

cdef inline short conn_interest(Conn* conn) noexcept nogil:
    """The events that this connection waits for; 0 for none."""
    if conn.state == CONNECTING:
        return POLLOUT if conn.fd >= 0 else 0
    if conn.state >= HANDSHAKE:
        return POLLIN | POLLOUT if conn.out.length and not conn.held_ns else POLLIN
    return 0


cdef void conn_advance(Engine_* e, Channel* ch, Conn* conn, short events, Round* r) noexcept nogil:
    """Go on with what is possible now: connect again, finish connecting, send, read. The mutex is held."""
    cdef int error
    if conn.state == RESOLVING:
        if e.node[conn.node].addresses or not rb_load(&e.node[conn.node].resolving):
            if e.node[conn.node].addresses:
                conn_try_address(e, ch, conn)
            else:
                conn_fail(e, ch, conn, e.node[conn.node].resolve_error, True)
        return
    if conn.state == CONNECTING:
        if conn.fd < 0:
            if rb_now_ns() >= conn.again_ns:
                conn_try_address(e, ch, conn)
            return
        if not events:
            return
        error = rb_socket_error(conn.fd)
        if error:
            conn_next_address(e, ch, conn, error)
        else:
            conn_connected(e, ch, conn)
        return
    if conn.state >= HANDSHAKE:
        if events & POLLOUT:
            conn_flush(conn)
        if events & ~POLLOUT:
            conn_read(e, ch, conn, r)


cdef void conn_read(Engine_* e, Channel* ch, Conn* conn, Round* r) noexcept nogil:
    """Read what has come and deal with every whole reply. The mutex is held.

    A node that sends without end is left for the next poll, so that deadlines are looked at.
    """
    cdef char[CHUNK] chunk
    cdef ssize_t size
    cdef int chunks = 0
    while conn.state >= HANDSHAKE and chunks < MOST_CHUNKS_READ:
        chunks += 1
        size = recv(conn.fd, chunk, sizeof(chunk), MSG_DONTWAIT)
        if size < 0 and errno == EINTR:
            continue
        if size < 0 and errno == EAGAIN:
            return
        conn_take(e, ch, conn, r, chunk, size, errno)
        if size < <ssize_t>sizeof(chunk):
            return


cdef void conn_take(
    Engine_* e, Channel* ch, Conn* conn, Round* r, const char* chunk, ssize_t size, int error
) noexcept nogil:
    """Deal with what one recv() gave: bytes, the end, or an error. The mutex is held."""
    cdef void* reply
    if size < 0:
        conn_fail(e, ch, conn, strerror(error), True)
        return
    if size == 0:
        conn_fail(e, ch, conn, b"the server closed the connection", True)
        return
    conn.fed += size
    if conn.fed > MOST_FED:
        conn_fail(e, ch, conn, b"the reply is too long for any lock", False)
        return
    redisReaderFeed(conn.reader, chunk, size)
    while conn.state >= HANDSHAKE:
        reply = NULL
        if redisReaderGetReply(conn.reader, &reply) != REDIS_OK:
            conn_fail(e, ch, conn, rb_reader_error(conn.reader), False)
            return
        if reply == NULL:
            return
        conn.fed = rb_reader_kept(conn.reader)
        on_reply(e, ch, conn, r)


# ---- giving up ----

cdef pthread_mutex_t retired_mutex
cdef Retired* retired_new = NULL  # handed to the agent


cdef void retire(Retired* retired) noexcept nogil:
    pthread_mutex_lock(&retired_mutex)
    global retired_new
    retired.next = retired_new
    retired_new = retired
    pthread_mutex_unlock(&retired_mutex)
    agent_wake()
