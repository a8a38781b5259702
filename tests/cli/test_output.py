"""What reaches a terminal or a pipe, and how a command ends where a stream is closed or full."""

from __future__ import annotations

import ast
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from centella.cli import escape, output
from tests.cli.test_cli import TINY, call, failed
from tests.weights.test_safetensors import entry, write

SRC = Path(__file__).parents[2] / "src" / "centella"
ON_CPU = ("--model", str(TINY), "--device", "cpu")
ODD = "\x1b[31mred\x9b2J\x07\u202eevil\r"
SHOWN = r"\x1b[31mred\x9b2J\x07\u202eevil\r"
posix = pytest.mark.skipif(sys.platform == "win32", reason="streams and signals of POSIX")


def is_harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x9b\x07\u202e\r\x00\udcff")


# -- control characters ---------------------------------------------------------------------------


def test_what_a_terminal_acts_on_is_escaped() -> None:
    assert escape.printable(ODD) == SHOWN
    assert escape.printable("a\udcffb\u2028c\x00") == r"a\udcffb\u2028c\x00"
    kept = "tab\tline\n grüße 今日\u3000\u00a0 👩\u200d👩 می\u200cخواهم"
    assert escape.printable(kept) == kept
    assert escape.in_line("two\nlines\t") == r"two\nlines\t"


def test_every_control_character_is_escaped() -> None:
    import unicodedata

    for code in range(0x110000):
        c = chr(code)
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t":
            assert escape.printable(c).isascii() and escape.printable(c) != c, hex(code)


def test_json_is_the_same_value_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": ODD + "grüße \U000e0041"}
    output.out_json(value)
    written = capsys.readouterr().out
    assert is_harmless(written) and "grüße" in written
    assert json.loads(written) == value


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "utf-16"])
def test_json_has_no_half_of_a_surrogate_pair(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strict readers refuse all of a document that has one."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    output.out_json({"file": "grüße \\udcff a\udcff", "text": "\ud800 \x9b 👩"})
    value = msgspec.json.decode(raw.getvalue().decode(encoding))
    assert value == {"file": "grüße \\udcff a\ufffd", "text": "\ufffd \x9b 👩"}
    assert encoding == "utf-8" or encoding == "utf-16" or raw.getvalue().isascii()


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes")
def test_json_of_the_demo_where_a_name_is_no_utf_8(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"A cat\xed\xa0\x80.")
    printed = call("demo", "a cat", "--over", tmp_path, *ON_CPU, "--json").stdout
    assert msgspec.json.decode(printed)["nearest"][0]["file"] == "caf\ufffd.txt"


def test_names_and_passages_of_the_demo(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("Windows has no such names")
    folder = tmp_path / "\x1b]0;title\x07"
    folder.mkdir()
    (folder / f"{ODD}.txt").write_text(f"A cat {ODD} sleeps.")
    (folder / f"two\nlines{ODD}.txt").write_bytes(b"\0")
    for more in ((), ("--json",)):
        result = call("demo", f"a {ODD} cat", "--over", folder, *ON_CPU, *more)
        assert is_harmless(result.stdout) and is_harmless(result.stderr)
    shown = call("demo", "a cat", "--over", folder, *ON_CPU).stdout
    assert f"{SHOWN}.txt:1" in shown
    assert rf"two\nlines{SHOWN}.txt (binary" in shown
    text = failed("demo", "--over", folder / f"none{ODD}")
    assert is_harmless(text) and "no such file" in text


def test_names_of_tensors_in_errors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    write(folder / "model.safetensors", {ODD: entry([1], 0, 4)}, bytes(4))
    text = failed("embed", "a", "--model", folder, "--device", "cpu")
    assert is_harmless(text)
    write(folder / "model.safetensors", {ODD: entry([9], 0, 4)}, bytes(4))
    text = failed("embed", "a", "--model", folder, "--device", "cpu")
    assert is_harmless(text) and SHOWN.partition(r"\r")[0].replace("\\", "") in text.replace(
        "\\", ""
    )


def test_texts_and_files_of_embed(tmp_path: Path) -> None:
    assert is_harmless(call("embed", ODD, *ON_CPU).stdout)
    assert is_harmless(call("embed", ODD, "--json", *ON_CPU).stdout)
    assert is_harmless(failed("embed", "--file", tmp_path / ODD, *ON_CPU))
    saved = tmp_path / f"{ODD}.npy"
    if sys.platform != "win32":
        assert is_harmless(call("embed", "a", "--output", saved, *ON_CPU).stdout)


@pytest.mark.parametrize("arguments", [(ODD,), ("info", ODD), ("embed", f"--{ODD}"), (f"--{ODD}",)])
def test_errors_in_the_use(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert is_harmless(result.output) and r"\x1b[31mred" in result.output


def test_the_log_and_tracebacks_of_debug(tmp_path: Path) -> None:
    run = centella("--debug", "embed", "a", "--model", str(tmp_path / "\x1b[31mred"))
    assert run.returncode == 1
    assert "Traceback" in run.stderr and is_harmless(run.stderr) and r"\x1b[31mred" in run.stderr


def test_one_module_prints() -> None:
    """The others call `out`, `err`, `out_json` and `show`."""
    wrong = []
    for path in (SRC / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in ("print", "typer.echo", "console.print", "typer.secho"):
                wrong.append(f"{path.name}:{node.lineno} {called}")
            if called.endswith((".stdout.write", ".stderr.write")):
                wrong.append(f"{path.name}:{node.lineno} {called}")
    # Before typer is known to be there the error of its absence is printed as it is.
    assert [w for w in wrong if not w.startswith(("output.py", "__init__.py"))] == []


# -- streams --------------------------------------------------------------------------------------


def centella(*arguments: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own; `redirect` is what a shell reads behind the command."""
    command = [sys.executable, "-m", "centella", *arguments]
    if redirect:
        command = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


EMBED = ("embed", "a", *ON_CPU)
FULL = "centella: standard output: no space left on device\n"
CLOSED = "centella: standard output: bad file descriptor\n"
COMMANDS = (
    EMBED, (*EMBED, "--json"), ("--help",), ("--version",), ("kernels",), ("kernels", "add"),
)  # fmt: skip


@posix
@pytest.mark.parametrize(("redirect", "said"), [(">/dev/full", FULL), (">&-", CLOSED)])
@pytest.mark.parametrize("arguments", COMMANDS)
def test_full_or_closed_output_is_an_error_in_one_line(
    arguments: tuple[str, ...], redirect: str, said: str
) -> None:
    if said is FULL and not Path("/dev/full").exists():
        pytest.skip("a device of Linux")
    run = centella(*arguments, redirect=redirect)
    assert (run.returncode, run.stderr) == (1, said)


@posix
def test_closed_errors_change_nothing() -> None:
    run = centella(*EMBED, "--ledger", "--timing", redirect="2>&-")
    assert run.returncode == 0 and run.stdout.startswith("text")
    assert "ledger" not in run.stdout
    run = centella("embed", "a", "--device", "gpu", redirect="2>&-")
    assert (run.returncode, run.stdout) == (1, "")


@posix
def test_closed_input_is_an_error_in_one_line() -> None:
    run = centella("embed", "--file", "-", *ON_CPU, redirect="<&-")
    assert run.returncode == 1
    assert run.stderr == "centella: embed: --file -: bad file descriptor\n"
    assert centella(*EMBED, redirect="<&-").returncode == 0


@posix
def test_all_streams_closed() -> None:
    run = centella(*EMBED, redirect="<&- >&- 2>&-")
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "")


@posix
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("arguments", [EMBED, ("kernels", "add"), ("kernels",), ("info",)])
def test_a_reader_that_left_ends_it_quietly(arguments: tuple[str, ...], both: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "centella", *arguments]
    errors = writing if both else subprocess.PIPE
    run = subprocess.run(
        command, stdout=writing, stderr=errors, text=True, check=False, timeout=120
    )
    os.close(writing)
    assert run.returncode == 128 + signal.SIGPIPE
    assert not run.stderr


@posix
def test_a_cursor_comes_back_where_a_signal_ends_it() -> None:
    import pty

    main, side = pty.openpty()
    code = (
        "import sys, time; from centella.cli import process\n"
        "def work():\n"
        "    from centella.cli.output import progress\n"
        "    with progress('', True) as tell:\n"
        "        tell(1, 9, 'softmax')\n"
        "        time.sleep(60)\n"
        "sys.exit(process.run(work))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=side, stdout=side, stderr=side,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(side)
    shown = _read(main, b"\x1b[?25l")  # the cursor goes
    child.send_signal(signal.SIGTERM)
    shown += _read(main, b"\x1b[?25h")  # and comes back
    assert child.wait(30) == 128 + signal.SIGTERM
    os.close(main)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"Traceback" not in shown


def _read(terminal: int, end: bytes) -> bytes:
    """What a terminal shows up to `end`."""
    shown, until = b"", time.monotonic() + 60
    while end not in shown and time.monotonic() < until:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # Linux, where the other side is closed
                break
    return shown


@posix
def test_a_signal_removes_what_was_half_written(tmp_path: Path) -> None:
    file = tmp_path / "out.npy"
    file.write_bytes(b"old")
    code = (
        "import sys, time\n"
        "from centella.cli import process\n"
        "from centella.host.files import replaced\n"
        "def work():\n"
        f"    with replaced({str(file)!r}) as target:\n"
        "        print('begun', flush=True); target.write(b'new'); time.sleep(60)\n"
        "sys.exit(process.run(work))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    child.terminate()
    assert child.wait(30) == 128 + signal.SIGTERM
    child.stdout.close()
    assert (file.read_bytes(), len(list(tmp_path.iterdir()))) == (b"old", 1)


@posix
def test_a_signal_that_was_ignored_stays_so() -> None:
    code = (
        "import os, signal, sys; from centella.cli import process\n"
        "sys.exit(process.run(lambda: os.kill(os.getpid(), signal.SIGHUP)))"
    )
    command = ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, check=False).returncode == 0


EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from centella_command import main
sys.argv = ["centella", "info"]
main()
"""


@posix
@pytest.mark.parametrize(
    "name",
    ["centella", "numpy", "centella.cli", "centella.cli.process", "typer", "centella.cli.app"],
)
def test_an_interrupt_of_imports_ends_the_script_without_a_traceback(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EARLY.format(name=name)], capture_output=True, check=False
    )
    assert run.returncode in (130, -signal.SIGINT)  # a shell says 130
    assert (run.stdout, run.stderr) == (b"", b"")


@posix
@pytest.mark.parametrize("name", ["centella.cli.info", "numpy", "centella.cli.process", "typer"])
def test_an_interrupt_of_imports_ends_python_m_without_a_traceback(
    tmp_path: Path, name: str
) -> None:
    hook = EARLY.format(name=name).partition("from centella")[0]
    (tmp_path / "sitecustomize.py").write_text(hook)
    paths = [str(tmp_path), str(SRC.parent)]
    run = subprocess.run(
        [sys.executable, "-m", "centella", "info"], capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert run.returncode in (130, -signal.SIGINT)  # a shell says 130
    assert (run.stdout, run.stderr) == (b"", b"")


@posix
def test_a_further_interrupt_ends_what_waits_for_threads() -> None:
    """As somebody presses Ctrl-C who does not see the prompt come back."""
    code = (  # which may be started in the background, where the signal is ignored
        "import signal, sys, threading, time; from centella.cli import process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def work():\n"
        "    threading.Thread(target=time.sleep, args=(20,)).start()\n"
        "    print('begun', flush=True); time.sleep(20)\n"
        "sys.exit(process.run(work))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    until = time.monotonic() + 15
    while child.poll() is None and time.monotonic() < until:
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert child.poll() == -signal.SIGINT  # a shell says 130
    assert child.communicate() == (b"", b"")


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    told: list[int] = []
    tell = output.every(5.0, lambda done, total: told.append(done))
    for done in range(1, 31):
        now += 0.7
        tell(done, 30)
    assert told == [8, 16, 24]


def test_a_signal_in_the_middle_of_a_section_comes_again_after_it() -> None:
    code = (
        "import signal, time\n"
        "from centella.cli import process\n"
        "from centella.host.interrupts import uninterrupted\n"
        "@uninterrupted\n"
        "def section():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(0.05)\n"
        "    print('whole', flush=True)\n"
        "def work():\n"
        "    section()\n"
        "    time.sleep(30)\n"
        "import sys\n"
        "sys.exit(process.run(work))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=25
    )
    assert (run.returncode, run.stdout) == (143, "whole\n")
