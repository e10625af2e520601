from __future__ import annotations

import signal

import pytest

from zrun import hints


@pytest.mark.parametrize(
    ("before", "now", "word"), [(3, 4, "cgroup"), (3, 3, "dmesg"), (None, 4, "dmesg"), (3, None, "dmesg")]
)
def test_who_sent_the_sigkill(monkeypatch, before, now, word):
    monkeypatch.setattr(hints, "count_oom_kills", lambda: now)
    assert word in hints.hint_for(signal.SIGKILL, before)
    assert "memory" in hints.hint_for(signal.SIGKILL, before)


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGBUS, "/dev/shm"), (signal.SIGSEGV, "PYTHONFAULTHANDLER"), (signal.SIGTERM, ""), (-3, "")],
)
def test_other_signals(number, word):
    hint = hints.hint_for(number, None)
    assert word in hint and bool(hint) == bool(word)


@pytest.mark.parametrize("version", [1, 2])
def test_kills_are_counted_in_the_nearest_cgroup_that_says(tmp_path, monkeypatch, version):
    names = {1: ("memory", "memory.oom_control"), 2: ("", "memory.events")}
    base, file = names[version]
    monkeypatch.setattr(hints, "CGROUP_ROOT", str(tmp_path))
    monkeypatch.setattr(hints, "_cgroups", lambda: ["/job/step", "/job", ""])
    assert hints.count_oom_kills() is None
    group = tmp_path / base / "job"
    group.mkdir(parents=True)
    (group / file).write_text("oom 9\nunder_oom 0\noom_kill 7\n")
    assert hints.count_oom_kills() == 7
