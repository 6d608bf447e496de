"""NVFP4, as compressed-tensors and as ModelOpt write it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import CutError, ShapeError
from qload.formats import CTNVFP4Weight, ModelOptNVFP4Weight, NVFP4Config
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

CODES = torch.arange(0x10, 0x100, 0x22).to(torch.uint8)  # 0x10, 0x32, ... 0xFE: the codes 0 to 15 in order
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
NAMES = {
    CTNVFP4Weight: ("weight_packed", "weight_global_scale"),
    ModelOptNVFP4Weight: ("weight", "weight_scale_2"),
}
BOTH = pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.format)


def layer(kind: Any, N: int = 1, groups: int = 2, second: float = 4.0) -> dict[str, Tensor]:
    """Every group holds the codes 0 to 15; the scale of group g is 2**g."""
    packed, other = NAMES[kind]
    scales = (2.0 ** torch.arange(groups)).expand(N, groups).contiguous()
    return {
        packed: CODES.repeat(N, groups),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        other: torch.tensor(second),
    }


def load(kind: Any, *layers: dict[str, Tensor], dim: str = "N", rank: Any = None) -> Any:
    named = {f"{i}.{name}": tensor for i, one in enumerate(layers) for name, tensor in one.items()}
    loader = FormatLoader(ConfiguredFormat(kind, NVFP4Config()))
    weights = Weights(MemoryStorage(named), loader=loader, process_group=rank)
    if len(layers) > 1:
        return weights.get_multi_weights_col([str(i) for i in range(len(layers))])
    return weights.get_weights_row("0") if dim == "K" else weights.get_weights_col("0")


@pytest.mark.parametrize(("kind", "factor"), [(CTNVFP4Weight, 1 / 4), (ModelOptNVFP4Weight, 4)])
def test_dequantize_by_hand(kind: Any, factor: float) -> None:
    """One of them divides by the second scale, the other multiplies."""
    packed, other = NAMES[kind]
    weight = kind(config=NVFP4Config(), **{**layer(kind), other: torch.tensor([4.0])})

    assert weight.dequantize().tolist() == [
        [value * factor for value in VALUES] + [2 * value * factor for value in VALUES]
    ]
    assert weight.fields()[packed].dtype == torch.uint8


@BOTH
def test_fused_parts_keep_a_second_scale_each(kind: Any) -> None:
    parts = [layer(kind, N=2, second=0.5), layer(kind, N=1, second=2.0)]

    got = load(kind, *parts).dequantize()

    apart = [load(kind, part).dequantize() for part in parts]
    assert torch.equal(got, torch.cat(apart))
    assert not torch.equal(apart[0][:1], apart[1])


@BOTH
def test_a_row_share_takes_whole_groups(kind: Any) -> None:
    share = load(kind, layer(kind, second=1.0), dim="K", rank=Rank(1, 2))

    assert share.dequantize().tolist() == [[2 * value for value in VALUES]]
    with pytest.raises(CutError, match="cuts must be multiples of 16 "):
        load(kind, layer(kind), dim="K", rank=Rank(0, 4))


@BOTH
def test_several_second_scales_for_one_tensor_are_refused(kind: Any) -> None:
    other = NAMES[kind][1]

    with pytest.raises(ShapeError, match=rf"0\.{other}: wrong shape\n  expected \(\) or \(1,\)"):
        load(kind, {**layer(kind), other: torch.ones(2)})


@BOTH
def test_the_activations_scale_goes_along(kind: Any) -> None:
    name = "input_global_scale" if kind is CTNVFP4Weight else "input_scale"

    assert load(kind, {**layer(kind), name: torch.tensor(7.0)}).fields()[name].tolist() == [7]
