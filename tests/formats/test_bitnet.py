"""BitNet: ternary codes whose scale divides or multiplies, plain codes, online weights, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import CutError, DtypeError, FieldValueError, ShapeError, UnsupportedFormatError
from qload.formats import BitNetConfig, BitNetWeight
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

CODES = torch.arange(16 * 8).reshape(16, 8) * 5 % 3 - 1


def words(codes: Tensor) -> Tensor:
    fields = (codes + 1).reshape(4, -1, codes.shape[1])
    return sum(field << 2 * at for at, field in enumerate(fields)).to(torch.uint8)


def weights(stored: dict[str, Tensor], rank: Any = None, **section: Any) -> Weights:
    storage = MemoryStorage({f"up.{name}": tensor for name, tensor in stored.items()})
    loader = loader_from_config({"quant_method": "bitnet", **section}, storage)
    return Weights(storage, loader=loader, process_group=rank)


def layer(scale: float) -> dict[str, Tensor]:
    return {"weight": words(CODES), "weight_scale": torch.tensor([scale]).bfloat16()}


def test_a_byte_by_hand() -> None:
    """The byte 0b10_01_00_10 has the outputs 0 to 3: 1, -1, 0, 1."""
    tensors = {
        "weight": torch.tensor([[0b10_01_00_10]], dtype=torch.uint8),
        "weight_scale": torch.tensor([4.0]),
    }

    for divide, times in ((True, 0.25), (False, 4.0)):
        weight = BitNetWeight(config=BitNetConfig(divide), **tensors)
        assert weight.dequantize().tolist() == [[times], [-times], [0], [times]]


@pytest.mark.parametrize(("kind", "scale"), [("bitlinear", 3.0), ("autobitlinear", 0.1), (None, 0.1)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shares_are_packed_anew(kind: str | None, scale: float, world: int) -> None:
    """Without a linear_class the scale divides."""
    rounded = torch.tensor(scale).bfloat16().float()
    want = CODES * rounded if kind == "autobitlinear" else CODES / rounded
    section = {"linear_class": kind} if kind else {}
    ranks = [weights(layer(scale), rank, **section) for rank in FakeWorld(world)]

    rows = [rank.get_weights_col("up") for rank in ranks]
    assert {tuple(row.weight.shape) for row in rows} == {(4 // world, 8)}
    assert torch.equal(torch.cat([row.dequantize() for row in rows]), want)
    assert torch.equal(torch.cat([rank.get_weights_row("up").dequantize() for rank in ranks], 1), want)
    if world < 4:  # blocks of at least four outputs
        blocks = [rank.get_weights_col_packed("up", 2).dequantize() for rank in ranks]
        assert torch.equal(torch.stack(blocks).reshape(world, 2, -1, 8).swapaxes(0, 1).reshape(16, 8), want)
    assert not ranks[0].report().unused


def test_outputs_are_cut_at_whole_bytes() -> None:
    with pytest.raises(CutError, match=r"multiples of 4   as weight is \(N/4, K\)"):
        weights(layer(1.0), next(iter(FakeWorld(8)))).get_weights_col("up")


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_fused_parts_keep_their_scales(kind: str) -> None:
    stored = {"q": layer(2.0), "k": layer(8.0)}
    storage = MemoryStorage({f"{name}.{key}": t for name, part in stored.items() for key, t in part.items()})
    loader = loader_from_config({"quant_method": "bitnet", "linear_class": kind}, storage)

    fused = Weights(storage, loader=loader).get_multi_weights_col(["q", "k"])

    want = [CODES / 2, CODES / 8] if kind == "bitlinear" else [CODES * 2, CODES * 8]
    assert torch.equal(fused.dequantize(), torch.cat(want).float())


def test_codes_that_are_stored_as_floats() -> None:
    stored = {"weight": CODES.bfloat16(), "weight_scale": torch.tensor([0.5]).bfloat16()}

    got = weights(stored, linear_class="autobitlinear").get_weights("up")
    assert torch.equal(got.dequantize(), CODES / 2)

    with pytest.raises(DtypeError):
        weights(stored, linear_class="bitlinear").get_weights("up")


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.tensor([[0, 0b00_11_00_00]], dtype=torch.uint8), "codes of 0, 1 and 2 in two bits"),
        (torch.tensor([[0, 0b11_00_10_01]], dtype=torch.uint8), "codes of 0, 1 and 2 in two bits"),
        (torch.tensor([[1, 0.5]]).bfloat16(), "-1, 0 or 1"),
    ],
)
def test_codes_that_are_not_ternary_are_errors(weight: Tensor, text: str) -> None:
    stored = {"weight": weight, "weight_scale": torch.ones(1)}

    with pytest.raises(FieldValueError, match=r"up\.weight: not a ternary code") as caught:
        weights(stored, linear_class="autobitlinear").get_weights("up")

    assert caught.value.expected == text
    assert caught.value.got.endswith("at (0, 1); 1 of 2 have one")


def test_online_weights_are_plain() -> None:
    stored = {"weight": torch.ones(4, 8)}
    opened = weights(stored, linear_class="autobitlinear", quantization_mode="online")

    assert opened.get_weights("up").plain


@pytest.mark.parametrize(
    ("section", "formats"),
    [
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, 0),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, 1),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, 1),  # bitlinear has no such mode
    ],
)
def test_online_layers_have_no_format(section: dict[str, str], formats: int) -> None:
    source = FoundConfig("config.json", "quantization_config", {"quant_method": "bitnet", **section})

    assert len(read_claims(source).formats) == formats


def test_online_weights_get_a_note() -> None:
    section = {"linear_class": "autobitlinear", "quantization_mode": "online", "quant_method": "bitnet"}

    notes = read_claims(FoundConfig("config.json", "quantization_config", section)).notes

    assert notes[0].startswith(
        "config.json has quantization_mode online: transformers quantizes weights when"
    )


def test_a_norm_of_each_layer_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        loader_from_config({"quant_method": "bitnet", "use_rms_norm": True})

    assert str(caught.value) == (
        "bitnet with use_rms_norm: not read by this qload\n"
        "  reason   config adds a norm before each layer, which is no part of the weight\n"
        "  known    bitnet (bitlinear, autobitlinear)\n"
        "  remedy   transformers loads it; or apply the norms outside, and state use_rms_norm false"
    )


def test_scales_of_parts_and_norms_of_a_layer_are_errors() -> None:
    with pytest.raises(ShapeError, match=r"up\.weight_scale"):
        weights(layer(1.0) | {"weight_scale": torch.ones(2)}).get_weights("up")

    with pytest.raises(UnsupportedFormatError, match=r"up\.rms_norm\.weight changes the result of the layer"):
        weights(layer(1.0) | {"rms_norm.weight": torch.ones(8)}).get_weights("up")
