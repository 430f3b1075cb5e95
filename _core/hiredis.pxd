# Declares what the core uses of hiredis, its incremental reply reader, and of reply.h, which listens to it.
from libc.stdint cimport uint64_t

cdef extern from "reply.h" nogil:
    enum: REDIS_OK
    enum: REDIS_REPLY_STRING, REDIS_REPLY_INTEGER, REDIS_REPLY_NIL, REDIS_REPLY_STATUS, REDIS_REPLY_ERROR
    enum: REDIS_REPLY_PUSH, REDIS_REPLY_ATTR
    ctypedef struct rb_reply:
        int type
        long long integer
        size_t length
        char* text
        int kind
        uint64_t mark
    ctypedef struct redisReader:
        pass
    enum: RB_MOST_TEXT
    enum: RB_INVALIDATE, RB_MESSAGE, RB_SUBSCRIBED
    redisReader* rb_reader(rb_reply*)
    const char* rb_reader_error(redisReader*)
    size_t rb_reader_kept(redisReader*)
    void redisReaderFree(redisReader*)
    int redisReaderFeed(redisReader*, const char*, size_t)
    int redisReaderGetReply(redisReader*, void**)
