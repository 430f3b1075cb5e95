/* The floor: what a lock cycle costs on this machine with nothing in the way.
 *
 * A cycle is SET key token NX PX and a compare-and-delete, each sent to all nodes at once; a round is
 * over when a quorum has answered.  Sockets arrive connected, commands arrive packed: this file holds
 * only what has to happen in every cycle.  Every reply is checked, also those that come after the
 * quorum: each connection must say +OK, :1, +OK, :1, ... and nothing else.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/random.h>
#endif

enum {
    MAX_NODES = 16,
    TOKEN = 32,              /* hex digits of 128 random bits */
    RANDOM = 256,            /* the most getentropy gives at once */
    MAX_UNANSWERED = 128,    /* a node that owes more replies than this is left out until it answers */
    ANSWER_WITHIN_MS = 2000,
};

struct command {
    char *bytes;
    int32_t length;
    int32_t token_at;
};

struct node {
    int32_t fd;
    int32_t taking_part;     /* in the cycle that runs now */
    int32_t unanswered;
    int32_t reply_at;        /* place in `replies` of the next byte */
    struct command release;
};

struct floor {
    int32_t count;
    int32_t quorum;
    struct command acquire;
    struct node nodes[MAX_NODES];
    uint8_t random[RANDOM];
    int32_t random_left;
    char error[160];
};

static const char replies[] = "+OK\r\n:1\r\n";
enum { ACQUIRE_REPLY = 5, BOTH_REPLIES = 9 };

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int fail(struct floor *f, int node, const char *what, int error)
{
    snprintf(f->error, sizeof f->error, "node %d: %s%s%s", node, what, error ? ": " : "",
             error ? strerror(error) : "");
    return -1;
}

static int fresh_token(struct floor *f, char *token)
{
    static const char hex[] = "0123456789abcdef";
    if (f->random_left < TOKEN / 2) {
        if (getentropy(f->random, RANDOM) < 0)
            return fail(f, 0, "getentropy", errno);
        f->random_left = RANDOM;
    }
    f->random_left -= TOKEN / 2;
    for (int i = 0; i < TOKEN / 2; i++) {
        uint8_t byte = f->random[f->random_left + i];
        token[2 * i] = hex[byte >> 4];
        token[2 * i + 1] = hex[byte & 15];
    }
    return 0;
}

/* Takes what has arrived from a node. */
static int take(struct floor *f, int i, int flags)
{
    struct node *n = &f->nodes[i];
    char bytes[4096];
    ssize_t got = recv(n->fd, bytes, sizeof bytes, flags);
    if (got < 0) {
        if (errno == EINTR || (errno == EAGAIN && (flags & MSG_DONTWAIT)))
            return 0;
        return fail(f, i, "recv", errno);
    }
    if (got == 0)
        return fail(f, i, "closed the connection", 0);
    for (ssize_t j = 0; j < got; j++) {
        if (n->unanswered == 0)
            return fail(f, i, "a reply that nobody asked for", 0);
        if (bytes[j] != replies[n->reply_at]) {
            char what[80];
            int length = (int)(got - j < 50 ? got - j : 50);
            snprintf(what, sizeof what, "unexpected reply %.*s", length, bytes + j);
            what[strcspn(what, "\r\n")] = 0;
            return fail(f, i, what, 0);
        }
        n->reply_at++;
        if (n->reply_at == ACQUIRE_REPLY || n->reply_at == BOTH_REPLIES)
            n->unanswered--;
        if (n->reply_at == BOTH_REPLIES)
            n->reply_at = 0;
    }
    return 0;
}

static int give(struct floor *f, int i, const struct command *c)
{
    struct node *n = &f->nodes[i];
    ssize_t sent;
    do
        sent = send(n->fd, c->bytes, (size_t)c->length, 0);
    while (sent < 0 && errno == EINTR);
    if (sent != c->length)
        return fail(f, i, "send", sent < 0 ? errno : ENOBUFS);
    n->unanswered++;
    return 0;
}

/* A node's last reply is this round's; until then it is answering earlier ones. */
static int has_voted(const struct node *n)
{
    return n->taking_part && n->unanswered == 0;
}

static int quorum(struct floor *f, struct pollfd *polled)
{
    for (int votes = 0; votes < f->quorum;) {
        int ready = poll(polled, (nfds_t)f->count, ANSWER_WITHIN_MS);
        if (ready == 0)
            return fail(f, 0, "no quorum has answered", 0);
        if (ready < 0 && errno != EINTR)
            return fail(f, 0, "poll", errno);
        for (int i = 0; ready > 0 && i < f->count; i++) {
            if (!polled[i].revents)
                continue;
            if (take(f, i, MSG_DONTWAIT) < 0)
                return -1;
            votes += has_voted(&f->nodes[i]);
        }
    }
    return 0;
}

static int one_cycle(struct floor *f, struct pollfd *polled)
{
    char token[TOKEN];
    if (fresh_token(f, token) < 0)
        return -1;
    memcpy(f->acquire.bytes + f->acquire.token_at, token, TOKEN);
    for (int i = 0; i < f->count; i++) {
        struct node *n = &f->nodes[i];
        n->taking_part = n->unanswered <= MAX_UNANSWERED - 2;
        memcpy(n->release.bytes + n->release.token_at, token, TOKEN);
    }
    for (int releasing = 0; releasing < 2; releasing++) {
        for (int i = 0; i < f->count; i++) {
            struct node *n = &f->nodes[i];
            if (n->taking_part && give(f, i, releasing ? &n->release : &f->acquire) < 0)
                return -1;
        }
        if (f->count > 1) {
            if (quorum(f, polled) < 0)
                return -1;
        } else {
            while (!has_voted(&f->nodes[0]))
                if (take(f, 0, 0) < 0)
                    return -1;
        }
    }
    return 0;
}

/* The layout that floor.py has to agree with. */
int32_t floor_size(void)
{
    return sizeof(struct floor);
}

/* Runs cycles for `duration_ns`, at most `limit`; their durations go to `took_ns`.  Returns how many,
 * or -1 with the reason in f->error. */
int64_t floor_run(struct floor *f, int64_t duration_ns, int64_t limit, int64_t *took_ns)
{
    struct pollfd polled[MAX_NODES];
    for (int i = 0; i < f->count; i++)
        polled[i] = (struct pollfd){.fd = f->nodes[i].fd, .events = POLLIN};

    int64_t done = 0;
    int64_t end = now_ns() + duration_ns;
    for (int64_t now = 0; done < limit && now < end;) {
        int64_t start = now_ns();
        if (one_cycle(f, polled) < 0)
            return -1;
        now = now_ns();
        took_ns[done++] = now - start;
    }
    return done;
}
