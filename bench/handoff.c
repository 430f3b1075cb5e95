/* The floors of a hand-off: what passing a lock on costs on this machine with nothing in the way.
 *
 * The waiter is told by the first node, in recv, by a message or by an element of a list; then it writes
 * SET key token NX PX to all nodes, and owns the lock when a quorum has granted it.  The holder deletes its
 * token on all nodes and tells the waiter, in one write per node, the first node last: then the others have
 * the delete before the waiter comes.  Sockets arrive connected, commands arrive packed.  The turns are those
 * of handoff_board.py, and so are its waits; here a contender asks when it has tried and was refused.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#ifdef __APPLE__
#include <sys/random.h>
#endif

enum {
    MAX_NODES = 16,
    TOKEN = 32,                 /* hex digits of 128 random bits */
    MAX_TOLD = 256,
    ANSWER_WITHIN_MS = 2000,
    MAX_TRIES = 100,
};

#define MILLISECONDS INT64_C(1000000)
#define WAITS_NS (3 * MILLISECONDS)
#define PAUSE_NS (2 * MILLISECONDS)
#define PATIENCE_NS (30000 * MILLISECONDS)

/* The cells of the board. */
enum { HELD, ASKED, ASKED_NS, WAITER, RELEASED, RELEASED_NS, LAST, UNTIL_NS, JITTER_NS };

struct command {
    char *bytes;
    int32_t length;
    int32_t token_at;
};

struct node {
    int32_t fd;
    int32_t unanswered;         /* replies that are still to come */
    int32_t expected;           /* of them in this round */
    int32_t yes;                /* whether those that have come are all a yes */
    int32_t line_length;        /* of the reply that is arriving */
    char line[32];
    struct command drop;        /* a delete, if it has our token */
    struct command pass_on;     /* the same, and on the first node what tells the waiter */
};

struct contender {
    int32_t number;
    int32_t count;
    int32_t quorum;
    int32_t told_by;            /* the connection on which we are told */
    struct command take;
    struct command arm;         /* what has to be sent there before each wait; may be empty */
    struct command told;        /* what comes */
    struct node nodes[MAX_NODES];
    int64_t retries;            /* tries after being told that found no quorum */
    char error[160];
};

typedef _Atomic int64_t *board;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void sleep_ns(int64_t ns)
{
    struct timespec t = {.tv_sec = ns / INT64_C(1000000000), .tv_nsec = ns % INT64_C(1000000000)};
    nanosleep(&t, NULL);
}

static int fail(struct contender *c, int node, const char *what, int error)
{
    snprintf(c->error, sizeof c->error, "contender %d, node %d: %s%s%s", c->number, node, what,
             error ? ": " : "", error ? strerror(error) : "");
    return -1;
}

/* ---- talking to the nodes ---- */

static int fresh_token(struct contender *c)
{
    static const char hex[] = "0123456789abcdef";
    uint8_t random[TOKEN / 2];
    char token[TOKEN];
    if (getentropy(random, sizeof random) < 0)
        return fail(c, 0, "getentropy", errno);
    for (int i = 0; i < TOKEN / 2; i++) {
        token[2 * i] = hex[random[i] >> 4];
        token[2 * i + 1] = hex[random[i] & 15];
    }
    memcpy(c->take.bytes + c->take.token_at, token, TOKEN);
    for (int i = 0; i < c->count; i++) {
        memcpy(c->nodes[i].drop.bytes + c->nodes[i].drop.token_at, token, TOKEN);
        memcpy(c->nodes[i].pass_on.bytes + c->nodes[i].pass_on.token_at, token, TOKEN);
    }
    return 0;
}

static int give(struct contender *c, int i, int fd, const struct command *command)
{
    ssize_t sent;
    do
        sent = send(fd, command->bytes, (size_t)command->length, 0);
    while (sent < 0 && errno == EINTR);
    if (sent != command->length)
        return fail(c, i, "send", sent < 0 ? errno : ENOBUFS);
    return 0;
}

/* A reply is a line; whether it is a yes.  Returns -1 if it is none of the known. */
static int judge(struct contender *c, int i)
{
    struct node *n = &c->nodes[i];
    if (!strcmp(n->line, "+OK") || !strcmp(n->line, ":1"))
        return 1;
    if (!strcmp(n->line, "$-1") || !strcmp(n->line, ":0"))
        return 0;
    char what[80];
    snprintf(what, sizeof what, "unexpected reply %s", n->line);
    return fail(c, i, what, 0);
}

/* Takes what has arrived from a node; counts its vote when that is complete. */
static int take(struct contender *c, int i, int flags, int *yes, int *no)
{
    struct node *n = &c->nodes[i];
    char bytes[512];
    ssize_t got = recv(n->fd, bytes, sizeof bytes, flags);
    if (got < 0) {
        if (errno == EINTR || (errno == EAGAIN && (flags & MSG_DONTWAIT)))
            return 0;
        return fail(c, i, "recv", errno);
    }
    if (got == 0)
        return fail(c, i, "closed the connection", 0);
    for (ssize_t j = 0; j < got; j++) {
        if (bytes[j] == '\r')
            continue;
        if (bytes[j] != '\n') {
            if (n->line_length < (int)sizeof n->line - 1)
                n->line[n->line_length++] = bytes[j];
            continue;
        }
        n->line[n->line_length] = 0;
        n->line_length = 0;
        if (n->unanswered-- == 0)
            return fail(c, i, "a reply that nobody asked for", 0);
        int answer = judge(c, i);
        if (answer < 0)
            return -1;
        if (n->unanswered < n->expected)
            n->yes &= answer;
        if (n->unanswered == 0)
            *(n->yes ? yes : no) += 1;
    }
    return 0;
}

enum round { TAKE, PASS_ON, DROP };

/* Sends to all nodes, and waits until a quorum has said yes or cannot any more; for a drop, until all have
 * answered.  Returns whether there is the quorum. */
static int run_round(struct contender *c, enum round what)
{
    int yes = 0, no = 0;
    struct pollfd polled[MAX_NODES];
    for (int i = c->count - 1; i >= 0; i--) {
        struct node *n = &c->nodes[i];
        const struct command *command = what == TAKE ? &c->take : what == PASS_ON ? &n->pass_on : &n->drop;
        if (give(c, i, n->fd, command) < 0)
            return -1;
        n->expected = what == PASS_ON && i == 0 ? 2 : 1;
        n->unanswered += n->expected;
        n->yes = 1;
        polled[i] = (struct pollfd){.fd = n->fd, .events = POLLIN};
    }
    while (what == DROP ? yes + no < c->count : yes < c->quorum && no <= c->count - c->quorum) {
        if (c->count == 1) {
            if (take(c, 0, 0, &yes, &no) < 0)
                return -1;
            continue;
        }
        int ready = poll(polled, (nfds_t)c->count, ANSWER_WITHIN_MS);
        if (ready == 0)
            return fail(c, 0, "no quorum has answered", 0);
        if (ready < 0 && errno != EINTR)
            return fail(c, 0, "poll", errno);
        for (int i = 0; ready > 0 && i < c->count; i++)
            if (polled[i].revents && take(c, i, MSG_DONTWAIT, &yes, &no) < 0)
                return -1;
    }
    return yes >= c->quorum;
}

/* One try; what it got without a quorum is taken back.  Returns whether the lock is ours. */
static int try_once(struct contender *c)
{
    if (fresh_token(c) < 0)
        return -1;
    int granted = run_round(c, TAKE);
    if (granted == 0 && run_round(c, DROP) < 0)
        return -1;
    return granted;
}

static int await_word(struct contender *c)
{
    char bytes[MAX_TOLD];
    int32_t length = 0;
    while (length < c->told.length) {
        ssize_t got = recv(c->told_by, bytes + length, (size_t)(c->told.length - length), 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return fail(c, 0, "nobody told us", got < 0 ? errno : 0);
        length += (int32_t)got;
    }
    if (memcmp(bytes, c->told.bytes, (size_t)length))
        return fail(c, 0, "told something else", 0);
    return 0;
}

/* ---- the turns ---- */

/* Whether a thread, of any process, is neither running nor ready to run. */
static int asleep(int64_t thread)
{
    char path[40], bytes[512];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return access("/proc/self/stat", F_OK) < 0;
    ssize_t got = read(fd, bytes, sizeof bytes - 1);
    close(fd);
    if (got <= 0)
        return 0;
    bytes[got] = 0;
    char *end = strrchr(bytes, ')');
    return end && !strncmp(end, ") S", 3);
}

static int64_t this_thread(void)
{
#ifdef __linux__
    return syscall(SYS_gettid);
#else
    return 0;
#endif
}

/* Waits until the other contender holds the turn before. */
static int await_turn(struct contender *c, board b, int64_t turn)
{
    int64_t end = now_ns() + PATIENCE_NS;
    while (b[HELD] < turn - 1) {
        if (now_ns() > end)
            return fail(c, 0, "the other contender is gone", 0);
        sleep_ns(1 * MILLISECONDS);
    }
    return 0;
}

/* Waits until the other one surely waits, and a little longer. */
static int await_waiter(struct contender *c, board b, int64_t turn)
{
    if (turn >= b[LAST])
        return 0;
    int64_t end = now_ns() + PATIENCE_NS;
    while (b[ASKED] != turn + 1 || now_ns() - b[ASKED_NS] < WAITS_NS || !asleep(b[WAITER])) {
        if (now_ns() > end)
            return fail(c, 0, "the other contender does not come", 0);
        sleep_ns(MILLISECONDS / 2);
    }
    if (now_ns() > b[UNTIL_NS])
        b[LAST] = turn + 1;
    uint32_t random;
    if (getentropy(&random, sizeof random) < 0)
        return fail(c, 0, "getentropy", errno);
    sleep_ns((int64_t)(random / 4294967296.0 * (double)b[JITTER_NS]));
    return 0;
}

/* Acquires a turn that the other one holds.  Returns how long ago it was released, or -1. */
static int64_t acquire(struct contender *c, board b, int64_t turn)
{
    int granted = try_once(c);
    if (granted)
        return granted < 0 ? -1 : fail(c, 0, "two held the lock at once", 0);
    if (c->arm.length && give(c, 0, c->told_by, &c->arm) < 0)
        return -1;
    b[WAITER] = this_thread();
    b[ASKED_NS] = now_ns();
    b[ASKED] = turn;
    if (await_word(c) < 0)
        return -1;
    for (int tries = 0; (granted = try_once(c)) == 0; tries++) {
        c->retries++;
        if (tries == MAX_TRIES)
            return fail(c, 0, "told, and never granted", 0);
    }
    int64_t took_ns = now_ns() - b[RELEASED_NS];
    if (granted < 0)
        return -1;
    if (b[RELEASED] != turn - 1 || took_ns < 0)
        return fail(c, 0, "two held the lock at once", 0);
    if (b[RELEASED_NS] - b[ASKED_NS] < WAITS_NS)
        return fail(c, 0, "it was released before we waited", 0);
    return took_ns;
}

static int release(struct contender *c, board b, int64_t turn)
{
    enum round how = turn < b[LAST] ? PASS_ON : DROP;
    b[RELEASED_NS] = now_ns();
    b[RELEASED] = turn;
    int released = run_round(c, how);
    return released ? released : fail(c, 0, "the lock was not there any more", 0);
}

/* The layout that handoff_floor.py has to agree with. */
int32_t handoff_size(void)
{
    return sizeof(struct contender);
}

/* Takes every second turn; how long the hand-offs to us took, but for the first, goes to `took_ns`.
 * Returns how many, or -1 with the reason in c->error. */
int64_t handoff_run(struct contender *c, int64_t *cells, int64_t *took_ns)
{
    board b = (board)cells;
    int64_t done = 0;
    for (int64_t turn = c->number; turn <= b[LAST]; turn += 2) {
        if (turn) {
            int64_t took;
            if (await_turn(c, b, turn) < 0 || (took = acquire(c, b, turn)) < 0)
                return -1;
            if (turn > 1)
                took_ns[done++] = took;
        } else {
            int granted = try_once(c);
            if (granted <= 0)
                return granted < 0 ? -1 : fail(c, 0, "somebody else holds the lock", 0);
        }
        b[HELD] = turn;
        if (await_waiter(c, b, turn) < 0 || release(c, b, turn) < 0)
            return -1;
        sleep_ns(PAUSE_NS);
    }
    return done;
}
