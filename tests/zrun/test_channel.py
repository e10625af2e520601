from __future__ import annotations

import os
import time

import pytest

from zrun.channel import CROWDED_BYTES, Command, Inbox, Outbox
from zrun.errors import ProtocolError
from zrun.events import AgentDone, Notice, decode


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            pass


def test_commands_come_in_any_pieces(pipe):
    reader, writer = pipe
    inbox = Inbox(reader, b'{"command": "be', lease=30.0)
    assert inbox.read() == []
    os.write(writer, b'at"}\n{"command":"stop","grace":1.5,"number":2,"later":[]}\n{"comm')
    assert inbox.read() == [Command("beat"), Command("stop", 2, 1.5)]
    os.write(writer, b'and":"kill"}\n')
    assert inbox.read() == [Command("kill")]
    assert not inbox.ended
    os.close(writer)
    assert inbox.read() == []
    assert inbox.ended


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b"{}\n", b'{"command":"stop","grace":"x"}\n', b"y" * 70_000])
def test_what_is_no_command_is_refused(pipe, line):
    reader, writer = pipe
    inbox = Inbox(reader, b"", lease=30.0)
    with pytest.raises(ProtocolError):
        for at in range(0, len(line), 50_000):
            os.write(writer, line[at : at + 50_000])
            inbox.read()


def test_the_lease_runs_out_unless_it_is_held(pipe):
    reader, writer = pipe
    inbox = Inbox(reader, b"", lease=0.05)
    time.sleep(0.1)
    assert inbox.expired
    os.write(writer, b'{"command":"beat"}\n{"command":"hold"}\n')
    inbox.read()
    time.sleep(0.1)
    assert not inbox.expired
    os.write(writer, b'{"command":"beat"}\n')
    inbox.read()
    assert not inbox.expired
    time.sleep(0.1)
    assert inbox.expired


def test_events_leave_in_order_and_never_wait(pipe):
    reader, writer = pipe
    outbox = Outbox(writer)
    events = [Notice(0, "info", "x" * 1000) for _ in range(CROWDED_BYTES // 1000 + 1000)]
    for event in events:
        outbox.put(event)
        outbox.flush()
    assert outbox.crowded
    os.set_blocking(reader, False)
    data = b""
    while outbox.waiting:
        data += os.read(reader, 1 << 20)
        outbox.flush()
    data += os.read(reader, 1 << 20)
    assert [decode(line) for line in data.splitlines()] == events


def test_a_reader_that_is_gone_is_no_error(pipe):
    reader, writer = pipe
    outbox = Outbox(writer)
    os.close(reader)
    outbox.put(AgentDone())
    outbox.flush()
    assert outbox.broken and not outbox.waiting
    outbox.put(AgentDone())
    assert not outbox.waiting
