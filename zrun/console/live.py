"""The console for a terminal: worker output scrolls by, the newest step stays at the bottom.

Everything is printed on the calling thread, at most about ten times a second however fast events come: lines gather in
a bounded buffer, the live row is drawn anew by `tick`. The terminal's cursor is never hidden, so a launcher that is
killed or suspended leaves a usable terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

import zrun.console.cells as cells
import zrun.console.figures as figures
from zrun.console.fold import Line
from zrun.console.narrator import FailureWords, Narrator
from zrun.console.output import Output
from zrun.events import StepDone
from zrun.job import FailureReport, JobView

PRINT_SECONDS = 0.1  # lines wait this long for others to be printed with
BUFFER_LINES = 200
BUFFER_CHARS = 64 * 1024
MIN_BAR = 8  # columns
FIGURE_LINES = 2
BARS_PART = 3  # of the terminal's height: what bars of scripts may take of it

_STYLES = {"info": "", "detail": "dim", "warning": "yellow", "error": "bold red"}
_RANK_STYLES = ("cyan", "magenta", "blue", "green", "yellow", "bright_black")


class LiveConsole(Narrator):
    """Rows that scroll, above a few that stay.

    Args:
        terminal: for tests; else a rich console on `output`.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        output: Output,
        verbose: bool = False,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(verbose, clock)
        # rich wants a TextIO and uses write, flush, isatty, fileno and encoding of it.
        self._terminal = terminal or Terminal(file=output, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
        self._row = StepRow(self)
        self._live = Live(
            self._row,
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._pending: list[Text] = []
        self._pending_chars = 0
        self._printed_at = self._drawn_at = self._began_at = clock()
        self._stale = False  # the row is older than its figures
        self._failed = False

    @property
    def elapsed(self) -> float:
        """Seconds since the job started."""
        return self.clock() - self._began_at

    def job_started(self, job: JobView) -> None:
        self._began_at = self.clock()
        super().job_started(job)
        self._row.reset()
        self._flush()
        self._live.start()
        self._terminal.show_cursor(True)

    def failed(self, failure: FailureReport) -> None:
        self._failed = True
        self.release()
        self._end_row()
        super().failed(failure)

    def tick(self) -> None:
        super().tick()
        if self._pending:
            self._flush()
        elif self._stale or self.clock() - self._drawn_at >= 1:
            self._draw()

    def close(self, exit_code: int) -> None:
        super().close(exit_code)
        self._end_row()
        if self.job is not None and not self._failed:
            took = figures.duration(self.elapsed)
            self.show_sentence(
                "detail", f"done in {took}" if not exit_code else f"ended after {took}, exit code {exit_code}"
            )
        self._flush()

    # ---- how the words look ----

    def show_line(self, line: Line) -> None:
        prefix, ranks = self.names.prefix(line.ranks), line.everyone
        text = Text()
        if prefix:
            text.append(prefix, style=_RANK_STYLES[ranks[0] % len(_RANK_STYLES)] if len(ranks) == 1 else "dim")
            text.append(" " * max(1, self.names.width - len(prefix) + 1))
        text.append(line.text)
        if line.transient:
            self._row.bars[ranks[0], line.stream] = text
            self._stale = True
            return
        for rank in ranks:
            self._row.bars.pop((rank, line.stream), None)
        self._print(text)

    def show_sentence(self, level: str, text: str) -> None:
        self._print(Text.assemble(("zrun: ", "dim"), (text, _STYLES.get(level, ""))))

    def show_step(self, event: StepDone) -> None:
        self._stale = True

    def show_failure(self, words: FailureWords) -> None:
        if words.traceback:
            self._print(Text())
            self._print(Text(f"{words.title}:", style="red"))
            for line in words.traceback:
                self._print(Text(f"  {line}"))
        self._print(Text())
        self._print(Text.assemble(("zrun: ", "dim"), (words.message, "bold red")))
        for remark in words.remarks:
            self._print(Text(f"      {remark}"))
        self._flush()

    # ---- printing ----

    def _print(self, line: Text) -> None:
        self._pending.append(line)
        self._pending_chars += len(line)
        full = len(self._pending) >= BUFFER_LINES or self._pending_chars >= BUFFER_CHARS
        if full or self.clock() - self._printed_at >= PRINT_SECONDS:
            self._flush()

    def _flush(self) -> None:
        """Print what waits; the row below is drawn anew by that."""
        if self._pending:
            text = Text("\n").join(self._pending)
            self._pending, self._pending_chars = [], 0
            self._terminal.print(text, soft_wrap=True)
        self._printed_at = self._drawn_at = self.clock()
        self._stale = False

    def _draw(self) -> None:
        self._live.refresh()
        self._drawn_at = self.clock()
        self._stale = False

    def _end_row(self) -> None:
        """Take the row away and leave its last figures as a line that stays."""
        if not self._live.is_started:
            return
        self._flush()
        self._live.stop()
        if self.progress.newest is not None:
            self._print(Text(cells.step_line(self.progress)))
        self._flush()


class StepRow:
    """The rows that stay at the bottom, drawn for the width of the moment.

    Figures keep the widest place they ever took, so that their neighbours stand still.
    """

    def __init__(self, console: LiveConsole) -> None:
        self._console = console
        self._widths: dict[str, int] = {}  # label -> widest value so far
        self.bars: dict[tuple[int, str], Text] = {}  # rank, stream -> newest state of a script's own progress bar

    def reset(self) -> None:
        self._widths = {}
        self.bars = {}

    def __rich_console__(self, terminal: Terminal, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - 1)  # a full last column makes some terminals wrap
        yield Text()  # keeps the scrolling lines at a distance
        for line in self._bars(options.size.height // BARS_PART) + self._lines(width, options.ascii_only):
            line.expand_tabs(8)
            line.truncate(width)
            line.no_wrap = True
            yield line

    def _bars(self, room: int) -> list[Text]:
        """A row for each rank that has a bar, in their order, as far as there is room."""
        rows = [self.bars[key].copy() for key in sorted(self.bars)]
        room = max(1, room)
        if len(rows) > room:
            rows[room - 1 :] = [Text(f"and {figures.count(len(rows) - room + 1, 'bar')} more", style="dim")]
        return rows

    def _lines(self, width: int, ascii_only: bool) -> list[Text]:
        progress = self._console.progress
        if progress.newest is None:
            return [self._waiting()]
        several = self._console.job is not None and self._console.job.world_size > 1
        row = [self._steady(cell) for cell in cells.cells(progress, name_rank=several)]
        lines = [self._bar_line(width, ascii_only)]
        for flowed in cells.flow(row, width, FIGURE_LINES):
            lines.append(Text(" " * cells.GAP).join(_figure(cell) for cell in flowed))
        return lines

    def _waiting(self) -> Text:
        job = self._console.job
        workers = figures.count(job.world_size, "worker") if job else "workers"
        return Text(f"{workers} running  {figures.duration(self._console.elapsed)}", style="dim")

    def _bar_line(self, width: int, ascii_only: bool) -> Text:
        """step 20/200 ━━━━╸───── 10%  eta 0:12, without what does not fit."""
        progress = self._console.progress
        line = Text.assemble(("step ", "dim"), (cells.step_label(progress), "bold"))
        fraction, left = progress.fraction, progress.seconds_left
        if fraction is None:
            return line.append(f"  running {figures.duration(self._console.elapsed)}", style="dim")
        percent = f"{fraction:4.0%}"
        eta = self._steady(cells.Cell("eta", figures.duration(left) if left is not None else figures.UNKNOWN, 0))
        room = width - len(line) - len(percent) - eta.width - 3 * cells.GAP
        if room >= MIN_BAR:
            line.append(" " * cells.GAP).append_text(bar(fraction, room, ascii_only))
        if room >= -cells.GAP:
            line.append(" " * cells.GAP + percent)
        if len(line) + cells.GAP + eta.width <= width:
            line.append(" " * cells.GAP).append_text(_figure(eta))
        return line

    def _steady(self, cell: cells.Cell) -> cells.Cell:
        if cell.value == figures.NOT_FINITE:
            return cell  # rare, and too long to make room for it ever after
        place = self._widths[cell.label] = max(self._widths.get(cell.label, 0), len(cell.value))
        return cells.Cell(cell.label, cell.value.ljust(place), cell.importance, cell.brief, cell.alarm)


def _figure(cell: cells.Cell) -> Text:
    style = "yellow" if cell.alarm else "bold" if cell.label == "loss" else ""
    return Text.assemble((f"{cell.label} ", "dim"), (cell.value, style))


def bar(fraction: float, width: int, ascii_only: bool) -> Text:
    """A bar of `width` columns, in steps of half a column."""
    if ascii_only:
        full = int(fraction * width)
        return Text("#" * full, style="cyan").append("-" * (width - full), style="bright_black")
    halves = int(fraction * width * 2)
    full, half = divmod(halves, 2)
    done = Text("━" * full + "╸" * half, style="green" if fraction >= 1 else "cyan")
    return done.append("━" * (width - full - half), style="bright_black")
