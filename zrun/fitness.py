"""From what hosts say of themselves to a judgement: who is fit for the job, who is not, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zrun.hostfile import Host
from zrun.probe import Facts

MAX_SKEW = 300.0  # seconds between clocks; beyond it files are from the future and certificates invalid
_REMARKABLE_SKEW = 2.0  # the order of failures on different hosts is told by their clocks
_LITTLE_SHM = 512 << 20  # bytes; data loaders and NCCL live there
_LITTLE_TEMP = 1 << 30
_NO_TEMP = 16 << 20


@dataclass(frozen=True)
class Problem:
    """Why a host is not fit, or what one should know about it."""

    what: str
    hint: str = ""
    fatal: bool = True


@dataclass(frozen=True)
class Wanted:
    """What a job asks of every host."""

    script: str = ""  # as the user calls it
    script_hash: str = ""  # of the one here; empty: not known
    device: str = "auto"  # auto, cpu or cuda
    backend: str = "auto"


@dataclass(frozen=True)
class Witness:
    """A host, what it says, and how far its clock is from ours."""

    host: Host
    facts: Facts
    skew: float  # seconds
    skew_error: float  # at most


def uses_gpus(witnesses: Sequence[Witness], wanted: Wanted) -> bool:
    """Whether the job runs on GPUs: if that is asked for, or left to us and there are any."""
    if wanted.device == "cpu" or (wanted.device == "auto" and wanted.backend == "gloo"):
        return False
    asked = wanted.device == "cuda" or wanted.backend == "nccl"
    return asked or any(witness.facts.gpus for witness in witnesses)


def judge(witnesses: Sequence[Witness], wanted: Wanted) -> list[list[Problem]]:
    """What is to be said of each host."""
    first = witnesses[0]
    on_gpu = uses_gpus(witnesses, wanted)
    script_hash = wanted.script_hash or first.facts.script_hash
    return [
        [
            *_leftovers(witness.facts),
            *_versions(witness.facts, first),
            *_places(witness.facts, wanted.script, script_hash),
            *(_devices(witness) if on_gpu else ()),
            *_clock(witness),
            *_space(witness.facts),
        ]
        for witness in witnesses
    ]


def _leftovers(facts: Facts) -> list[Problem]:
    if not facts.left:
        return []
    return [Problem(f"{facts.left} processes of the last attempt are still there", "they end by themselves")]


def _versions(facts: Facts, first: Witness) -> list[Problem]:
    problems = []
    if facts.python.split(".")[:2] != first.facts.python.split(".")[:2]:
        what = f"its Python is {facts.python}, that of {first.host.name} {first.facts.python}"
        problems.append(Problem(what, "use the same everywhere; python= in the hostfile names one"))
    if facts.runtime != first.facts.runtime:
        what = f"it has {_name('zrun_runtime', facts.runtime)}, {first.host.name} has {first.facts.runtime or 'none'}"
        problems.append(Problem(what, "install the same zrun everywhere"))
    if facts.torch != first.facts.torch:
        what = f"it has {_name('torch', facts.torch)}, {first.host.name} has {first.facts.torch or 'none'}"
        problems.append(Problem(what, "install the same torch everywhere"))
    return problems


def _name(what: str, version: str) -> str:
    return f"{what} {version}" if version else f"no {what}"


def _places(facts: Facts, script: str, script_hash: str) -> list[Problem]:
    if facts.cwd_problem:
        return [Problem(facts.cwd_problem, "workers run in the directory that zrun was started in; copy or mount it")]
    if facts.script_problem:
        return [Problem(facts.script_problem, "copy or mount it at the same place on all hosts")]
    if facts.script_hash != script_hash:
        return [Problem(f"its {script} is not the same as here", "copy it there; all ranks must run the same script")]
    return []


def _devices(witness: Witness) -> list[Problem]:
    there, highest = len(witness.facts.gpus), max(witness.host.slot_numbers, default=-1)
    if highest < there:
        return []
    return [Problem(f"slot {highest} is asked for: {witness.facts.gpus_found}", "give it fewer slots, or --device cpu")]


def _clock(witness: Witness) -> list[Problem]:
    skew = abs(witness.skew) - witness.skew_error
    what = f"its clock is {abs(witness.skew):.0f} s {'ahead' if witness.skew > 0 else 'behind'}"
    if skew > MAX_SKEW:
        return [Problem(what, "set it, best with NTP")]
    return [Problem(what, "failures may be told in the wrong order", fatal=False)] if skew > _REMARKABLE_SKEW else []


def _space(facts: Facts) -> list[Problem]:
    problems = []
    if facts.temp_problem or facts.temp_free < _NO_TEMP:
        what = facts.temp_problem or f"no room for temporary files: {_mib(facts.temp_free)} are free"
        problems.append(Problem(what, "free some, or set TMPDIR there"))
    elif facts.temp_free < _LITTLE_TEMP:
        problems.append(Problem(f"little room for temporary files: {_mib(facts.temp_free)}", fatal=False))
    if facts.shm_free < 0:
        problems.append(Problem("there is no /dev/shm", "data loaders and NCCL need it"))
    elif facts.shm_free < _LITTLE_SHM:
        what = f"/dev/shm has only {_mib(facts.shm_free)} free"
        problems.append(Problem(what, "data loaders and NCCL need it (docker run --shm-size)", fatal=False))
    return problems


def _mib(size: int) -> str:
    return f"{max(0, size) >> 20} MiB"
