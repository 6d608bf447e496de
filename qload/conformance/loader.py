"""`LoaderSuite`: tests of loaders of every rank's share of a checkpoint."""

from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from qload.conformance.cases import ConformanceCase, check_tier
from qload.conformance.suite import CaseRun, Suite
from qload.testing.traits import contract

SIZES = {"K": 512, "N": 1024}  # of a hidden state, and between the layers of a block
DAMAGES = ("cut-short", "scales-missing", "wrong-shape")


class LoaderSuite(Suite):
    """Tests of loaders of a rank's share of a checkpoint's files: derive, and define how to call it.

    The checkpoint has `model.layers.0.self_attn.q_proj` and `model.layers.0.mlp.up_proj`, split along their
    outputs, and `o_proj` and `down_proj`, split along their inputs.

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
        """Return the share of `rank` in a `world` of ranks: stored tensors by full name.

        `files`: safetensors files; `config.json` is in their folder. Raise an error for an impossible split.
        """

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """Return the cases of a `tier`: whole layers first, then those of two, four and eight ranks."""
        check_tier(tier)
        allowed, smoke = contract(cls.format), tier == "smoke"
        traits = [allowed.common(cls.format)] if smoke else allowed.corners(cls.format)
        return tuple(
            ConformanceCase(**{**asdict(replace(each, dtype=dtype)), **SIZES, "world": world})
            for world in ((1, 2) if smoke else (1, 2, 4, 8))
            for dtype in cls.dtypes
            for each in traits
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest, tmp_path: Path) -> CaseRun:
        """The run of the `case`, with files under pytest's `tmp_path`."""
        from qload.conformance.loader_checks import LoaderChecks

        return CaseRun(self, case, request, lambda case, device: LoaderChecks(self, case, tmp_path))

    def test_shares_are_exact(self, trial: CaseRun) -> None:
        """Every rank gets its part of every stored tensor, or all refuse: `trial`."""
        trial.check("shares_are_exact")

    def test_several_files_are_one(self, trial: CaseRun) -> None:
        """The same tensors in several files with an index give the same shares: `trial`."""
        trial.check("several_files_are_one")

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_refused(self, trial: CaseRun, damage: str) -> None:
        """A truncated file, and one with too few scales or none, raises an error: `trial`, `damage`."""
        trial.check(f"{damage.replace('-', '_')}_is_refused")
