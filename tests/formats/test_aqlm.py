"""AQLM: sums of codebooks, vectors of several outputs, codes modulo their bits, shares, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import ConfigError, CutError, ExcludedModuleError, MismatchError, ShapeError
from qload.formats import AQLMConfig, AQLMWeight
from qload.parallel import FakeWorld
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

N, K = 16, 32


def layer(count: int, bits: int, og: int, ig: int) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Return tensors, config, and the weight; sums of whole numbers are exact."""
    draw = torch.Generator().manual_seed(bits)
    size = 2**bits
    codes = torch.randint(size, (N // og, K // ig, count), generator=draw)
    books = torch.randint(-9, 9, (count, size, og, ig), generator=draw).half()
    scales = (2.0 ** (torch.arange(N // og) % 4 - 1)).half().reshape(-1, 1, 1, 1)
    blocks = sum(books[at].float()[codes[..., at]] for at in range(count)) * scales.float()
    wrapped = codes - size * (codes >= size // 2)
    dtype = torch.int8 if bits <= 8 else torch.int16
    section = {"in_group_size": ig, "out_group_size": og, "num_codebooks": count, "nbits_per_codebook": bits}
    weight = blocks.swapaxes(1, 2).reshape(N, K)
    return {"codes": wrapped.to(dtype), "codebooks": books, "scales": scales}, section, weight


def weights(stored: dict[str, Tensor], rank: Any = None, **section: Any) -> Weights:
    storage = MemoryStorage({f"mlp.up.{name}": tensor for name, tensor in stored.items()})
    loader = loader_from_config({"quant_method": "aqlm", **section}, storage)
    return Weights(storage, loader=loader, process_group=rank)


def test_a_vector_by_hand() -> None:
    """Codes -1 and 0 of two bits are the vectors 3 and 0: (1, 2) + (16, 32), times 0.5."""
    books = torch.tensor([[[0, 0], [0, 0], [0, 0], [1, 2]], [[16, 32], [0, 0], [0, 0], [0, 0]]]).half()
    weight = AQLMWeight(
        config=AQLMConfig(codebooks=2, bits=2, in_group=2),
        indices=torch.tensor([[[-1, 0]]], dtype=torch.int8),
        codebooks=books[:, :, None],
        scales=torch.full((1, 1, 1, 1), 0.5).half(),
    )

    assert weight.dequantize().tolist() == [[8.5, 17]]


def test_sums_are_in_float32() -> None:
    """float16 has 1024 and 0.25, and not their sum."""
    books = torch.tensor([1024, 0.25]).half().reshape(2, 1, 1, 1).expand(2, 2, 1, 1).contiguous()
    weight = AQLMWeight(
        config=AQLMConfig(codebooks=2, bits=1, in_group=1),
        indices=torch.zeros(1, 1, 2, dtype=torch.int8),
        codebooks=books,
        scales=torch.ones(1, 1, 1, 1).half(),
    )

    assert weight.dequantize().tolist() == [[1024.25]]


@pytest.mark.parametrize("case", [(2, 8, 1, 8), (1, 9, 2, 4), (3, 4, 4, 16)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shares_of_vectors(case: tuple[int, int, int, int], world: int) -> None:
    stored, section, want = layer(*case)
    ranks = [weights(stored, rank, **section) for rank in FakeWorld(world)]

    for dim, load in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        if want.shape[dim] // world % case[2 + dim]:
            with pytest.raises(CutError, match=r"mlp\.up\.codes"):
                load(ranks[0], "mlp.up")
            continue
        assert torch.equal(torch.cat([load(rank, "mlp.up").dequantize() for rank in ranks], dim), want)
    assert not ranks[0].report().unused


@pytest.mark.parametrize("turns", [-1, 1])
def test_codes_count_modulo_their_bits(turns: int) -> None:
    stored, section, want = layer(1, 9, 2, 4)
    stored["codes"] = stored["codes"] + turns * 512

    assert torch.equal(weights(stored, **section).get_weights("mlp.up").dequantize(), want)


def test_layers_with_other_codebooks_are_not_fused() -> None:
    stored, section, _ = layer(2, 8, 1, 8)
    tensors = {f"{name}.{key}": tensor for name in "qk" for key, tensor in stored.items()}
    tensors["k.codebooks"] = stored["codebooks"] + 1
    storage = MemoryStorage(tensors)
    loader = loader_from_config({"quant_method": "aqlm", **section}, storage)

    with pytest.raises(MismatchError, match="parts of a fused layer differ in codebooks"):
        Weights(storage, loader=loader).get_multi_weights_col(["q", "k"])


def test_excluded_weights_are_named_with_their_suffix() -> None:
    stored, section, _ = layer(2, 8, 1, 8)

    with pytest.raises(ExcludedModuleError, match="linear_weights_not_to_quantize"):
        weights(stored, **section, linear_weights_not_to_quantize=["mlp.up.weight"]).get_weights("mlp.up")


def test_excluded_names_are_those_of_modules() -> None:
    section = {"quant_method": "aqlm", "linear_weights_not_to_quantize": ["lm_head.weight", "mlp.up"]}

    exclusions = read_claims(FoundConfig("config.json", "quantization_config", section)).exclusions

    selected = {name: exclusions.selects(name) for name in ("lm_head", "mlp.up", "mlp.down")}
    assert selected == {"lm_head": True, "mlp.up": True, "mlp.down": False}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_codebooks": 1}, r"mlp\.up\.codes: wrong shape\n  expected \(16, 4, 1\)"),
        ({"nbits_per_codebook": 7}, r"mlp\.up\.codebooks: wrong shape\n  expected \(2, 128, 1, 8\)"),
        ({"out_group_size": 2}, r"mlp\.up"),
        ({"in_group_size": 4}, r"mlp\.up\.codebooks: wrong shape\n  expected \(2, 256, 1, 4\)"),
    ],
    ids=str,
)
def test_shapes_other_than_the_configs_are_errors(change: dict[str, int], text: str) -> None:
    stored, section, _ = layer(2, 8, 1, 8)

    with pytest.raises(ShapeError, match=text):
        weights(stored, **(section | change)).get_weights("mlp.up")


@pytest.mark.parametrize("key", ["in_group_size", "out_group_size", "num_codebooks", "nbits_per_codebook"])
def test_sizes_of_no_codebook_are_errors(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_config\.{key}"):
        loader_from_config({"quant_method": "aqlm", key: 0})
