"""How a program ends with a signal."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvrepro.errors import ENDING, INTERRUPTED, TOO_SMALL, InputError, ensure_known, one_line_errors, program

WAITS = """import sys, time, typer
from kvrepro.errors import program
app = typer.Typer()
@app.command()
def main():
    print("begun", flush=True)
    time.sleep(60)
program(app, "waits", [])"""


OTHER = """def from_c():
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise ImportError("initialization failed") from None
@app"""


def started(code=WAITS, ignored=(), **given):
    def signals():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen([sys.executable, "-c", code], preexec_fn=signals, text=True, **given)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_one_line_and_its_exit_code(number):
    process = started(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, printed = process.communicate(timeout=10)
    assert printed.strip() == INTERRUPTED
    assert process.returncode == 128 + number


PRINTS = """import sys, typer
from kvrepro.errors import program
app = typer.Typer()
@app.command()
def main():
    print("tea \\U0001f6a2")
program(app, "prints", [])"""


@pytest.mark.parametrize(("before", "after", "encoding", "code", "printed"), [
    ("", "", "utf-8", 0, "tea \U0001f6a2\n"),
    ("", "", "cp1252", 0, "tea \\U0001f6a2\n"),
    ("", ">&-", "utf-8", 0, ""),
    ("", ">&- 2>&-", "utf-8", 0, ""),
    ("", "< /dev/null | exec true", "utf-8", 0, ""),
    ("-OO", "", "utf-8", 2, "python -OO drops the texts that kvrepro prints: start it without -OO\n"),
])  # fmt: skip
def test_unusual_streams_end_in_text_and_never_in_a_traceback(before, after, encoding, code, printed):
    command = f'"$0" {before} -c "$1" {after}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PRINTS], capture_output=True, text=True, encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (code, printed)


def test_what_ignores_a_closed_terminal_goes_on():
    process = started(ignored=[signal.SIGHUP], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_terminal_that_is_gone_changes_no_exit_code():
    ours, theirs = pty.openpty()
    process = started(stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    printed = b""
    while not printed.endswith(b"\n"):  # a line reaches a terminal in pieces
        printed += os.read(ours, 100)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(10) == 128 + signal.SIGHUP


def test_an_interrupt_that_a_library_makes_another_error_stays_one():
    """As a module in C does that is being imported."""
    code = WAITS.replace("time.sleep(60)", "from_c()").replace("@app", OTHER, 1)
    process = started(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=10)
    assert (printed.strip(), process.returncode) == (INTERRUPTED, 128 + signal.SIGTERM)


def test_an_interrupt_with_a_text_is_one(capsys):
    before = [signal.getsignal(number) for number in ENDING]
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise KeyboardInterrupt("enough")
    for number, handler in zip(ENDING, before, strict=True):
        signal.signal(number, handler)
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == INTERRUPTED


def test_a_name_that_is_not_known_is_told_with_those_that_are():
    ensure_known("fruit", ["pear"], {"pear": 1, "plum": 2})
    with pytest.raises(InputError, match="unknown fruit 'peer', did you mean 'pear'.; there are: all, pear, plum"):
        ensure_known("fruit", ["pear", "peer"], ("pear", "plum"), also=["all"])


def test_a_line_that_quotes_something_endless_keeps_its_ends(capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise InputError(f"models {[1] * 10**5}: give a list of at least one, each once")
    printed = capsys.readouterr().err
    assert printed.startswith("models [1, 1,")
    assert printed.endswith(", 1]: give a list of at least one, each once\n")
    assert len(printed) < 2000


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError",
        "ImportError('libtorch_cpu.so: failed to map segment from shared object')",
        "OSError(12, 'Cannot allocate memory')",
    ],
)
def test_too_little_memory_is_one_line(error):
    code = WAITS.partition("    print")[0] + f"    raise {error}\nprogram(app, 'starts', [])"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, TOO_SMALL + "\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("printed", ["x", "x" * 100_000])
def test_output_that_the_disk_has_no_room_for_is_one_line(printed):
    code = WAITS.partition("    print")[0] + f"    print({printed!r})\nprogram(app, 'prints', [])"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "the output cannot be written (No space left on device): what was computed is stored"
    ]


def test_a_program_that_ends_does_not_look_for_unused_objects():
    at_the_end = "atexit.register(lambda: print(gc.get_freeze_count() > 0))"
    code = f"import atexit, gc; from kvrepro.errors import program; {at_the_end}; program(lambda *_, **__: 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_help_in_the_place_of_a_missing_command_is_all_that_is_printed(capsys):
    app = typer.Typer(no_args_is_help=True)
    for name in ("one", "two"):
        app.command(name)(lambda: None)
    with pytest.raises(SystemExit) as end:
        program(app, "name", [])
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert "Usage: name" in printed.out + printed.err
    assert "Given" not in printed.out + printed.err
