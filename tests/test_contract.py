"""The two packages never import each other, so this holds both ends of the event line to docs/protocol.md."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zrun import events
from zrun_runtime.telemetry import Telemetry

ROOT = Path(__file__).resolve().parents[1]

SAID = {
    "run_started": {"steps_per_print": None, "total_steps": 200, "details": (("parameters", "1.2 million"),)},
    "step": {
        "step": 20,
        "seconds": 0.25,
        "samples": 32,
        "skipped_steps": 1,
        "loss": 2.5,
        "learning_rate": 1e-3,
        "loss_scale": 65536.0,
        "grad_norm": 0.9,
        "total_steps": 200,
        "due": True,
    },
    "memory": {"used": 10**9, "peak": 2 * 10**9},
    "notice": {"level": "warning", "text": 'naïve "quotes"\nand a line \u2028 more', "from_watch": True},
    "position": {"operation": 41, "step": 3, "text": "waits for other ranks at a step", "since": 1.5e9},
}


@pytest.fixture
def pipe(monkeypatch):
    """The reading end of a pipe whose writing end ZRUN_EVENT_FD names."""
    reader, writer = os.pipe()
    monkeypatch.setenv("ZRUN_EVENT_FD", f"{writer}:{os.fstat(writer).st_ino}")
    with os.fdopen(reader, "rb") as lines:
        yield lines, writer
        os.close(writer)


def test_every_worker_kind_is_covered():
    assert set(SAID) == events.WORKER_KINDS


@pytest.mark.parametrize("kind", sorted(SAID))
def test_what_the_runtime_writes_the_launcher_reads(kind, pipe):
    lines, _ = pipe
    assert Telemetry.from_environment().emit(kind, rank=3, **SAID[kind])
    assert events.decode(lines.readline()) == events.KINDS[kind](rank=3, **SAID[kind])


def test_numbers_that_are_not_finite_arrive_as_unknown(pipe):
    lines, _ = pipe
    step = {**SAID["step"], "loss": math.nan, "grad_norm": math.inf}
    assert Telemetry.from_environment().emit("step", rank=0, **step)
    event = events.decode(lines.readline())
    assert isinstance(event, events.StepDone)
    assert (event.loss, event.grad_norm) == (None, None)


def test_a_worker_process_speaks_through_the_inherited_pipe(pipe):
    lines, writer = pipe
    code = "from zrun_runtime.telemetry import notice; notice('info', 'hello', rank=1)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, pass_fds=[writer], check=True, timeout=60)
    assert events.decode(lines.readline()) == events.Notice(rank=1, level="info", text="hello")


TRAINING = """
import torch
import zrun_runtime

config = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}
model = torch.nn.Linear(3, 1)
engine, *_ = zrun_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(4):
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
"""


def test_what_a_training_run_says_the_launcher_reads(pipe):
    lines, writer = pipe
    subprocess.run([sys.executable, "-c", TRAINING], cwd=ROOT, pass_fds=[writer], check=True, timeout=120)
    os.set_blocking(lines.fileno(), False)
    said = [events.decode(line) for line in lines]
    started = [event for event in said if isinstance(event, events.RunStarted)]
    steps = [event for event in said if isinstance(event, events.StepDone)]
    assert [event.steps_per_print for event in started] == [2]
    assert [(event.step, event.due) for event in steps] == [(1, False), (2, True), (3, False), (4, True)]
    assert [(event.samples, event.skipped_steps, event.learning_rate) for event in steps] == [(2, 0, 0.1)] * 4
    losses = [event.loss for event in steps if event.loss is not None]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert all(event.grad_norm is not None and event.seconds >= 0 for event in steps)


def test_every_event_the_runtime_says_has_the_fields_of_its_dataclass():
    for where, kind, fields in _emit_calls():
        assert kind in events.WORKER_KINDS, where
        declared = {f.name: f for f in dataclasses.fields(events.KINDS[kind])}
        assert fields <= set(declared), where
        assert {n for n, f in declared.items() if f.default is dataclasses.MISSING} <= fields, where


def _emit_calls():
    """Each `....emit("kind", field=...)` in the runtime's source whose fields are written out."""
    for path in sorted((ROOT / "zrun_runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "emit" and node.args):
                continue
            kind, names = node.args[0], [k.arg for k in node.keywords]
            if isinstance(kind, ast.Constant) and None not in names:
                yield f"{path.name}:{node.lineno}", kind.value, set(names)


def test_the_protocol_page_lists_every_kind():
    page = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    section = page.split("## 3. Events")[1].split("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", rows)) == set(events.KINDS)
