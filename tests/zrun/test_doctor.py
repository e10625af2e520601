"""The preflight over real agents on this machine."""

from __future__ import annotations

import os

import pytest

from zrun.doctor import Survey, report_table
from zrun.errors import HostLostError, PreflightError
from zrun.hostfile import Host
from zrun.prepare import prepare
from zrun.settings import LaunchConfig
from zrun.transport.local import LocalTransport


class Mixed:
    """Real agents, except for a host that cannot be reached."""

    def __init__(self):
        self.local = LocalTransport(os.environ)

    def start(self, host):
        if host.name == "away":
            raise HostLostError("no route to it", "plug it in")
        return self.local.start(host)


def survey(tmp_path, *names, **options):
    (tmp_path / "train.py").write_text("pass\n")
    config = LaunchConfig(script="train.py", device="cpu", backend="gloo", **options)
    job = prepare(config, os.environ, str(tmp_path), [Host(name, 2) for name in names])
    job.port.release()
    return job, Survey(job, Mixed(), config, str(tmp_path), print)


def test_fit_hosts_meet(tmp_path):
    job, look = survey(tmp_path, "localhost", "127.0.0.1")
    report = look.run()
    assert report.fit and report.meeting.address == "127.0.0.1" and report.kind == ("cpu", "gloo")
    assert report.hosts[0].facts.script_hash == report.hosts[1].facts.script_hash != ""
    settled = report.settle(job)
    assert {spec.master_port for spec in settled.specs} == {report.meeting.port}
    assert settled.view.master == f"127.0.0.1:{report.meeting.port}"
    table = report_table(report).splitlines()
    assert table[1].startswith("localhost  ok") and len(table) == 3


def test_the_agents_are_kept_for_the_job(tmp_path):
    _, look = survey(tmp_path, "localhost")
    kept = []
    assert look.run(lambda host, link: kept.append((host.name, link))).fit
    ((name, link),) = kept
    assert name == "localhost"
    link.send(b"no job\n")
    assert link.receive(1000).startswith(b"zrun-agent ")  # as a new agent would
    assert b"agent_failed" in link.receive(10_000)
    assert link.end(5.0).returncode == 0


def test_one_host_that_is_not_fit_stops_everything(tmp_path):
    job, look = survey(tmp_path, "localhost", "away")
    kept = []
    report = look.run(lambda host, link: kept.append(link))
    assert not report.fit and report.meeting is None and kept == []
    with pytest.raises(PreflightError) as error:
        report.settle(job)
    assert "1 of 2 hosts is not fit" in error.value.message
    assert "away: no route to it\n  -> plug it in" in error.value.message
    assert "away       NOT FIT" in error.value.message
    data = report.as_data()
    assert [host["fit"] for host in data["hosts"]] == [True, False] and data["meeting"] is None


def test_differences_are_only_said_without_preflight(tmp_path, monkeypatch):
    monkeypatch.setattr("zrun.doctor._hash", lambda path: "another")
    job, look = survey(tmp_path, "localhost", no_preflight=True)
    settled = look.run().settle(job)
    assert ("warning", "localhost: its train.py is not the same as here") in settled.remarks
    _, look = survey(tmp_path, "localhost")
    assert not look.run().fit


def test_an_address_that_leads_nowhere(tmp_path):
    _, look = survey(tmp_path, "localhost", master_addr="127.255.255.255")
    report = look.run()
    assert not report.fit and "127.255.255.255 port" in report.hosts[0].problems[0].what
