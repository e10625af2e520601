"""The plan of the house, as tables, and the proof that each rule catches what it is for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import architecture as rules

ROOT = Path(__file__).resolve().parents[1]
ZRUN = rules.read_modules(ROOT, "zrun")
RUNTIME = rules.read_modules(ROOT, "zrun_runtime")

# A row is a module, or a package with all that is in it. A module imports from its own row and from lower levels.
# The whole numbers are the levels of the house; tenths order the parts of one level.
LEVELS = {
    "zrun": 0.0,  # the version
    "zrun.errors": 0.0,
    "zrun.events": 0.1,
    "zrun.hostlist": 0.1,
    "zrun.yamltext": 0.1,
    "zrun.hostfile": 0.2,
    "zrun.yamlhosts": 0.3,
    "zrun.filters": 0.3,
    "zrun.foreign": 0.0,
    "zrun.hints": 0.1,
    "zrun.outputs": 0.1,
    "zrun.stall": 1.1,
    "zrun.wire": 0.1,
    "zrun.interfaces": 0.1,
    "zrun.job": 1.0,
    "zrun.devices": 1.0,
    "zrun.ports": 1.0,
    "zrun.signals": 1.0,
    "zrun.slurm": 1.0,
    "zrun.machine": 1.0,
    "zrun.cores": 1.1,
    "zrun.topology": 1.1,
    "zrun.environment": 1.1,
    "zrun.settings": 1.2,
    "zrun.advice": 1.3,
    "zrun.hosts": 1.3,
    "zrun.prepare": 1.4,
    "zrun.transport": 2.0,
    "zrun.channel": 2.0,
    "zrun.processes": 2.0,
    "zrun.spool": 2.0,
    "zrun.keeper": 2.1,
    "zrun.registry": 2.1,
    "zrun.taps": 2.1,
    "zrun.workers": 2.2,
    "zrun.probe": 2.2,
    "zrun.agent": 2.3,
    "zrun.console": 3.0,
    "zrun.connection": 3.0,
    "zrun.outcome": 3.0,
    "zrun.feed": 3.1,
    "zrun.heart": 3.1,
    "zrun.attempt": 3.2,
    "zrun.supervisor": 3.3,
    "zrun.fitness": 3.0,
    "zrun.interview": 3.1,
    "zrun.meeting": 3.1,
    "zrun.doctor": 3.2,
    "zrun.running": 3.4,
    "zrun.tools": 3.5,
    "zrun.cluster_options": 3.0,
    "zrun.cli": 4.0,
    "zrun.alias": 4.1,
    "zrun.__main__": 4.1,
    "zrun_runtime.errors": 0.0,
    "zrun_runtime.layout": 0.1,
    "zrun_runtime.config": 0.1,
    "zrun_runtime.telemetry": 0.1,
    "zrun_runtime.uncaught": 0.2,
    "zrun_runtime.positions": 0.2,
    "zrun_runtime.watch": 1.1,
    "zrun_runtime.call": 1.0,
    "zrun_runtime.tree": 0.1,
    "zrun_runtime.hook": 0.1,
    "zrun_runtime.compiled": 0.2,
    "zrun_runtime.ownership": 0.1,
    "zrun_runtime.plan": 1.0,
    "zrun_runtime.distributed": 1.0,
    "zrun_runtime.precision": 1.0,
    "zrun_runtime.window": 1.0,
    "zrun_runtime.checkpointing": 1.0,
    "zrun_runtime.types_of_inputs": 1.1,
    "zrun_runtime.data": 1.1,
    "zrun_runtime.monitors": 1.0,
    "zrun_runtime.stopwatch": 1.0,
    "zrun_runtime.progress": 1.1,
    "zrun_runtime.collectives": 2.0,
    "zrun_runtime.agreement": 2.1,
    "zrun_runtime.sharded_parameter": 2.0,
    "zrun_runtime.tiers": 2.0,
    "zrun_runtime.flat_group": 3.0,
    "zrun_runtime.edits": 3.1,
    "zrun_runtime.unfit": 3.1,
    "zrun_runtime.grouping": 3.1,
    "zrun_runtime.departures": 3.05,
    "zrun_runtime.reducer": 3.1,
    "zrun_runtime.order": 3.95,
    "zrun_runtime.holder": 3.97,
    "zrun_runtime.hooks": 4.0,
    "zrun_runtime.optimizers": 2.0,
    "zrun_runtime.group_state": 3.9,
    "zrun_runtime.state_homes": 3.95,
    "zrun_runtime.marks": 0.1,
    "zrun_runtime.fused": 1.0,
    "zrun_runtime.master": 2.5,
    "zrun_runtime.shards": 2.5,
    "zrun_runtime.residence": 2.5,
    "zrun_runtime.placement": 3.1,
    "zrun_runtime.optim": 4.0,
    "zrun_runtime.schedules": 4.0,
    "zrun_runtime.pacing": 4.0,
    "zrun_runtime.checkpoint": 4.3,
    "zrun_runtime.memory": 1.1,
    "zrun_runtime.step_cost": 1.2,
    "zrun_runtime.savings": 1.2,
    "zrun_runtime.planner": 1.3,
    "zrun_runtime.model_size": 4.1,
    "zrun_runtime.regroup": 4.05,
    "zrun_runtime.zero_model": 4.1,
    "zrun_runtime.accounts": 4.2,
    "zrun_runtime.formation": 4.2,
    "zrun_runtime.consolidate": 4.2,
    "zrun_runtime.parking": 4.2,
    "zrun_runtime.early": 4.0,
    "zrun_runtime.leaves": 4.0,
    "zrun_runtime.casting": 4.1,
    "zrun_runtime.config_answers": 4.7,
    "zrun_runtime.optimizer_names": 4.7,
    "zrun_runtime.answers": 4.8,
    "zrun_runtime.accumulation": 4.9,
    "zrun_runtime.engine_state": 4.95,
    "zrun_runtime.engine_checkpoint": 4.97,
    "zrun_runtime.engine": 5.0,
    "zrun_runtime.build": 5.1,
    "zrun_runtime.zero": 5.1,
    "zrun_runtime": 6.0,  # initialize() and the names in __all__
    "zrun_runtime.integrations": 6.1,
    "zrun_runtime.commands": 6.1,
}

# (importing row, imported row) -> why an import may lead sideways or up.
SIDEWAYS: dict[tuple[str, str], str] = {}

# (module, beginning of what it imports inside a function) -> why not at the top.
LATE_IMPORTS = {
    (
        "zrun.environment",
        "importlib.metadata",
    ): "start-up time; only --as_deepspeed and the commands of its name need it",
    ("zrun.hosts", "zrun.yamlhosts"): "only a YAML hostfile pays for loading a YAML library",
    ("zrun.settings", "zrun.yamltext"): "only a profile pays for loading a YAML library",
    ("zrun.agent", "zrun.probe"): "a job does not wait for what only questions before it need",
    ("zrun.running", "zrun.doctor"): "a job on this machine alone is not looked at before",
    ("zrun.transport.each", "zrun.transport.ssh"): "only other hosts pay for loading paramiko",
    ("zrun.console", "zrun.console.live"): "only a terminal pays for loading rich",
    ("zrun.cli", "zrun.tools"): "no launch has to wait for the other commands",
    ("zrun.cli", "importlib.metadata.entry_points"): "only a word that is no file pays for looking up commands",
}

# Rows that may call torch.distributed's collectives.
COLLECTIVE_HOMES = ["zrun_runtime.collectives", "zrun_runtime.integrations"]

# Rows that may speak of stages, and single names elsewhere (module:Class.name -> why).
STAGE_HOMES = ["zrun_runtime.config", "zrun_runtime.plan"]
STAGE_NAMES = {
    "zrun_runtime.build:_settings": "where the config's number becomes the plan",
    "zrun_runtime.build:_announce": "the number is shown to a person",
    "zrun_runtime.zero.estimate": "names of the field",
    "zrun_runtime.savings:plan_of": "where the config's number becomes the plan",
    "zrun_runtime.planner": "compares the stages, and writes configs",
    "zrun_runtime.zero": "names of the field",
    "zrun_runtime.commands.smoke": "writes configs, as any program that uses the runtime does",
    "zrun_runtime.integrations.optimizers": "names of the field",
    "zrun_runtime.integrations.config": "names of the field",
    "zrun_runtime.integrations.enums": "names of the field",
    "zrun_runtime.integrations.site.deepspeed._names": "names of the field",
    "zrun_runtime.engine_state:EngineState": "trainers call one method by a name with the stage in it",
    "zrun_runtime.answers:EngineAnswers.zero_optimization_stage": "a method of the field, which scripts ask",
}

# Rows, and single functions, whose public signatures are the field's, however long.
PUBLIC_SIGNATURES = [
    "zrun_runtime:initialize",
    "zrun_runtime.distributed:init_distributed",
    "zrun_runtime.answers",
    "zrun_runtime.accumulation",
    "zrun_runtime.engine_state",
    "zrun_runtime.engine",
    "zrun_runtime.engine_checkpoint",
    "zrun_runtime.checkpointing:configure",
    "zrun_runtime.optimizers",
    "zrun_runtime.schedules",
    "zrun_runtime.zero",
    "zrun_runtime.integrations",
]

# (rule, where) -> why it may be larger.
BUDGET_EXCEPTIONS = {
    ("attributes", "zrun_runtime.config_answers:ConfigAnswers"): "one line for each question of the field's scripts",
    ("methods", "zrun_runtime.engine:Engine"): "one short method for each name that the field's scripts call",
    ("methods", "zrun_runtime.answers:EngineAnswers"): "one short method for each question of the field's scripts",
}


def report(findings: list[rules.Finding]) -> None:
    assert not findings, "\n" + "\n".join(map(str, findings))


# ---- the house -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [ZRUN, RUNTIME], ids=["zrun", "zrun_runtime"])
def test_imports_lead_downwards(modules):
    report(rules.check_levels(modules, LEVELS, SIDEWAYS))
    report(rules.check_cycles(modules))


def test_the_packages_do_not_know_each_other():
    report(rules.check_forbidden(ZRUN, "zrun", ["torch", "zrun_runtime"]))
    report(rules.check_forbidden(RUNTIME, "zrun_runtime", ["zrun"]))


def test_the_launch_path_loads_nothing_heavy():
    entries = ("zrun", "zrun.cli", "zrun.supervisor", "zrun.agent", "zrun.keeper")
    modules = ", ".join(m.name for m in ZRUN if m.name in entries)
    heavy = ["torch", "numpy", "zrun_runtime", "pydantic", "rich", "paramiko"]
    code = f"import sys, {modules}; print(*[n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_imports_stand_at_the_top():
    report(rules.check_late_imports(ZRUN + RUNTIME, LATE_IMPORTS))


def test_only_collectives_move_data():
    report(rules.check_collectives(ZRUN + RUNTIME, COLLECTIVE_HOMES))


def test_only_the_plan_knows_stages():
    report(rules.check_stage(ZRUN + RUNTIME, STAGE_HOMES, STAGE_NAMES))
    found = {f.where for f in rules.check_stage(ZRUN + RUNTIME, STAGE_HOMES, {})}
    stale = [name for name in STAGE_NAMES if not any(where == name or where.startswith(name + ":") for where in found)]
    assert not stale, f"exceptions that are no longer needed: {stale}"


def test_nothing_is_asserted():
    report(rules.check_asserts(ZRUN + RUNTIME))


def test_budgets():
    found = rules.check_budgets(ZRUN + RUNTIME, PUBLIC_SIGNATURES)
    report([f for f in found if (f.rule, f.where) not in BUDGET_EXCEPTIONS])
    stale = set(BUDGET_EXCEPTIONS) - {(f.rule, f.where) for f in found}
    assert not stale, f"exceptions that are no longer needed: {stale}"


def test_the_tables_name_only_rows():
    rows = [
        *COLLECTIVE_HOMES,
        *STAGE_HOMES,
        *PUBLIC_SIGNATURES,
        *STAGE_NAMES,
        *[row for pair in SIDEWAYS for row in pair],
    ]
    assert not [row for row in rows if rules.unit_of(row.split(":")[0], LEVELS) in (None, "zrun")]


# ---- the rules themselves ------------------------------------------------------------------------------------------


def findings_of(check, source: str, *tables, name: str = "p.low", others: tuple[rules.Module, ...] = ()) -> list[str]:
    return [str(f) for f in check([rules.Module(name, source), *others], *tables)]


HIGH = rules.Module("p.high", "")
PART = rules.Module("p.box.part", "")
TABLE = {"p": 9, "p.low": 1, "p.high": 2, "p.twin": 1, "p.box": 1}


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("from p.high import thing", True),
        ("from p import high", True),
        ("import p.high as h", True),
        ("from .high import thing", True),
        ("from . import high", True),
        ("def f():\n    from p.high import thing", True),
        ("from p.box.part import thing", True),  # its own level, another row
        ("from p.high_other import thing", False),  # no module of ours
        ("import os, json", False),
    ],
)
def test_upward_imports_are_caught(source, caught):
    assert bool(findings_of(rules.check_levels, source, TABLE, {}, others=(HIGH, PART))) == caught


def test_a_module_imports_downwards_in_its_row_and_by_exception():
    up = rules.Module("p.high", "from p.low import x")
    assert not findings_of(rules.check_levels, "", TABLE, {}, others=(up,))
    sibling = rules.Module("p.box.other", "from p.box.part import x")
    assert not findings_of(rules.check_levels, "", TABLE, {}, others=(PART, sibling))
    sideways = {("p.low", "p.high"): "reason"}
    assert not findings_of(rules.check_levels, "import p.high", TABLE, sideways, others=(HIGH,))


def test_a_module_without_a_level_is_caught():
    assert "LEVELS" in findings_of(rules.check_levels, "", TABLE, {}, name="p.new")[0]
    assert "LEVELS" in findings_of(rules.check_levels, "", {"p": 0}, {}, name="p.new")[0]


def test_cycles_are_caught():
    chain = (rules.Module("p.b", "import p.c"), rules.Module("p.c", "def f():\n    from p import low"))
    assert "p.low -> p.b -> p.c -> p.low" in findings_of(rules.check_cycles, "from p.b import x", others=chain)[0]
    assert not findings_of(rules.check_cycles, "from p.b import x", others=(rules.Module("p.b", "import p.c"),))


@pytest.mark.parametrize("source", ["import torch.nn", "from torch import nn", "def f():\n    import torch"])
def test_forbidden_imports_are_caught(source):
    assert findings_of(rules.check_forbidden, source, "zrun", ["torch"])
    assert not findings_of(rules.check_forbidden, "import torchlike", "zrun", ["torch"])


def test_late_imports_are_caught():
    source = "class A:\n    def f(self):\n        from a.b import c"
    assert "f() imports a.b.c" in findings_of(rules.check_late_imports, source, {})[0]
    assert not findings_of(rules.check_late_imports, source, {("p.low", "a.b"): "reason"})
    assert findings_of(rules.check_late_imports, source, {("p.low", "a.bc"): "reason"})
    assert not findings_of(rules.check_late_imports, "if True:\n    import a", {})


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import torch\ntorch.distributed.all_reduce(x)", True),
        ("import torch as t\nt.distributed.all_reduce(x)", True),
        ("import torch.distributed as dist\ndist.broadcast(x, 0)", True),
        ("from torch import distributed as d\nd.barrier()", True),
        ("from torch import distributed\nf = distributed.send", True),
        ("from torch.distributed import all_gather", True),
        ("from torch.distributed.distributed_c10d import _coalescing_manager", True),
        ("import torch.distributed._functional_collectives", False),  # harmless until something of it is used
        ("from torch.distributed._functional_collectives import all_reduce", True),
        ("group.allreduce([x]).wait()", True),
        ("import torch.distributed as dist\ndist.init_process_group()\ndist.destroy_process_group()", False),
        ("from zrun_runtime.collectives import broadcast\nbroadcast(x)\nself.wire.all_reduce(x)", False),
    ],
)
def test_collectives_are_caught(source, caught):
    assert bool(findings_of(rules.check_collectives, source, ["p.wire"])) == caught
    assert not findings_of(rules.check_collectives, source, ["p.wire"], name="p.wire.gloo")


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("if stage == 3: pass", True),
        ("if config.zero.stage >= 2: pass", True),
        ("x = d['zero_optimization']['stage']", True),
        ("getattr(c, 'stage')", True),
        ("def f(zero_stage): pass", True),
        ("f(stage=2)", True),
        ("c.stage3_max_live_parameters", True),
        ("is_zero3 = True", True),
        ("class C:\n    stage: int", True),
        ("from p.plan import STAGES", True),
        ("'''At stage 3 the buffer is gone.'''\n# stage 3\nraise E(f'stage {n} cannot')", False),
        ("staged = backstage = zero = p.upstaged", False),
    ],
)
def test_stages_are_caught(source, caught):
    assert bool(findings_of(rules.check_stage, source, ["p.plan"], {})) == caught
    assert not findings_of(rules.check_stage, source, ["p.plan"], {}, name="p.plan")


def test_a_stage_may_be_named_by_exception():
    source = "class E:\n    def zero_optimization_stage(self): return self.plan.number"
    assert findings_of(rules.check_stage, source, [], {})
    assert not findings_of(rules.check_stage, source, [], {"p.low:E.zero_optimization_stage": "the field's name"})


def test_asserts_are_caught():
    assert findings_of(rules.check_asserts, "def f(x):\n    assert x")


def rules_broken(source: str, *public: str) -> set[str]:
    return {f.rule for f in rules.check_budgets([rules.Module("p.low", source)], public)}


def test_long_files_and_functions_are_caught():
    assert rules_broken("x = 1\n" * 401) == {"file lines"}
    assert not rules_broken("x = 1\n" * 400)
    body = "    x = 1\n" * 49
    assert not rules_broken("def f():\n" + body)
    assert rules_broken("def f():\n" + body + "    x = 1\n") == {"function lines"}
    assert not rules_broken('def f():\n    """One.\n\n    Two.\n    """\n' + body)


def test_large_classes_are_caught():
    methods = "".join(f"    def m{i}(self): self.a{i % 15} = 1\n" for i in range(20))
    assert not rules_broken("class C:\n" + methods)
    assert rules_broken("class C:\n" + methods + "    def more(self): pass") == {"methods"}
    assert rules_broken("class C:\n" + methods + "    one_more = 1") == {"attributes"}


def test_messages_may_have_many_fields():
    fields = "".join(f"    f{i}: int\n" for i in range(30))
    assert rules_broken("@dataclass\nclass C:\n" + fields) == {"attributes"}
    assert not rules_broken("@dataclass(frozen=True)\nclass C:\n" + fields)
    assert not rules_broken("class Base(pydantic.BaseModel): pass\nclass C(Base):\n" + fields)


def test_many_parameters_are_caught():
    assert not rules_broken("class C:\n    def f(self, a, b, c, d, e, *, f, **more): pass")
    long = "def f(a, b, c, d, e, *, f, g): pass"
    assert rules_broken(long) == {"parameters"}
    assert not rules_broken(long, "p.low")
    assert not rules_broken(long, "p.low:f")
    assert rules_broken(long.replace("f(", "_f("), "p.low") == {"parameters"}
    assert not rules_broken("@click.command()\n@click.argument('a')\n" + long)
