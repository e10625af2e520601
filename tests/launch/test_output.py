"""What workers write reaches the console whole, or is said to be in a file; and it never holds anybody up."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.folded import unfolded
from tests.launch.jobs import job, read

CPU = ("--backend", "gloo")


def outputs(run, rank=0, stream="stdout"):
    """Texts of the output events of `--json`."""
    events = [json.loads(line) for line in run.out.splitlines()]
    return [e["text"] for e in events if e["event"] == "output" and (e["rank"], e["stream"]) == (rank, stream)]


def of_kind(run, kind):
    return [e for e in map(json.loads, run.out.splitlines()) if e["event"] == kind]


def resident_mib(pid):
    pages = int(read(f"/proc/{pid}/statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_lines_of_ranks_never_tear(tmp_path):
    script = """
        import os, sys, time
        rank = os.environ["RANK"]
        for i in range(300):
            for piece in (f"<{rank}:", f"{i}:" + rank * 50, ">\\n"):
                sys.stdout.write(piece)
                sys.stdout.flush()
    """
    with job(tmp_path, script, "--num_gpus", "4", "--plain", *CPU) as run:
        assert run.wait() == 0
        lines = [line for line in run.out.splitlines() if line.startswith("[")]
        assert len(lines) == 1200
        for rank in range(4):
            assert [x for x in lines if x.startswith(f"[{rank}]")] == [
                f"[{rank}] <{rank}:{i}:{str(rank) * 50}>" for i in range(300)
            ]


def test_text_that_is_not_utf8_and_lines_without_an_end(tmp_path):
    script = """
        import os
        os.write(1, b"a \\xff b\\n" + "ü€😀\\n".encode() + b"x" * 100_000 + b"\\nlast")
    """
    with job(tmp_path, script, "--json", "--log_dir", "logs", *CPU) as run:
        assert run.wait() == 0
        texts = outputs(run)
        assert texts[:2] == ["a \ufffd b", "ü€😀"]
        assert texts[2] == "x" * len(texts[2]) and 10_000 < len(texts[2]) < 100_000
        assert texts[3:] == ["last"]
        assert [e["partial"] for e in of_kind(run, "output")] == [False, False, True, False]
        whole = (tmp_path / "logs" / "rank-0" / "stdout").read_bytes()
        assert whole == b"a \xff b\n" + "ü€😀\n".encode() + b"x" * 100_000 + b"\nlast"


@pytest.mark.slow
def test_a_progress_bar_does_not_flood(tmp_path):
    script = """
        import sys, time
        for i in range(101):
            sys.stderr.write(f"\\r{i:3d}%|" + "#" * i)
            sys.stderr.flush()
            time.sleep(0.02)
        sys.stderr.write("\\nafter\\n")
    """
    with job(tmp_path, script, "--json", *CPU) as run:
        assert run.wait() == 0
        texts = outputs(run, stream="stderr")
        assert texts[-2:] == ["100%|" + "#" * 100, "after"]
        assert len(texts) <= 6


@pytest.mark.slow
def test_a_flood_stalls_nobody_and_is_in_the_file(tmp_path):
    script = """
        import os, resource, time
        line = b"y" * 99 + b"\\n"
        start = time.monotonic()
        for _ in range(1600):
            block = line * 1000
            while block:
                block = block[os.write(1, block):]
        print(f"\\nflood took {time.monotonic() - start:.1f}", flush=True)
        open("done", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
    """
    with job(tmp_path, script, "--json", "--log_dir", "logs", *CPU) as run:
        run.wait_for("done", 60)
        sizes = [resident_mib(pid) for pid in (*run.agents(), run.process.pid)]
        (tmp_path / "go").touch()
        assert run.wait() == 0
        assert max(sizes) < 100
        shown, left_out = outputs(run), of_kind(run, "output_dropped")
        assert shown.count("y" * 99) + sum(e["lines"] for e in left_out) >= 1_600_000
        path = tmp_path / "logs" / "rank-0" / "stdout"
        assert {e["path"] for e in left_out} == {str(path)}
        kept = path.read_bytes()
        assert kept.endswith(b"\n") and b"flood took" in kept
        assert path.stat().st_size + path.with_suffix(".1").stat().st_size <= 128 * 2**20
        assert any("older output" in e["text"] for e in of_kind(run, "notice"))


def test_a_console_that_stalls_holds_nobody_up(tmp_path):
    script = """
        import os
        for i in range(200_000):
            os.write(1, b"line %d\\n" % i)
        open("done", "w").close()
        while not os.path.exists("go"):
            import time; time.sleep(0.02)
    """
    reader, writer = os.pipe()
    try:
        with job(tmp_path, script, "--plain", "--log_dir", "logs", *CPU, stdout=writer) as run:
            os.close(writer)
            run.wait_for("done", 60)
            assert resident_mib(run.process.pid) < 150
            (tmp_path / "go").touch()
            chunks = []
            while chunk := os.read(reader, 1 << 20):
                chunks.append(chunk)
            assert run.wait() == 0
            text = b"".join(chunks).decode()
            assert "line 0\n" in text
            assert "came too fast" in text and str(tmp_path / "logs" / "rank-0" / "stdout") in text
            assert (tmp_path / "logs" / "rank-0" / "stdout").read_bytes().count(b"\n") == 200_000
    finally:
        os.close(reader)


@pytest.mark.slow
def test_a_stalled_console_does_not_keep_the_job_from_ending(tmp_path):
    script = """
        import os, pathlib
        pathlib.Path("up").touch()
        while True:
            os.write(1, b"x" * 1000 + b"\\n")
    """
    reader, writer = os.pipe()
    try:
        with job(tmp_path, script, "--plain", *CPU, stdout=writer) as run:
            os.close(writer)
            run.wait_for("up")
            time.sleep(1.0)
            run.send(15)
            assert run.wait(10) == 143
            assert run.pids() == []
    finally:
        os.close(reader)


def test_a_reader_that_leaves_does_not_end_the_job(tmp_path):
    script = """
        import os, pathlib, time
        pathlib.Path("up").touch()
        while not os.path.exists("go"):
            print("hello", flush=True)
            time.sleep(0.02)
        pathlib.Path("finished").touch()
    """
    reader, writer = os.pipe()
    with job(tmp_path, script, "--plain", *CPU, stdout=writer) as run:
        os.close(writer)
        run.wait_for("up")
        os.close(reader)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        assert run.wait() == 0
        assert (tmp_path / "finished").exists()


def test_eight_ranks_that_fail_alike_give_one_traceback(tmp_path):
    script = """
        import os
        class Odd:
            pass
        def train(rank):
            raise RuntimeError(f"rank {rank} of pid {os.getpid()} broke on {Odd()}")
        train(int(os.environ["RANK"]))
    """
    with job(tmp_path, script, "--num_gpus", "8", "--json", *CPU) as run:
        assert run.wait() == 1
        (failure,) = of_kind(run, "failure")
        assert failure["same_count"] == 8
        assert failure["traceback"].count("Traceback") == 1
        assert f"RuntimeError: rank {failure['rank']} of pid" in failure["traceback"]
        assert [e["event"] for e in map(json.loads, run.out.splitlines())][-2:] == ["failure", "exit"]


def test_the_cause_is_blamed_and_not_those_who_fail_because_of_it(tmp_path):
    script = """
        import atexit, os, pathlib, time
        if os.environ["RANK"] == "1":
            atexit.register(lambda: (pathlib.Path("gone").touch(), time.sleep(0.3)))
            raise ValueError("the cause")
        while not os.path.exists("gone"):
            time.sleep(0.005)
        time.sleep(0.1)  # the agent tells no order of what it reads at once
        raise RuntimeError("connection closed by peer")
    """
    with job(tmp_path, script, "--num_gpus", "3", "--json", *CPU) as run:
        assert run.wait() == 1
        (failure,) = of_kind(run, "failure")
        assert failure["traceback"].endswith("ValueError: the cause")
        assert failure["rank"] == 1


def test_a_traceback_that_is_only_in_the_error_file_is_shown(tmp_path):
    script = """
        import sys
        from torch.distributed.elastic.multiprocessing.errors import record
        sys.excepthook = lambda *error: print("something fancy", file=sys.stderr)
        @record
        def main():
            raise ValueError("only in the file")
        main()
    """
    with job(tmp_path, script, *CPU) as run:
        assert run.wait(60) == 1
        report = run.out[run.out.index("ended with") :]
        assert "Traceback (most" in report and "ValueError: only in the file" in report


def test_a_chain_of_exceptions_is_shown_whole(tmp_path):
    script = """
        def load():
            try:
                {}["weights"]
            except KeyError as error:
                raise ValueError("no weights") from error
        load()
    """
    with job(tmp_path, script, "--json", *CPU) as run:
        assert run.wait() == 1
        (failure,) = of_kind(run, "failure")
        assert "KeyError: 'weights'" in failure["traceback"]
        assert failure["traceback"].endswith("ValueError: no weights")


def test_events_of_workers_come_through_and_garbage_does_not(tmp_path):
    script = """
        import json, os
        fd = int(os.environ["ZRUN_EVENT_FD"].split(":")[0])
        rank = int(os.environ["RANK"])
        assert os.fstat(fd).st_ino == int(os.environ["ZRUN_EVENT_FD"].split(":")[1])
        def say(**fields):
            os.write(fd, json.dumps(fields).encode() + b"\\n")
        say(event="notice", rank=rank, level="info", text=f"ok {rank}", news=1)
        say(event="notice", rank=rank + 1, level="info", text="for another")
        say(event="agent_done", log_dir="")
        say(event="worker_exited", rank=rank, returncode=1, stopped=False, at=0.0)
        os.write(fd, b"\\xff\\x00garbage\\n" + b"[" * 100_000 + b"\\n" + b"z" * 1_000_000 + b"\\n")
        say(event="memory", rank=rank, used=1, peak=2)
    """
    with job(tmp_path, script, "--num_gpus", "2", "--json", *CPU) as run:
        assert run.wait() == 0
        notices = [(e["rank"], e["text"]) for e in of_kind(run, "notice")]
        for rank in (0, 1):
            said = [text for who, text in notices if who == rank]
            assert said[0] == f"ok {rank}"
            assert len(said) == 2 and "ZRUN_EVENT_FD" in said[1]
        assert sorted(e["rank"] for e in of_kind(run, "memory")) == [0, 1]
        assert len(of_kind(run, "agent_done")) == 1


def test_log_dir_keeps_what_an_earlier_job_left(tmp_path):
    for word in ("first", "second"):
        with job(tmp_path, f"print({word!r})", "--log_dir", "logs", "--num_gpus", "2", *CPU) as run:
            assert run.wait() == 0
    assert (tmp_path / "logs" / "rank-1" / "stdout").read_text() == "second\n"
    assert (tmp_path / "logs" / "rank-1" / "stdout.1").read_text() == "first\n"


def test_log_dir_holds_all_words_and_the_life_of_the_job(tmp_path):
    script = """
        import os, sys
        print("hello", flush=True)
        sys.exit(5 if os.environ["RANK"] == "1" else 0)
    """
    options = ("--log_dir", "logs", "--show_ranks", "0", "--num_gpus", "2", "--max_restarts", "1")
    with job(tmp_path, script, *options, *CPU) as run:
        assert run.wait() == 5
        assert "[1] hello" not in run.out
    merged = unfolded((tmp_path / "logs" / "merged.log").read_text())
    assert merged.count("[0] hello") == merged.count("[1] hello") == 2
    assert merged.endswith(run.out[run.out.rindex("zrun: error:") :])
    life = [json.loads(line) for line in (tmp_path / "logs" / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in life]
    assert kinds.count("job_started") == 2 and kinds.count("worker_exited") == 4 and "output" not in kinds
    assert kinds[-1] == "exit" and life[-1]["code"] == 5
    assert any("starts again" in event["text"] for event in life if event["event"] == "message")
    times = [event["time"] for event in life]
    assert times == sorted(times) and times[-1] - times[0] < 60
