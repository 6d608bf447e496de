"""Faults in functions of a project under test: given tensors by name, typed weights, or inputs."""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import GPTQWeight
from qload.errors import ArgumentError
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest import adopted_matrix, fault_injection
from qload.testing.selftest.fault_injection import around_product, replace_function, with_fault
from qload.testing.selftest.matrix import gptq

WEIGHT = gptq()


def fault(name: str) -> KernelFault:
    return next(each for each in KERNEL_FAULTS if each.name == name)


def meaning(scales: Tensor, qweight: Tensor, qzeros: Tensor, *, g_idx: Tensor) -> Tensor:
    """A packing function with its own order of arguments."""
    held = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    return WEIGHT.holding(held).dequantize()


def test_tensors_are_changed_by_their_names(tmp_path: Path) -> None:
    wrong = with_fault(meaning, fault("scales-late"), "gptq", tmp_path / "reached")

    got = wrong(WEIGHT.scales, **{name: held for name, held in WEIGHT.fields().items() if name != "scales"})

    assert (wrong.__name__, signature(wrong)) == ("meaning", signature(meaning))  # for torch and for tests
    assert torch.equal(got, WEIGHT.holding({"scales": WEIGHT.scales.roll(1, 0)}).dequantize())
    assert (tmp_path / "reached").is_file()


def test_a_typed_weight_is_changed_as_a_whole(tmp_path: Path) -> None:
    def pack(number: int, weight: GPTQWeight, *, factor: int) -> Tensor:
        return factor * weight.scales + number

    wrong = with_fault(pack, fault("scales-doubled"), None, tmp_path / "reached")

    assert torch.equal(wrong(1, WEIGHT, factor=4), 8 * WEIGHT.scales.float() + 1)
    assert (tmp_path / "reached").is_file()


def test_a_fault_that_changes_nothing_is_not_reached(tmp_path: Path) -> None:
    wrong = with_fault(meaning, fault("second-scale-lost"), "gptq", tmp_path / "reached")

    assert torch.equal(wrong(**WEIGHT.fields()), WEIGHT.dequantize())
    assert not (tmp_path / "reached").exists()


def test_tensors_without_a_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="for tensors under stored names"):
        with_fault(meaning, fault("scales-late"), None, tmp_path / "reached")(**WEIGHT.fields())


def test_a_product_gets_other_inputs(tmp_path: Path) -> None:
    def product(name: str, ids: Tensor, x: Tensor, *, factor: int) -> Tensor:
        return factor * x

    wrong = around_product(product, fault("inputs-reversed"), tmp_path / "reached")
    ids, x = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4.0).reshape(1, 4)

    assert (wrong.__name__, signature(wrong)) == ("product", signature(product))
    assert wrong("no matrix of floats", ids, x[0], factor=3).tolist() == [0, 3, 6, 9]
    assert not (tmp_path / "reached").exists()
    assert wrong("a name", ids, x, factor=3).tolist() == [[9, 6, 3, 0]]
    assert (tmp_path / "reached").is_file()


def test_a_function_is_replaced_where_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_project")
    vars(module)["Kernel"] = type("Kernel", (), {"pack": staticmethod(lambda: 1)})
    monkeypatch.setitem(sys.modules, "a_project", module)

    replace_function("a_project:Kernel.pack", lambda function: staticmethod(lambda: function() + 1))

    assert vars(module)["Kernel"].pack() == 2


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [("scales-doubled", {"pack"}), ("inputs-reversed", {"gemm"}), (None, set())],
)
def test_the_plugin_plants_the_fault_in_the_function_that_it_concerns(
    name: str | None, wrapped: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project, reached = ModuleType("a_project"), tmp_path / "reached"
    own = {"pack": lambda scales: scales * 1, "gemm": lambda x: x * 1}
    vars(project).update(own)
    monkeypatch.setitem(sys.modules, "a_project", project)
    places = {"pack": "a_project:pack", "gemm": "a_project:gemm", "format": "gptq"}
    values: dict[str, Any] = {**places, "fault": name, "reached": str(reached)}
    config: Any = SimpleNamespace(getoption=lambda option: values[option.removeprefix("--qload-plant-")])

    fault_injection.pytest_configure(config)

    assert {each for each in own if vars(project)[each] is not own[each]} == wrapped
    scales, x = vars(project)["pack"](WEIGHT.scales), vars(project)["gemm"](torch.eye(3)[:1])
    assert torch.equal(scales, WEIGHT.scales) == ("pack" not in wrapped)
    assert torch.equal(x, torch.eye(3)[:1]) == ("gemm" not in wrapped)
    assert reached.exists() == bool(wrapped)


def runs(codes: dict[str, int], reaching: bool) -> Callable[..., int]:
    """What stands for a run of pytest: its exit code by the fault that it is given."""

    def run(options: list[str], allowed: tuple[int, ...]) -> int:
        planted = [option for option in options if option.startswith("--qload-plant-")]
        given = dict(option.removeprefix("--qload-plant-").split("=", 1) for option in planted)
        if reaching and given:
            Path(given["reached"]).write_text("planted")
        return codes.get(given.get("fault", ""), 0)

    return run


def test_tests_that_fail_caught_a_fault_and_others_let_it_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_run", runs({"scales-late": 1}, reaching=True))

    ends = {each.fault: each.end for each in adopted_matrix("pytest tests", pack="a:b", format="gptq")}

    assert ends["scales-late"] == "caught"
    assert ends["scales-early"] == "let through"
    assert "gate-and-up" not in ends  # there is no product to put it around


def test_a_fault_that_no_test_meets_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_run", runs({}, reaching=False))

    assert {each.end for each in adopted_matrix("pytest tests", gemm="a:b")} == {"not reached"}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("tests", "pack"), [("make test", "a:b"), ("pytest tests", None)])
def test_what_is_no_run_of_pytest_is_refused(tests: str, pack: str | None) -> None:
    with pytest.raises(ArgumentError):
        next(adopted_matrix(tests, pack=pack))


@pytest.mark.slow
def test_a_projects_own_tests_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel.py").write_text("def gemm(x, w):\n    return x @ w\n")
    (tmp_path / "test_kernel.py").write_text(
        "import torch, kernel\n\n\ndef test_it():\n"
        "    assert torch.equal(kernel.gemm(torch.eye(8), torch.eye(8)), torch.eye(8))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fault_injection, "KERNEL_FAULTS", (fault("result-doubled"),))

    (found,) = adopted_matrix("pytest test_kernel.py", gemm="kernel:gemm")

    assert found.end == "caught"
