from __future__ import annotations

import os

from zrun.spool import SpoolDirectory, SpoolFile


def test_a_file_rotates_and_says_so_once(tmp_path):
    path = str(tmp_path / "stdout")
    file = SpoolFile(path, limit=100)
    said = [file.write(bytes([65 + i]) * 60) for i in range(5)]
    assert [bool(text) for text in said] == [False, True, False, False, False]
    assert "stdout.1" in said[1]
    assert (tmp_path / "stdout").read_bytes() == b"E" * 60
    assert (tmp_path / "stdout.1").read_bytes() == b"D" * 60


def test_a_write_larger_than_the_limit_is_kept_whole(tmp_path):
    file = SpoolFile(str(tmp_path / "f"), limit=10)
    file.write(b"x" * 50)
    assert (tmp_path / "f").stat().st_size == 50


def test_a_disk_that_takes_no_more_is_said_once(tmp_path, monkeypatch):
    file = SpoolFile(str(tmp_path / "f"))

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert file.takes and "No space left" in file.write(b"x")
    assert file.write(b"y") == "" and not file.takes


def test_our_directory_is_private_and_goes_away(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spools = SpoolDirectory("", "job")
    assert os.stat(spools.path).st_mode & 0o777 == 0o700
    spools.open(0, "stdout").write(b"x")
    assert spools.finish(keep=False) == ""
    assert list(tmp_path.iterdir()) == []


def test_our_directory_stays_if_something_in_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    empty, full = SpoolDirectory("", "empty"), SpoolDirectory("", "full")
    empty.open(0, "stdout")
    full.open(0, "stdout").write(b"x")
    assert empty.finish(keep=True) == ""
    assert full.finish(keep=True) == full.path
    assert list(tmp_path.iterdir()) == [tmp_path / os.path.basename(full.path)]


def test_a_chosen_directory_always_stays(tmp_path):
    spools = SpoolDirectory(str(tmp_path / "logs"), "job")
    spools.open(7, "stderr").write(b"x")
    assert spools.finish(keep=False) == str(tmp_path / "logs")
    assert (tmp_path / "logs" / "rank-7" / "stderr").read_bytes() == b"x"
