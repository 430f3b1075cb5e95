/* One reply, as hiredis' reader reports it. Only the outermost value is kept, and of a push what it is about: a
 * lock never asks for more, and what a hostile server nests inside costs neither memory nor stack. */
#ifndef REDBOLT_REPLY_H
#define REDBOLT_REPLY_H

#include <hiredis.h>
#include <stdlib.h>
#include <string.h>

#include "portable.h"

#define RB_MOST_TEXT 65600 /* a little more than the longest key or token */
#define RB_MOST_KEY 65536  /* redbolt._engine.MAX_KEY */

typedef struct {
    int type;
    long long integer;
    size_t length; /* of the text; what is longer than RB_MOST_TEXT is cut, its length is not */
    size_t room;
    char *text;
    int kind;      /* of a push */
    uint64_t mark; /* of a push: rb_hash of its one key or topic, 0 for any key */
} rb_reply;

/* Kinds of pushes. */
enum { RB_OTHER, RB_INVALIDATE, RB_MESSAGE, RB_SUBSCRIBED };

static void *const rb_seen = (void *)1; /* any value but NULL tells the reader that all is well */

static inline rb_reply *rb_outermost(const redisReadTask *task) {
    if (task->parent) return NULL;
    rb_reply *reply = task->privdata;
    reply->type = task->type;
    reply->integer = 0;
    reply->length = 0;
    reply->kind = RB_OTHER;
    reply->mark = 0;
    return reply;
}

static inline int rb_is(const char *text, size_t length, const char *word) {
    return length == strlen(word) && !memcmp(text, word, length);
}

/* Of a push: its first word says what it is, the second is a topic or an array of keys. */
static inline void rb_inside(const redisReadTask *task, const char *text, size_t length) {
    const redisReadTask *parent = task->parent, *above = parent->parent;
    rb_reply *reply = task->privdata;
    if (length > RB_MOST_KEY) return; /* no lock has such a key */
    if (!above && parent->type == REDIS_REPLY_PUSH) {
        if (task->idx == 0)
            reply->kind = rb_is(text, length, "invalidate")  ? RB_INVALIDATE
                          : rb_is(text, length, "message")   ? RB_MESSAGE
                          : rb_is(text, length, "subscribe") ? RB_SUBSCRIBED
                                                             : RB_OTHER;
        else if (task->idx == 1 && reply->kind == RB_MESSAGE)
            reply->mark = rb_hash(text, length);
    } else if (above && !above->parent && above->type == REDIS_REPLY_PUSH && parent->idx == 1) {
        if (reply->kind == RB_INVALIDATE && parent->elements == 1) reply->mark = rb_hash(text, length);
    }
}

static void *rb_on_string(const redisReadTask *task, char *text, size_t length) {
    rb_reply *reply = rb_outermost(task);
    if (!reply) {
        rb_inside(task, text, length);
        return rb_seen;
    }
    size_t kept = length < RB_MOST_TEXT ? length : RB_MOST_TEXT;
    if (kept > reply->room) {
        char *grown = realloc(reply->text, kept);
        if (!grown) return NULL;
        reply->text = grown;
        reply->room = kept;
    }
    if (kept) memcpy(reply->text, text, kept);
    reply->length = length;
    return rb_seen;
}

static void *rb_on_array(const redisReadTask *task, size_t elements) {
    (void)elements;
    rb_outermost(task);
    return rb_seen;
}

static void *rb_on_integer(const redisReadTask *task, long long value) {
    rb_reply *reply = rb_outermost(task);
    if (reply) reply->integer = value;
    return rb_seen;
}

static void *rb_on_double(const redisReadTask *task, double value, char *text, size_t length) {
    (void)value, (void)text, (void)length;
    rb_outermost(task);
    return rb_seen;
}

static void *rb_on_nil(const redisReadTask *task) { /* also the nil of a string or an array in RESP2 */
    rb_reply *reply = rb_outermost(task);
    if (reply) reply->type = REDIS_REPLY_NIL;
    return rb_seen;
}

static void *rb_on_bool(const redisReadTask *task, int value) {
    rb_reply *reply = rb_outermost(task);
    if (reply) reply->integer = value;
    return rb_seen;
}

static void rb_on_free(void *reply) { (void)reply; }

static redisReplyObjectFunctions rb_reply_functions = {
    rb_on_string, rb_on_array, rb_on_integer, rb_on_double, rb_on_nil, rb_on_bool, rb_on_free,
};

static redisReader *rb_reader(rb_reply *reply) {
    redisReader *reader = redisReaderCreateWithFunctions(&rb_reply_functions);
    if (!reader) return NULL;
    reader->privdata = reply;
    reader->maxelements = 65536;
    return reader;
}

static inline const char *rb_reader_error(redisReader *reader) { return reader->errstr; }

static inline size_t rb_reader_kept(redisReader *reader) { return reader->len - reader->pos; }

#endif
