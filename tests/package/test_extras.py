"""What each extra of the built wheel brings: resolved by pip, listed, and kept small.

The megabytes are those of the packages as installed here; "-" marks one that is not.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from centella.cli import info
from tests.package.test_layers import foreign

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What no user may get from us, nor who runs the tests; two extras are for work on the library.
HEAVY = re.compile(r"torch|transformers|triton|cuda-toolkit|nvidia-.*")
OURS_ALONE = {"ptxas", "reference"}
FOR_WORK = {"test", "ptxas", "lint", "reference"}


def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree; skips where pip reaches no index."""
    if pip("download", "--no-deps", "-d", tmp_path_factory.mktemp("index"), "pip").returncode:
        pytest.skip("pip reaches no package index")
    folder = tmp_path_factory.mktemp("wheel")
    build = pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    assert build.returncode == 0, build.stderr
    (built,) = folder.glob("*.whl")
    return built


def resolve(requirement: str) -> dict[str, str]:
    """The packages that pip would install, name to version."""
    run = pip(
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--use-feature=fast-deps",  # reads a wheel's metadata without downloading the wheel
        "--report=-",
        requirement,
    )
    assert run.returncode == 0, f"{requirement}: {run.stderr}"
    packages = [item["metadata"] for item in json.loads(run.stdout)["install"]]
    versions = {re.sub(r"[-_.]+", "-", p["name"]).lower(): p["version"] for p in packages}
    del versions["centella"]
    return versions


def installed(extras: list[str]) -> dict[str, str] | None:
    """What extras bring, of what is installed here; None where that does not satisfy them all."""
    seen = dict[tuple[str, tuple[str, ...]], str]()

    def visit(lines: list[str], extra: str = "") -> bool:
        for requirement in map(Requirement, lines):
            name, asked = requirement.name, ("", *sorted(requirement.extras))
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            if name == PROJECT["name"]:
                if not all(visit(EXTRAS[e]) for e in asked[1:]):
                    return False
                continue
            try:
                package = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                return False
            if not requirement.specifier.contains(package.version, prereleases=True):
                return False
            key = re.sub(r"[-_.]+", "-", name).lower(), asked
            if key not in seen:
                seen[key] = package.version
                if not all(visit(package.requires or [], e) for e in asked):
                    return False
        return True

    if not all(visit(lines) for lines in (PROJECT["dependencies"], *(EXTRAS[e] for e in extras))):
        return None
    return {name: version for (name, _), version in seen.items()}


def megabytes(name: str, version: str) -> float | None:
    """Size of a package as installed here, or None where that version is not."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if package.version != version:
        return None
    return sum(file.size or 0 for file in package.files or []) / 1e6


def table(extra: str, packages: dict[str, str]) -> str:
    """The packages of an extra and their sizes, in words, the largest first."""
    sizes = {name: megabytes(name, version) for name, version in packages.items()}
    shown = [
        f"{name} {packages[name]} ({'-' if size is None else f'{size:.1f}'})"
        for name, size in sorted(sizes.items(), key=lambda item: -(item[1] or 0))
    ]
    total = sum(size or 0 for size in sizes.values())
    return f"[{extra}] {len(packages)} packages, {total:.0f} MB: {', '.join(shown)}"


def test_extras_together_bring_no_framework(request: pytest.FixtureRequest) -> None:
    """What people install; the test below has each by itself, and asks pip."""
    every = [e for e in EXTRAS if e not in OURS_ALONE | {"cuda12"}]
    packages = installed(every)
    if packages is None:
        packages = resolve(f"{request.getfixturevalue('wheel')}[{','.join(every)}]")
    assert {"numpy", "wgpu", "tokenizers", "pytest"} <= set(packages)
    assert [name for name in packages if HEAVY.fullmatch(name)] == []


@pytest.mark.sweep
@pytest.mark.parametrize("apart", [False, True])
def test_every_extra_resolves_and_stays_small(
    wheel: Path, apart: bool, record_property: Callable[[str, object], None]
) -> None:
    """All at once: most of the time pip waits for the index. What `all` has is seen in it."""
    inside = {name for part in EXTRAS["all"] for name in re.findall(r"\w+", part.split(";")[0])}
    extras = [e for e in ("", *EXTRAS) if (e in inside or e in ("", "cuda")) == apart]
    wanted = [f"{wheel}[{extra}]" if extra else str(wheel) for extra in extras]
    with ThreadPoolExecutor(len(extras)) as pool:
        resolved = dict(zip(extras, pool.map(resolve, wanted), strict=True))
    brought = {}
    for extra, packages in resolved.items():
        record_property("shown", table(extra, packages))
        heavy = [name for name in packages if HEAVY.fullmatch(name)]
        if heavy and extra not in OURS_ALONE:
            brought[extra] = heavy
    assert brought == {}


def test_each_package_that_users_get_is_imported() -> None:
    """`info.EXTRAS` holds the packages of all extras for users: test_cli.py compares them."""
    modules = {"cuda-core": "cuda", "cuda-bindings": "cuda"}
    imported = {i.target.split(".")[0] for i in foreign()}
    packages = {p for packages in info.EXTRAS.values() for p in packages}
    assert {p for p in packages if modules.get(p, p) not in imported} == set()
    assert set(EXTRAS) - FOR_WORK - {"all", "cuda12", "cuda13"} == set(info.EXTRAS)


def test_wheel_is_pure(wheel: Path) -> None:
    assert wheel.name == f"centella-{PROJECT['version']}-py3-none-any.whl"


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_pages_install_from_a_clone_into_an_environment(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    typed = [line for line in text.splitlines() if re.match(r"pip install|python3 -m venv", line)]
    assert typed[0] == "python3 -m venv .venv && . .venv/bin/activate"
    assert typed[1].startswith("pip install '.[all]'")
    extras = {e for line in typed for e in re.findall(r"\.\[([\w,]+)\]", line)}
    assert {e for names in extras for e in names.split(",")} <= set(EXTRAS)
