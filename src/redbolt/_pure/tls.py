"""A TLS socket with the manners of a plain one: as much of it as a connection needs."""

from __future__ import annotations

import socket
import ssl
import threading

__all__ = ["TlsSocket"]


class TlsSocket:
    """A non-blocking ``ssl.SSLSocket`` that says BlockingIOError where the system's sockets do.

    Reading and sending exclude one another, since OpenSSL allows no two threads in one session.
    """

    __slots__ = ("_lock", "_sock", "family")

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.family = sock.family

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes | bytearray, flags: int = 0) -> int:
        """Send what goes now. What did not go must come again, at the front of the next call."""
        with self._lock:
            try:
                return self._sock.send(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def recv(self, size: int) -> bytes:
        """Read what there is, with all that TLS has deciphered already: poll() does not know of that."""
        with self._lock:
            try:
                data = self._sock.recv(size)
                while data and (kept := self._sock.pending()):
                    data += self._sock.recv(kept)
                return data
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """End the sending side of the TCP connection, and go on reading.

        There is no TLS goodbye: OpenSSL would wait for the other one, and take replies that come first for
        an error. Servers execute what came before the end all the same.
        """
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Give the descriptor back; nothing is sent, so that a forked child can do it, too."""
        self._sock.close()
