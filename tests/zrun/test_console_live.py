"""What the live console leaves on a terminal, which a small emulator of it keeps."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import pytest
from rich.console import Console as Terminal

from zrun import events
from zrun.console.fold import PATIENCE
from zrun.console.live import LiveConsole, bar
from zrun.console.output import Output
from zrun.job import FailureReport, JobView


@dataclass
class Screen:
    """As much of a terminal as rich uses: lines, cursor up, erase line, carriage return."""

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif re.fullmatch(r"\x1b\[\d*A", part):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and not part.startswith("\x1b"):
                self.lines[self.row] += part


class Bench:
    """A live console on a terminal of `width`, with a clock that a test moves."""

    def __init__(
        self, width: int = 100, world_size: int = 2, hosts: tuple[str, ...] = ("localhost",), encoding: str = "utf-8"
    ):
        self.now = 0.0
        self.raw = io.BytesIO()
        self.stream = io.TextIOWrapper(self.raw, encoding=encoding, write_through=True)
        output = Output(self.stream)
        terminal = Terminal(file=output, force_terminal=True, width=width, height=30, highlight=False, markup=False)
        self.console = LiveConsole(output, terminal=terminal, clock=lambda: self.now)
        self.console.job_started(JobView("j", world_size, hosts, "cpu", "gloo", "127.0.0.1:1", "train.py"))

    def say(self, *said: events.Event, host: str = "localhost") -> None:
        for event in said:
            self.console.handle(host, event)
            self.now += PATIENCE + 0.1
            self.console.tick()

    def text(self) -> str:
        return self.raw.getvalue().decode(self.stream.encoding)

    def screen(self) -> list[str]:
        screen = Screen()
        screen.feed(self.text())
        while screen.lines and not screen.lines[-1].strip():
            screen.lines.pop()
        return [line.rstrip() for line in screen.lines]


def step(number: int, **fields) -> events.StepDone:
    values = {"seconds": 0.05, "samples": 32, "skipped_steps": 0, "loss": 2.5, "learning_rate": 3e-4, "grad_norm": 0.98}
    return events.StepDone(rank=0, step=number, **{"total_steps": 200, **values, **fields})


def output(rank: int, text: str) -> events.WorkerOutput:
    return events.WorkerOutput(rank, "stdout", text)


FIRST = "zrun: 2 workers on localhost, device cpu, backend gloo, master 127.0.0.1:1"


def test_before_the_first_step_the_row_tells_the_time():
    bench = Bench()
    bench.now = 61
    bench.console.tick()
    assert bench.screen() == [FIRST, "", "2 workers running  1:01"]


def test_the_newest_step_stays_below_what_scrolls():
    bench = Bench()
    bench.say(events.MemoryUsed(0, 2**30, 0), events.MemoryUsed(1, 2**31, 0))
    bench.say(step(1), step(2), output(1, "hello"), step(20), output(0, "again"))
    lines = bench.screen()
    assert lines[:4] == [FIRST, "[1] hello", "[0] again", ""]
    assert re.fullmatch(r"step 20/200  ━+╸?━+   10%  eta 0:09", lines[4])
    assert lines[5] == "loss 2.5000  lr 3.0e-04  norm 0.98  samples/s 640  step time 50 ms  mem 2.0 GiB (rank 1)"
    assert len(lines) == 6


def test_without_a_total_there_is_no_bar():
    bench = Bench()
    bench.say(step(7, total_steps=None))
    assert bench.screen()[2].startswith("step 7  running 0:00")


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20, 10, 2])
def test_no_width_breaks_the_row(width):
    bench = Bench(width=width)
    for number in range(1, 30):
        bench.say(step(number, loss_scale=65536.0, skipped_steps=3), events.MemoryUsed(number % 2, 10**9 * number, 0))
    row = bench.screen()[bench.screen().index("") + 1 :]
    assert row[0].startswith("step 29/200"[: width - 1])
    assert 2 <= len(row) <= 3
    assert all(len(line) < width for line in row)
    assert ("eta" in row[0]) == (width >= 40)


def test_figures_stand_still():
    bench = Bench()
    bench.say(step(1, grad_norm=12.3), step(2, grad_norm=1234.0))
    before = bench.screen()[-1].index("samples/s")
    bench.say(step(3, grad_norm=1.0))
    assert bench.screen()[-1].index("samples/s") == before


def test_worker_text_is_text_and_moves_no_cursor():
    bench = Bench()
    bench.say(output(1, "[bold]x[/bold] :smile: \x1b[5A\x1b[2J\x1b]0;title\x07[link=y]z"))
    assert bench.screen()[1] == "[1] [bold]x[/bold] :smile: [link=y]z"


def test_prefixes_are_aligned():
    bench = Bench(world_size=16, hosts=("n1.org", "node-2.org"))
    bench.say(output(3, "a"), host="n1.org")
    bench.say(output(12, "b"), host="node-2.org")
    assert bench.screen()[1:3] == ["[n1:3]      a", "[node-2:12] b"]


def test_a_progress_bar_of_the_script_stays_too_until_its_line_ends():
    bench = Bench()
    bench.say(*(events.WorkerOutput(0, "stderr", f"{n}%|##", transient=True) for n in (10, 20)), output(0, "hello"))
    assert bench.screen()[:-1] == [FIRST, "[0] hello", "", "[0] 20%|##"]
    bench.say(events.WorkerOutput(0, "stderr", "100%|####"))
    assert bench.screen()[:-1] == [FIRST, "[0] hello", "[0] 100%|####", ""]


def test_bars_of_several_ranks_have_a_row_each():
    bench = Bench(world_size=16)

    def state(rank: int, text: str) -> events.WorkerOutput:
        return events.WorkerOutput(rank, "stderr", text, transient=True)

    bench.say(state(1, "1%"), state(0, "2%"), state(1, "3%"))
    assert bench.screen()[2:4] == ["[0]  2%", "[1]  3%"]
    bench.say(events.WorkerOutput(0, "stderr", "100%"))
    assert bench.screen()[1:4] == ["[0]  100%", "", "[1]  3%"]
    bench.say(*(state(rank, f"of {rank}") for rank in range(15, 1, -1)))
    assert [line for line in bench.screen() if "of " in line] == [
        f"[{rank}]{' ' * (rank < 10)} of {rank}" for rank in range(2, 10)
    ]
    assert bench.screen()[-2] == "and 6 bars more"


def test_a_progress_bar_of_the_script_wider_than_the_terminal_is_cut():
    bench = Bench(width=30)
    bench.say(events.WorkerOutput(0, "stderr", "a\tbar\tof many\tcolumns\t漢字", transient=True))
    assert bench.screen()[-2] == "[0] a   bar     of many colum"


def test_a_flood_is_printed_in_batches_without_a_loss():
    bench = Bench()
    before = len(re.findall("\x1b\\[2K", bench.text()))
    for number in range(1000):
        bench.console.handle("localhost", output(1, f"line {number}"))
    bench.now += 1
    bench.console.tick()
    assert bench.screen()[1:1001] == [f"[1] line {number}" for number in range(1000)]
    assert len(re.findall("\x1b\\[2K", bench.text())) - before < 50


def test_a_line_does_not_wait_for_the_next_one():
    bench = Bench(world_size=1)
    bench.now += 10
    bench.console.handle("localhost", output(0, "first"))
    assert "first" in bench.screen()
    bench.console.handle("localhost", output(0, "second"))
    bench.now += 0.2
    bench.console.tick()
    assert "second" in bench.screen()


def test_the_cursor_is_left_visible_all_along():
    bench = Bench()
    bench.say(step(1))
    assert bench.text().rfind("\x1b[?25h") > bench.text().rfind("\x1b[?25l")


def test_the_end_leaves_the_last_step_and_the_time():
    bench = Bench()
    bench.say(step(199), step(200))
    bench.now = 75
    bench.console.close(0)
    assert bench.screen() == [
        FIRST,
        "step 200/200  loss 2.5000  lr 3.0e-04  norm 0.98  samples/s 640  step time 50 ms",
        "zrun: done in 1:15",
    ]


def test_an_end_by_the_user_tells_the_exit_code():
    bench = Bench()
    bench.now = 75
    bench.console.close(130)
    assert bench.screen() == [FIRST, "zrun: ended after 1:15, exit code 130"]


def test_a_failure_comes_last():
    bench = Bench()
    bench.say(step(3), output(1, "before"))
    report = FailureReport(
        "rank 1 was killed by SIGKILL", "localhost", 1, -9, 137, "SIGKILL", "Traceback:\n  [x]\n", 2, 0, "hint"
    )
    bench.console.failed(report)
    bench.console.close(137)
    assert bench.screen()[-9:] == [
        "step 3/200  loss 2.5000  lr 3.0e-04  norm 0.98  samples/s 640  step time 50 ms",
        "",
        "rank 1 on localhost ended with:",
        "  Traceback:",
        "    [x]",
        "",
        "zrun: rank 1 was killed by SIGKILL",
        "      2 ranks failed alike, shown is the first",
        "      hint",
    ]


def test_a_terminal_without_unicode_gets_a_bar_of_ascii():
    bench = Bench(encoding="ascii")
    bench.say(step(1), step(100))
    assert re.search(r"step 100/200  #+-+   50%", "\n".join(bench.screen()))


def test_bars_fill():
    assert bar(0.0, 4, ascii_only=False).plain == "━━━━"
    assert bar(0.5, 4, ascii_only=True).plain == "##--"
    assert bar(0.4, 4, ascii_only=False).plain == "━╸━━"
    assert bar(1.0, 4, ascii_only=True).plain == "####"
    assert all(len(bar(n / 50, 7, ascii_only=False).plain) == 7 for n in range(51))
