"""EETQ: codes by hand, its owner's numbers, shares of what no slice shows, and its variant of 4 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qload.detect import EETQWeightsLoader, loader_from_config
from qload.errors import ConfigError, CutError, ShapeError, UnsupportedFormatError
from qload.formats import EETQConfig, EETQWeight, UnquantizedWeight
from qload.layouts import eetq
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.paths import cases
from tests.support import owners

pytestmark = pytest.mark.usefixtures("seen_texts")

CONFIG = {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": None}
LOADS = [("N", Weights.get_weights_col), ("K", Weights.get_weights_row)]
every_fixture = pytest.mark.parametrize("folder", cases("eetq"), ids=lambda folder: folder.name)


def read(folder: Path) -> owners.Owned:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    owner = load_file(folder / "expected" / "expected.safetensors")
    return owners.Owned(load_file(folder / "model.safetensors"), config, owner)


def layer(N: int = 128, K: int = 192, name: str = "weight", seed: int = 0) -> dict[str, Tensor]:
    """Every byte, and scales of every power of two that is plain in fp16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"a.{name}": torch.randint(-128, 128, (K, N), dtype=torch.int8, generator=generator),
        "a.weight_scales": 2.0 ** (torch.arange(N) % 20 - 10).half(),
    }


def load(tensors: dict[str, Tensor], rank: Rank | None = None) -> Weights:
    return Weights(MemoryStorage(tensors), loader=EETQWeightsLoader(), process_group=rank)


def test_two_codes_by_hand() -> None:
    """Byte 0 is code 128 + 3 of output 0 and input 0; byte 65 is code 128 - 2 of output 1 and input 8."""
    weight = EETQWeight(
        config=EETQConfig(),
        weight=torch.full((64, 64), -128, dtype=torch.int8),
        weight_scales=torch.arange(64).half(),
    )
    weight.weight_scales[0] = 0.5
    weight.weight[0, 0], weight.weight[1, 1] = 131 - 256, 126

    found = weight.dequantize()

    assert found.nonzero().tolist() == [[0, 0], [1, 8]]
    assert (found[0, 0].item(), found[1, 8].item()) == (1.5, -2)


@every_fixture
def test_a_layer_has_its_owners_numbers(folder: Path, tmp_path: Path) -> None:
    owners.check_whole(read(folder), tmp_path)


@every_fixture
def test_its_codes_are_those_its_owner_had_before_they_were_ordered(folder: Path) -> None:
    layer = read(folder)

    codes = layer.weight.codes()

    assert_same_bits(codes.codes.view(torch.int8).T ^ -128, layer.owner["repacked.unprocessed.int8"])
    assert_same_bits(eetq.pack(codes.codes), layer.weight.weight)


@every_fixture
@pytest.mark.parametrize("world", [2, 4])
def test_shares_have_their_owners_numbers_or_are_refused(folder: Path, world: int, tmp_path: Path) -> None:
    owners.check_shares(read(folder), tmp_path, world)


@pytest.mark.parametrize(("dim", "get"), LOADS, ids=["N", "K"])
def test_a_share_is_no_slice_of_what_is_stored(dim: str, get: Any) -> None:
    tensors = layer(N=128, K=128)
    whole = load(tensors).get_weights("a").dequantize()

    first, second = (get(load(tensors, rank), "a") for rank in FakeWorld(2))

    axis = 0 if dim == "N" else 1
    assert_same_bits(torch.cat([first.dequantize(), second.dequantize()], axis), whole)
    sliced = tensors["a.weight"].chunk(2, 1 - axis)[0].contiguous()
    assert not torch.equal(first.weight, sliced)


@pytest.mark.parametrize(("dim", "get"), LOADS, ids=["N", "K"])
def test_a_cut_off_the_64_is_refused(dim: str, get: Any) -> None:
    with pytest.raises(
        CutError, match=f"a.weight: cannot cut {dim} = 192 at 96 .*\n  cuts must be multiples of 64"
    ):
        get(load(layer(N=192, K=192), Rank(0, 2)), "a")


def test_fused_layers_are_joined_as_pairs_of_outputs() -> None:
    tensors = layer() | {name.replace("a.", "b."): each for name, each in layer(N=64, seed=1).items()}

    fused = load(tensors).get_multi_weights_col(["a", "b"])

    parts = [load(tensors).get_weights(prefix).dequantize() for prefix in ("a", "b")]
    assert_same_bits(fused.dequantize(), torch.cat(parts))


def test_eetqs_own_layers_say_qweight() -> None:
    theirs, ours = (load(layer(name=name)) for name in ("qweight", "weight"))

    assert_same_bits(theirs.get_weights("a").dequantize(), ours.get_weights("a").dequantize())
    assert theirs.report().complete


def test_a_layer_that_fills_no_tile_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"K = 96 has to be a multiple of 64"):
        load(layer(K=96)).get_weights("a")


def test_a_plain_layer_beside_them_stays_plain() -> None:
    tensors = layer() | {"b.weight": torch.ones(8, 8, dtype=torch.float16)}

    assert isinstance(load(tensors).get_weights("b"), UnquantizedWeight)
    assert isinstance(load(tensors).get_weights("a"), EETQWeight)


def test_two_codes_a_byte_are_refused_by_name() -> None:
    tensors = layer(N=64) | {"a.weight_scales": torch.ones(128, dtype=torch.float16)}

    with pytest.raises(UnsupportedFormatError) as caught:
        load(tensors).get_weights("a")

    assert str(caught.value).splitlines() == [
        "eetq_int4: not read by this qload",
        "  reason   a.weight has two codes a byte: 64 columns for 128 scales",
        "  remedy   EETQ itself loads it; quantize the model anew with 8 bits",
    ]


@pytest.mark.parametrize("config", [CONFIG, {"quant_method": "eetq"}], ids=["", "weights not said"])
def test_a_config_of_8_bits_is_read(config: dict[str, Any]) -> None:
    source = Weights(MemoryStorage(layer()), loader=loader_from_config(config))

    assert source.get_weights("a").config == EETQConfig()


def test_a_config_of_4_bits_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormatError, match="eetq_int4: not read by this qload"):
        loader_from_config({**CONFIG, "weights": "int4"})


@pytest.mark.parametrize(("key", "value"), [("weights", 8), ("weights", ""), ("modules_to_not_convert", {})])
def test_a_malformed_config_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_config.{key}\n"):
        loader_from_config({**CONFIG, key: value})


@pytest.mark.parametrize(("offset", "stride"), [(0, 128), (1, 128), (2, 128), (4, 128), (0, 256)])
def test_words_of_four_bytes_begin_at_multiples_of_four(offset: int, stride: int) -> None:
    bytes_ = layer(128, 192)["a.weight"]
    memory = torch.zeros(4 + 192 * stride, dtype=torch.int8)
    placed = torch.as_strided(memory, (192, 128), (stride, 1), offset)
    placed.copy_(bytes_)
    weight = EETQWeight(config=EETQConfig(), weight=placed, weight_scales=torch.ones(128).half())
    sound = EETQWeight(config=EETQConfig(), weight=bytes_, weight_scales=torch.ones(128).half())

    assert (weight.stored() is None) == (offset % 4 != 0 or stride != 128)
    assert_same_bits(weight.dequantize(), sound.dequantize())


def test_a_layer_without_inputs_has_no_words() -> None:
    empty = torch.zeros(0, 128, dtype=torch.int8)
    weight = EETQWeight(config=EETQConfig(), weight=empty, weight_scales=torch.ones(128).half())

    assert weight.stored() is None
    assert weight.dequantize().shape == (128, 0)
