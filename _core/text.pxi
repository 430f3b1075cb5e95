# Growable bytes, and packed deletes that several slots share.

cdef bint text_reserve(Text* text, size_t more) noexcept nogil:
    cdef size_t room = text.room
    cdef char* grown
    if text.length + more <= room:
        return True
    room = 256 if room == 0 else room
    while room < text.length + more:
        room *= 2
    grown = <char*>realloc(text.bytes, room)
    if grown == NULL:
        return False
    text.bytes = grown
    text.room = room
    return True


cdef inline bint text_add(Text* text, const char* bytes, size_t length) noexcept nogil:
    if not text_reserve(text, length):
        return False
    if length:
        memcpy(text.bytes + text.length, bytes, length)
    text.length += length
    return True


cdef inline void text_drop(Text* text, size_t length) noexcept nogil:
    """Take ``length`` bytes off its front."""
    text.length -= length
    if text.length:
        memmove(text.bytes, text.bytes + length, text.length)
    elif text.room > 65536:
        text_free(text)


cdef inline void text_free(Text* text) noexcept nogil:
    free(text.bytes)
    text.bytes = NULL
    text.length = text.room = 0


cdef inline void copy_cause(char* cause, const char* text, size_t length) noexcept nogil:
    """Keep the beginning of ``text``, in one line and ended by NUL."""
    cdef size_t i
    if length > CAUSE - 1:
        length = CAUSE - 1
    for i in range(length):
        cause[i] = text[i] if text[i] >= 32 or text[i] < 0 else 32
    cause[length] = 0


cdef inline Packed* packed_keep(Packed* packed) noexcept nogil:
    if packed != NULL:
        rb_add(&packed.refs, 1)
    return packed


cdef inline void packed_free(Packed* packed) noexcept nogil:
    if packed != NULL and rb_add(&packed.refs, -1) == 0:
        free(packed)
