"""Worlds of ranks that stay up and run many cases: starting one costs seconds, a case milliseconds.

A case is a function at the top of a module, `case(rank, world, **keywords)`; what it returns is pickled back, one
result a rank. A rank that raises, dies or hangs fails the case with its traceback or stack, and the whole world is
ended; the next case gets a new one. Ranks die with the process that made them, whatever ends it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import IO, Any

GRACE = 15.0  # seconds the other ranks get once one rank has failed
# What an outer launcher may have set, in the beginnings of its names.
_LAUNCHER_PREFIXES = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "MASTER_", "CROSS_", "ROLE_"),
    *("ZRUN_", "TORCHELASTIC_", "OMPI_", "SLURM_", "PMI"),
)


class CaseFailed(AssertionError):
    """Some rank raised, died or hung; the text says which and shows where."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world: int, port: int | None) -> dict[str, str]:
    """The environment a launcher gives a rank; with no port, that of a plain `python script.py`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    environment.update(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    )
    if port is not None:
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    return environment


class _Rank:
    """One worker process, the parent's end of its pipe, and what it printed."""

    def __init__(self, rank: int, world: int, port: int | None) -> None:
        self.rank = rank
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(rank), str(world), str(os.getpid())],
            env=rank_environment(rank, world, port),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.link = connection.Connection(ours.detach())

    def end(self, *, gently: bool) -> None:
        """End the process: by closing its pipe if it waits for a case, else by SIGKILL."""
        self.link.close()
        try:
            self.process.wait(timeout=5.0 if gently else 0.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()

    def tail(self, limit: int = 6000) -> str:
        """The last characters of what the rank printed, stacks of all its threads included if it hung."""
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - limit))
        return self.output.read().decode(errors="replace")


class World:
    """Ranks 0..size-1 on this machine, started when first needed.

    Args:
        size: how many ranks.
        launched: False starts the ranks without any launcher environment (size 1 only).
    """

    def __init__(self, size: int, *, launched: bool = True) -> None:
        if size > 1 and not launched:
            raise ValueError("only a world of one rank can do without a launcher's environment")
        self.size = size
        self._launched = launched
        self._ranks: list[_Rank] = []

    def run(
        self, case: Callable[..., Any], *, timeout: float = 120.0, last: bool = False, **keywords: Any
    ) -> list[Any]:
        """Run `case(rank, world, **keywords)` on every rank and return the results by rank.

        Args:
            timeout: seconds after which the case counts as hung.
            last: the case leaves the process group in no usable state, so end this world after it.

        Raises:
            CaseFailed: a rank raised, died or hung.
        """
        if not self._ranks:
            port = free_port() if self._launched else None
            self._ranks = [_Rank(rank, self.size, port) for rank in range(self.size)]
        payload = pickle.dumps((case, keywords))
        replies: dict[int, tuple[bool, Any]] = {}
        try:
            for rank in self._ranks:
                rank.link.send_bytes(payload)
            self._collect(replies, timeout)
            troubles = self._troubles(replies, timeout)
        except BaseException:
            self.close(gently=False)
            raise
        if troubles or last:
            self.close(gently=not troubles)
        if troubles:
            raise CaseFailed("\n".join(troubles))
        return [replies[rank][1] for rank in range(self.size)]

    def _collect(self, replies: dict[int, tuple[bool, Any]], timeout: float) -> None:
        """Fill `replies` until every rank answered or died, or the time is up."""
        deadline = time.monotonic() + timeout
        waiting = {rank.link: rank for rank in self._ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for link in connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(link)  # type: ignore[call-overload]
                try:
                    replies[rank.rank] = pickle.loads(rank.link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    code = rank.process.wait()
                    replies[rank.rank] = False, f"died with exit code {code}\n{rank.tail()}"
                if not replies[rank.rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)

    def _troubles(self, replies: dict[int, tuple[bool, Any]], timeout: float) -> list[str]:
        troubles = [f"[rank {rank}] {text}" for rank, (fine, text) in sorted(replies.items()) if not fine]
        hung = [rank for rank in self._ranks if rank.rank not in replies]
        for rank in hung:
            rank.process.send_signal(signal.SIGUSR1)  # faulthandler prints the stacks
        if hung:
            time.sleep(0.5)
        return troubles + [f"[rank {rank.rank}] did not answer (limit {timeout} s)\n{rank.tail()}" for rank in hung]

    def close(self, *, gently: bool = True) -> None:
        """End every rank; the world starts anew at the next case."""
        ranks, self._ranks = self._ranks, []
        if not gently:
            for rank in ranks:
                rank.process.kill()
        for rank in ranks:
            rank.end(gently=gently)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(link: connection.Connection, rank: int, world: int) -> None:
    """Run the cases that come through the pipe until it closes."""
    while True:
        try:
            case, keywords = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        try:
            reply = True, case(rank, world, **keywords)
        except Exception:
            reply = False, traceback.format_exc()
        gc.collect()
        # Plain pickle: the pickler of multiprocessing would send tensors as handles to shared memory.
        link.send_bytes(pickle.dumps(reply))


def main(arguments: list[str]) -> None:
    """What a rank runs: file descriptor of the pipe, rank, world size, process id of the parent."""
    descriptor, rank, world, parent = (int(argument) for argument in arguments)
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to handle
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _serve(connection.Connection(descriptor), rank, world)
    sys.stdout.flush()
    os._exit(0)  # how a process group ends is not what the cases are about


if __name__ == "__main__":
    main(sys.argv[1:])
