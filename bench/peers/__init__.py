"""The rows beside the floor: redbolt and its peers, in this process or in one of their own."""

from bench.peers.apart import PEERS, Peer, Worker
from bench.peers.in_process import Redbolt, RedisPy, RedlockPy, Threads

__all__ = ["PEERS", "Peer", "Redbolt", "RedisPy", "RedlockPy", "Threads", "Worker"]
