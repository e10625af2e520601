"""The answer of `zrun plan`: as data, as a table for a terminal, and as a plain one for everything else."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zrun_runtime.config import Config
from zrun_runtime.planner import (
    USABLE_DEVICE,
    USABLE_HOST,
    Offer,
    Question,
    fastest,
    networks_wanted,
    nodes_needed,
    offers,
)
from zrun_runtime.savings import in_words

_HEADERS = ("ZeRO", "optimizer", "params", "state", "peak", "ckpt", "host", "disk", "sent", "s", "fits")
_WORDS = (0, 1, 2, len(_HEADERS) - 1)  # columns that are not numbers
_GIGABIT = 1e9 / 8


def report_data(question: Question, model: str, how: str, settings: Config, nvme_path: str) -> dict[str, Any]:
    """Everything that is known, as JSON types. Bytes, seconds, bytes a second."""
    found = offers(question)
    best = fastest(found)
    return {
        "model": model,
        "parameters": question.model.numel,
        "precision": settings.precision,
        "optimizer": settings.optimizer.type if settings.optimizer else None,
        "accumulation": settings.accumulation_steps,
        "world_size": question.machines.world,
        "machines": dataclasses.asdict(question.machines),
        "tokens_per_micro_batch": question.work.tokens,
        "activations": {"plain": question.activations[0], "checkpointed": question.activations[1], "how": how},
        "layouts": [_offer_data(offer, nvme_path) for offer in found],
        "network": {
            "given": question.machines.network,
            "wanted": {f"ZeRO {number}": rate for number, rate in networks_wanted(question).items()},
        },
        "recommended": _offer_data(best, nvme_path) if best is not None else None,
        "nodes_needed": None if best is not None else nodes_needed(question),
    }


def _offer_data(offer: Offer, nvme_path: str) -> dict[str, Any]:
    return {
        "name": offer.choice.name,
        "places": offer.choice.places,
        "zero_optimization": offer.choice.section(nvme_path),
        "device": {**dataclasses.asdict(offer.held.device), "peak": offer.plain, "checkpointed": offer.checkpointed},
        "host": dataclasses.asdict(offer.held.host),
        "host_of_node": offer.host,
        "disk": dataclasses.asdict(offer.held.disk),
        "disk_of_node": offer.disk,
        "sent": offer.sent,
        "seconds": {**dataclasses.asdict(offer.cost), "step": offer.cost.seconds},
        "fits": offer.fits,
        "needs_checkpointing": offer.needs_checkpointing,
        "lacking": offer.lacking,
    }


def report(question: Question, data: dict[str, Any], assumed: bool, config: str | None) -> None:
    """Print the answer."""
    machines = question.machines
    accumulated = f" x {data['accumulation']} accumulated" if data["accumulation"] > 1 else ""
    click.echo(
        f"{data['model']}, {data['precision']}, {data['optimizer'] or 'Adam taken'}; {machines.world} devices of "
        f"{in_words(machines.device_memory)} on {machines.nodes} node(s) of {in_words(machines.host_memory)}; "
        f"{data['tokens_per_micro_batch']:,} tokens a micro-batch{accumulated}"
    )
    plain, checkpointed = (in_words(question.activations[number]) for number in (0, 1))
    click.echo(f"activations a device: {plain}, with checkpointing {checkpointed} ({data['activations']['how']})")
    unit, name = (2**30, "GiB") if question.model.numel >= 10**9 else (2**20, "MiB")
    rows = [_cells(layout, data["recommended"], unit) for layout in data["layouts"]]
    if sys.stdout.isatty():
        Console().print(_table(rows))
    else:
        click.echo("\n" + _plain(rows) + "\n")
    click.echo(
        f"{name}. Of a device: state, held between steps; peak, within a step and with activations; ckpt, with "
        f"activation checkpointing.\nOf a node: host, disk. Sent: by a rank in a step; s: its seconds at least. "
        f"Usable: {USABLE_DEVICE:.0%} of device, {USABLE_HOST:.0%} of host memory."
    )
    for line in _network_lines(question, data, assumed):
        click.echo(line)
    _recommend(data, config)


def _cells(layout: dict[str, Any], best: dict[str, Any] | None, unit: int) -> list[str]:
    device, places = layout["device"], layout["places"]
    state = device["params"] + device["master"] + device["optimizer"]
    bytes_of = (state, device["peak"], device["checkpointed"], layout["host_of_node"], layout["disk_of_node"])
    fits = "with ckpt" if layout["needs_checkpointing"] else "yes"
    if not layout["fits"]:
        fits = f"lacks {layout['lacking']}"
    elif best is not None and best["name"] == layout["name"]:
        fits += ", fastest"
    return [
        *places,
        *(f"{nbytes / unit:,.1f}" if nbytes else "-" for nbytes in (*bytes_of, layout["sent"])),
        f"{layout['seconds']['step']:.2f}",
        fits,
    ]


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(_HEADERS):
        last = index == len(_HEADERS) - 1
        table.add_column(header, justify="left" if index in _WORDS else "right", overflow="fold", no_wrap=not last)
    for row in rows:
        style = "bold green" if row[-1].endswith("fastest") else "dim" if row[-1].startswith("lacks") else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def _plain(rows: Sequence[Sequence[str]]) -> str:
    cells = [list(_HEADERS), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADERS))]
    lines = []
    for row in cells:
        padded = [
            text.ljust(width) if index in _WORDS else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _network_lines(question: Question, data: dict[str, Any], assumed: bool) -> list[str]:
    if question.machines.world == 1:
        return []
    given, wanted = data["network"]["given"], data["network"]["wanted"]
    two, three = wanted["ZeRO 2"], wanted["ZeRO 3"]
    lines = [
        f"network: {_gigabits(given)}{' (assumed)' if assumed else ''}; communication hides behind arithmetic "
        f"from {_gigabits(two)} on under ZeRO 2, from {_gigabits(three)} on under ZeRO 3 "
        f"({question.machines.flops / 1e12:,.0f} TFLOP/s a device)"
    ]
    if given < three:
        slower = max(1.0, three / given) / max(1.0, two / given)
        lines.append(
            f"ZeRO 3 does not pay below {_gigabits(three)}: here its steps take {slower:.2f} times those of ZeRO 2, "
            "where that fits. A larger micro-batch needs less network; accumulation helps ZeRO 0 and 1 alone"
        )
    return lines


def _gigabits(rate: float) -> str:
    return f"{rate / _GIGABIT:,.3g} Gbit/s"


def _recommend(data: dict[str, Any], config: str | None) -> None:
    best = data["recommended"]
    if best is None:
        nodes = data["nodes_needed"]
        click.echo(
            "nothing fits" + (f"; it would on {nodes} such node(s)" if nodes else "")
            + ": a smaller --batch or --seq, more devices, or more host memory"
        )  # fmt: skip
        return
    click.echo(f"\nfastest that fits: {best['name']}")
    if best["needs_checkpointing"]:
        click.echo("with activation checkpointing (Hugging Face: model.gradient_checkpointing_enable())")
    click.echo(f"in {config or 'the config'}:")
    click.echo(json.dumps({"zero_optimization": best["zero_optimization"]}, indent=2))
