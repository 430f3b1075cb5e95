# What the engine knows of one node: addresses, credentials, whether it answers, and deletes that it still
# has to get.

cdef enum:
    MOST_ORPHANS = 1024

cdef int64_t MS = 1_000_000
cdef int64_t FIRST_BACK_OFF_NS = 10_000_000
cdef int64_t LAST_BACK_OFF_NS = 500_000_000


cdef NodeState* node_new(object node) except NULL:
    cdef NodeState* state = <NodeState*>calloc(1, sizeof(NodeState))
    cdef bytes text
    cdef int i
    if state == NULL:
        raise MemoryError()
    state.refs = 1
    rb_mutex_init(&state.mutex)
    try:
        if node.path is not None:
            text = node.path.encode()
            state.is_unix = 1
            memcpy(state.path, <const char*>text, min(len(text), <Py_ssize_t>sizeof(state.path) - 1))
        else:
            text = node.host.encode("idna") if not node.host.isascii() else node.host.encode()
            if len(text) > 255:
                raise ValueError("a host name has at most 255 bytes")
            memcpy(state.host, <const char*>text, len(text))
            text = b"%d" % node.port
            memcpy(state.port, <const char*>text, len(text))
            state.numeric = resolve_into(state, AI_NUMERICHOST | AI_NUMERICSERV) == 0
        state.connect_ns = int((node.connect_timeout or 0) * 1e9)
        state.says_hello = node.protocol == 3
        state.says_name = bool(node.client_name)
        for i in range(8):
            watch = i & 4 != 0
            for argv in node.handshake(watch or not i & 1, not i & 2, watch, watch and i & 1 != 0):
                text = b"*%d\r\n" % len(argv)
                text += b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in argv])
                if not text_add(&state.handshake[i], text, len(text)):
                    raise MemoryError()
                state.handshakes[i] += 1
    except BaseException:
        node_free(state)
        raise
    return state


cdef void node_free(NodeState* node) noexcept nogil:
    """Give up one reference."""
    cdef int i
    if rb_add(&node.refs, -1) > 0:
        return
    for i in range(node.orphans):
        packed_free(node.orphan[i])
    free(node.orphan)
    for i in range(8):
        text_free(&node.handshake[i])
    free(node)


cdef int resolve_into(NodeState* node, int flags) noexcept nogil:
    """Look the host up and keep the addresses. Blocks unless the flags forbid asking anybody."""
    cdef addrinfo hints
    cdef addrinfo* found = NULL
    cdef addrinfo* at
    cdef int error, count = 0
    memset(&hints, 0, sizeof(hints))
    hints.ai_family = AF_UNSPEC
    hints.ai_socktype = SOCK_STREAM
    hints.ai_flags = flags
    error = getaddrinfo(node.host, node.port, &hints, &found)
    pthread_mutex_lock(&node.mutex)
    if error:
        copy_cause(node.resolve_error, gai_strerror(error), strlen(gai_strerror(error)))
    else:
        at = found
        while at != NULL and count < MOST_ADDRESSES:
            memcpy(&node.address[count], at.ai_addr, at.ai_addrlen)
            node.address_size[count] = at.ai_addrlen
            count += 1
            at = at.ai_next
        node.addresses = count
        node.resolve_error[0] = 0
    pthread_mutex_unlock(&node.mutex)
    if found != NULL:
        freeaddrinfo(found)
    return error


cdef void* resolver(void* argument) noexcept nogil:
    """Body of the detached thread that nobody joins: a name server that hangs must hold up nobody."""
    cdef NodeState* node = <NodeState*>argument
    resolve_into(node, 0)
    rb_store(&node.resolving, 0)
    agent_wake()
    node_free(node)
    return NULL


cdef void node_resolve(NodeState* node) noexcept nogil:
    """Begin to look the host up, unless that is going on or not needed."""
    cdef pthread_t thread
    if node.is_unix or node.numeric:
        return
    if rb_load(&node.resolving):
        return
    rb_store(&node.resolving, 1)
    rb_add(&node.refs, 1)
    if rb_thread(&thread, resolver, node, 1) != 0:
        rb_store(&node.resolving, 0)
        rb_add(&node.refs, -1)


cdef void node_add_orphan(NodeState* node, Packed* packed) noexcept nogil:
    """Remember a delete for the next connection; takes over the reference. The node's mutex is held."""
    cdef Packed** grown
    cdef int room
    if node.orphans == MOST_ORPHANS:
        packed_free(node.orphan[0])
        node.orphans -= 1
        memmove(node.orphan, node.orphan + 1, node.orphans * sizeof(Packed*))
    if node.orphans == node.orphan_room:
        room = max(8, 2 * node.orphan_room)
        grown = <Packed**>realloc(node.orphan, room * sizeof(Packed*))
        if grown == NULL:
            packed_free(packed)
            return
        node.orphan = grown
        node.orphan_room = room
    node.orphan[node.orphans] = packed
    node.orphans += 1


cdef void node_expire_orphans(NodeState* node, int64_t now) noexcept nogil:
    """Forget deletes whose keys have ended by themselves. The node's mutex is held."""
    cdef int i, kept = 0
    for i in range(node.orphans):
        if node.orphan[i].expires_ns > now:
            node.orphan[kept] = node.orphan[i]
            kept += 1
        else:
            packed_free(node.orphan[i])
    node.orphans = kept


cdef void node_failed(NodeState* node, const char* cause, int64_t now) noexcept nogil:
    """A connect came to nothing: note why, and wait longer before the next. The node's mutex is held."""
    cdef int64_t bound
    copy_cause(node.cause, cause, strlen(cause))
    node.back_off_ns = min(LAST_BACK_OFF_NS, max(FIRST_BACK_OFF_NS, 2 * node.back_off_ns))
    bound = node.back_off_ns // 2
    node.next_connect_ns = now + bound + <int64_t>(rb_random() % <uint32_t>(bound + 1))


cdef void node_suspect(NodeState* node, const char* cause) noexcept nogil:
    pthread_mutex_lock(&node.mutex)
    if not node.suspect:
        copy_cause(node.cause, cause, strlen(cause))
        node.suspect = 1
    pthread_mutex_unlock(&node.mutex)
