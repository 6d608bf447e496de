"""`LoaderSuite`: does a loader give every rank its share of a checkpoint, to the bit, or refuse?"""

from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from qload.conformance.case import ConformanceCase
from qload.conformance.cases import TIERS
from qload.conformance.suite import Judged, Suite
from qload.errors import ArgumentError
from qload.testing.traits import contract

SIZES = {"K": 512, "N": 1024}  # of a hidden state, and of what lies within a block
DAMAGES = ("cut-short", "scales-missing", "wrong-shape")


class LoaderSuite(Suite):
    """Tests of what reads a rank's share of a checkpoint's files: derive, and say how to call it.

    The checkpoint has `model.layers.0.self_attn.q_proj` and `model.layers.0.mlp.up_proj`, which are cut along
    their outputs, and `o_proj` and `down_proj` beside them, which are cut along their inputs.

    Examples
    --------
    >>> from qload.conformance import LoaderSuite
    >>> class TestMine(LoaderSuite):
    ...     format = "gptq"
    ...     def load(self, files, rank, world):
    ...         return my_load(files, rank, world)  # doctest: +SKIP
    >>> [case.id for case in TestMine.cases("smoke")]
    ['gptq.v1.w4.g128.k512n1024', 'gptq.v1.w4.g128.k512n1024.tp2']
    """

    @abstractmethod
    def load(self, files: list[Path], rank: int, world: int) -> Any:
        """The share of `rank`, of a `world` of ranks: a mapping of full names to tensors as they are stored.

        `files`: safetensors files; `config.json` lies in their folder. What cannot be cut is to raise.
        """

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """The cases of a `tier`: whole layers first, then those of two, four and eight ranks."""
        if tier not in TIERS:
            raise ArgumentError("tier", f"one of {', '.join(TIERS)}", repr(tier))
        allowed, few = contract(cls.format), tier == "smoke"
        traits = [allowed.common(cls.format)] if few else allowed.corners(cls.format)
        return tuple(
            ConformanceCase(**{**asdict(replace(each, dtype=dtype)), **SIZES, "world": world})
            for world in ((1, 2) if few else (1, 2, 4, 8))
            for dtype in cls.dtypes
            for each in traits
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest, tmp_path: Path) -> Judged:
        """The `case` on trial, with files under pytest's `tmp_path`."""
        from qload.conformance.loader_trial import LoaderTrial

        return Judged(self, case, request, lambda case, device: LoaderTrial(self, case, tmp_path))

    def test_shares_are_exact(self, trial: Judged) -> None:
        """Every rank gets its part of every tensor, as it is stored, or all refuse: `trial`."""
        trial.by("shares_are_exact")

    def test_several_files_are_one(self, trial: Judged) -> None:
        """The same tensors in several files and an index give the same shares: `trial`."""
        trial.by("several_files_are_one")

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_refused(self, trial: Judged, damage: str) -> None:
        """A file that is cut short, lacks scales, or has too few, raises: `trial`, `damage`."""
        trial.by(f"{damage.replace('-', '_')}_is_refused")
