"""What native code is asked to use, and what is said where it cannot."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from qload import native
from qload.cli import main
from qload.devices import cpu
from qload.errors import ArgumentError
from qload.layouts import gptq
from qload.native import modules


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has no AVX-512."""
    module = modules.NativeModule(SimpleNamespace(isas=lambda: ["avx2", "scalar"]))  # type: ignore[arg-type]
    monkeypatch.setattr(modules, "load", lambda name: module)
    monkeypatch.delenv("QLOAD_ISA", raising=False)
    monkeypatch.delenv("QLOAD_NUM_THREADS", raising=False)
    return


@pytest.mark.usefixtures("fake")
def test_by_default_the_best_instructions_and_torchs_threads() -> None:
    assert native.isa() == "avx2"
    assert native.threads() == torch.get_num_threads()


@pytest.mark.usefixtures("fake")
def test_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QLOAD_ISA", "scalar")
    monkeypatch.setenv("QLOAD_NUM_THREADS", "3")

    assert (native.isa(), native.threads()) == ("scalar", 3)
    with native.using("avx2", 5):
        assert (native.isa(), native.threads()) == ("avx2", 5)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("QLOAD_ISA", "neon", "one of scalar, avx2, avx512, avx512_vnni, avx512_bf16, avx512_amx"),
        ("QLOAD_ISA", "avx512", "an instruction set of this CPU: avx2, scalar"),
        ("QLOAD_NUM_THREADS", "0", "a number from 1 to 4096"),
        ("QLOAD_NUM_THREADS", "many", "a number from 1 to 4096"),
        ("QLOAD_NUM_THREADS", "99999999999", "a number from 1 to 4096"),
    ],
)
def test_what_is_not_to_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ArgumentError, match=f"{variable}\n  expected {expected}\n  got      '{value}'"):
        native.isa() if variable == "QLOAD_ISA" else native.threads()
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 1


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules._LOADED_MODULES.clear()
    yield
    monkeypatch.undo()
    modules._LOADED_MODULES.clear()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: None) -> Path:
    """An installation without native modules, and without a word of what its build left out."""
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    monkeypatch.setattr(modules, "__file__", str(tmp_path / "modules.py"))
    monkeypatch.setitem(sys.modules, "qload.native._missing", None)  # type: ignore[arg-type]
    return tmp_path


def test_where_nothing_was_built_it_says_so(nowhere: Path) -> None:
    assert native.load("cpu") == native.load("cuda") == modules.NativeModule(None, modules.NOT_BUILT)


@pytest.mark.usefixtures("nowhere")
def test_what_the_build_left_out_the_doctor_says_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    record: Any = ModuleType("_missing")
    record.MISSING = {"cuda": "QLOAD_CUDA=0 asked for none"}
    monkeypatch.setitem(sys.modules, "qload.native._missing", record)

    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["modules"]
    assert found["cuda"] == {"built": False, "reason": "not built: QLOAD_CUDA=0 asked for none"}
    assert found["cpu"] == {"built": False, "reason": modules.FILE_MISSING}


def test_a_module_for_another_python_says_so(nowhere: Path) -> None:
    (nowhere / "_cpu.cpython-39-x86_64-linux-gnu.so").touch()
    assert native.load("cpu").reason.startswith(
        "built for another Python: _cpu.cpython-39-x86_64-linux-gnu.so"
    )


@pytest.mark.usefixtures("empty")
def test_a_module_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(modules, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr(modules, "find_spec", lambda name: object())
    monkeypatch.setattr(modules, "import_module", fail)

    reason = "built, but cannot be loaded: libcudart.so.12: cannot open shared object file"
    assert native.load("cuda") == modules.NativeModule(None, reason)


def test_without_native_code_everything_works() -> None:
    codes = torch.arange(64, dtype=torch.int32).reshape(8, 8) % 16

    with native.reference():
        assert cpu.pack(gptq.rows(4), codes, codes) is None
        assert gptq.rows(4).unpack(gptq.rows(4).pack(codes)).equal(codes)


def test_the_doctor_says_what_is_here_in_json_and_in_words() -> None:
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    words = CliRunner().invoke(main, ["doctor", "--table"])

    assert report["modules"].keys() == {"cpu", "cuda"}
    assert report["modules"]["cpu"]["built"] == bool(report["isas"])
    assert report["torch"] == torch.__version__
    assert torch.__version__ in words.stdout
    assert words.exit_code == 0
