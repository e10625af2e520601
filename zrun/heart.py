"""Tells the agents that the launcher lives."""

from __future__ import annotations

import threading
import time

from zrun.connection import Connection

_FLUSH_SECONDS = 2.0  # for the last words before a silence


class Heart:
    """Tells the agents, from a thread, that the launcher lives.

    Args:
        patience: seconds of silence that would mean something.
    """

    def __init__(self, connections: list[Connection], patience: float) -> None:
        self._connections = connections
        self._seconds = min(5.0, patience / 4)
        self._over = threading.Event()
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def hold(self) -> None:
        """The launcher will be silent on purpose: the last line the agents get for now."""
        self._beating.acquire()
        self._beat("hold")
        until = time.monotonic() + _FLUSH_SECONDS
        for connection in self._connections:
            connection.flush(max(0.0, until - time.monotonic()))

    def go_on(self) -> None:
        self._beat("beat")
        self._beating.release()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            with self._beating:
                self._beat("beat")

    def _beat(self, command: str) -> None:
        for connection in self._connections:
            connection.command(command)
