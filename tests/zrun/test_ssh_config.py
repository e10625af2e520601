"""How ssh_config and the hostfile lead to a target; what cannot be honoured is named."""

from __future__ import annotations

import getpass
import os

import pytest

from zrun.errors import UsageError
from zrun.hostfile import Host
from zrun.transport.algorithms import choose
from zrun.transport.ssh_config import SshConfig
from zrun.transport.ssh_options import SshOptions


def target(tmp_path, text, host=None, **options):
    path = tmp_path / "config"
    path.write_text(text)
    return SshConfig(str(path)).target(host or Host("node-1", 1), SshOptions(**options))


def test_an_empty_config(tmp_path):
    found = target(tmp_path, "")
    assert (found.hostname, found.port, found.user, found.known_as) == ("node-1", 22, getpass.getuser(), "node-1")
    assert found.known_hosts[0] == os.path.expanduser("~/.ssh/known_hosts")
    assert found.identity_files[0] == os.path.expanduser("~/.ssh/id_ed25519")
    assert not found.proxy_command and not found.proxy_jump and not found.only_these and not found.agent


def test_what_is_honoured(tmp_path):
    text = """
    Host node-*   # all of them
        HostName %h.example.org
        Port 2222
        User ann
        IdentityFile ~/keys/a
        IdentityFile /keys/b
        IdentitiesOnly yes
        IdentityAgent none
        UserKnownHostsFile /known/a /known/b
        GlobalKnownHostsFile none
        HostKeyAlias farm
        ProxyJump gate
        AddressFamily inet6
        StrictHostKeyChecking accept-new
    Host *
        User nobody
    """.replace("   # all of them", "")
    found = target(tmp_path, text)
    assert (found.hostname, found.port, found.user) == ("node-1.example.org", 2222, "ann")
    assert found.identity_files == (os.path.expanduser("~/keys/a"), "/keys/b")
    assert found.only_these and found.agent == "none"
    assert found.known_hosts == ("/known/a", "/known/b") and found.known_as == "farm"
    assert (found.proxy_jump, found.family, found.strict_words) == ("gate", "inet6", "accept-new")


def test_the_host_line_and_options_come_before_ssh_config(tmp_path):
    text = "Host *\n User ann\n Port 1000\n ProxyCommand nc %h %p %r\n"
    assert target(tmp_path, text).port == 1000
    assert target(tmp_path, text, port=2000).port == 2000
    found = target(tmp_path, text, Host("node-1", 1, user="bob", port=3000), port=2000)
    assert (found.user, found.port, str(found)) == ("bob", 3000, "bob@node-1:3000")
    assert found.command() == f"ssh -F {tmp_path}/config -p 3000 bob@node-1 true"


def test_the_port_of_a_proxy_is_the_one_that_is_used(tmp_path):
    assert target(tmp_path, "ProxyCommand nc %h %p\n").proxy_command == "nc node-1 22"
    assert target(tmp_path, "ProxyCommand none\n").proxy_command == ""


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("CertificateFile /c", "certificatefile"),
        ("PKCS11Provider /lib/p.so", "pkcs11provider"),
        ("BindAddress 10.0.0.1", "bindaddress"),
        ("KnownHostsCommand /bin/true", "knownhostscommand"),
        ("RemoteCommand tmux", "remotecommand"),
        ("RequestTTY force", "requesttty"),
        ("ProxyUseFdpass yes", "proxyusefdpass"),
        ("Port many", "'many' is not a port"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path, line, word):
    with pytest.raises(UsageError, match=word):
        target(tmp_path, f"Host node-1\n  {line}\n")
    assert target(tmp_path, f"Host other\n  {line}\n").hostname == "node-1"


@pytest.mark.parametrize(
    "line",
    ["Ciphers +aes128-cbc", "RequestTTY no", "IdentityAgent SSH_AUTH_SOCK", "ForwardAgent yes", "Compression yes"],
)
def test_what_changes_nothing_is_no_error(tmp_path, line):
    assert target(tmp_path, f"{line}\n").hostname == "node-1"


def test_match_blocks(tmp_path):
    text = "Match host node-1 user ann\n Port 7\nMatch originalhost node-1\n User bob\n"
    assert (target(tmp_path, text).port, target(tmp_path, text).user) == (22, "bob")
    with pytest.raises(UsageError, match="Match exec"):
        target(tmp_path, 'Match exec "true"\n Port 7\n')


# As RHEL and its kin have it in /etc/ssh, with the lists in a file of its own.
DISTRIBUTION = """
Match final all
    Include {tmp_path}/lists
    GSSAPIAuthentication yes
Host node-1
    Ciphers aes128-ctr
    User later
"""
LISTS = "Ciphers aes256-gcm@openssh.com,aes256-ctr\nMACs hmac-sha2-512\nPubkeyAcceptedKeyTypes ssh-ed25519\nUser last\n"


def test_final_blocks_come_last(tmp_path):
    (tmp_path / "lists").write_text(LISTS)
    text = DISTRIBUTION.replace("{tmp_path}", str(tmp_path))
    found = target(tmp_path, text)
    lists = {"macs": "hmac-sha2-512", "pubkeyacceptedalgorithms": "ssh-ed25519"}
    assert (found.user, dict(found.algorithms)) == ("later", {"ciphers": "aes128-ctr", **lists})
    found = target(tmp_path, text, Host("node-2", 1))
    assert (found.user, dict(found.algorithms)["ciphers"]) == ("last", "aes256-gcm@openssh.com,aes256-ctr")
    assert target(tmp_path, "Match final host node-2\n User x\n", Host("node-2", 1)).user == "x"


def test_an_include_behind_a_block_for_every_host(tmp_path):
    (tmp_path / "more").write_text("Host node-1\n  User inner\nHost node-2\n  Port 7\n")
    text = f"Host *\n  Compression yes\n  Include {tmp_path}/more\n  IdentitiesOnly yes\n"
    found = target(tmp_path, text)
    assert (found.user, found.port, found.only_these) == ("inner", 22, True)
    with pytest.raises(UsageError, match="inside of a block"):
        target(tmp_path, text.replace("Host *", "Host node-?"))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("*", ("a-1", "a-2", "b-1")),
        ("b-1,none,a-1", ("b-1", "a-1")),
        ("a-?", ("a-1", "a-2")),
        ("-a-*", ("b-1",)),
        ("+c", ("a-1", "a-2", "b-1")),
        ("^b-1", ("a-1", "a-2", "b-1")),
        ("c", ()),
    ],
)
def test_what_a_list_leaves(text, left):
    assert choose(("a-1", "a-2", "b-1"), text) == left


def test_included_files(tmp_path):
    (tmp_path / "a.conf").write_text("Host node-1\n  Port 7\n")
    (tmp_path / "b.conf").write_text("User bob\n")
    found = target(tmp_path, f"Include {tmp_path}/a.conf\nHost node-1\n  Include b.conf\n  HostName there\n")
    assert (found.port, found.user, found.hostname) == (7, "bob", "there")
    with pytest.raises(UsageError, match=r"a\.conf, which has blocks"):
        target(tmp_path, "Host x\n  Include a.conf\n")
    with pytest.raises(UsageError, match="include each other"):
        target(tmp_path, f"Include {tmp_path}/config\n")


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "$(x)"])
def test_names_that_a_shell_would_read_otherwise(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be the name"):
        target(tmp_path, "", Host(name, 1))


def test_files_that_are_not_there_or_make_no_sense(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        SshConfig(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("Host\n")
    with pytest.raises(UsageError, match="ssh_config"):
        SshConfig(str(tmp_path / "bad"))
