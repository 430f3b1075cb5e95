"""A program that adds to a number which only a lock guards."""

from __future__ import annotations

import redis

from tests.programs import main
from tests.programs.places import place


def count(urls: list[str], kind: str, times: int) -> None:
    """Add to a number on the first server, by reading it and writing it back."""
    lock = place(urls, kind, sleep=0.002)
    with redis.Redis.from_url(urls[0]) as client:
        for _ in range(times):
            with lock:
                before = client.get("number")
                client.set("number", int(before or 0) + 1)


if __name__ == "__main__":
    main(globals())
