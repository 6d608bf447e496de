"""Linear growth of the work with the number of tensors, and equal findings for any number of threads."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from qload.checkpoint import layer_index
from qload.errors import ArgumentError
from qload.loader import description
from qload.loader.exclusion import Exclusions
from qload.parallel import Rank, collectives_of
from qload.parallel.process_group import torch_group
from qload.storage import MemoryStorage, header
from qload.verify import Report, inspect, run_rules, verify
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.rules import RULES
from qload.verify.rules import layers as layers_of_rules
from qload.verify.rules.rule import merge_contradictions
from qload.verify.workers import Workers
from qload.weights import Weights
from tests.bench import folders
from tests.support import torchrun
from tests.verify.checkpoints import GPTQ, gptq, model

# From n to 2n to 4n, linear work grows by n and 2n, quadratic work by 3 and 12 times n * n.
LINEAR, QUADRATIC = 2, 4


def growth(count: Callable[[int], int], n: int) -> float:
    """Return the growth of the second doubling relative to the first."""
    first, second, fourth = (count(size) for size in (n, 2 * n, 4 * n))
    return (fourth - second) / (second - first)


def calls(work: Callable[[], object]) -> int:
    """Return the number of function calls, in Python and in C."""
    total = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal total
        total += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return total


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Record the arguments of every call of a function."""
    seen, function = list[tuple[Any, ...]](), getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: seen.append(given) or function(*given))
    return seen


def is_linear(ratio: float) -> bool:
    return ratio < (LINEAR + QUADRATIC) / 2


def test_layers_that_are_alike_are_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = counted(monkeypatch, description, "describe")
    counts = []
    for size in (500, 1500):
        folder = tmp_path / str(size)
        folder.mkdir()
        folders.sparse(folder, folders.experts(size + size % 2), 4, folders.FP8)
        described.clear()
        report = inspect(folder)
        assert len(report.layers) > size / 2 - 20
        counts.append(len(described))

    assert counts[0] == counts[1]


def test_inspect_reads_each_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.sparse(tmp_path, folders.experts(100), 5, folders.FP8)
    parsed = counted(monkeypatch, header, "parse_header")

    inspect(tmp_path)

    assert sorted(file for _, _, file in parsed) == [
        f"model-{at:05}-of-00005.safetensors" for at in range(1, 6)
    ]


def test_names_are_gathered_once_for_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.sparse(tmp_path, folders.experts(100), 1, folders.FP8)
    split = counted(monkeypatch, layer_index, "split_name")

    inspect(tmp_path)

    assert len(split) == 100
    assert all(names is split[0][1] for _, names in split)


def expert_names(count: int) -> list[str]:
    """Return names of experts; one lacks a tensor."""
    names = [f"model.layers.0.mlp.experts.{at}.{name}" for at in range(count) for name in ("up", "down")]
    return sorted(names[:-1])


class Compared(frozenset[str]):
    """Set of names with a count of subset comparisons."""

    times = 0

    def __lt__(self, other: object) -> bool:
        Compared.times += 1
        return isinstance(other, frozenset) and frozenset.__lt__(self, other)

    def __le__(self, other: object) -> bool:
        Compared.times += 1
        return isinstance(other, frozenset) and frozenset.__le__(self, other)


def test_siblings_are_compared_in_proportion_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_lists = layers_of_rules.layer_lists

    def comparing(names: list[str]) -> dict[str, dict[str, Compared]]:
        return {
            block: {index: Compared(found) for index, found in layers.items()}
            for block, layers in layer_lists(names).items()
        }

    def found(count: int) -> int:
        """Return the number of comparisons for `count` experts, one of them without a tensor."""
        Compared.times = 0
        names = expert_names(count)
        known = {"prefixes": {name: name for name in names}, "all_layers": {}}  # no layer has a description
        account = SimpleNamespace(hides=lambda name: False)
        given: Any = SimpleNamespace(
            names=names, architecture=None, requires_all_tensors=True, account=account, **known
        )
        (finding,) = layers_of_rules.lost_siblings(given)
        assert finding.name == f"model.layers.0.mlp.experts.{count - 1}.down"
        return Compared.times + count  # one look at each is necessary

    monkeypatch.setattr(layers_of_rules, "layer_lists", comparing)

    assert is_linear(growth(found, 50))


def test_a_name_that_is_missing_is_looked_for_near_its_place() -> None:
    def weights(count: int) -> Weights:
        tensors = {f"layers.{at}.up.qweight": torch.zeros(1) for at in range(count)}
        return Weights(MemoryStorage(tensors), loader=alike_loader())

    def lost(count: int) -> int:
        held = weights(count)
        return calls(lambda: [held.missing(f"layers.{at}.up.scales") for at in range(count)])

    assert weights(20).missing("layers.7.up.scales").near == ["layers.7.up.qweight"]
    assert is_linear(growth(lost, 50))


def alike_loader() -> Any:
    from qload.detect import loader_from_config

    return loader_from_config(None)


def test_a_list_of_exceptions_costs_a_layer_no_more_than_one_of_them() -> None:
    def left_out(count: int) -> int:
        exclusions = Exclusions(tuple(f"layers.{at}.gate" for at in range(count)))
        return calls(lambda: [exclusions.entry(f"model.layers.{at}.gate") for at in range(count)])

    assert is_linear(growth(left_out, 50))


def damaged(folder: Path) -> Path:
    """Write eighty layers with some wrong zero points, scales and indices."""
    tensors = {}
    for at in range(80):
        tensors.update(gptq(f"model.layers.{at}.up_proj", zero=8 if at % 9 == 4 else 7))
        if at % 7 == 3:
            tensors[f"model.layers.{at}.up_proj.scales"][1, 2] = torch.nan
        if at % 13 == 5:
            tensors[f"model.layers.{at}.up_proj.g_idx"][0] = 1
    return model(folder, tensors, quantization_config=GPTQ)


def report(folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> Report:
    monkeypatch.setenv("QLOAD_NUM_THREADS", str(threads))
    return verify(folder)


def test_any_number_of_threads_finds_the_same_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged(tmp_path)
    whole = VerifiedCheckpoint.open(folder, collect=True)
    rule_by_rule = merge_contradictions(
        whole, [finding for rule in RULES for finding in rule.check(rule, whole)]
    )
    whole.close()

    one, many = (report(folder, monkeypatch, threads) for threads in (1, 5))

    assert len({finding.rule for finding in one.findings}) >= 3
    assert list(one.findings) == rule_by_rule
    assert one == many


def test_threads_leave_torch_as_many_as_it_had(tmp_path: Path) -> None:
    before = torch.get_num_threads()

    verify(damaged(tmp_path))

    assert torch.get_num_threads() == before


def test_what_a_thread_raises_is_told_by_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run_rules, "_findings", fail)

    report = verify(damaged(tmp_path))

    assert report.verdict == "internal"
    assert "ZeroDivisionError" in report.findings[0].message


@pytest.mark.slow
def test_processes_under_torchrun_print_one_report(tmp_path: Path) -> None:
    folder = damaged(tmp_path)

    one, two = (torchrun.ended(count, "-m", "qload", "verify", str(folder), "--json") for count in (1, 2))

    assert json.loads(two.stdout) == json.loads(one.stdout)
    assert (one.returncode, two.returncode) == (1, 1)


def test_a_group_that_asks_torchs_gathers_by_it_and_does_not_keep_it() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        crew = Workers.of(collectives_of(torch.distributed.group.WORLD))
        assert torch_group(crew.group) is torch.distributed.group.WORLD
        assert len(crew.gather("all")) == 2
    finally:
        torch.distributed.destroy_process_group()

    with pytest.raises(ArgumentError, match="a destroyed group"):
        crew.gather("all")


def test_a_group_that_cannot_gather_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")

    with pytest.raises(ArgumentError, match="process_group"):
        verify(tmp_path, process_group=Rank(0, 2))
