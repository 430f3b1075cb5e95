# Declares the data of the core. Who may touch what:
#   Engine_.mutex   the idle channels, the list of all, and the counts of watches and closings (taken before a
#                   Conn's or NodeState's mutex)
#   Conn.mutex      its output and its slots; reading is the owner's alone (taken before a NodeState's mutex)
#   NodeState.mutex addresses, orphans, causes, back-off; plain ints (suspect, form) may be read without it
#   Channel         its thread, or under the engine's mutex who finds it idle; `flags` and `sleeps` are for all
#   keep_mutex      all that is kept, and the engines' heaps of it; whoever sends for a kept lease has it
#                   (taken before an engine's mutex)
#   agent_mutex     the list of engines (taken before any of these); retired_mutex and start_mutex are leaves
from libc.stdint cimport int8_t, int64_t, uint64_t, uint32_t, uint8_t
from system cimport pthread_mutex_t, rb_gate, sockaddr_storage, socklen_t
from hiredis cimport rb_reply, redisReader

cdef enum:
    MOST_NODES = 64
    MOST_PROGRAMS = 32
    MOST_FORMS = 4
    MOST_CHUNKS = 12
    MOST_ARGS = 8
    MOST_ADDRESSES = 8
    CAUSE = 200

# ---- programs ----

cdef struct Chunk:              # a run of constant bytes, or one argument
    int argument                # -1: constant
    int length
    const char* bytes

cdef struct Form:
    int chunks
    Chunk chunk[MOST_CHUNKS]

cdef struct Prog:
    int decoder
    int forms
    int native                  # this many leading forms are plain commands
    int writes
    int words                   # how many it is given, with the key
    int deletes
    int tries
    int undo                    # the program that takes it back, below 0: none
    int after                   # the argument with another token whose writes it follows, 0: none
    Form form[MOST_FORMS]

cdef struct Text:               # growable bytes
    char* bytes
    size_t length
    size_t room

cdef struct Bytes:              # borrowed bytes
    const char* bytes
    size_t length

# ---- connections ----

cdef struct Packed:             # a whole command in the form that works everywhere, shared by the slots of a round
    int refs
    int program
    uint64_t tag
    int64_t expires_ns
    size_t length
    char bytes[1]

cdef struct Kept:               # a lease that the agent looks after
    int refs                    # its Renewal, and the slots that its votes come from
    Engine_* engine
    int program                 # that renews it, below 0: it is only watched
    int back                    # that puts it back, below 0: none
    int64_t lease_ms
    int quorum
    int64_t drift_ns
    int64_t limit_ns
    int64_t until_ns
    int64_t surely_ns           # no renewal is good for longer
    int64_t started_ns
    int64_t length_ms
    int64_t valid_until_ns      # atomic, as all that a Renewal tells
    uint64_t touched
    uint64_t tag
    int place                   # in the heap, below 0: on none
    int64_t due_ns
    int64_t slack_ns            # it may as well be done so much earlier, if others are
    int paused
    int stopped
    int lost
    int renewed
    int failed
    int failures                # since the last renewal
    int64_t retry_ns
    uint64_t round              # the one that runs or ran last
    int64_t round_started_ns
    int64_t round_ends_ns       # votes count until then
    int64_t life_ms             # which that gives
    int running                 # it has no verdict yet
    int granted
    uint64_t open               # a bit per node that has not voted yet
    uint64_t waiting            # of these, those whose connection is just being made
    uint64_t sent               # it may be executed there
    uint64_t yes
    uint64_t no
    uint64_t restored           # where the token was put back
    Kept* next_voted
    int voted                   # it is on that list
    rb_gate* gate               # of somebody who wants to hear that it is lost, or NULL
    rb_gate moved               # where `wait` sleeps
    size_t key_length
    size_t token_length
    char bytes[1]               # the key, and then the token

cdef struct Slot:               # who waits for one reply, and what it means
    uint64_t round              # 0: nobody waits
    uint64_t tag                # of the token written, 0 for reads
    int64_t sent_ns
    int64_t due_ns              # unanswered after this, the node is suspect
    uint32_t size               # of the command
    int8_t program              # below 0: a command of the handshake
    uint8_t form
    Packed* spare               # of a try its undo, of other writes themselves: sent if the reply asks for it
    uint64_t mark               # what the event is to call the key that it asks about, 0: nobody wants to know
    Kept* kept                  # whose renewal it is, of the round `round`; on the keeper only

cdef enum ConnState:
    CLOSED = 0
    RESOLVING
    CONNECTING
    HANDSHAKE
    READY

cdef struct Conn:
    pthread_mutex_t mutex
    int state
    int fd
    int node                    # its place in the engine
    int kind                    # that of its channel
    int address                 # which address of the node is tried
    int shaking                 # replies of the handshake still open
    int64_t limit_ns            # how long connecting may take
    int64_t opened_ns
    int64_t again_ns            # connect() is to be called again then (backlog full), 0 otherwise
    int64_t held_ns             # what is queued may wait until then for a command to go along with, 0: no more
    int heard                   # some reply has come
    int degraded                # it ends by what the node can do without: the next one goes without
    int wanted                  # somebody waits to hear that it is ready
    int silent                  # somebody was told that it leaves a reply open
    uint64_t* topic             # the marks of what was subscribed to
    int topics
    int topic_room
    uint8_t[MOST_PROGRAMS] proven   # a bit per form: answered on this connection
    size_t fed                  # bytes since the last complete reply
    redisReader* reader
    rb_reply reply
    Text out
    Slot* slot                  # ring
    uint32_t first
    uint32_t slots
    uint32_t room
    size_t backlog              # bytes of unanswered commands

cdef struct NodeState:
    int refs
    pthread_mutex_t mutex
    int is_unix
    char host[256]
    char port[8]
    char path[108]
    int addresses
    sockaddr_storage address[MOST_ADDRESSES]
    socklen_t address_size[MOST_ADDRESSES]
    int resolving
    int numeric
    char resolve_error[CAUSE]
    Text[8] handshake           # as it is; + 1: without HELLO; + 2: without the name of the connection
                                # 4: that of a watch; + 1: with tracking; + 2 as above
    int[8] handshakes           # how many commands it has
    int says_hello
    int says_name
    int no_hello
    int no_name                 # it does not let connections have a name
    int no_push                 # it cannot tell anything unasked
    int no_tracking             # nor which keys have changed
    int64_t connect_ns          # the most that a round waits for a connect; 0: as long as it waits at all
    int suspect
    int no_ping
    int away                    # a connect failed since it was last there
    char cause[CAUSE]
    int64_t next_connect_ns
    int64_t back_off_ns
    uint8_t form[MOST_PROGRAMS]
    Packed** orphan
    int orphans
    int orphan_room

cdef struct Told:               # an event of a watch
    int what
    int node
    uint64_t mark
    int64_t value

cdef struct Channel:
    int kind                    # ORDINARY, PLAIN_WATCH or TRACKING_WATCH
    int subscribed              # to something, on some connection
    int taken_at                # the count of closings when its watch took it
    int flags                   # for who waits on it: POKED, LOOK_AGAIN (atomic)
    int sleeps                  # it does (atomic)
    int[2] waker                # wakes it
    Told* told                  # ring of events, the owner's alone
    int first_told
    int tolds
    Channel* next_idle
    Channel* next
    Conn* conn
    uint64_t round              # the round that runs or ran last
    int active                  # it runs
    uint64_t late               # a bit per token that may have an unanswered write here (Engine_.mutex)
    uint64_t late_since         # what others have added to it since its user last looked (Engine_.mutex)
    int64_t used_ns
    uint8_t* vote
    uint8_t* sent
    int hits
    char* cause                 # nodes x CAUSE
    Text form_bytes[MOST_FORMS]
    size_t form_length[MOST_FORMS]    # of the command alone, where something goes along behind it
    uint8_t form_packed[MOST_FORMS]   # for the round that runs

cdef struct Engine_:
    pthread_mutex_t mutex
    int nodes
    NodeState** node
    int[MOST_NODES] order       # in which they are written to
    Channel* idle
    Channel* idle_watch[2]      # plain, tracking
    int watches                 # in use
    int closings                # how often it was closed
    int used_at                 # the count of closings when its last round ended
    Channel* all
    Channel* keeper             # the agent's own, for renewals; one of all, and never idle
    Kept** kept                 # heap by what is due next (keep_mutex)
    int kepts
    int kept_room
    Kept* voted                 # somebody has voted on these, empty whenever nobody has keep_mutex
    uint64_t waiting            # a bit per node whose connection is waited for (keep_mutex)
    size_t[MOST_NODES] owed     # bytes that will be sent when it is there (keep_mutex)
    int64_t used_ns
    Engine_* next               # in the agent's list

cdef struct Retired:
    int fd
    int64_t until_ns
    NodeState* node
    Text out
    int shut
    int orphans
    Packed** orphan
    Retired* next

cdef struct Linked:             # a gate in the list of all
    rb_gate gate
    Linked* next
    Linked* previous

cdef struct Round:
    Engine_* engine
    Channel* channel            # set beforehand: it has to be this one
    uint64_t mark               # a LIFE of the key goes along, with this mark, 0: none
    int program
    int args
    Bytes arg[MOST_ARGS]        # 0 the key, 1 the token or first argument
    uint64_t tag
    int fresh                   # the token is new, so nothing earlier can be unanswered
    uint64_t follows            # of the token whose unanswered writes come first, 0: none can be
    uint64_t behind             # a bit per node where it was queued behind one, on another channel
    int quorum
    uint64_t touched            # a bit per node that may have the token; the others are left out
    uint64_t asked              # of a try: a bit per node that counts
    uint64_t reached            # after it: a bit per node that may have executed it
    int64_t limit_ns
    int64_t undo_life_ns        # how long its undo is remembered
    int64_t valid_ns            # of a try: length of the lease less drift
    int waits                   # 0: nobody waits for the replies
    int held                    # it goes out with the next command of its connection
    int generation
    Packed* spare
    int64_t started_ns
    int64_t ended_ns
    int yes
    int no
    int faults
    int hits
    int verdict
    uint8_t vote[MOST_NODES]
    char* causes                # nodes x CAUSE, or NULL where there is nothing to tell
    int too_late                # of a try: a quorum said yes, but no validity was left
    int interrupted
    int forked
