"""Reads the source with `ast` and says where it breaks the rules of the house. No knowledge of single modules here:
the tables that name them are in test_architecture.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_METHODS = 20
MAX_ATTRIBUTES = 15
MAX_PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions of torch.distributed that move data or wait for other ranks. Making and destroying groups is not among them.
COLLECTIVES = _words(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all
    all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend
    monitored_barrier P2POp recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter
    scatter_object_list send send_object_list _all_gather_base _reduce_scatter_base _coalescing_manager
    """
)
# The same as methods of a ProcessGroup object, by names that nothing else has.
GROUP_METHODS = _words(
    "allreduce allreduce_coalesced allgather _allgather_base allgather_into_tensor_coalesced _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced alltoall alltoall_base"
)
STAGE_WORDS = re.compile(r"(^|_)(stage[0-3s]?|zero[1-3])(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    """One parsed source file."""

    name: str  # dotted
    source: str
    is_package: bool = False  # an __init__.py
    tree: ast.Module = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.source))


@dataclass(frozen=True)
class Import:
    target: str  # dotted; of `from a import b`: a.b
    line: int
    inside: str | None  # the function it is in; None: at the top of the file, or under its `if`


@dataclass(frozen=True)
class Finding:
    rule: str
    where: str  # what an exception table can name: a module, or module:qualified.name
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.where} (line {self.line}): {self.text} [{self.rule}]"


def read_modules(root: Path, package: str) -> list[Module]:
    """Every module of `package` below `root`, in a fixed order."""
    modules = []
    for path in sorted((root / package).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text("utf-8"), is_package))
    return modules


# ---- imports -----------------------------------------------------------------------------------------------------


def imports(module: Module) -> list[Import]:
    """What `module` imports, wherever the statement stands. Relative imports are made absolute."""
    found = []
    for node, scope in _walk_scoped(module.tree):
        inside = next((s.name for s in reversed(scope) if isinstance(s, Function)), None)
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            found += [Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names]
    return found


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + module.is_package
    return ".".join(parts[:kept] + ([node.module] if node.module else []))


def module_of(target: str, names: Iterable[str]) -> str | None:
    """The module of `names` that the import target means: the longest one that begins it."""
    candidates = [n for n in names if target == n or target.startswith(n + ".")]
    return max(candidates, key=len, default=None)


def unit_of(name: str, levels: Mapping[str, float]) -> str | None:
    """The row of the levels table that `name` belongs to; a package root stands for itself alone."""
    rows = [r for r in levels if name == r or ("." in r and name.startswith(r + "."))]
    return max(rows, key=len, default=None)


def check_levels(
    modules: list[Module], levels: Mapping[str, float], sideways: Mapping[tuple[str, str], str]
) -> list[Finding]:
    """Modules without a level, and imports that do not lead to a lower one (or stay in their own row)."""
    names = [m.name for m in modules]
    findings = []
    for module in modules:
        own = unit_of(module.name, levels)
        if own is None:
            findings.append(Finding("level", module.name, 1, "has no level; give it one in LEVELS"))
            continue
        for item in imports(module):
            other_name = module_of(item.target, names)
            other = unit_of(other_name, levels) if other_name else None
            if other is None or other == own or levels[other] < levels[own] or (own, other) in sideways:
                continue
            text = f"level {levels[own]} imports {other_name} of level {levels[other]}"
            findings.append(Finding("level", module.name, item.line, text))
    return findings


def check_cycles(modules: list[Module]) -> list[Finding]:
    """Modules that lead back to themselves. A package that imports its own parts is no cycle unless they import it."""
    names = [m.name for m in modules]
    targets = {m.name: {module_of(i.target, names) for i in imports(m)} - {None, m.name} for m in modules}
    findings = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            loop = [*path[path.index(name) :], name]
            findings.append(Finding("cycle", name, 1, " -> ".join(loop)))
        elif name not in done:
            for target in sorted(t for t in targets[name] if t):
                visit(target, [*path, name])
            done.add(name)

    for name in names:
        visit(name, [])
    return findings


def check_forbidden(modules: list[Module], package: str, forbidden: Iterable[str]) -> list[Finding]:
    """Imports in `package` of any top-level name in `forbidden`."""
    return [
        Finding("forbidden import", m.name, i.line, f"{package} must not import {i.target.split('.')[0]}")
        for m in modules
        for i in imports(m)
        if i.target.split(".")[0] in set(forbidden)
    ]


def check_late_imports(modules: list[Module], allowed: Mapping[tuple[str, str], str]) -> list[Finding]:
    """Imports inside functions; `allowed` holds (module, beginning of the target) -> reason."""
    return [
        Finding("late import", m.name, i.line, f"{i.inside}() imports {i.target}; move it to the top of the file")
        for m in modules
        for i in imports(m)
        if i.inside and not any(m.name == where and _begins(i.target, what) for where, what in allowed)
    ]


def _begins(target: str, beginning: str) -> bool:
    return target == beginning or target.startswith(beginning + ".")


# ---- torch.distributed, stages, asserts --------------------------------------------------------------------------


def check_collectives(modules: list[Module], homes: Iterable[str]) -> list[Finding]:
    """Uses of torch.distributed's collectives outside the modules in `homes`."""
    findings = []
    for module in modules:
        if any(_begins(module.name, home) for home in homes):
            continue
        aliases = _aliases_of_distributed(module.tree)
        for node in ast.walk(module.tree):
            for name in _collectives_used(node, aliases):
                findings.append(
                    Finding("collective", module.name, node.lineno, f"uses {name}; that is for collectives/")
                )
    return findings


def _aliases_of_distributed(tree: ast.Module) -> set[str]:
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
            aliases |= {f"{a.asname}.distributed" for a in node.names if a.name == "torch" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    return aliases


def _collectives_used(node: ast.AST, aliases: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
        for alias in node.names:
            if alias.name in COLLECTIVES or "_functional_collectives" in f"{node.module}.{alias.name}":
                yield f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute):
        if node.attr in COLLECTIVES and ast.unparse(node.value) in aliases:
            yield f"torch.distributed.{node.attr}"
        elif node.attr in GROUP_METHODS:
            yield f".{node.attr}"


def check_stage(modules: list[Module], homes: Iterable[str], exceptions: Mapping[str, str]) -> list[Finding]:
    """Names and keys that speak of a ZeRO stage outside `homes`. Comments, docstrings and messages may.

    A name does if one of its words is stage, stages, stage0..stage3 or zero1..zero3; a string does if it is one such
    name and nothing else (a key, an attribute for getattr).
    """
    findings = []
    for module in modules:
        if any(_begins(module.name, home) for home in homes):
            continue
        for node, scope in _walk_scoped(module.tree):
            where = _qualified(module, scope, node)
            if where in exceptions or module.name in exceptions:
                continue
            for name in _names_said(node):
                if STAGE_WORDS.search(name):
                    line = getattr(node, "lineno", 1)
                    findings.append(Finding("stage", where, line, f"{name!r} speaks of a stage; ask the plan instead"))
    return findings


def _names_said(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.split(".")[-1]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        yield node.value


def check_asserts(modules: list[Module]) -> list[Finding]:
    return [
        Finding("assert", m.name, node.lineno, "raise an error of the house instead")
        for m in modules
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Assert)
    ]


# ---- budgets -----------------------------------------------------------------------------------------------------


def check_budgets(modules: list[Module], public: Iterable[str]) -> list[Finding]:
    """Files, functions and classes that are too large.

    Exempt from the number of parameters: click commands, and the public functions and methods of what `public` names.
    Exempt from the number of attributes: fields of frozen dataclasses and of pydantic models (they are messages).
    """
    findings = []
    messages = _message_classes(modules)
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > MAX_FILE_LINES:
            findings.append(Finding("file lines", module.name, 1, f"{lines} lines, allowed {MAX_FILE_LINES}"))
        for node, scope in _walk_scoped(module.tree):
            where = _qualified(module, scope, node)
            if isinstance(node, Function):
                is_public = any(_begins(module.name, p) or where == p for p in public)
                findings += _function_budget(node, where, is_public)
            elif isinstance(node, ast.ClassDef):
                findings += _class_budget(node, where, node.name in messages)
    return findings


def _function_budget(node: Function, where: str, is_public: bool) -> Iterator[Finding]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield Finding("function lines", where, node.lineno, f"{lines} lines, allowed {MAX_FUNCTION_LINES}")
    exempt = (is_public and (not node.name.startswith("_") or node.name == "__init__")) or _is_click_command(node)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = sum(1 for a in arguments if a.arg not in ("self", "cls"))
    if count > MAX_PARAMETERS and not exempt:
        yield Finding("parameters", where, node.lineno, f"{count} parameters, allowed {MAX_PARAMETERS}")


def _is_click_command(node: Function) -> bool:
    return any(re.search(r"\b(command|group|option|argument)\(", ast.unparse(d) + "(") for d in node.decorator_list)


def _class_budget(node: ast.ClassDef, where: str, is_message: bool) -> Iterator[Finding]:
    methods = {n.name for n in node.body if isinstance(n, Function)}
    if len(methods) > MAX_METHODS:
        yield Finding("methods", where, node.lineno, f"{len(methods)} methods, allowed {MAX_METHODS}")
    attributes = set() if is_message else {n for s in node.body for n in _assigned_names(s)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
            attributes.add(inner.attr)
    if len(attributes) > MAX_ATTRIBUTES:
        yield Finding("attributes", where, node.lineno, f"{len(attributes)} attributes, allowed {MAX_ATTRIBUTES}")


def _message_classes(modules: list[Module]) -> set[str]:
    """Names of frozen dataclasses, of pydantic models, and of classes derived from them."""
    classes = [n for m in modules for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
    found = {"BaseModel"}
    while True:
        more = {c.name for c in classes if _is_frozen(c) or found & {ast.unparse(b).split(".")[-1] for b in c.bases}}
        if more <= found:
            return found
        found |= more


def _is_frozen(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return any("dataclass" in d and "frozen=True" in d for d in decorators)


def _assigned_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Assign):
        yield from (t.id for t in statement.targets if isinstance(t, ast.Name) and t.id != "__slots__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# ---- walking -----------------------------------------------------------------------------------------------------


def _walk_scoped(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Every node with the functions and classes around it, outermost first."""
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while stack:
        node, scope = stack.pop()
        yield node, scope
        inner = [*scope, node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else scope
        stack += [(child, inner) for child in reversed(list(ast.iter_child_nodes(node)))]


def _qualified(module: Module, scope: list[ast.AST], node: ast.AST) -> str:
    own = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
    names = [n.name for n in [*scope, *own] if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return f"{module.name}:{'.'.join(names)}" if names else module.name
