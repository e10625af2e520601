"""known_hosts as OpenSSH reads it, and never rewritten."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading

import pytest

from zrun.errors import UsageError
from zrun.transport.known_hosts import KnownHosts, add_line, known_as, matches


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        ("node-1", "node-1", True),
        ("node-1,10.0.0.1", "10.0.0.1", True),
        ("Node-1", "node-1", True),
        ("node-1", "node-10", False),
        ("*.example.org,!bad.example.org", "a.example.org", True),
        ("*.example.org,!bad.example.org", "bad.example.org", False),
        ("node-?", "node-7", True),
        ("[node-1]:2222", "[node-1]:2222", True),
        ("[node-1]:2222", "node-1", False),
        (hashed("node-1"), "node-1", True),
        (hashed("node-1"), "node-2", False),
        ("|1|not base64|at all", "node-1", False),
    ],
)
def test_names(names, name, found):
    assert matches(names, name) is found


def test_files_are_read_in_order_and_odd_lines_mean_nothing(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("# a comment\n\nnode-1 ssh-ed25519 AAAA who@where\nnode-1\n@revoked * ssh-rsa BBBB\n")
    two.write_text("@cert-authority *.example.org ssh-rsa CCCC\nnode-1 ssh-rsa DDDD\n")
    known = KnownHosts([str(one), str(two), str(tmp_path / "none")])
    assert [(key.kind, key.key, key.where) for key in known.find("node-1", 22)] == [
        ("ssh-ed25519", "AAAA", f"{one}:3"),
        ("ssh-rsa", "DDDD", f"{two}:2"),
    ]
    assert known.revoked("BBBB").where == f"{one}:5" and known.revoked("AAAA") is None
    assert known.authority("a.example.org", 22).where == f"{two}:1"
    assert known.find("a.example.org", 22) == []


def test_another_port_is_another_name_unless_only_the_plain_one_is_known(tmp_path):
    path = tmp_path / "known"
    path.write_text("node-1 ssh-rsa AAAA\n[node-2]:2222 ssh-rsa BBBB\nnode-2 ssh-rsa CCCC\n")
    known = KnownHosts([str(path)])
    assert known_as("node-1", 22) == "node-1" and known_as("node-1", 2222) == "[node-1]:2222"
    assert [key.key for key in known.find("node-1", 2222)] == ["AAAA"]
    assert [key.key for key in known.find("node-2", 2222)] == ["BBBB"]


def test_a_key_is_appended_once_and_nothing_is_rewritten(tmp_path):
    path = tmp_path / "ssh" / "known_hosts"
    path.parent.mkdir()
    path.write_bytes(b"# mine\n\xff odd bytes\nnode-9 ssh-rsa ZZZZ")  # without a newline at the end
    before = path.read_bytes()
    added = []
    threads = [
        threading.Thread(target=lambda i=i: added.append(add_line(str(path), f"node-{i % 5}", 22, "ssh-rsa", "KEY")))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes().startswith(before + b"\n")
    lines = path.read_bytes()[len(before) + 1 :].decode().splitlines()
    assert sorted(lines) == [f"node-{i} ssh-rsa KEY" for i in range(5)]
    assert sorted(added) == [False] * 15 + [True] * 5


def test_a_new_file_is_made_and_one_that_cannot_be_is_an_error(tmp_path):
    path = tmp_path / "new" / "known_hosts"
    assert add_line(str(path), "fd99::1", 2222, "ssh-rsa", "KEY")
    assert path.read_text() == "[fd99::1]:2222 ssh-rsa KEY\n"
    with pytest.raises(UsageError, match="cannot write"):
        add_line(str(path / "below"), "a", 22, "ssh-rsa", "KEY")
