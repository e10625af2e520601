"""Rare orders of events, over a transport without processes."""

from __future__ import annotations

import dataclasses
import json
import queue
from functools import partial

import pytest

from tests.zrun.test_feed import Recorder
from zrun import attempt as attempting
from zrun.errors import HostLostError, PreflightError
from zrun.events import AgentAlive, AgentDone, AgentFailed, Event, WorkerExited, WorkerOutput, encode
from zrun.hostfile import Host
from zrun.job import JobSpec, JobView
from zrun.ports import claim_free_port
from zrun.prepare import Job
from zrun.supervisor import Supervisor
from zrun.topology import assign_ranks
from zrun.transport.base import AgentEnd

GREETING = b"zrun-agent 1 0.1.0\n"


class FakeAgent:
    """The far end of a link: says what it is told to say, and reacts to commands."""

    def __init__(self, says: list[bytes], at_stop: list[bytes], end: AgentEnd) -> None:
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for said in says:
            self.said.put(said)
        self.at_stop = at_stop
        self.how = end
        self.lives = 0  # heartbeats that it answers
        self.heard: list[dict] = []
        self.hung_up = False

    def send(self, line):
        data = json.loads(line)
        self.heard.append(data)
        if data.get("command") == "beat" and self.lives > 0:
            self.lives -= 1
            self.said.put(encode(AgentAlive()))
        if data.get("command") in ("stop", "kill"):
            for said in self.at_stop:
                self.said.put(said)

    def receive(self, limit):
        return self.said.get(timeout=30)[:limit]

    def flush(self, timeout):
        pass

    def hang_up(self):
        self.hung_up = True
        self.said.put(b"")

    def end(self, timeout):
        self.waited = timeout
        return self.how

    def commands(self):
        return [data["command"] for data in self.heard if "command" in data]


class FakeTransport:
    def __init__(self, **agents: FakeAgent | Exception) -> None:
        self.agents = agents

    def start(self, host):
        agent = self.agents[host.name]
        if isinstance(agent, Exception):
            raise agent
        return agent


def agent(*says: Event | bytes, at_stop: tuple[Event | bytes, ...] = (), end: AgentEnd | None = None) -> FakeAgent:
    def lines(things):
        return [thing if isinstance(thing, bytes) else encode(thing) for thing in things]

    return FakeAgent([GREETING, *lines(says)], lines(at_stop), end or AgentEnd(0, ""))


def run(grace=1.0, lease=30.0, again=lambda job, verdict, say: None, stall=None, **agents):
    hosts = tuple(Host(name, 1) for name in agents)
    first = JobSpec(
        "id", "", 0, len(hosts), len(hosts), 0, 1, "::1", 1, "cpu", "gloo", ("x",), "/", {}, grace=grace, lease=lease
    )
    specs = tuple(dataclasses.replace(first, host=host.name, node_rank=i, first_rank=i) for i, host in enumerate(hosts))
    view = JobView("id", len(hosts), tuple(agents), "cpu", "gloo", "x:1", "x")
    job = Job(view, hosts, specs, assign_ranks(hosts), (), claim_free_port())
    console = Recorder()
    code = Supervisor(job, FakeTransport(**agents), console, partial(again, job), stall).run()
    job.port.release()
    return code, console


def done(rank, code=0, stopped=False):
    return WorkerExited(rank, code, stopped, float(rank))


def failure_of(console):
    (report,) = [call[1] for call in console.calls if call[0] == "failed"]
    return report


def test_success():
    one, two = agent(done(0), AgentDone(), b""), agent(done(1), AgentDone(), b"")
    code, console = run(a=one, b=two)
    assert code == 0
    assert console.calls[-1] == ("close", 0)
    assert one.heard[0]["job_id"] == "id"
    assert "stop" not in one.commands()


def test_a_failure_stops_the_others_with_one_shared_grace():
    one = agent(done(0, 3), AgentDone(), b"")
    two = agent(at_stop=(done(1, -15, stopped=True), AgentDone(), b""))
    code, console = run(grace=7.0, a=one, b=two)
    assert (code, failure_of(console).rank, failure_of(console).others_stopped) == (3, 0, 1)
    (stop,) = [data for data in two.heard if data.get("command") == "stop"]
    assert stop["grace"] == 7.0


def test_a_host_that_cannot_be_reached_stops_the_others():
    two = agent(at_stop=(done(1, -15, stopped=True), AgentDone(), b""))
    code, console = run(a=HostLostError("no route", "plug it in"), b=two)
    assert (code, failure_of(console).host, failure_of(console).hint) == (4, "a", "plug it in")
    assert "no route" in failure_of(console).message


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ((b"",), "ended before the job"),
        ((done(0), b""), "ended before the job"),
        ((AgentDone(), b""), "left before all workers"),
        ((b"garbage\n",), "not an event"),
        ((b'{"event":"agent_done","log_dir":7}\n',), "log_dir"),
        ((b'{"event":"step"',), "ended before the job"),
        ((b"x" * 300_000,), "line of more than"),
    ],
)
def test_an_agent_that_breaks_the_rules_is_a_lost_host(says, words):
    one = agent(*says, end=AgentEnd(1, "ImportError: something"))
    code, console = run(a=one)
    assert code == 4
    assert words in failure_of(console).message
    assert failure_of(console).traceback == "ImportError: something"
    assert one.hung_up


def test_noise_before_the_greeting_is_thrown_away():
    one = FakeAgent(
        [b"Welcome!\n", b"\xff\n", GREETING, encode(done(0)), encode(AgentDone()), b""], [], AgentEnd(0, "")
    )
    assert run(a=one)[0] == 0


@pytest.mark.parametrize(
    ("greeting", "words"),
    [([b"zrun-agent 99 7.0\n"], "protocol 99"), ([b"x" * 2**19, b"y" * 2**19], "before the agent's greeting")],
)
def test_another_greeting_is_refused(greeting, words):
    code, console = run(a=FakeAgent(greeting, [], AgentEnd(0, "")))
    assert code == 4 and words in failure_of(console).message


def test_an_agent_that_does_not_start_in_time(monkeypatch):
    monkeypatch.setattr(attempting, "GREETING_SECONDS", 0.3)
    code, console = run(a=FakeAgent([], [], AgentEnd(None, "")))
    assert code == 4 and "not started" in failure_of(console).message


def test_an_agent_that_does_not_end_in_time(monkeypatch):
    monkeypatch.setattr(attempting, "_CLEANUP_SECONDS", 0.3)
    deaf = agent()
    code, console = run(grace=0.2, a=agent(done(0, 9), AgentDone(), b""), b=deaf)
    assert (code, failure_of(console).rank) == (9, 0)
    assert deaf.hung_up


def test_the_first_of_two_failures_is_told():
    one = agent(done(0, 7), AgentDone(), b"")
    two = agent(at_stop=(AgentFailed("late trouble"), done(1, 1, stopped=True), AgentDone(), b""))
    code, console = run(a=one, b=two)
    assert (code, failure_of(console).rank) == (7, 0)


def test_an_agent_that_gives_up():
    code, console = run(a=agent(AgentFailed("no such program", "install it", 2), AgentDone(), b""))
    assert (code, failure_of(console).message) == (2, "no such program")


def test_output_after_the_failure_is_still_shown():
    one = agent(done(0, 1), at_stop=(WorkerOutput(0, "stderr", "late words"), AgentDone(), b""))
    _, console = run(a=one)
    kinds = [call[0] for call in console.calls]
    assert ("handle", "a", WorkerOutput(0, "stderr", "late words")) in console.calls
    assert kinds[-2:] == ["failed", "close"]


def test_a_silent_host_is_lost_though_its_line_looks_well():
    one, two = agent(), agent(at_stop=(done(1, -15, stopped=True), AgentDone(), b""))
    two.lives = 100
    code, console = run(lease=0.8, a=one, b=two)
    assert (code, failure_of(console).host) == (4, "a")
    assert "no sign of life for 0.8 s" in failure_of(console).message
    assert one.waited == 0.0 and two.waited > 0.0


def test_answers_to_heartbeats_keep_a_host():
    one = agent(at_stop=(AgentDone(), b""))
    one.lives = 8  # at a quarter of the lease each
    code, console = run(lease=1.0, a=one)
    assert code == 4 and one.lives == 0
    assert not [call for call in console.calls if call[0] == "handle"]


def test_a_job_that_fails_starts_again_while_that_is_wanted():
    first, later = agent(done(0, 3), AgentDone(), b""), agent(done(0), AgentDone(), b"")
    attempts = []

    def again(job, verdict, say):
        attempts.append((verdict.code, verdict.lost, verdict.report.rank))
        say("warning", "once more")
        first.__dict__.update(later.__dict__)
        return job

    code, console = run(again=again, a=first)
    assert (code, attempts) == (0, [(3, (), 0)])
    kinds = [call[0] for call in console.calls]
    assert kinds.count("job_started") == 2 and kinds.count("close") == 1 and "failed" not in kinds


def test_a_restart_that_cannot_be_leaves_the_first_failure():
    def again(job, verdict, say):
        raise PreflightError("a is away")

    code, console = run(again=again, a=agent(done(0, 3), AgentDone(), b""))
    assert (code, failure_of(console).rank) == (3, 0)
    assert ("message", "error", "the job cannot be started again: a is away") in console.calls


def test_silent_ranks_are_ended_for_their_stacks():
    one = agent(end=AgentEnd(0, ""))
    dump = (
        'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "/t.py", line 3 in load\n'
    )

    def answer(line):
        if json.loads(line).get("number") == 6:
            for said in (WorkerExited(0, -6, False, 1.0, dump), AgentDone()):
                one.said.put(encode(said))
            one.said.put(b"")

    one.send = answer
    code, console = run(stall=0.3, a=one)
    assert code == 134
    assert "silent for 0.3 s: all are at /t.py:3 in load" in failure_of(console).message
