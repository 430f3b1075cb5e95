# From a reply to a vote. A slot answers only the round that made it; what comes later is read, and never
# counted.

cdef enum:
    FALL_BACK = 4       # beside OPEN, YES, NO, FAULT: the node does not know this form
    BROKEN = 5          # no reply that this program can have

cdef const char* UNASKED = b"a reply that nobody asked for"


cdef inline bint is_error(const rb_reply* reply) noexcept nogil:
    return reply.type == REDIS_REPLY_ERROR


cdef inline bint is_status(const rb_reply* reply, const char* text) noexcept nogil:
    if reply.type != REDIS_REPLY_STATUS or reply.length != strlen(text):
        return False
    return memcmp(reply.text, text, reply.length) == 0


cdef int decode(const rb_reply* reply, int decoder, const Bytes* token, int* hit) noexcept nogil:
    """Read a reply as the program's decoder says (`redbolt._programs.Decoder`)."""
    cdef size_t kept = min(reply.length, <size_t>RB_MOST_TEXT)
    hit[0] = 0
    if is_error(reply):
        if has_word(reply.text, kept, b"WRONGTYPE"):
            if decoder == GONE:
                return YES
            if decoder == SAME or decoder == FLAG:
                return NO
        return FALL_BACK if falls_back_on(reply.text, kept) else FAULT
    if decoder == OK or decoder == FLAG:
        if is_status(reply, b"OK"):
            return YES
        if reply.type == REDIS_REPLY_NIL:
            return NO
    if reply.type == REDIS_REPLY_INTEGER and (reply.integer == 0 or reply.integer == 1):
        if decoder == FLAG:
            return YES if reply.integer else NO
        if decoder == GONE:
            hit[0] = <int>reply.integer
            return YES
    if decoder == SAME and (reply.type == REDIS_REPLY_STRING or reply.type == REDIS_REPLY_NIL):
        if token == NULL or reply.type == REDIS_REPLY_NIL or reply.length != token.length:
            return NO
        return YES if memcmp(reply.text, token.bytes, token.length) == 0 else NO
    if decoder == TEXT and reply.type == REDIS_REPLY_STATUS:
        return YES
    if decoder == LIFE and reply.type == REDIS_REPLY_INTEGER and reply.integer >= -2:
        return YES if reply.integer == -2 else NO
    return BROKEN


cdef void on_push(Channel* ch, Conn* conn) noexcept nogil:
    """What a node says unasked, on a connection of a watch; ``ch`` is NULL in the agent."""
    cdef rb_reply* reply = &conn.reply
    if reply.kind == RB_SUBSCRIBED and conn.slots and slot_at(conn, 0).program == SUBSCRIPTION:
        conn.backlog -= slot_at(conn, 0).size
        conn.first = (conn.first + 1) & (conn.room - 1)
        conn.slots -= 1
        conn.heard = 1
        conn.silent = 0
    elif ch != NULL and (reply.kind == RB_INVALIDATE or reply.kind == RB_MESSAGE):
        tell(ch, CHANGED, conn.node, reply.mark, 0)


cdef void on_refused_subscription(Engine_* e, Channel* ch, Conn* conn, const char* text) noexcept nogil:
    """A subscription was answered by a reply: an error, or something that is none."""
    conn.topics = 0
    if not is_error(&conn.reply):
        conn_fail(e, ch, conn, b"a reply that does not belong to the command", False)
    elif ch != NULL:
        tell(ch, LOST, conn.node, 0, falls_back_on(text, strlen(text)))


cdef void on_reply(Engine_* e, Channel* ch, Conn* conn, Round* r) noexcept nogil:
    """Deal with the reply in ``conn.reply``; ``r`` is the calling thread's round, or NULL in the agent."""
    cdef rb_reply* reply = &conn.reply
    cdef NodeState* node = e.node[conn.node]
    cdef char text[CAUSE]
    cdef Slot slot
    cdef bint mine
    cdef int vote, hit = 0
    cdef Bytes* token
    cdef Bytes kept_token
    if reply.type == REDIS_REPLY_PUSH and conn.kind:
        on_push(ch, conn)
        return
    if reply.type == REDIS_REPLY_PUSH or reply.type == REDIS_REPLY_ATTR:
        return
    text[0] = 0
    if is_error(reply) or reply.type == REDIS_REPLY_STATUS:
        copy_cause(text, reply.text, reply.length)
    if conn.slots == 0:  # unasked: a server that is full says so before it hangs up
        if not text[0]:
            copy_cause(text, UNASKED, strlen(UNASKED))
        conn_fail(e, ch, conn, text, False)
        return
    slot = slot_at(conn, 0)[0]
    conn.first = (conn.first + 1) & (conn.room - 1)
    conn.slots -= 1
    conn.backlog -= slot.size
    conn.heard = 1
    conn.silent = 0
    if node.suspect and conn.state == READY:
        node.suspect = 0
    if slot.program == SUBSCRIPTION:
        on_refused_subscription(e, ch, conn, text)
        return
    if slot.program < 0:
        if is_error(reply) and slot.program == HANDSHAKE_NAME:
            node.no_name = 1
        elif is_error(reply) and slot.program != HANDSHAKE_PING:
            if slot.program == HANDSHAKE_HELLO and is_without_hello(text, strlen(text)):
                do_without(node, conn, HANDSHAKE_HELLO)
            elif slot.program == HANDSHAKE_TRACKING:
                do_without(node, conn, HANDSHAKE_TRACKING)
            conn_fail(e, ch, conn, text, False)
            return
        if conn.state == READY:  # the PING of the agent
            return
        conn.shaking -= 1
        if conn.shaking == 0:
            conn_ready(e, ch, conn)
        return
    mine = r != NULL and ch.active and slot.round == ch.round
    token = &r.arg[1] if mine and r.args > 1 else NULL
    if slot.kept != NULL:
        kept_token = token_of(slot.kept)
        token = &kept_token
    vote = decode(reply, prog[slot.program].decoder, token, &hit)
    if vote == FALL_BACK:
        if slot.form + 1 < prog[slot.program].forms:
            # A script that was forgotten is known again after its EVAL.
            if node.form[slot.program] <= slot.form and not starts_with(text, strlen(text), b"NOSCRIPT"):
                node.form[slot.program] = slot.form + 1
            if mine:
                packed_free(slot.spare)
                round_send(r, conn, slot.form + 1)
            elif slot.kept != NULL:
                renew_again(e, conn, &slot)
            elif slot.spare != NULL:
                # Late. A delete can always be sent, another write only if none for its token came after it.
                if prog[slot.spare.program].deletes or not conn_has_tag(conn, slot.tag):
                    conn_put_spare(conn, slot.spare, slot.due_ns)
                packed_free(slot.spare)
            return
        vote = FAULT
    elif vote != BROKEN:
        conn.proven[slot.program] |= <uint8_t>(1 << slot.form)
    if vote == BROKEN:
        conn.first = (conn.first - 1) & (conn.room - 1)  # what it did is unknown: its undo must not be lost
        conn.slots += 1
        conn.backlog += slot.size
        conn_fail(e, ch, conn, b"a reply that does not belong to the command", False)
        return
    packed_free(slot.spare)
    if slot.kept != NULL:
        take_vote(e, conn.node, &slot, vote)
    if slot.mark and ch != NULL:
        if vote == FAULT:  # with 1 if it does not know or permit the question
            tell(ch, LOST, conn.node, 0, falls_back_on(text, strlen(text)))
        else:
            tell(ch, LIFE_TOLD, conn.node, slot.mark, reply.integer)
    if mine and ch.vote[conn.node] == OPEN:
        ch.vote[conn.node] = <uint8_t>vote
        ch.hits += hit
        if vote == FAULT or prog[slot.program].decoder == TEXT:
            memcpy(&ch.cause[conn.node * CAUSE], text, CAUSE)
