from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from zrun.errors import HostLostError
from zrun.hostfile import Host
from zrun.transport.jumps import Jumps, parse_jump
from zrun.transport.ssh_config import Target

TARGET = Target("a", "a", 22, "me", "a", (), (), False, "", "", "", "any", "")


class Session:
    alive = True

    def close(self):
        self.alive = False


def soon(seconds=5.0):
    return time.monotonic() + seconds


def test_those_who_come_at_once_share_one_connection():
    made = []

    def connect():
        time.sleep(0.05)
        made.append(Session())
        return made[-1]

    jumps = Jumps()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: jumps.get(TARGET, soon(), connect), range(8)))
    assert len(made) == 1 and set(got) == {made[0]}
    made[0].close()
    assert jumps.get(TARGET, soon(), connect) is made[1]
    jumps.close()
    assert not made[1].alive


def test_those_who_wait_share_the_error_and_later_ones_try_again():
    tries = []
    waiting = threading.Barrier(4)

    def connect():
        tries.append(1)
        time.sleep(0.3)  # until the others wait
        raise HostLostError("refused")

    def one(_):
        waiting.wait()
        with pytest.raises(HostLostError, match="refused"):
            jumps.get(TARGET, soon(), connect)

    jumps = Jumps()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert len(tries) == 1
    with pytest.raises(HostLostError):
        jumps.get(TARGET, soon(), connect)
    assert len(tries) == 2


def test_a_circle_of_two_ends():
    jumps, held = Jumps(), threading.Barrier(2)
    other = Target("b", "b", 22, "me", "b", (), (), False, "", "", "", "any", "")

    def through(first, second):
        def connect():
            held.wait()
            return jumps.get(second, soon(0.2), Session)

        with pytest.raises(HostLostError, match="not reached in time"):
            jumps.get(first, soon(), connect)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(through, (TARGET, other), (other, TARGET))) == [None, None]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("bastion", Host("bastion", 0)),
        ("me@bastion:2222", Host("bastion", 0, user="me", port=2222)),
        ("ssh://me@bastion", Host("bastion", 0, user="me")),
        ("[fd00::1]:22", Host("fd00::1", 0, port=22)),
        ("[fd00::1]", Host("fd00::1", 0)),
        ("me@fd00::1", Host("fd00::1", 0, user="me")),
    ],
)
def test_how_a_jump_is_written(text, host):
    assert parse_jump(text) == host
