"""Sources of the CUDA module compiled to PTX for Hopper, without optimization: their instances are valid.

Two sources that differ in the type of floats take turns: one is compiled for each kind of codes.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

NVCC = shutil.which("nvcc")
FOLDER = ROOT / "csrc" / "cuda"
ALL_SOURCES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.cu"))
TWINS = sorted(name for name in ALL_SOURCES if name.replace("half", "bfloat16") != name)
LEFT_OUT = {name if number % 2 else name.replace("half", "bfloat16") for number, name in enumerate(TWINS)}
SOURCES = [name for name in ALL_SOURCES if name not in LEFT_OUT]
OPTIONS = ("-std=c++17", f"-I{FOLDER.parent}", f"-I{FOLDER}", "-ptx", "-arch=compute_90a", "-Xcicc=-O0")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="there is no nvcc on PATH")]


def compile_to_ptx(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(NVCC), *OPTIONS, "-o", str(folder / "out.ptx"), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_has_valid_calls_in_all_instances(source: str, tmp_path: Path) -> None:
    run = compile_to_ptx(FOLDER / source, tmp_path)
    assert run.returncode == 0, run.stderr


def test_each_kind_of_codes_is_compiled_for_one_type_of_floats() -> None:
    kinds = {name.replace("half", "*").replace("bfloat16", "*") for name in ALL_SOURCES}

    assert len(SOURCES) == len(kinds)
    assert {name.replace("half", "*").replace("bfloat16", "*") for name in SOURCES} == kinds
    assert any("half" in name for name in SOURCES)
    assert any("bfloat16" in name for name in SOURCES)


def test_a_wrong_call_in_an_instance_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    kernel = "template <class T> __global__ void kernel(T* to) { to[0] = T::absent(); }"
    source.write_text(f"{kernel}\nvoid call(float* to) {{ kernel<<<1, 1>>>(to); }}\n")
    run = compile_to_ptx(source, tmp_path)

    assert run.returncode
    assert "absent" in run.stderr
