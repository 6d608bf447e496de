"""The checks of `LoaderSuite`: a loader beside qload's own shares of the same files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.checkpoint import COLUMN, ROW, layers_of_case, write
from qload.conformance.prefixed import prefixed
from qload.errors import CutError, DivideError
from qload.parallel import FakeWorld
from qload.spec import named
from qload.testing import checks
from qload.testing.drawn import DrawnLayer
from qload.weights import Weights


class LoaderTrial:
    """A loader and one case: `suite`, a `LoaderSuite`; `case`; `folder`, for its files."""

    def __init__(self, suite: Any, case: ConformanceCase, folder: Path) -> None:
        self.suite, self.case, self.folder = suite, case, folder
        self.layers = layers_of_case(case)
        self.tensors = {key: t for name, layer in self.layers.items() for key, t in layer.named(name).items()}

    def shares_are_exact(self) -> None:
        """From one file."""
        self._exact(self._written("whole", self.tensors))

    def several_files_are_one(self) -> None:
        """From three."""
        self._exact(self._written("several", self.tensors, 3))

    def cut_short_is_refused(self) -> dict[str, str]:
        """The last byte of the file is gone."""
        (file,) = self._written("cut-short", self.tensors)
        file.write_bytes(file.read_bytes()[:-1])
        return self._refused([file], "a file without its last byte")

    def scales_missing_is_refused(self) -> dict[str, str]:
        """One tensor that the format needs is not stored."""
        name = self._of_scales()
        rest = {key: tensor for key, tensor in self.tensors.items() if key != name}
        return self._refused(self._written("missing", rest), f"files without {name}")

    def wrong_shape_is_refused(self) -> dict[str, str]:
        """One tensor has a row less."""
        name = self._of_scales()
        shape = self.tensors[name].shape
        if not shape or shape[0] < 2:
            pytest.skip(f"{name} has no second row")
        short = {**self.tensors, name: self.tensors[name][1:]}
        return self._refused(self._written("shape", short), f"{name} without its first row")

    def _of_scales(self) -> str:
        """The name of a layer's scales, which every rank needs."""
        prefix, layer = next(iter(self.layers.items()))
        for name in ("scales", "weight_scale", "absmax", "qweight", "weight"):
            if name in layer.tensors:
                suffix = {s.name: s.suffix for s in layer.weight_type.tensors(layer.config)}[name]
                return named(prefix, suffix)
        raise AssertionError(f"{layer} has no tensor of a known name")

    def _written(self, name: str, tensors: dict[str, Tensor], files: int = 1) -> list[Path]:
        return write(self.folder / f"{name}-{self.case.id}", tensors, self.case, files)

    def _refused(self, files: list[Path], what: str) -> dict[str, str]:
        """With which error; a loader that raises on sound files too refuses nothing."""
        __tracebackhide__ = True
        if self.case.world != 1:
            pytest.skip("damage is shown to one rank")
        self.suite.load(self._written("sound", self.tensors), 0, 1)
        refusal = self._refusal(files, 0, 1)
        assert refusal, f"{what} was loaded, and an error was due"
        return {"refused with": refusal}

    def _refusal(self, files: list[Path], rank: int, world: int) -> str:
        """The error that the loader raises, or nothing; no loader refuses by running out of memory."""
        try:
            self.suite.load(files, rank, world)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a class of the loader's own
            first, *_ = str(error).splitlines() or [""]
            return f"{type(error).__name__}: {first}"
        return ""

    def _exact(self, files: list[Path]) -> None:
        __tracebackhide__ = True
        for rank in FakeWorld(self.case.world):
            where = f"rank {rank.rank()} of {self.case.world}: "
            want = self._expected(rank)
            if isinstance(want, str):
                refusal = self._refusal(files, rank.rank(), self.case.world)
                assert refusal, f"{where}it was loaded, and no such cut exists: {want}"
                continue
            got = self.suite.load(files, rank.rank(), self.case.world)
            assert isinstance(got, Mapping), (
                f"{where}load returned {type(got).__name__}, expected tensors by name"
            )
            self._same(dict(got), want, where)

    def _same(self, got: dict[str, Any], want: dict[str, Tensor], where: str) -> None:
        __tracebackhide__ = True
        missing = sorted(set(want) - set(got))
        assert not missing, (
            f"{where}{len(missing)} of {len(want)} tensors are missing, the first {missing[0]}"
        )
        for name, tensor in want.items():
            with prefixed(f"{where}{name}: "):
                own = got[name]
                same = (own.dtype, tuple(own.shape)) == (tensor.dtype, tuple(tensor.shape))
                assert same, (
                    f"{own.dtype}, {tuple(own.shape)}; expected {tensor.dtype}, {tuple(tensor.shape)}"
                    f"{self._other_rank(name, own)}"
                )
                if not torch.equal(_bytes(own.cpu()), _bytes(tensor)):
                    said = self._other_rank(name, own)
                    with prefixed(f"{said.removeprefix(', ')}: " if said else ""):
                        checks.assert_same_bits(own.cpu(), tensor)

    def _other_rank(self, name: str, own: Tensor) -> str:
        """Whose share it is instead."""
        for rank in FakeWorld(self.case.world):
            want = self._expected(rank)
            if not isinstance(want, str) and torch.equal(_bytes(own.cpu()), _bytes(want[name])):
                return f", the share of rank {rank.rank()}"
        return ", the whole tensor" if own.shape == self.tensors[name].shape else ""

    def _expected(self, group: Any) -> dict[str, Tensor] | str:
        """A rank's tensors by full name; or why no rank can have them."""
        found: dict[str, Tensor] = {}
        loads: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...] = (
            (COLUMN, Weights.get_weights_col),
            (ROW, Weights.get_weights_row),
        )
        for names, load in loads:
            for name in names:
                layer: DrawnLayer = self.layers[name]
                weights = Weights(layer.storage(name), loader=layer.loader(), process_group=group)
                try:
                    share = load(weights, name)
                except (CutError, DivideError) as error:
                    return str(error).splitlines()[0]
                suffixes = {spec.name: spec.suffix for spec in type(share).tensors(share.config)}
                found |= {named(name, suffixes[f]): tensor for f, tensor in share.fields().items()}
        return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
