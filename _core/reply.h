/* One reply, as hiredis' reader reports it. Only the outermost value is kept: a lock never asks for more, and
 * what a hostile server nests inside costs neither memory nor stack. */
#ifndef REDBOLT_REPLY_H
#define REDBOLT_REPLY_H

#include <hiredis.h>
#include <stdlib.h>
#include <string.h>

#define RB_MOST_TEXT 65600 /* a little more than the longest key or token */

typedef struct {
    int type;
    long long integer;
    size_t length; /* of the text; what is longer than RB_MOST_TEXT is cut, its length is not */
    size_t room;
    char *text;
} rb_reply;

static void *const rb_seen = (void *)1; /* any value but NULL tells the reader that all is well */

static inline rb_reply *rb_outermost(const redisReadTask *task) {
    if (task->parent) return NULL;
    rb_reply *reply = task->privdata;
    reply->type = task->type;
    reply->integer = 0;
    reply->length = 0;
    return reply;
}

static void *rb_on_string(const redisReadTask *task, char *text, size_t length) {
    rb_reply *reply = rb_outermost(task);
    if (!reply) return rb_seen;
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
