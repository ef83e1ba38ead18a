"""How a program ends with a signal."""

import signal
import subprocess
import sys

import pytest

from kvrepro.errors import INTERRUPTED, TOO_SMALL, InputError, ensure_known

WAITS = """import sys, time, typer
from kvrepro.errors import program
app = typer.Typer()
@app.command()
def main():
    print("begun", flush=True)
    time.sleep(60)
program(app, "waits", [])"""


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
    print("tea")
program(app, "prints", [])"""


@pytest.mark.parametrize(
    ("after", "printed"),
    [("", "tea\n"), ("< /dev/null | exec true", "")],
)
def test_a_program_ends_in_text_and_never_in_a_traceback(after, printed):
    command = f'"$0" -c "$1" {after}'
    done = subprocess.run(["bash", "-c", command, sys.executable, PRINTS], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, printed)


def test_a_name_that_is_not_known_is_told_with_those_that_are():
    ensure_known("fruit", ["pear"], {"pear": 1, "plum": 2})
    with pytest.raises(InputError, match="unknown fruit 'peer', did you mean 'pear'.; there are: all, pear, plum"):
        ensure_known("fruit", ["pear", "peer"], ("pear", "plum"), also=["all"])


def test_too_little_memory_is_one_line():
    code = WAITS.partition("    print")[0] + "    raise MemoryError\nprogram(app, 'starts', [])"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, TOO_SMALL + "\n")
