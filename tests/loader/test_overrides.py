"""Sources and loaders of other projects that override single methods."""

from collections.abc import Iterable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from qload import DefaultWeightsLoader, MemoryStorage, UnquantizedWeight, Weights, loader_from_config
from qload.errors import MismatchError
from qload.loader import Part, Split, TensorSource, WeightsLoader
from qload.loader.source import WrappedSource
from qload.parallel import Rank
from qload.spec import Role, Weight
from qload.storage import TensorInfo

pytestmark = pytest.mark.usefixtures("seen_texts")

MATRIX = torch.arange(8.0).reshape(4, 2)


def stored_under(name: str) -> Weights:
    return Weights(MemoryStorage({name: MATRIX}), loader=loader_from_config(None))


class Renamed(WrappedSource):
    """Tensors of an inner source with `old.` in place of `new.`."""

    def has_tensor(self, name: str) -> bool:
        return self.inner.has_tensor(name.replace("new.", "old."))

    def info(self, name: str) -> TensorInfo:
        return self.inner.info(name.replace("new.", "old."))

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role) -> Tensor:
        return self.inner.read(name.replace("new.", "old."), index, role=role)

    def take(self, names: Iterable[str]) -> None:
        self.inner.take([name.replace("new.", "old.") for name in names])


def test_a_wrapped_source_finds_tensors_by_its_own_names() -> None:
    weights = stored_under("old.weight")

    weight = DefaultWeightsLoader().get_weights(Renamed(weights), "new")

    assert torch.equal(weight.dequantize(), MATRIX)
    assert weights.report().complete


def test_weights_find_tensors_by_names_of_a_subclass() -> None:
    class Upper(Weights):
        def has_tensor(self, name: str) -> bool:
            return super().has_tensor(name.lower())

        def info(self, name: str) -> TensorInfo:
            return super().info(name.lower())

        def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role | None = None) -> Tensor:
            return super().read(name.lower(), index, role=role)

    weights = Upper(MemoryStorage({"up.weight": MATRIX}), loader=loader_from_config(None))

    assert torch.equal(weights.get_weights("UP").dequantize(), MATRIX)


class OwnLoads(WeightsLoader):
    """A loader with typed loads of its own, each with a layer of another size."""

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        raise AssertionError("every typed load is overridden")

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        return 4, 2

    def get_weights(self, weights: TensorSource, prefix: str) -> Weight:
        return UnquantizedWeight(weight=torch.ones(1, 2))

    def get_weights_col(self, weights: TensorSource, prefix: str) -> Weight:
        return UnquantizedWeight(weight=torch.ones(2, 2))

    def get_weights_row(self, weights: TensorSource, prefix: str) -> Weight:
        return UnquantizedWeight(weight=torch.ones(3, 2))

    def get_multi_weights_col(self, weights: TensorSource, prefixes: Sequence[str], dim: int = 0) -> Weight:
        return UnquantizedWeight(weight=torch.ones(4 + len(prefixes), 2))

    def get_weights_col_packed(self, weights: TensorSource, prefix: str, block_sizes: object) -> Weight:
        return UnquantizedWeight(weight=torch.ones(9, 2))


def test_weights_call_the_typed_loads_that_a_loader_overrides() -> None:
    weights = Weights(MemoryStorage({"up.weight": MATRIX}), loader=OwnLoads())

    assert weights.get_weights("up").shape == (1, 2)
    assert weights.get_weights_col("up").shape == (2, 2)
    assert weights.get_weights_row("up").shape == (3, 2)
    assert weights.get_multi_weights_col(["up", "up"]).shape == (6, 2)
    assert weights.get_weights_col_packed("up", 2).shape == (9, 2)


class RowsLoader(WeightsLoader):
    """A loader of plain matrices that reads all outputs of each part."""

    def load(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> Weight:
        matrices = [weights.read(f"{part.prefix}.weight", role=Role.FLOAT) for part in parts]
        return UnquantizedWeight(weight=torch.cat(matrices))

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        N, K = weights.info(f"{prefix}.weight").shape
        return N, K


def test_parts_with_other_inputs_are_refused_before_a_custom_load() -> None:
    tensors = {"gate.weight": MATRIX, "up.weight": MATRIX, "odd.weight": torch.ones(4, 3)}
    weights = Weights(MemoryStorage(tensors), loader=RowsLoader())

    assert weights.get_multi_weights_col(["gate", "up"]).shape == (8, 2)
    with pytest.raises(MismatchError, match=r"odd: parts of a fused layer differ in K\n.*2\n.*3"):
        weights.get_multi_weights_col(["gate", "up", "odd"])


def test_a_custom_load_of_all_outputs_is_no_share() -> None:
    weights = Weights(MemoryStorage({"up.weight": MATRIX}), loader=RowsLoader(), process_group=Rank(0, 2))

    with pytest.raises(MismatchError, match=r"RowsLoader\.load returned .*\n.*\(2, 2\)\n.*\(4, 2\)"):
        weights.get_weights_col("up")


def test_blocks_of_a_vocabulary_have_the_size_that_a_custom_load_gives_them() -> None:
    loader, parts = RowsLoader(), [Part("up", short=True)]
    shared, alone = (
        Weights(MemoryStorage({"up.weight": MATRIX}), loader=loader, process_group=rank)
        for rank in (Rank(1, 2), Rank(0, 1))
    )

    assert loader.plan(shared, parts, "N").finish(shared).shape == (4, 2)
    with pytest.raises(MismatchError, match=r"\(3, 2\)\n.*\(4, 2\)"):
        loader.plan(alone, [Part("up", 0, 3, short=True)], "N").finish(alone)


@pytest.mark.parametrize(("ledger", "before", "after"), [("inner", 1, 1), ("later", 0, 1), ("none", 0, 0)])
def test_entries_reach_the_inner_ledger_once_and_at_their_time(
    ledger: Literal["inner", "later", "none"], before: int, after: int
) -> None:
    weights = stored_under("up.weight")
    source = WrappedSource(weights, ledger=ledger)
    found = []
    source.take(["up.weight"])
    source.note("a contradiction")
    if ledger == "later":
        source.note("a contradiction")
    found.append(weights.report())
    if ledger == "later":
        source.commit()
    found.append(weights.report())

    assert [len(report.used) for report in found] == [before, after]
    assert [[*report.notes] for report in found] == [["a contradiction"] * count for count in (before, after)]
    assert not found[1].twice
