"""Certificates for tests, and TLS in front of any node."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from .clients import HasAddress

_CONFIG = """
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = localhost
[extensions]
basicConstraints = critical, CA:true
subjectAltName = {}
"""


class Certificate:
    """A key, and a certificate that it signed itself, made by the ``openssl`` command.

    Args:
        folder: where the files go.
        name: of the files. Default "server".
        valid_for: the names and addresses it is for. Default: those of this machine.
    """

    def __init__(
        self, folder: Path, name: str = "server", valid_for: str = "DNS:localhost, IP:127.0.0.1"
    ) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("openssl is not installed (Debian: apt-get install openssl)")
        self.key, self.path = str(folder / f"{name}.key"), str(folder / f"{name}.crt")
        config = folder / f"{name}.cnf"
        config.write_text(_CONFIG.format(valid_for))
        argv = [openssl, "req", "-x509", "-config", str(config), "-days", "2", "-nodes"]
        argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        argv += ["-keyout", self.key, "-out", self.path]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def context(self) -> ssl.SSLContext:
        """For a server that shows it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path, self.key)
        context.num_tickets = 0  # redis-py, which `raw` uses, takes them for unread replies
        return context


class TlsFront:
    """A TLS server on loopback that passes everything on to a plain one; a context manager.

    Args:
        target: the plain server.
        certificate: what it shows.
    """

    def __init__(self, target: HasAddress, certificate: Certificate) -> None:
        self.ca = certificate.path
        self._target = target
        self._context = certificate.context()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.host, self.port = self._listener.getsockname()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """With the certificate to be trusted."""
        return f"rediss://{self.host}:{self.port}?ssl_ca_certs={self.ca}"

    def __enter__(self) -> TlsFront:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        socket.create_connection((self.host, self.port)).close()  # wakes the acceptor
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._closing.is_set():
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with connection, self._context.wrap_socket(connection, server_side=True) as client:
                with socket.create_connection((self._target.host, self._target.port)) as server:
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._pass_on(client, server)
        except OSError:
            return  # one of them has gone

    def _pass_on(self, client: ssl.SSLSocket, server: socket.socket) -> None:
        while not self._closing.is_set():
            readable, _, _ = select.select([client, server], [], [], 0.2)
            if client in readable:
                data = client.recv(65536)
                if not data:  # it may still read: as Redis does, answer what it sent before
                    server.shutdown(socket.SHUT_WR)
                    while data := server.recv(65536):
                        client.sendall(data)
                    return
                server.sendall(data)
            if server in readable:
                data = server.recv(65536)
                if not data:
                    return
                client.sendall(data)
