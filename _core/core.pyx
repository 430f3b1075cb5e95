"""The native engine: rounds in C without the GIL, over hiredis' reply reader; see `redbolt._engine`."""

from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset, strlen
from system cimport *
from hiredis cimport *
from data cimport *

include "judge.pxi"
include "text.pxi"
include "program.pxi"
include "node.pxi"
include "event.pxi"
include "connection.pxi"
include "reply.pxi"
include "channel.pxi"
include "round.pxi"
include "agent.pxi"
include "gate.pxi"
include "engine.pxi"
include "keep.pxi"
include "watch.pxi"
