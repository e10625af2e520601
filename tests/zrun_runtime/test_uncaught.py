"""What the hook for uncaught errors prints, exits with, and leaves to others."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from zrun_runtime import uncaught
from zrun_runtime.errors import ConfigError, EngineError
from zrun_runtime.uncaught import ExceptHook, show_short

OURS = f"{uncaught._OURS}/engine.py"


def define(path: str, code: str, name: str, **names):
    """A function of that name, as if it stood in that file."""
    exec(compile(code, path, "exec"), names)
    return names[name]


fail = define(
    OURS,
    "def fail(message='ds.json: too large', hint='make it 4', error=ConfigError): raise error(message, hint)",
    "fail",
    ConfigError=ConfigError,
)


@pytest.fixture
def hook(monkeypatch):
    """Whatever hook is the outermost, and the errors that the one below ours heard of, with what that printed."""
    heard = []

    def before(kind, error, trace):
        heard.append(error)
        print("TRACEBACK", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setattr(ExceptHook, "newest", None)
    monkeypatch.setattr(sys, "__excepthook__", object())
    for name in ("WORLD_SIZE", "RANK", "ZRUN_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    show_short()
    return heard


def end_with(code: str, path: str = "/job/train.py", **names) -> int:
    """The exit code of a script that runs `code`."""
    try:
        exec(compile(code, path, "exec"), {"fail": fail, **names})
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            return end.code
        return 1
    return 0


def test_message_line_and_advice(hook, capsys):
    assert end_with("def main():\n    fail()\nmain()") == 2
    text = capsys.readouterr().err
    assert text == "zrun_runtime: ConfigError: ds.json: too large\n  at /job/train.py:2, in main\n  -> make it 4\n"
    assert [type(error) for error in hook] == [ConfigError]  # others may do more than print


def test_each_kind_has_its_exit_code_and_all_lines_but_the_first_are_indented(hook, capsys):
    assert end_with("fail('two\\n  problems', '', EngineError)", EngineError=EngineError) == 1
    assert capsys.readouterr().err == "zrun_runtime: EngineError: two\n    problems\n  at /job/train.py:1\n"


LIBRARY = "/x/lib/python3.11/site-packages/transformers/trainer.py"


def test_the_line_is_of_the_script_and_not_of_a_library_that_it_calls(hook, capsys):
    end_with("train()", train=define(LIBRARY, "def train(): fail()", "train", fail=fail))
    assert "\n  at /job/train.py:1\n" in capsys.readouterr().err


def test_without_a_script_the_line_of_the_library_has_to_do():
    with pytest.raises(ConfigError) as caught:
        define(LIBRARY, "def train(): fail()", "train", fail=fail)()
    assert f"\n  at {LIBRARY}:1, in train" in uncaught.words(caught.value, caught.tb.tb_next)


@pytest.mark.parametrize(
    "code",
    [
        "raise KeyError(1)",
        "try:\n    fail()\nexcept Exception as error:\n    raise KeyError(1) from error",
        "try:\n    raise KeyError(1)\nexcept KeyError:\n    fail()",
        "try:\n    try:\n        raise KeyError(1)\n    finally:\n        fail()\nfinally:\n    fail()",
        "raise SystemError",
    ],
)
def test_what_is_the_script_s_own_goes_to_the_hook_below(hook, capsys, code):
    assert end_with(code) == 1
    assert capsys.readouterr().err == "TRACEBACK\n"


@pytest.mark.parametrize(
    "code",
    [
        "ours()",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nfail()",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    caught = True\nif caught:\n    ours()",
    ],
)
def test_what_our_own_code_handled_is_no_cause(hook, capsys, code):
    inner = "def ours():\n    try:\n        {}['x']\n    except KeyError as e:\n        raise ConfigError('no') from e"
    assert end_with(code, ours=define(OURS, inner, "ours", ConfigError=ConfigError)) == 2
    assert "TRACEBACK" not in capsys.readouterr().err


def test_the_whole_traceback_if_it_is_wanted(hook, capsys, monkeypatch):
    monkeypatch.setenv("ZRUN_TRACEBACK", "1")
    assert end_with("fail()") == 2
    assert capsys.readouterr().err == "TRACEBACK\n"
    monkeypatch.setenv("ZRUN_TRACEBACK", "0")
    assert end_with("fail()") == 2
    assert "TRACEBACK" not in capsys.readouterr().err


def test_an_interactive_session_goes_on(hook, capsys, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert end_with("fail()") == 1
    assert capsys.readouterr().err == "TRACEBACK\n"


def test_over_a_hook_that_came_later(hook, capsys, monkeypatch):
    """It buffers what the hook below it prints, as torch's does: the older one of ours must not answer."""
    below = sys.excepthook

    def buffering(*error):
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            below(*error)
        finally:
            sys.stderr = stderr
        print("BUFFERED", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", buffering)
    said = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", said)
    assert end_with("fail()") == 2  # below that hook, ours still says it, on the process's own stderr
    assert said.getvalue().startswith("zrun_runtime: ConfigError")
    capsys.readouterr()
    show_short()
    monkeypatch.setattr(sys, "stderr", err := io.TextIOWrapper(io.BytesIO(), write_through=True))
    assert end_with("fail()") == 2
    text = err.buffer.getvalue().decode()
    assert text.count("zrun_runtime: ConfigError") == 1 and "TRACEBACK" not in text and "BUFFERED" not in text
    show_short()
    assert sys.excepthook is ExceptHook.newest


def test_ranks_of_another_launcher_are_named(hook, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    end_with("fail()")
    assert all(line.startswith("[rank3]: ") for line in capsys.readouterr().err.splitlines())


def test_a_closed_stderr_hides_no_exit_code(hook, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "__stderr__", None)
    assert end_with("fail()") == 2


def test_threads_keep_their_tracebacks(hook, capsys, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert told[0].exc_type is ConfigError and capsys.readouterr().err == ""
