"""A loader for each module: the first that knows it, or the default."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, MismatchError, MissingTensorError
from qload.formats import CTIntConfig, CTIntWeight, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader, ModuleLoader
from qload.parallel import FakeWorld
from qload.spec import ActivationScheme
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
CHANNEL, GROUPS = (ConfiguredFormat(CTIntWeight, CTIntConfig(block)) for block in ((1, -1), (1, 2)))


def quantized(scale: Tensor) -> dict[str, Tensor]:
    return {"weight": torch.ones(2, 4, dtype=torch.int8), "weight_scale": scale}


LAYERS = {
    "a.q": quantized(torch.full((2, 1), 3.0)),
    "a.k": quantized(torch.tensor([[5.0, 7.0]] * 2)),
    "a.v": {"weight": torch.full((2, 4), 9.0)},
    "a.w": quantized(torch.full((2, 1), 4.0)),
}


def load(
    *choices: tuple[str, ConfiguredFormat], default: ConfiguredFormat = PLAIN, rank: Any = None
) -> Weights:
    stored = {f"{prefix}.{name}": t for prefix, layer in LAYERS.items() for name, t in layer.items()}
    loader = ModuleLoader(
        [
            (lambda name, end=end: name.endswith(end), FormatLoader(weight_type))
            for end, weight_type in choices
        ],
        FormatLoader(default),
    )
    return Weights(MemoryStorage(stored), loader=loader, process_group=rank)


def test_each_module_is_loaded_by_the_first_that_knows_it() -> None:
    weights = load(("q", CHANNEL), ("k", GROUPS), ("q", GROUPS))

    assert weights.get_weights("a.q").dequantize().unique().tolist() == [3]
    assert weights.get_weights("a.k").dequantize()[0].tolist() == [5, 5, 7, 7]
    assert isinstance(weights.get_weights("a.v"), UnquantizedWeight)


def test_a_module_that_none_knows_is_loaded_by_the_default() -> None:
    assert load(default=CHANNEL).get_weights("a.q").config == CTIntConfig((1, -1))
    with pytest.raises(MissingTensorError, match=r"a\.q\.weight_zero_point"):
        load(default=ConfiguredFormat(CTIntWeight, CTIntConfig((1, -1), symmetric=False))).get_weights("a.q")


@pytest.mark.parametrize(
    ("other", "what"),
    [("a.k", "differ in config"), ("a.v", "differ in format")],
)
def test_fused_parts_of_different_loaders_are_refused_by_every_rank_with_both_names(
    other: str, what: str
) -> None:
    texts = set()
    for rank in FakeWorld(2):
        weights = load(("q", CHANNEL), ("k", GROUPS), rank=rank)
        with pytest.raises(MismatchError) as caught:
            weights.get_multi_weights_col(["a.q", other])
        texts.add(str(caught.value))

    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith(f"{other}: parts of a fused layer {what}")
    assert "as in a.q" in text


def test_fused_parts_of_loaders_that_make_the_same_of_them_fuse() -> None:
    fused = load(("q", CHANNEL), ("w", CHANNEL)).get_multi_weights_col(["a.q", "a.w"])

    assert fused.dequantize()[:, 0].tolist() == [3, 3, 4, 4]


def test_parts_whose_scales_of_inputs_are_found_by_another_arithmetic_do_not_fuse() -> None:
    scheme = ActivationScheme("int", 8, dynamic=True, strategy="token")
    one = replace(CHANNEL, activations=scheme)
    other = replace(CHANNEL, activations=replace(scheme, owner="transformers"))

    with pytest.raises(MismatchError, match=r"quantize inputs apart\n(.|\n)*owner='transformers'"):
        load(("q", one), ("w", other)).get_multi_weights_col(["a.q", "a.w"])
    assert load(("q", one), ("w", one)).get_multi_weights_col(["a.q", "a.w"]).activations == scheme


def test_parts_of_which_one_takes_its_inputs_as_they_come_do_not_fuse() -> None:
    quantized = replace(CHANNEL, activations=ActivationScheme("int", 8, dynamic=True, strategy="token"))
    weights = load(("q", quantized), ("w", replace(CHANNEL, activations=None)))

    with pytest.raises(MismatchError, match="quantize inputs apart"):
        weights.get_multi_weights_col(["a.q", "a.w"])


def test_every_room_is_listed_once_and_no_single_config_can_be_changed() -> None:
    loader = load(("q", CHANNEL), ("k", GROUPS), ("w", CHANNEL)).loader

    assert isinstance(loader, ModuleLoader)
    assert loader.formats == (CHANNEL, GROUPS, PLAIN)
    with pytest.raises(
        ArgumentError, match=r"^changes\n  expected none: each module has its own config\n  got      bits$"
    ):
        loader.with_config(bits=4)
