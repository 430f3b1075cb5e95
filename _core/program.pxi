# The programs of redbolt._programs, made ready for packing: constant bytes are joined beforehand.

from redbolt import _programs

cdef Prog prog[MOST_PROGRAMS]
cdef list _constants = []  # owns the bytes that chunks point to

cdef enum:
    OK = 0
    FLAG = 1
    GONE = 2
    SAME = 3
    TEXT = 4
    LIFE = 5

cdef int TAKE = _programs.TAKE.index
cdef int DROP = _programs.DROP.index
cdef int ASK_LIFE = _programs.LIFE.index


cdef int load_programs() except -1:
    cdef Prog* p
    cdef Form* f
    if len(_programs.PROGRAMS) > MOST_PROGRAMS:
        raise ValueError("there are too many programs")
    for program in _programs.PROGRAMS:
        p = &prog[program.index]
        p.decoder = program.decoder
        p.native = program.native
        p.writes = program.writes
        p.deletes = program.deletes
        p.tries = program.tries
        p.words = program.words
        p.undo = program.undo
        p.after = program.after
        p.forms = len(program.forms)
        for i, words in enumerate(program.forms):
            f = &p.form[i]
            joined = b"*%d\r\n" % len(words)
            for word in words:
                if isinstance(word, int):
                    add_chunk(f, -1, joined)
                    add_chunk(f, word, b"")
                    joined = b"\r\n"
                else:
                    joined += b"$%d\r\n%b\r\n" % (len(word), word)
            add_chunk(f, -1, joined)
    return 0


cdef int add_chunk(Form* form, int argument, bytes constant) except -1:
    if form.chunks >= MOST_CHUNKS:
        raise ValueError("a form has too many parts")
    cdef Chunk* chunk = &form.chunk[form.chunks]
    _constants.append(constant)
    chunk.argument = argument
    chunk.bytes = constant
    chunk.length = <int>len(constant)
    form.chunks += 1
    return 0


load_programs()


cdef bint pack(Text* text, int program, int form, const Bytes* arg) noexcept nogil:
    """Append one command to ``text``. Between an argument and the next chunk stands its own length line."""
    cdef const Form* f = &prog[program].form[form]
    cdef const Chunk* chunk
    cdef const Bytes* a
    cdef char[24] head
    cdef int i, size
    for i in range(f.chunks):
        chunk = &f.chunk[i]
        if chunk.argument < 0:
            if not text_add(text, chunk.bytes, chunk.length):
                return False
            continue
        a = &arg[chunk.argument]
        size = rb_length_line(head, a.length)
        if not (text_add(text, head, size) and text_add(text, a.bytes, a.length)):
            return False
    return True


cdef Packed* pack_spare(int program, const Bytes* arg, uint64_t tag, int64_t expires_ns) noexcept nogil:
    """A command in the form that works on every node, as bytes to keep."""
    cdef Text text
    cdef Packed* packed
    memset(&text, 0, sizeof(text))
    if not pack(&text, program, prog[program].forms - 1, arg):
        text_free(&text)
        return NULL
    packed = <Packed*>malloc(sizeof(Packed) + text.length)
    if packed != NULL:
        packed.refs = 1
        packed.program = program
        packed.tag = tag
        packed.expires_ns = expires_ns
        packed.length = text.length
        memcpy(packed.bytes, text.bytes, text.length)
    text_free(&text)
    return packed
