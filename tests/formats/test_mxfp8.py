"""MXFP8: bytes, and a power of two for every 32 inputs."""

from typing import Any

import pytest
import torch

from qload.configs import FoundConfig
from qload.detect import read_claims
from qload.errors import CutError, ShapeError
from qload.formats import MXFP8Config, MXFP8Weight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

VALUES = torch.tensor([1.0, -448, 2.0**-9, 0]).repeat(16).to(torch.float8_e4m3fn)[None]
LAYER = {"a.weight": VALUES, "a.weight_scale": torch.tensor([[126, 129]], dtype=torch.uint8)}


def weights(layer: dict[str, torch.Tensor], rank: Rank | None = None, **options: Any) -> Weights:
    loader = FormatLoader(ConfiguredFormat(MXFP8Weight, MXFP8Config()))
    return Weights(MemoryStorage(layer), loader=loader, process_group=rank, **options)


def test_dequantize_by_hand() -> None:
    """Exponents 126 and 129 are the factors 1/2 and 4."""
    weight = weights(LAYER).get_weights("a")

    assert weight.dequantize().tolist() == [[0.5, -224, 2.0**-10, 0] * 8 + [4, -1792, 2.0**-7, 0] * 8]


@pytest.mark.parametrize(("exponent", "factor"), [(0, 2.0**-127), (254, 2.0**127)])
def test_the_ends_of_the_exponents_are_exact(exponent: int, factor: float) -> None:
    layer = {**LAYER, "a.weight_scale": torch.full((1, 2), exponent, dtype=torch.uint8)}

    assert weights(layer).get_weights("a").dequantize()[0, 0] == factor


def test_the_last_exponent_is_no_number() -> None:
    layer = {**LAYER, "a.weight_scale": torch.tensor([[127, 255]], dtype=torch.uint8)}

    got = weights(layer, nonfinite="allow").get_weights("a").dequantize()
    assert got[0, :32].isfinite().all()
    assert got[0, 32:].isnan().all()


def test_a_row_share_takes_whole_groups() -> None:
    first, second = (weights(LAYER, rank).get_weights_row("a") for rank in FakeWorld(2))

    assert torch.equal(
        torch.cat([first.dequantize(), second.dequantize()], 1), weights(LAYER).get_weights("a").dequantize()
    )
    with pytest.raises(CutError, match="cuts must be multiples of 32 "):
        weights(LAYER, Rank(0, 4)).get_weights_row("a")


def test_exponents_that_are_short_of_one_are_refused() -> None:
    layer = {**LAYER, "a.weight_scale": torch.tensor([[127]], dtype=torch.uint8)}

    with pytest.raises(ShapeError, match=r"a\.weight"):
        weights(layer).get_weights("a")


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_either_list_excludes_modules(key: str) -> None:
    source = FoundConfig("config.json", "quantization_config", {"quant_method": "mxfp8", key: ["lm_head"]})

    exclusions = read_claims(source).exclusions

    assert (exclusions.selects("lm_head"), exclusions.selects("up")) == (True, False)
