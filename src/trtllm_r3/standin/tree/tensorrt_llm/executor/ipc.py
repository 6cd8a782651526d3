"""Queues between processes: pickles over a loopback connection that starts with a shared secret."""

from __future__ import annotations

import hmac
import os
import pickle
import select
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

_KEY_BYTES = 32


class IpcQueue:
    """One end of a two-way queue. The client connects at once to the server's `address` (endpoint, key).

    Any thread may `put`; one thread at a time may `get`. EOFError when the other end is gone.
    """

    def __init__(
        self, address: tuple[str, bytes] | None = None, *, is_server: bool, name: str | None = None
    ) -> None:
        if not is_server and address is None:
            raise ValueError("a client needs the server's address")
        self.name = name
        self._connection: Connection | None = None
        self._listener: socket.socket | None = None
        self._closed = False
        self._send_lock, self._accept_lock = threading.Lock(), threading.Lock()
        if is_server:
            self._listener = socket.create_server(("127.0.0.1", 0))
            port = self._listener.getsockname()[1]
            self.address = (f"tcp://127.0.0.1:{port}", os.urandom(_KEY_BYTES))
        elif address is not None:
            self.address = address
            self._connection = _connect(*address)

    def put(self, obj: Any) -> None:
        """Send an object, by plain pickle: tensors are copied, never shared."""
        data = pickle.dumps(obj)
        connection = self._connected(None)
        with self._send_lock:
            connection.send_bytes(data)

    def put_noblock(self, obj: Any) -> bool:
        """Send an object unless no other end is there; whether it was sent."""
        try:
            if self._accept(0):
                self.put(obj)
                return True
        except (EOFError, OSError):
            return False
        return False

    def get(self) -> Any:
        """Wait for an object."""
        try:
            return pickle.loads(self._connected(None).recv_bytes())
        except OSError as error:
            raise EOFError(f"{self.name}: the other end is gone") from error

    def poll(self, timeout: float) -> bool:
        """Whether an object (or the end of the connection) arrives within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if not self._accept(timeout):
            return False
        return self._connected(0).poll(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        for end in (self._connection, self._listener):
            if end is not None:
                end.close()
        self._connection = self._listener = None

    def _connected(self, timeout: float | None) -> Connection:
        while not self._accept(0.2):
            if timeout is not None:
                break
        if self._connection is None:
            raise EOFError(f"{self.name}: closed")
        return self._connection

    def _accept(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the client; strangers without the key are turned away."""
        with self._accept_lock:
            deadline = time.monotonic() + timeout
            while self._connection is None:
                caller = self._next_caller(max(0.0, deadline - time.monotonic()))
                if caller is not None:
                    self._connection = _admit(caller, self.address[1])
                elif time.monotonic() >= deadline:
                    return False
        return True

    def _next_caller(self, timeout: float) -> socket.socket | None:
        if self._closed or self._listener is None:
            raise EOFError(f"{self.name}: closed")
        try:
            ready, _, _ = select.select([self._listener], [], [], timeout)
            return self._listener.accept()[0] if ready else None
        except (OSError, ValueError, AttributeError) as error:  # closed by another thread meanwhile
            raise EOFError(f"{self.name}: closed") from error


class FusedIpcQueue(IpcQueue):
    """A queue whose messages are lists."""

    def put(self, obj: Any) -> None:
        """Send a list, or one object as a list of one."""
        super().put(obj if isinstance(obj, list) else [obj])


def _no_delay(end: socket.socket) -> Connection:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setblocking(True)
    return Connection(end.detach())


def _connect(endpoint: str, key: bytes) -> Connection:
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    connection = _no_delay(socket.create_connection((host, int(port)), timeout=30))
    connection.send_bytes(key)
    return connection


def _admit(end: socket.socket, key: bytes) -> Connection | None:
    connection = _no_delay(end)
    try:
        if connection.poll(1) and hmac.compare_digest(connection.recv_bytes(_KEY_BYTES), key):
            return connection
    except (EOFError, OSError):
        connection.close()
        return None
    connection.close()
    return None
