"""zrun checkpoint inspect | verify | export | diff | import: checkpoints without an engine, a model or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zrun_runtime.checkpoint.compare import differences
from zrun_runtime.checkpoint.compare import verify as verify_one
from zrun_runtime.checkpoint.deepspeed import import_deepspeed
from zrun_runtime.checkpoint.errors import CheckpointError
from zrun_runtime.checkpoint.export import DTYPES, Form, parse_size
from zrun_runtime.checkpoint.export import export as export_one
from zrun_runtime.checkpoint.files import list_tags, read_latest
from zrun_runtime.checkpoint.open import locate, open_checkpoint, summary_of
from zrun_runtime.commands.options import REFUSED, SETTINGS, refuse

DIFFERENT = 1
_EXAMPLES = """\b
Examples:
  zrun checkpoint inspect out --json                   what is in the newest checkpoint of the directory `out`
  zrun checkpoint verify out                           read every byte of all of them
  zrun checkpoint export out weights --dtype bf16      model.safetensors, as Hugging Face reads it
  zrun checkpoint diff out/step100 out/step200
  zrun checkpoint import ds_out out --tag global_step100

\b
Exit code: 0, 1 for a difference, 2 for what cannot be done.
"""
PIPE_WIDTH = 140  # columns of a table that goes to a file or another program
_directory = click.argument("directory", type=click.Path(path_type=Path))
_tag = click.option("--tag", help="The checkpoint's name; without it, the one that `latest` names.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def _errors_as_text() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.strerror}: {error.filename}" if error.filename else str(error))


@click.group(epilog=_EXAMPLES, context_settings=SETTINGS)
def checkpoint() -> None:
    """Look into checkpoints, check them, and take whole weights out of them."""


@checkpoint.command()
@_directory
@_tag
@_json
def inspect(directory: Path, tag: str | None, as_json: bool) -> None:
    """Show what is in a checkpoint: DIRECTORY is what save_checkpoint was given, or one checkpoint's own."""
    with _errors_as_text(), open_checkpoint(directory, tag) as reader:
        rows = [
            (h.name, list(h.shape), h.dtype, "trained" if h.trained else "frozen", list(h.moments))
            for h in reader.index.held.values()
        ]
        rows += [(t.name, list(t.shape), t.dtype, "buffer", []) for t in reader.manifest.tensors if t.what == "buffer"]
        rows += [(alias, [], "", f"is {name}", []) for alias, name in reader.manifest.aliases.items()]
        summary = summary_of(reader.manifest)
    if as_json:
        keys = ("name", "shape", "dtype", "kind", "optimizer_state")
        click.echo(json.dumps({**summary, "tensors": [dict(zip(keys, row, strict=True)) for row in rows]}, indent=2))
        return
    for key, value in summary.items():
        if value is not None:
            click.echo(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    table = Table("name", "shape", "stored as", "kind", "optimizer state", box=box.SIMPLE_HEAD)
    for name, shape, dtype, kind, moments in rows:
        table.add_row(*map(Text, (name, " x ".join(map(str, shape)), dtype, kind, ", ".join(moments))))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


@checkpoint.command()
@_directory
@click.option("--tag", help="Look at this one only.")
@_json
def verify(directory: Path, tag: str | None, as_json: bool) -> None:
    """Read every byte of the checkpoints in DIRECTORY and compare checksums. Exit code 0 if all are whole, else 2."""
    with _errors_as_text():
        one = tag is not None or not list_tags(directory)
        parent, named = locate(directory, tag) if one else (directory, "")
        latest = read_latest(parent)
        tags = [named] if one else list_tags(parent)
        if latest is not None and latest not in tags and not one:
            tags.append(latest)
        troubles = {found: verify_one(parent, found) for found in tags}
    if as_json:
        rows = [
            {"tag": t, "latest": t == latest, "whole": not trouble, "trouble": trouble}
            for t, trouble in troubles.items()
        ]
        click.echo(json.dumps(rows, indent=2))
        sys.exit(REFUSED if any(troubles.values()) else 0)
    for found, trouble in troubles.items():
        mark = " (latest)" if found == latest else ""
        click.echo(f"{found}{mark}: {trouble or 'whole'}")
    whole = [found for found, trouble in troubles.items() if not trouble]
    if len(whole) < len(troubles):
        click.echo(f"the newest whole one is {whole[0]}" if whole else "there is no whole one", err=True)
        sys.exit(REFUSED)


@checkpoint.command()
@_directory
@click.argument("output", type=click.Path(path_type=Path))
@_tag
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32", show_default=True, help="Of parameters.")
@click.option("--max_shard_size", default="5GB", show_default=True, help="Of one file.")
@click.option("--torch", "as_torch", is_flag=True, help="Write pytorch_model.bin instead of safetensors.")
@click.option("--exclude_frozen_parameters", is_flag=True, help="Only what was trained.")
def export(
    directory: Path,
    output: Path,
    tag: str | None,
    dtype: str,
    max_shard_size: str,
    as_torch: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """Write the whole weights of a checkpoint into OUTPUT, as Hugging Face reads them."""
    with _errors_as_text():
        form = Form(DTYPES[dtype], parse_size(max_shard_size), not as_torch, exclude_frozen_parameters)
        for path in export_one(directory, output, tag, form):
            click.echo(f"{path}  {path.stat().st_size:,} bytes")


@checkpoint.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@_json
def diff(first: Path, second: Path, as_json: bool) -> None:
    """Compare two checkpoints: weights, optimizer state, counters. Exit code 0 if all are equal, 1 if not."""
    found = []
    with _errors_as_text(), open_checkpoint(first) as one, open_checkpoint(second) as other:
        for difference in differences(one, other):
            found.append({"name": difference.name, "text": difference.text})
            if not as_json:
                click.echo(f"{difference.name}: {difference.text}")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not found:
        click.echo("equal")
    sys.exit(DIFFERENT if found else 0)


@checkpoint.command("import")
@_directory
@click.argument("output", type=click.Path(path_type=Path))
@_tag
def import_(directory: Path, output: Path, tag: str | None) -> None:
    """Write a checkpoint of DeepSpeed (ZeRO stages 0 to 3, or a universal one) into OUTPUT as one of ours."""
    with _errors_as_text():
        written = import_deepspeed(directory, output, tag)
        click.echo(f"{written}: load it with load_checkpoint({str(output)!r})")
