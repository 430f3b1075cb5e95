"""The rows beside the floor: redbolt and its peers, in this process or in one of their own."""

from bench.peers.apart import PEERS, Peer, Process, Worker
from bench.peers.contending import CONTENDING, Contending
from bench.peers.in_process import Redbolt, RedisPy, RedlockPy, Threads

__all__ = [
    "CONTENDING",
    "PEERS",
    "Contending",
    "Peer",
    "Process",
    "Redbolt",
    "RedisPy",
    "RedlockPy",
    "Threads",
    "Worker",
]
