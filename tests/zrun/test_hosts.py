"""Where the hosts of a job come from, and what a job on them looks like, without starting anything."""

from __future__ import annotations

import pytest

from zrun import hosts as module
from zrun.devices import Gpus
from zrun.errors import UsageError
from zrun.hosts import find_hosts
from zrun.machine import ThisMachine
from zrun.prepare import Job, prepare
from zrun.settings import LaunchConfig

MACHINE = ThisMachine(frozenset({"here"}), "me")
SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.fixture(autouse=True)
def no_default_hostfile(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "DEFAULT_HOSTFILE", str(tmp_path / "default"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)


def found(tmp_path, environ=None, **options):
    return find_hosts(LaunchConfig("x.py", **options), environ or {}, str(tmp_path), MACHINE)


def names(result):
    return [f"{host.name}*{host.slots}" for host in result.hosts]


def test_without_anything_it_is_this_machine(tmp_path):
    assert found(tmp_path).hosts == () and found(tmp_path, num_nodes=1).hosts == ()


def test_hosts_without_a_slot_are_not_this_machine(tmp_path):
    (tmp_path / "hf").write_text("worker-1 slots=0\nworker-2 slots=0\n")
    with pytest.raises(UsageError, match="hf: every host has slots=0"):
        found(tmp_path, hostfile="hf")


def test_more_nodes_than_are_known(tmp_path):
    with pytest.raises(UsageError) as caught:
        found(tmp_path, num_nodes=2, num_gpus=4)
    assert "--num_nodes 2, but only this machine is known" in caught.value.message
    assert "--hostfile" in caught.value.hint


def test_the_hostfile_that_was_named_counts_most(tmp_path):
    (tmp_path / "default").write_text("d slots=1")
    (tmp_path / "h").write_text("a slots=2 max_slots=4\nb slots=2")
    result = found(tmp_path, SLURM, hostfile="h", include="a:1")
    assert names(result) == ["a*1"] and result.hosts[0].slot_numbers == (1,)
    assert ["max_slots" in text for _, text in result.remarks] == [True]


def test_the_default_hostfile_is_announced(tmp_path):
    (tmp_path / "default").write_text("d slots=1")
    result = found(tmp_path, SLURM)
    assert names(result) == ["d*1"]
    assert result.remarks[0][0] == "info" and str(tmp_path / "default") in result.remarks[0][1]


def test_an_allocation_is_announced(tmp_path):
    result = found(tmp_path, SLURM)
    assert names(result) == ["n1*2", "n2*2"] and "Slurm" in result.remarks[0][1]
    assert names(found(tmp_path, SLURM, num_nodes=1)) == ["n1*2"]


def test_an_allocation_of_this_machine_alone_is_this_machine(tmp_path):
    assert found(tmp_path, {"SLURM_JOB_NODELIST": "here"}).hosts == ()
    assert names(found(tmp_path, {"SLURM_JOB_NODELIST": "there"})) == ["there*1"]


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no hostfile missing"):
        found(tmp_path, hostfile="missing")


# ---- the job -------------------------------------------------------------------------------------------------------


def made(tmp_path, text, environ=None, **options) -> Job:
    (tmp_path / "x.py").touch()
    (tmp_path / "h").write_text(text)
    job = prepare(LaunchConfig("x.py", hostfile="h", **options), environ or {}, str(tmp_path))
    job.port.release()
    return job


def test_unequal_slots(tmp_path):
    job = made(tmp_path, "a slots=3\nlocalhost slots=2", backend="gloo")
    shares = [(s.host, s.node_rank, s.first_rank, s.local_world_size, s.world_size, s.node_count) for s in job.specs]
    assert shares == [("a", 0, 0, 3, 5, 2), ("localhost", 1, 3, 2, 5, 2)]
    assert job.here == (False, True) and job.view.hosts == ("a", "localhost")


def test_one_host_that_is_left_is_that_host(tmp_path):
    job = made(tmp_path, "localhost slots=1\nfar slots=2", backend="gloo", include="far")
    assert [host.name for host in job.hosts] == ["far"] and job.here == (False,)
    assert job.specs[0].master_addr == "127.0.0.1"  # all its ranks are there


@pytest.mark.parametrize(
    ("text", "options", "master"),
    [
        ("me@a slots=1\nb slots=1", {}, "a"),
        ("a slots=1 addr=10.0.0.1\nb slots=1", {}, "10.0.0.1"),
        ("a slots=1 addr=10.0.0.1\nb slots=1", {"master_addr": "m"}, "m"),
        ("localhost slots=1\n127.0.0.1 slots=1", {}, "127.0.0.1"),
    ],
)
def test_the_master_address(tmp_path, text, options, master):
    assert {spec.master_addr for spec in made(tmp_path, text, backend="gloo", **options).specs} == {master}


def test_a_python_of_its_own(tmp_path):
    job = made(tmp_path, "a slots=1 python=/opt/py\nb slots=1", backend="gloo")
    assert job.specs[0].command == ("/opt/py", "x.py")
    assert job.specs[1].command[0] != "/opt/py"


def test_slots_are_devices_elsewhere(tmp_path):
    job = made(tmp_path, "a slots=4\nb slots=2", {"CUDA_VISIBLE_DEVICES": ""}, device="cuda", exclude="a:0,2")
    assert [spec.devices for spec in job.specs] == [("1", "3"), ("0", "1")]
    assert [rank.device for rank in job.ranks] == ["1", "3", "0", "1"]
    assert [spec.backend for spec in job.specs] == ["nccl", "nccl"]
    assert any("CUDA_VISIBLE_DEVICES" in text for level, text in job.remarks if level == "warning")


def test_more_slots_here_than_gpus(tmp_path):
    with pytest.raises(UsageError, match=r"localhost \(h:2:1\) is this machine, .* slot 0"):
        made(tmp_path, "a slots=1\nlocalhost slots=1", {"CUDA_VISIBLE_DEVICES": ""}, device="cuda")


def test_variables_travel_to_other_machines(tmp_path):
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "A": "1"}
    job = made(tmp_path, "a slots=1\nlocalhost slots=1", environ, backend="gloo", env=("A", "NCCL_DEBUG=WARN"))
    assert job.specs[0].environment == {"NCCL_DEBUG": "WARN", "HF_TOKEN": "t", "A": "1"}
    assert job.specs[1].environment == {"NCCL_DEBUG": "WARN", "A": "1"}


def test_slots_of_this_machine_without_a_hostfile(tmp_path):
    (tmp_path / "x.py").touch()
    with pytest.raises(UsageError) as caught:
        prepare(LaunchConfig("x.py", backend="gloo", include="localhost:4,5"), {}, str(tmp_path))
    assert "localhost has no slot 4-5" in caught.value.message
    with pytest.raises(UsageError, match="--include and --num_gpus"):
        prepare(LaunchConfig("x.py", include="localhost", num_gpus=1), {}, str(tmp_path))


@pytest.fixture
def two_gpus(monkeypatch):
    """This machine shows the devices 4 and 5."""
    monkeypatch.setattr("zrun.prepare.find_gpus", lambda environ: Gpus(("4", "5"), "8 GPUs"))
    return {"CUDA_VISIBLE_DEVICES": "4,5"}


@pytest.mark.parametrize(
    ("options", "devices"),
    [({}, ("4", "5")), ({"num_gpus": 1}, ("4",)), ({"include": "localhost:1"}, ("5",)), ({"exclude": "*:0"}, ("5",))],
)
def test_slots_here_count_the_devices_that_are_visible(tmp_path, two_gpus, options, devices):
    (tmp_path / "x.py").touch()
    job = prepare(LaunchConfig("x.py", **options), two_gpus, str(tmp_path))
    assert job.specs[0].devices == devices
    warned = any("CUDA_VISIBLE_DEVICES=4,5 holds" in text for level, text in job.remarks if level == "warning")
    assert warned == bool(options)


def test_devices_that_are_not_slots(tmp_path, two_gpus):
    (tmp_path / "x.py").touch()
    with pytest.raises(UsageError) as caught:
        prepare(LaunchConfig("x.py", include="localhost:4,5"), two_gpus, str(tmp_path))
    assert "no slot 4-5" in caught.value.message
    assert "CUDA_VISIBLE_DEVICES=4,5" in caught.value.hint and "0-1" in caught.value.hint


def test_slots_here_of_a_hostfile(tmp_path, two_gpus):
    job = made(tmp_path, "localhost slots=2\nfar slots=2", two_gpus)
    assert [spec.devices for spec in job.specs] == [("4", "5"), ("0", "1")]
    with pytest.raises(UsageError, match="no GPU for its slot 2"):
        made(tmp_path, "localhost slots=3", two_gpus)


def test_one_machine_by_two_names(tmp_path, two_gpus):
    job = made(tmp_path, "localhost slots=1\n127.0.0.1 slots=1", two_gpus)
    assert ("warning", "localhost, 127.0.0.1 are all this machine: their workers share its GPUs") in job.remarks


# ---- .deepspeed_env ------------------------------------------------------------------------------------------------


def environment(tmp_path, environ=None, **options):
    (tmp_path / "x.py").touch()
    environ = {"HOME": str(tmp_path / "home"), **(environ or {})}
    job = prepare(LaunchConfig("x.py", backend="gloo", **options), environ, str(tmp_path))
    job.port.release()
    return job.specs[0].environment, " ".join(text for _, text in job.remarks)


def test_the_file_here_wins_over_the_one_at_home(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("# mine\n\nA=home\nB='x = y'\n")
    (tmp_path / ".deepspeed_env").write_text('export A="here"\nC=a=b\n')
    variables, said = environment(tmp_path, env=("C=option",))
    assert variables == {"A": "here", "B": "x = y", "C": "option"}
    assert str(tmp_path / ".deepspeed_env") in said and "A, B" in said and "here" not in said.replace(str(tmp_path), "")


def test_another_name_for_it(tmp_path):
    (tmp_path / "mine").write_text("A=1")
    (tmp_path / ".deepspeed_env").write_text("B=1")
    for name in ("mine", str(tmp_path / "mine")):
        assert environment(tmp_path, {"DS_ENV_FILE": name})[0] == {"A": "1"}
    variables, said = environment(tmp_path, {"DS_ENV_FILE": "missing"})
    assert variables == {} and "missing" in said


def test_what_zrun_says_itself_is_left_out(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("MASTER_ADDR=x\nA=1")
    variables, said = environment(tmp_path)
    assert variables == {"A": "1"} and "MASTER_ADDR is left out" in said


def test_a_meeting_place_in_the_environment_is_no_silent_wish(tmp_path):
    theirs = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    said = environment(tmp_path, theirs)[1]
    assert "MASTER_ADDR=10.0.0.1 of the environment has no effect" in said and "--master_port says it" in said
    assert "MASTER" not in environment(tmp_path, {**theirs, "ZRUN_JOB_ID": "of an outer job"})[1]
    assert "MASTER_PORT" not in environment(tmp_path, theirs, master_port=29502)[1]


def test_a_line_that_is_wrong(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("A=1\nnonsense\n")
    with pytest.raises(UsageError, match=r"\.deepspeed_env:2"):
        environment(tmp_path)


@pytest.mark.parametrize("name", ["nosuch.invalid", "192.0.2.7", "a" * 300 + ".invalid", "0.0.0.0"])
def test_a_master_elsewhere_is_refused_where_all_ranks_are_here(tmp_path, name):
    with pytest.raises(UsageError, match="--master_addr") as caught:
        made(tmp_path, "localhost slots=2", backend="gloo", master_addr=name)
    assert "leave it out" in caught.value.hint
    assert made(tmp_path, "localhost slots=2", backend="gloo", master_addr=name, no_preflight=True).specs
    for own in ("127.0.0.1", "localhost", "::1"):
        made(tmp_path, "localhost slots=2", backend="gloo", master_addr=own)
