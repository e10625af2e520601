"""What a rank says of a wait that failed. The table of all ranks needs ranks: tests/distributed/test_diverge.py."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from zrun_runtime.distributed import World
from zrun_runtime.errors import RanksDivergedError
from zrun_runtime.watch import PeerError, Watch, hung_up


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        (
            "[/build/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:5. This is typically caused by a remote",
            "gone",
        ),
        ("[/build/gloo/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete", "silent"),
    ],
)
def test_a_wait_that_failed_names_rank_operation_and_reason(reason: str, found: str) -> None:
    watch = Watch(World(0, 1, 0, torch.device("cpu"), "gloo"))
    with pytest.raises(RanksDivergedError) as caught, watch.waiting("a gather of blocks.1"):
        raise PeerError(3, reason)
    said = str(caught.value)
    assert said.startswith(f"rank 0 waited for rank 3 at a gather of blocks.1, but found it {found}: ")
    assert "/build/" not in said and "typically" not in said
    assert "no word of the other ranks" in said


def test_a_server_that_is_gone_is_seen_without_asking_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            assert not hung_up(port)
            accepted.close()
            assert client.recv(1) == b""
            assert hung_up(port)


SLOW_STORE = """
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from zrun_runtime import watch
from zrun_runtime.distributed import World
slow = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=2))
dist.init_process_group("gloo", store=slow, rank=0, world_size=1)
def ask(posts, text):
    try:
        slow.get("what nobody says")
    except dist.DistError:
        pass
watch._Posts._set = ask
watch.Watch(World(0, 2, 0, torch.device("cpu"), "gloo", data=dist.group.WORLD))
time.sleep(1.5)
"""


def test_a_program_that_ends_while_its_place_is_being_said_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW_STORE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
