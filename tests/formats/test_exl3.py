"""EXL3: a tile that is known by heart, a decoder of bits in text, float64's Hadamard matrices, and damage."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import CutError, MismatchError, MissingTensorError, QloadError, ShapeError, TwoFormatsError
from qload.experts import GatedActivation
from qload.formats import Exl3Config, Exl3Weight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.models.feed_forward import GatedFeedForward
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

MCG, MUL1 = 0xCBAC1FED, 0x83DCD12D
LAYER = FormatLoader(ConfiguredFormat(Exl3Weight, Exl3Config()))


def marker(value: int) -> Tensor:
    return torch.tensor(value - (1 << 32), dtype=torch.int32)


MARKERS = {"3inst": {}, "mcg": {"mcg": marker(MCG)}, "mul1": {"mul1": marker(MUL1)}}


def layer(codebook: str, bits: float, N: int = 128, K: int = 128) -> dict[str, Tensor]:
    """Draw a layer of random bits and scales of either sign."""
    draw = torch.Generator().manual_seed(int(bits * 10) + len(codebook))
    shape = (K // 16, N // 16, int(16 * bits))
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=draw).to(torch.int16)
    scales = {"suh": torch.randn(K, generator=draw).half(), "svh": torch.randn(N, generator=draw).half()}
    return {"trellis": words, **scales, **MARKERS[codebook]}


def named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def weight_of(tensors: dict[str, Any]) -> Exl3Weight:
    return Exl3Weight(config=Exl3Config(), **tensors)


@pytest.mark.parametrize(
    ("codebook", "corner"),
    [
        pytest.param("3inst", 98.3125, id="3inst: 0x38B4 + 0x31C4, 0.587890625 + 0.18017578125"),
        pytest.param("mcg", 236, id="mcg: twice 0x3B60, 0.921875"),
        pytest.param("mul1", -442, id="mul1: 1024 * 1774 / 2**18 - 10.3828125"),
    ],
)
def test_zeros_by_hand(codebook: str, corner: float) -> None:
    """State 0 everywhere: of a constant matrix Hadamard matrices leave 128 times the value in a corner."""
    tensors = layer(codebook, 2)
    tensors["trellis"].zero_()
    tensors["suh"][0], tensors["svh"][0] = 2, -0.5

    values = weight_of(tensors).dequantize()

    assert values[0, 0] == -corner
    assert values.count_nonzero() == 1


def decode(tile: Tensor, bits: float, codebook: str) -> np.ndarray[Any, np.dtype[np.float16]]:
    """Decode a tile (16 * bits,) to values (inputs, outputs), bit by bit, in the text of its words."""
    ring = "".join(f"{word:032b}" for word in tile.numpy().view("<u4").tolist())
    values, end = np.zeros((16, 16), np.float16), 0
    for t in range(256):
        end += int(bits) + (t % 2 if bits % 1 else 0)
        state = int((ring + ring)[end + len(ring) - 16 :][:16] if end < 16 else ring[end - 16 : end], 2)
        lane, j = divmod(t, 8)
        row, column = 2 * (lane % 4) + (0, 1, 8, 9)[j % 4], lane // 4 + 8 * (j // 4)
        values[row, column] = value_of(state, codebook)
    return values


def value_of(state: int, codebook: str) -> np.float16:
    """Value of a state, in numpy's half precision."""
    if codebook == "mul1":
        total = sum((state * MUL1 & 0xFFFFFFFF).to_bytes(4, "little"))
        h, factor, added = np.array([0x6400 + total, 0x1EEE, 0xC931], np.uint16).view(np.float16).tolist()
        return np.float16(h * factor + added)  # exact in float64
    y = state * MCG if codebook == "mcg" else state * 89226354 + 64248484
    halves = np.array([y & 0x8FFF8FFF ^ 0x3B603B60], np.uint64).astype(np.uint32).view(np.float16)
    return np.float16(halves[0] + halves[1])


WIDTHS = [
    *(("3inst", bits) for bits in (1, 2, 3, 4, 5, 6, 7, 8)),
    *(("mcg", bits) for bits in (1, 3, 8)),
    *(("mul1", bits) for bits in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)),
]


@pytest.mark.parametrize(("codebook", "bits"), WIDTHS)
def test_every_codebook_and_width_is_decoded(codebook: str, bits: float) -> None:
    tensors = layer(codebook, bits)
    weight = weight_of(tensors)

    values = weight.codes().dequantize()

    for k, n in ((0, 0), (7, 2)):
        want = torch.from_numpy(decode(tensors["trellis"][k, n], bits, codebook)).float().T
        assert_same_bits(values[16 * n : 16 * n + 16, 16 * k : 16 * k + 16].contiguous(), want.contiguous())
    assert (weight.config.bits, weight.config.codebook) == (bits, codebook)


def hadamard(size: int) -> Tensor:
    """Block-diagonal matrix: -1 where the positions within a block of 128 share an odd number of bits."""
    block = [[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return torch.kron(torch.eye(size // 128, dtype=torch.float64), torch.tensor(block, dtype=torch.float64))


def test_a_layer_is_its_values_between_hadamard_matrices_and_scales() -> None:
    """Sums and the product of two scales are exact in float64, so that no order of them matters."""
    weight: Any = weight_of(layer("mul1", 2.5, N=256, K=384))
    sums = hadamard(256) @ weight.codes().dequantize().double() @ hadamard(384)

    want = sums / 128 * (weight.svh.double()[:, None] * weight.suh.double())

    assert_same_bits(weight.dequantize(), want.float())


def test_signs_of_older_files_are_scales_of_one() -> None:
    tensors = layer("3inst", 3)
    signs = {"su": torch.arange(-4, 4, dtype=torch.int16), "sv": torch.arange(8, dtype=torch.int16) * 4099}
    as_text = {name: "".join(f"{v & 0xFFFF:016b}"[::-1] for v in t.tolist()) for name, t in signs.items()}
    scales = {
        f"{name}h": torch.tensor([1.0 - 2 * int(bit) for bit in text]).half()
        for name, text in as_text.items()
    }

    old = weight_of({"trellis": tensors["trellis"], **signs})

    assert_same_bits(old.dequantize(), weight_of({**tensors, **scales}).dequantize())


@pytest.mark.parametrize("field", ["su", "sv"])
def test_a_bit_of_a_sign_turns_one_input_or_output(field: str) -> None:
    """Bit 3 of the second word is the sign of entry 19."""
    words = {
        "trellis": layer("3inst", 3)["trellis"],
        **{name: torch.zeros(8).short() for name in ("su", "sv")},
    }
    want = weight_of(words).dequantize()
    want[(slice(None), 19) if field == "su" else 19] *= -1

    turned = weight_of({**words, field: torch.tensor([0, 1 << 3, 0, 0, 0, 0, 0, 0]).short()}).dequantize()

    assert torch.equal(turned, want)


def refusal(tensors: dict[str, Tensor]) -> QloadError:
    with pytest.raises(QloadError) as caught:
        Weights(MemoryStorage(named("up", tensors)), loader=LAYER).get_weights("up")
    return caught.value


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        pytest.param(
            {"trellis": torch.zeros(8, 8, 72, dtype=torch.int16)}, ShapeError,
            "up.trellis: wrong shape\n  expected (8, 8, W), W 16 to 128 in steps of 16, or 24, 40, 56\n"
            "  got      (8, 8, 72)\n  4.5 bits per weight",
            id="4.5 bits",
        ),
        pytest.param(
            {"trellis": torch.zeros(8, 8, 40, dtype=torch.int16)}, MismatchError,
            "up.trellis: 2.5 bits per weight\n  expected whole bits, or the codebook mul1\n"
            "  got      the codebook mcg",
            id="half a bit without mul1",
        ),
        pytest.param(
            {"mul1": marker(MUL1)}, TwoFormatsError,
            "up.mcg: markers of two codebooks\n  expected either mcg or mul1\n  got      mcg and mul1",
            id="two codebooks",
        ),
        pytest.param(
            {"mcg": marker(MUL1)}, MismatchError,
            "up.mcg: multiplier of the codebook\n  expected 0xCBAC1FED\n  got      0x83DCD12D",
            id="the multiplier of another codebook",
        ),
        pytest.param(
            {"mcg": None, "mul1": marker(MUL1 + 1)}, MismatchError,
            "up.mul1: multiplier of the codebook\n  expected 0x83DCD12D\n  got      0x83DCD12E",
            id="another multiplier",
        ),
        pytest.param(
            {"su": torch.zeros(8, dtype=torch.int16)}, TwoFormatsError,
            "up.suh: stored beside signs of the same\n  expected either suh or su\n  got      suh and su",
            id="scales and signs",
        ),
        pytest.param(
            {"svh": None}, MissingTensorError,
            "up.svh: not in the checkpoint\n  EXL3 stores svh, or in older files sv",
            id="no scales of outputs",
        ),
        pytest.param(
            {"trellis": torch.zeros(7, 8, 64, dtype=torch.int16), "suh": torch.ones(112).half()}, ShapeError,
            "up.trellis: wrong shape\n  expected (?, 8, 64) = (K@128/16, N@128/16, W)\n"
            "  got      (7, 8, 64)\n  K = 112 has to be a multiple of 128",
            id="part of a Hadamard matrix",
        ),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_is_refused(changes: dict[str, Any], kind: type, text: str) -> None:
    tensors = {**layer("mcg", 4), **changes}

    error = refusal({name: tensor for name, tensor in tensors.items() if tensor is not None})

    assert (type(error), str(error)) == (kind, text)


@pytest.mark.parametrize(
    ("load", "dim"),
    [
        pytest.param(Weights.get_weights_col, "N", id="outputs"),
        pytest.param(Weights.get_weights_row, "K", id="inputs"),
    ],
)
def test_a_cut_within_a_hadamard_matrix_is_refused_with_the_lawful_ranks(load: Any, dim: str) -> None:
    stored = named("up", layer("mul1", 2, N=384, K=384))
    ranks = FakeWorld(2)

    texts = set()
    for rank in ranks:
        with pytest.raises(CutError) as caught:
            load(Weights(MemoryStorage(stored), loader=LAYER, process_group=rank), "up")
        texts.add(str(caught.value))

    assert texts == {
        f"up.trellis: cannot cut {dim} = 384 at 192 for 2 ranks\n"
        "  cuts must be multiples of 128   as trellis is (K@128/16, N@128/16, 32)\n"
        "  nearest  128 or 256\n  lawful   world sizes 3"
    }


def test_layers_are_fused_only_with_equal_scales_of_inputs() -> None:
    one, other = layer("mcg", 3), layer("mcg", 3, N=256)
    other["suh"][0] = -1
    stored = named("q", one) | named("k", other)

    with pytest.raises(MismatchError) as caught:
        Weights(MemoryStorage(stored), loader=LAYER).get_multi_weights_col(["q", "k"])
    assert str(caught.value) == (
        "k: parts of a fused layer differ in suh, from row 0 on\n"
        "  expected -1.916015625 as in q\n  got      -1.0\n"
        "  remedy   load them as layers of their own"
    )
    stored["k.suh"] = one["suh"]
    fused = Weights(MemoryStorage(stored), loader=LAYER).get_multi_weights_col(["q", "k"])

    parts = [weight_of(one), weight_of({**other, "suh": one["suh"]})]
    assert_same_bits(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_another_codebook_in_the_config_is_noted() -> None:
    stored = MemoryStorage(named("up", layer("mcg", 3)))
    loader = loader_from_config({"quant_method": "exl3", "bits": 3.0, "codebook": "mul1"})

    described = loader.describe(Weights(stored, loader=loader), "up")

    assert described.notes == ("the codebook is mcg by the tensors; mul1 of the config is not used",)


def test_a_lost_marker_of_the_configs_codebook_is_an_error() -> None:
    stored = layer("mul1", 3)
    del stored["mul1"]
    loader = loader_from_config({"quant_method": "exl3", "bits": 3.0, "codebook": "mul1"})

    with pytest.raises(MismatchError, match=r"up\.mul1: codebook\n  expected mul1, as the config states"):
        Weights(MemoryStorage(named("up", stored)), loader=loader).get_weights("up")
    assert (
        Weights(MemoryStorage(named("up", stored)), loader=LAYER).get_weights("up").config.codebook == "3inst"
    )


def test_a_padded_feed_forward_is_loaded_with_the_stored_sizes() -> None:
    """exllamav3 rounds an intermediate size of 352 up to 384, in gate, up and down."""
    gate, up, down = layer("mcg", 8, N=384), layer("mul1", 3, N=384), layer("mcg", 4, K=384)
    stored = named("mlp.gate_proj", gate) | named("mlp.up_proj", up) | named("mlp.down_proj", down)
    weights = Weights(MemoryStorage(stored), loader=LAYER, dtype=torch.float32)

    module = GatedFeedForward.load(weights, "mlp", (128, 352, 128), GatedActivation("silu"))

    columns = torch.cat([weight_of(each).dequantize()[:, 5] for each in (gate, up)])
    assert_same_bits(module.gate_up_proj(torch.eye(128)[5:6])[0], columns)
    assert_same_bits(
        module.down_proj(torch.eye(384)[380:381])[0], weight_of(down).dequantize()[:, 380].clone()
    )
    with pytest.raises(ShapeError) as caught:
        GatedFeedForward.load(weights, "mlp", (128, 256, 128), GatedActivation("silu"))
    assert str(caught.value) == (
        "mlp.gate_proj: wrong shape\n  expected (256, 128), as the config says\n  got      (384, 128)"
    )
