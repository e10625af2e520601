from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun.errors import UsageError
from zrun.hostfile import Host, Hostfile, parse_hostfile
from zrun.hosts import read_hostfile
from zrun.yamlhosts import parse_yaml_hostfile

SAMPLES = Path(__file__).resolve().parents[2] / "hostfiles"


def short(found: Hostfile) -> list[str]:
    return [f"{host.name}*{host.slots}" for host in found.hosts]


def refused(text: str, parse=parse_hostfile) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(text, "f")
    return caught.value


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        # comments
        ("# 节点地址   slots(数量)   # —\n192.0.2.11 slots=1           # master\nb slots=1", ["192.0.2.11*1", "b*1"]),
        ("a slots=4 # rack-a\nb slots=4# rack-b\n#c slots=1\n  # d slots=1\n", ["a*4", "b*4"]),
        # unequal slots, order of the file
        ("n1 slots=8\nn2 slots=2\nn3 slots=4\nn0 slots=1\n", ["n1*8", "n2*2", "n3*4", "n0*1"]),
        # white space, line ends, the end of the file
        ("a slots=2\r\nb slots=2\r\n", ["a*2", "b*2"]),
        ("a slots=4\rb slots=2\n", ["a*4", "b*2"]),
        ("\ufeffa slots=1\nb slots=1 ", ["a*1", "b*1"]),
        ("\ta\t\tslots=4   \n\n   \n \t b slots=8\n\t", ["a*4", "b*8"]),
        ("a slots=1\n\x1a", ["a*1"]),
        # names
        ("node01.cluster.example.org slots=16\njob-copy4-master-0 slots=8\nnode_1 slots=1\n301A-1 slots=1", None),
        ("127.0.0.1 slots=1\n127.0.0.2 slots=2\nlocalhost slots=1", None),
        ("::1 slots=1\n[fe80::2] slots=2\nfe80::3%eth0 slots=1", ["::1*1", "fe80::2*2", "fe80::3%eth0*1"]),
        ("n[1-2,04] slots=3\nx slots=1", ["n1*3", "n2*3", "n04*3", "x*1"]),
        ("10.0.0.[7-8] slots=1", ["10.0.0.7*1", "10.0.0.8*1"]),
        # keys in any order
        ("a max_slots=8 port=22 slots=2", ["a*2"]),
        ("a slots=08", ["a*8"]),
        ("127.0.0.1 slots=8 public_addr=x.example.org# ...", ["127.0.0.1*8"]),
        # one name behind two ports is two machines
        ("localhost port=2201 slots=1\nlocalhost port=2202 slots=2", ["localhost*1", "localhost*2"]),
    ],
)
def test_good_hostfiles(text, hosts):
    found = parse_hostfile(text, "f")
    assert hosts is None or short(found) == hosts
    assert not any("\r" in repr(host) or host.slots < 1 for host in found.hosts)


def test_everything_that_a_line_may_say():
    text = "me@n[1-2] slots=2 port=2222 python=/opt/py addr=10.0.0.1\nb user=you slots=1 addr=[fd00::1]"
    one, two, other = parse_hostfile(text, "f").hosts
    assert one == Host("n1", 2, user="me", port=2222, python="/opt/py", addr="10.0.0.1")
    assert two == Host("n2", 2, user="me", port=2222, python="/opt/py", addr="10.0.0.1")
    assert other == Host("b", 1, user="you", addr="fd00::1")
    assert (two.where, other.where) == ("f:1:1", "f:2:1")


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        # no slots
        ("node-1\nnode-1", "f:1:1: 'node-1'", "node-1 slots=8"),
        ("a slots=1\n\n# x\n  node-2", "f:4:3: 'node-2'", "node-2 slots=8"),
        ("a port=22", "f:1:1: 'a'", "a slots=8"),
        ("me@a", "f:1:1", "me@a slots=8"),
        # MPI's counts
        ("301A-1:8", "f:1:1: '301A-1:8'", "301A-1 slots=8"),
        ("# x\nnode01:20\nnode02:20", "f:2:1", "node01 slots=20"),
        ("192.0.2.11:2\n\n", "f:1:1", "192.0.2.11 slots=2"),
        ("a:2222 slots=4", "f:1:1: 'a:2222'", "port=2222"),
        # misspelt
        ("a slot=8", "f:1:3", "slots=8"),
        ("a slots=1\nb lots=8", "f:2:3: lots=8", "slots=8"),
        ("a SLOTS=8", "f:1:3", "slots=8"),
        ("a slots=8 prot=22", "f:1:11: prot=22", "port=22"),
        ("a slots = 4", "f:1:3", "a slots=4"),
        ("a slots: 4", "f:1:3", "a slots=4"),
        ("a slots=4 rack-a", "f:1:11", "#"),
        # values
        ("ip_of_main slots=num_of_gpus", "f:1:12: slots=num_of_gpus", "slots=8"),
        ("a slots=", "f:1:3", ""),
        ("a slots=-1", "f:1:3", ""),
        ("a slots=4abc", "f:1:3", ""),
        ("a slots=1e3", "f:1:3", ""),
        ("a slots=²", "f:1:3", ""),
        ("a slots=99999", "f:1:3", ""),
        ("a slots=" + 5000 * "9", "f:1:3", ""),
        ("a slots=1 port=0", "f:1:11", ""),
        ("a slots=1 port=70000", "f:1:11", ""),
        ("a slots=1 python=-c", "f:1:11", ""),
        ("a slots=1 python=$(x)", "f:1:11", ""),
        ("a slots=1 user=-l", "f:1:11", ""),
        ("a slots=1 addr=a/b", "f:1:11", ""),
        ("a slots=1 slots=2", "f:1:11", ""),
        ("me@a slots=1 user=you", "f:1:14", ""),
        # something else than a hostfile
        ("index,ip\na,192.0.2.1", "f:1:1", "one host a line"),
        ("XX,XX,XX,XX  slots=8", "f:1:1", "one host a line"),
        ("192.0.2.20 worker0", "f:1:12", "192.0.2.20 slots=8"),
        ("a slots=2\nthis is bad slots=1", "f:2:6", "this slots=1"),
        ("<host> slots=1", "f:1:1", ""),
        ("slots=8", "f:1:1", "worker-1 slots=8"),
        ("{'a': 8}", "f:1:1", ""),
        # names that cannot be
        ("-oProxyCommand=x slots=1", "f:1:1", ""),
        ("-a slots=1", "f:1:1: '-a'", ""),
        ("a/b slots=1", "f:1:1", ""),
        ("nöde slots=1", "f:1:1: 'nöde': the character U+00F6", ""),
        ("@a slots=1", "f:1:1", "user@host"),
        ("-x@a slots=1", "f:1:1", "user@host"),
        ("a@ slots=1", "f:1:1", ""),
        ("n[1-2 slots=1", "f:1:1", "node-[1-4,8]"),
        ("n[2-1] slots=1", "f:1:1", "node-[1-4,8]"),
        # characters that look like a blank, or like nothing
        ("a\u00a0slots=8", "f:1:2", "blank"),
        ("a slots=8\x00", "f:1:10", ""),
        ("a\u200b slots=8", "f:1:2", ""),
        # twice
        ("node_ip slots=8\nnode_ip slots=8", "f:2:1: node_ip is there already, at f:1:1", "slots=16"),
        ("xx.xx slots=8\r\nxx.xx slots=8\r\n", "f:2:1", "slots=16"),
        ("w1 slots=2\nw2 slots=1\nW1 slots=1", "f:3:1", "slots=3"),
        ("n[1-3] slots=2\nn2 slots=1", "f:2:1: n2", ""),
        ("a@h slots=1\nb@h slots=1", "f:2:1: h", ""),
        # nothing
        ("", "f names no host", "worker-1 slots=8"),
        ("# 节点 —\n# 192.0.2.9 slots=8\n\n", "f names no host", "worker-1 slots=8"),
    ],
)
def test_errors_name_the_place_and_what_to_write(text, place, hint):
    error = refused(text)
    assert error.message.startswith(place), error.message
    assert hint in error.hint and error.exit_code == 2
    assert len(error.message) < 6000 and "\r" not in error.message


def test_what_nobody_heeds_is_said_once_a_kind():
    found = parse_hostfile("a slots=4 max-slots=4\nb slots=4 max-slots=4 color=red\nc slots=0", "f")
    assert [text.partition(":")[0] for _, text in found.notes] == ["f", "f", "f"]
    said = " ".join(text for _, text in found.notes)
    assert said.count("max-slots=") == 1 and "color=" in said and "f:3:1: c has slots=0" in said
    assert [level for level, _ in found.notes] == ["info", "info", "warning"]


def test_a_name_that_means_every_machine_is_warned_of_beside_others():
    mixed = "127.0.0.1 slots=1\nlocalhost slots=8\n192.0.2.11 slots=8\n"
    assert [(level, "127.0.0.1" in text) for level, text in parse_hostfile(mixed, "f").notes] == [("warning", True)]
    for fine in (
        "localhost slots=2",
        "localhost slots=1\n127.0.0.2 slots=1",
        "localhost slots=1 addr=10.0.0.1\nb slots=1",
    ):
        assert not parse_hostfile(fine, "f").notes


# ---- YAML ----------------------------------------------------------------------------------------------------------


def test_yaml_says_the_same():
    expected = (Host("a", 8), Host("n1", 2, user="me"), Host("n2", 2, user="me"), Host("::1", 1, port=2222))
    mapping = "hosts:\n  a: 8\n  n[1-2]: {slots: 2, user: me}\n  '::1':\n    slots: 1\n    port: 2222\n"
    items = "hosts:\n - {name: a, slots: 8}\n - {name: 'me@n[1-2]', slots: 2}\n - {name: '::1', slots: 1, port: 2222}\n"
    for text in (mapping, items):
        assert parse_yaml_hostfile(text, "f").hosts == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "f names no host"),
        ("hosts:", "f names no host"),
        ("- a", "f:1:1"),
        ("hosts: 3", "f:1:8: '3'"),
        ("machines: {a: 1}", "f:1:1"),
        ("hosts: {a: 1}\nhost: 2", "f:2:7: host"),
        ("hosts:\n  a: 1\n  a: 2", "f:3:3: a"),
        ("hosts:\n  a: 1\n  A: 2", "f:3:6: A"),
        ("hosts:\n  a: many", "f:2:6: slots=many"),
        ("hosts:\n  a:", "f:2:5: slots="),
        ("hosts:\n  a: [1]", "f:2:6: slots of a"),
        ("hosts:\n  a: {slots: 1, prot: 2}", "f:2:23: prot=2"),
        ("hosts:\n  a: {port: 2}", "f:2:6: 'a': slots= is missing"),
        ("hosts:\n  - a", "f:2:5"),
        ("hosts:\n  - {slots: 1}", "f:2:5"),
        ("hosts:\n  a,b: 1", "f:2:8: 'a,b'"),
        ("hosts:\n\ta: 1", "f:2:1: not valid YAML"),
        ("hosts: [", "f:1:9: not valid YAML"),
        ("hosts: {a: 1}\n---\nb: 1", "f:2:1: not valid YAML"),
        ("hosts: &a [*a]", "f:1:8"),
        ("hosts: !!python/object/apply:os.system [x]", "f:1:41"),
        ("hosts: {[1]: 2}", "f:1:9"),
        ("a: \x01", "f: not valid YAML"),
    ],
)
def test_yaml_errors_name_the_place(text, place):
    assert refused(text, parse_yaml_hostfile).message.startswith(place)


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(p for p in SAMPLES.iterdir() if p.name != "README.md"), ids=lambda p: p.name)
def test_samples_mean_what_they_say(path):
    found = read_hostfile(str(path), path.name)
    assert found.notes == ()
    expected = {"localhost": (1, 2), "two-machines": (2, 16), "cluster": (11, 60), "cluster.yaml": (6, 48)}
    assert (len(found.hosts), sum(host.slots for host in found.hosts)) == expected[path.name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.yml", "hosts: {a: 2}"),
        ("h", "# mine\r\n\r\nhosts:\r\n  a: 2\r\n"),
        ("h", "---\nhosts:\n  - {name: a, slots: 2}"),
        ("h", "hosts: {a: 2}"),
        ("h", "\ufeffa slots=2"),
    ],
)
def test_the_kind_of_a_file_is_seen(tmp_path, name, text):
    (tmp_path / name).write_text(text, newline="")
    assert read_hostfile(str(tmp_path / name), name).hosts == (Host("a", 2),)


def test_a_host_may_be_called_hosts(tmp_path):
    (tmp_path / "h").write_text("hosts:8\n")
    with pytest.raises(UsageError) as caught:
        read_hostfile(str(tmp_path / "h"), "h")
    assert caught.value.hint == "write: hosts slots=8"


@pytest.mark.parametrize(("name", "content"), [("missing", None), (".", None), ("utf16", b"\xff\xfea\x00")])
def test_files_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"hostfile {name}"):
        read_hostfile(str(tmp_path / name), name)


# ---- any text ------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,6}(\.[a-z]{1,3})?|10\.0\.0\.[1-9]|fd00::[1-9a-f]", fullmatch=True)
HOSTS = st.lists(
    st.builds(
        Host,
        NAMES,
        st.integers(1, 64),
        user=st.sampled_from(["", "me"]),
        port=st.none() | st.integers(1, 65_535),
        python=st.sampled_from(["", "/opt/py"]),
        addr=st.sampled_from(["", "10.9.9.9", "fd00::99"]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda host: (host.name, host.port),
)
BLANKS = st.text(alphabet=" \t", max_size=3)
ENDS = st.sampled_from(["\n", "\r\n", "\r", " \n", "\t# slots=9\n", "# x y\n", "\n\n", "\n # b\n"])


@given(HOSTS, st.data())
def test_hosts_survive_being_written(hosts, data):
    lines = []
    for host in hosts:
        name = f"[{host.name}]" if ":" in host.name and data.draw(st.booleans()) else host.name
        values = {"slots": host.slots, "port": host.port, "python": host.python, "addr": host.addr}
        words = [f"{key}={value}" for key, value in values.items() if value]
        if host.user and data.draw(st.booleans()):
            name = f"{host.user}@{name}"
        elif host.user:
            words.append(f"user={host.user}")
        blanks = [" " + data.draw(BLANKS) for _ in words]
        line = data.draw(BLANKS) + name
        for blank, word in zip(blanks, data.draw(st.permutations(words)), strict=True):
            line += blank + word
        lines.append(line + data.draw(ENDS))
    assert parse_hostfile("".join(lines), "f").hosts == tuple(hosts)


@given(st.text(alphabet="ab1 \t\n\r=#:@[]-,.slots\u00a0%", max_size=60))
def test_any_text_is_hosts_or_an_error_of_the_user(text):
    for parse in (parse_hostfile, parse_yaml_hostfile):
        try:
            assert parse(text, "f").hosts
        except UsageError as error:
            assert error.message.startswith("f")
