"""Published package: page text, name and extras, and the build of its wheels."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qload.cli import main
from tests.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PAGE = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
# Link, image, reference and HTML tag, each with its target.
TARGETS = re.compile(r"""\]\(([^)]*)\)|^\[[^\]]+\]: *(\S+)|(?:href|src)=["']([^"']*)""", re.MULTILINE)


def page(text: str) -> str:
    for change in PAGE["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def leads(text: str) -> list[str]:
    return ["".join(found) for found in TARGETS.findall(text)]


def test_no_link_of_the_indexs_page_leads_into_a_tree_that_is_not_there() -> None:
    (fragment,) = PAGE["fragments"]
    text = (ROOT / fragment["path"]).read_text()

    assert any(not target.startswith("https://") for target in leads(text))
    assert [target for target in leads(page(text)) if not target.startswith("https://")] == []
    assert len(page(text).split()) == len(
        re.sub(r"\]\([^)]*\)", "]", text).split()
    )  # the text keeps every word


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [native code](docs/native.md).", "see native code."),
        ("[every rule](docs/rules) · [changes](CHANGELOG.md)", "every rule · changes"),
        ("![a picture](docs/a.png) [here](#below)", "a picture here"),
        ("[theirs](https://example.org/a)", "[theirs](https://example.org/a)"),
    ],
)
def test_of_a_link_into_the_tree_the_page_keeps_the_words(text: str, shown: str) -> None:
    assert page(text) == shown


def test_no_address_is_invented() -> None:
    assert "urls" not in PROJECT


def test_what_is_installed_shows_that_page() -> None:
    try:
        shown = metadata.metadata(PROJECT["name"])
    except metadata.PackageNotFoundError:
        pytest.skip("qload is not installed here")

    assert [target for target in leads(shown["Description"]) if not target.startswith("https://")] == []
    assert not shown.get_all("Project-URL")
    assert not shown.get_all("Home-page")


def test_the_version_is_asked_of_the_distribution_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    monkeypatch.setattr(metadata, "version", lambda name: f"of {name}")

    assert CliRunner().invoke(main, ["--version"]).output == f"qload of {PROJECT['name']}\n"


@pytest.mark.slow
def test_without_hypothesis_there_are_the_checks_and_the_way_to_the_strategies() -> None:
    code = """
import sys
sys.modules["hypothesis"] = None  # which makes its import fail
from qload.testing import assert_reads_back, assert_same_bits, assert_sums_exactly, assert_within_bound
try:
    from qload.testing import layers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert "testing" in PROJECT["optional-dependencies"]
    assert f"pip install '{PROJECT['name']}[testing]'" in done.stdout


def test_nothing_makes_scikit_build_core_compile_for_the_metadata() -> None:
    """Check for overrides with a condition on a failed build: they force a build for the metadata."""
    conditions = [override["if"] for override in PYPROJECT["tool"]["scikit-build"]["overrides"]]

    assert conditions
    assert not [each for each in conditions if "failed" in each or "failed" in each.get("any", {})]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the build backend on a fake scikit-build-core with recorded calls and errors from `failing`."""
    fake: Any = ModuleType("scikit_build_core.build")
    fake.asked, fake.failing = [], [1, 1]

    def build(folder: str, settings: Any) -> str:
        names = ("QLOAD_CUDA", "QLOAD_PYTHON_ONLY")
        fake.asked.append({name: os.environ[name] for name in names if name in os.environ})
        if fake.failing:
            raise SystemExit(fake.failing.pop())
        return "a.whl"

    text = (ROOT / "csrc" / "build_backend.py").read_text()
    for hook in re.findall(r"(?:build|get|prepare)_\w+", text):
        setattr(fake, hook, build)
    package: Any = ModuleType("scikit_build_core")
    package.build = fake
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", fake)
    monkeypatch.setattr(os, "environ", {"CUDACXX": "nvcc"})
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "csrc" / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_fails_is_left_out_step_by_step(backend: Any) -> None:
    assert backend.build_wheel("folder") == "a.whl"
    assert backend.backend.asked == [
        {},
        {"QLOAD_CUDA": "failed"},
        {"QLOAD_CUDA": "failed", "QLOAD_PYTHON_ONLY": "failed"},
    ]


def test_without_cuda_there_is_one_step(backend: Any) -> None:
    os.environ["QLOAD_CUDA"] = "0"
    backend.backend.failing.pop()

    assert backend.build_editable("folder") == "a.whl"
    assert backend.backend.asked == [{"QLOAD_CUDA": "0"}, {"QLOAD_CUDA": "0", "QLOAD_PYTHON_ONLY": "failed"}]


@pytest.mark.parametrize(("cuda", "code"), [("1", 1), ("yes", 1), ("auto", 7)])
def test_what_is_asked_by_name_and_what_is_set_wrong_stay_errors(backend: Any, cuda: str, code: int) -> None:
    os.environ["QLOAD_CUDA"] = cuda
    backend.backend.failing[:] = [code]

    with pytest.raises(SystemExit):
        backend.build_wheel("folder")
    assert len(backend.backend.asked) == 1


def hook(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one hook of the real build backend in a separate process, without a working compiler."""
    for needed in ("scikit_build_core", "pybind11", "hatch_fancy_pypi_readme"):
        pytest.importorskip(needed, reason=f"building needs {needed}, which is not installed here")
    if not shutil.which("cmake"):
        pytest.skip("building needs cmake, which is not installed here")
    code = f"import sys; sys.path.insert(0, 'csrc'); import build_backend; build_backend.{name}(sys.argv[1])"
    asked = {key: value for key, value in os.environ.items() if not key.startswith(("QLOAD", "CUDA"))}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env=asked | {"CXX": sys.executable, "CUDACXX": sys.executable} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_metadata_needs_no_compiler(tmp_path: Path) -> None:
    done = hook("prepare_metadata_for_build_wheel", tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = tmp_path.glob("*.dist-info/METADATA")
    assert f"Name: {PROJECT['name']}" in told.read_text().splitlines()
    assert "pure Python" not in done.stdout  # without a build, nothing fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "reason", "warns"),
    [
        ({}, "the compiler failed, or there was none", True),
        ({"QLOAD_PYTHON_ONLY": "1"}, "QLOAD_PYTHON_ONLY=1 asked for none", False),
    ],
    ids=["a compiler that fails", "no compiler asked for"],
)
def test_a_wheel_of_pure_python_says_why(
    tmp_path: Path, variables: dict[str, str], reason: str, warns: bool
) -> None:
    done = hook("build_wheel", tmp_path, **variables)

    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert ("This wheel is pure Python: everything works, slowly." in done.stdout) == warns
    held: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as files:
        exec(files.read("qload/native/_missing.py"), held)
    assert held["MISSING"].keys() == {"cpu", "cuda"}
    assert all(text.startswith(reason) for text in held["MISSING"].values())


@pytest.mark.slow
def test_asked_for_by_name_what_fails_is_an_error_and_no_wheel(tmp_path: Path) -> None:
    done = hook("build_wheel", tmp_path, QLOAD_CUDA="1")

    assert done.returncode != 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("says", "chips"),
    [
        ("9.0\n8.0\n9.0\n", "80;90"),
        ("12.0\n8.6\n10.0\n", "86;100;120"),
        ("7.5\n", ""),
        ("No devices were found\n", ""),
    ],
)
def test_cuda_is_compiled_for_the_chips_that_are_here(tmp_path: Path, says: str, chips: str) -> None:
    if not shutil.which("cmake") or os.name == "nt":
        pytest.skip("needs cmake, and a shell that says what nvidia-smi would")
    (tmp_path / "says").write_text(says)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat '{tmp_path}/says'\n")
    smi.chmod(0o755)
    script = tmp_path / "ask.cmake"
    include = ROOT / "csrc" / "cuda" / "chips.cmake"
    script.write_text(
        f'include("{include.as_posix()}")\nchips_of_this_machine(chips gpus)\nmessage("[${{chips}}]")\n'
    )
    asked = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["cmake", "-P", str(script)], env=asked, capture_output=True, text=True, check=True)

    assert done.stderr.strip() == f"[{chips}]"
