"""A program that holds a lock in a global, and ends in one way or another."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any

from tests.programs import main

held: Any = None


def end(urls: list[str], kind: str, how: str) -> None:
    """Hold a lock, and end."""
    global held
    if how == "by an atexit handler older than the library":
        assert "redbolt" not in sys.modules
        atexit.register(lambda: held.release())
    import redbolt

    def lock(name: str, sleep: float = 0.1) -> redbolt.Lock:
        if len(urls) == 1:
            return redbolt.Lock(urls[0], name, 30, sleep, engine=kind)
        return redbolt.RedLock(urls, name, 30, sleep, engine=kind)

    held = lock("name")
    assert held.acquire()
    print("held", flush=True)
    sys.stdin.readline()
    if how == "by an atexit handler":
        atexit.register(held.release)
    elif how == "by sys.exit":
        sys.exit(3)
    elif how == "by sys.exit in a thread":
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
    elif how == "by an exception":
        raise KeyError("the program itself")
    elif how == "after close":
        redbolt.close()
    elif how == "after an extend without an answer":
        try:
            held.extend(1)
        except redbolt.NodesUnavailable:
            pass
    elif how == "while daemon threads wait":
        for i in range(3):
            threading.Thread(target=lock("name", 0.001 * i).acquire, daemon=True).start()
        time.sleep(0.05)
    elif how == "while daemon threads take locks":

        def work(name: str) -> None:
            while True:
                with lock(name):
                    pass

        for i in range(3):
            threading.Thread(target=work, args=(f"name {i}",), daemon=True).start()
        time.sleep(0.05)


if __name__ == "__main__":
    main(globals())
