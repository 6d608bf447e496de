"""Complete output of verify for damage: all findings, one model per damage, with numbers and remedy."""

from collections.abc import Iterator
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.loader import FormatLoader
from qload.verify import verify
from qload.verify.values.contents import Numbers, NumbersAccumulator
from qload.verify.values.measure import measure_codes
from tests.verify.damage import planted
from tests.verify.test_planted import NAMES, damaged, sound

PREFIXES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def cases() -> Iterator[Any]:
    """Yield each damage in one model; neighbours in the list use different models if possible."""
    for place, plant in enumerate(planted.PLANTS):
        turned = [*NAMES[place % len(NAMES) :], *NAMES[: place % len(NAMES)]]
        name = next(name for name in turned if damaged(name, plant) is not None)
        yield pytest.param(name, plant, id=plant.__name__)


@pytest.mark.parametrize(("name", "plant"), list(cases()))
def test_the_findings_of_a_damage(
    name: str, plant: planted.Plant, golden: SnapshotAssertion, tmp_path: Path
) -> None:
    model = damaged(name, plant)
    assert model is not None

    report = verify(model.write(tmp_path / "damaged"))

    lines = [
        f"{one.severity} {one.rule} {one.tensor}: {one.message} ({one.remedy})" for one in report.findings
    ]
    told = "\n".join([name, report.verdict, *lines, *report.notes])
    assert told.replace(str(tmp_path), "TMP") == golden


@pytest.mark.parametrize("name", NAMES)
def test_the_statistics_of_sound_layers(name: str, golden: SnapshotAssertion, tmp_path: Path) -> None:
    lines = []
    with open_checkpoint(sound(name).write(tmp_path / "sound")) as weights:
        loader = weights.loader
        assert isinstance(loader, FormatLoader)
        for prefix in PREFIXES:
            if not any(known.startswith(f"{prefix}.") for known in [*weights.storage.keys()]):
                continue
            found = measure_codes(weights, loader, loader.describe(weights, prefix))
            lines += [prefix] if found is None else [prefix, *(shown(found))]

    assert "\n".join(lines) == golden


def shown(found: Any) -> Iterator[str]:
    """Yield the fields of the statistics, floats to four digits for equality on every machine."""
    for field in fields(found):
        value = getattr(found, field.name)
        yield f"  {field.name} {f'{value:.4g}' if isinstance(value, float) else value}"


def numbers(*pieces: Tensor, **options: bool) -> Numbers:
    made = NumbersAccumulator(**{"exponents": False, "fully": False} | options)
    for piece in pieces:
        made.add(piece)
    return made.finish()


@pytest.mark.parametrize(
    ("pieces", "low", "high", "quantiles"),
    [
        ([], 0, 0, (0, 0, 0)),
        ([[0.0, 0.0]], 0, 0, (0, 0, 0)),
        ([[-3.0, 2.0, 0.0]], -3, 2, (2, 2, 2)),
        ([[1.0], [-5.0]], -5, 1, (1, 1, 1)),
        ([[*range(1, 22)]], 1, 21, (2, 11, 20)),
        ([[1.0, inf]], 1, inf, (1, 1, 1)),
        ([[-inf, 2.0]], -inf, 2, (2, 2, 2)),
    ],
)
def test_the_range_and_the_quantiles_of_floats(
    pieces: list[list[float]], low: float, high: float, quantiles: tuple[float, float, float]
) -> None:
    found = numbers(*(torch.tensor(piece, dtype=torch.float32) for piece in pieces))

    assert (found.low, found.high, found.quantiles) == (low, high, quantiles)
    assert (found.largest, found.median) == (max(abs(low), abs(high)), quantiles[1])
    assert found.finite == (inf not in (abs(low), abs(high)))
    assert (found.count, found.retyped) == (sum(map(len, pieces)), (0.0, 0.0, 0.0))


def test_a_number_that_is_none_is_kept_whatever_comes_after() -> None:
    for pieces in ([[nan], [1.0]], [[1.0], [nan]], [[1.0, nan, 2.0], [3.0]]):
        found = numbers(*map(torch.tensor, pieces))
        assert found.largest != found.largest
        assert not found.finite


def test_zeros_and_the_least_are_counted_of_scales_alone() -> None:
    values = torch.tensor([0.0, -0.25, 4.0, -0.0, inf])

    found, usual = numbers(values, values[:1], fully=True), numbers(values)
    assert (found.zeros, found.least) == (3, 0.25)
    assert (usual.zeros, usual.least) == (0, inf)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
    ids=str,
)
def test_the_range_of_bytes_is_that_of_the_floats_they_are(dtype: torch.dtype) -> None:
    for values in ([1.0, 0.5], [-2.0, 1.0], [0.0, 0.0], [4.0, -0.5]):
        found = numbers(torch.tensor(values).to(dtype))
        assert found.largest == max(map(abs, values))
        assert (found.low < 0) == (min(values) < 0)
    nothing = torch.tensor([0x7F if "fnuz" not in str(dtype) else 0x80, 0], dtype=torch.uint8).view(dtype)
    assert not numbers(nothing).finite


def test_exponents_are_powers_of_two() -> None:
    found = numbers(torch.tensor([126, 127, 130], dtype=torch.uint8), exponents=True, fully=True)

    assert (found.low, found.high, found.least) == (0.5, 8, 0.5)
    assert not numbers(torch.tensor([1, 255], dtype=torch.uint8), exponents=True).finite


def test_bits_of_one_float_type_are_shown_as_the_other() -> None:
    half = torch.tensor([1.0, 1.0], dtype=torch.float16)

    assert numbers(half).retyped == (half.view(torch.bfloat16).float()[0].item(),) * 3
    assert numbers(half.bfloat16()).retyped == (half.bfloat16().view(torch.float16).float()[0].item(),) * 3
