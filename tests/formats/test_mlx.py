"""MLX: affine codes of every width, modes of floats, entries of single modules, stacks of experts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import ConfigError, CutError, DtypeError, ShapeError, UnsupportedFormatError
from qload.formats import MLXConfig, MLXFloatConfig, MLXFloatWeight, MLXWeight
from qload.formats.mlx import EntryModules
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., K) as one little-endian number for each row."""
    rows = codes.reshape(-1, codes.shape[-1]).tolist()
    numbers = [sum(code << bits * at for at, code in enumerate(row)) for row in rows]
    stored = b"".join(number.to_bytes(codes.shape[-1] * bits // 8, "little") for number in numbers)
    return torch.from_numpy(np.frombuffer(stored, np.uint32).copy()).reshape(*codes.shape[:-1], -1)


def affine(bits: int, group: int, N: int = 4, K: int = 128, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Return tensors with ascending codes, and scales and biases of either sign."""
    codes = (torch.arange(N * K).reshape(N, K) % 2**bits).expand(*lead, N, K)
    place = torch.arange(N * K // group).reshape(N, K // group).expand(*lead, N, K // group)
    scales = ((-1) ** place * 2.0 ** (place % 5 - 3)).bfloat16()
    return {"weight": words(codes, bits), "scales": scales, "biases": (place % 7 - 3).bfloat16()}


def weights(stored: dict[str, Tensor], section: dict[str, Any], rank: Any = None) -> Weights:
    storage = MemoryStorage({f"mlp.up.{name}": tensor for name, tensor in stored.items()})
    loader = loader_from_config({"quant_method": "mlx", **section}, storage)
    return Weights(storage, loader=loader, process_group=rank)


def test_a_block_by_hand() -> None:
    """Codes of three bits: the word 0o76543210 has 0 to 7, and the next code straddles two words."""
    codes = torch.arange(32)[None] % 8
    stored = words(codes, 3)
    assert stored.dtype == torch.uint32
    assert stored[0, 0].item() == int("0o76543210", 8) | 0b000 << 24 | 0b001 << 27 | 0b10 << 30

    weight = MLXWeight(
        config=MLXConfig(bits=3, group_size=32),
        weight=stored,
        scales=torch.tensor([[-0.5]]).half(),
        biases=torch.tensor([[2.0]]).half(),
    )

    assert weight.dequantize().tolist() == [[2 - code / 2 for code in range(8)] * 4]


@pytest.mark.parametrize(
    ("mode", "scale", "times"), [("mxfp4", 130, 8.0), ("nvfp4", 0x40, 2.0), ("nvfp4", 0x01, 2.0**-9)]
)
def test_floats_of_four_bits_by_hand(mode: Any, scale: int, times: float) -> None:
    config = MLXFloatConfig(mode)
    stored = words(torch.arange(32)[None] % 16, 4)

    scales = torch.full((1, 32 // config.group_size), scale, dtype=torch.uint8)
    weight = MLXFloatWeight(config=config, weight=stored, scales=scales)

    assert weight.dequantize().tolist() == [[times * value for value in E2M1] * 2]


def test_floats_of_eight_bits_by_hand() -> None:
    bytes_ = torch.tensor([1.0, 448, -0.5, 0] * 8).to(torch.float8_e4m3fn)
    stored = words(bytes_.view(torch.uint8)[None].long(), 8)

    weight = MLXFloatWeight(
        config=MLXFloatConfig("mxfp8"), weight=stored, scales=torch.tensor([[125]], dtype=torch.uint8)
    )

    assert weight.dequantize().tolist() == [[0.25, 112, -0.125, 0] * 8]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_codes_of_every_width_whole_and_cut(bits: int, group: int, world: int) -> None:
    stored, section = affine(bits, group), {"bits": bits, "group_size": group}
    codes = (torch.arange(512).reshape(4, 128) % 2**bits).float()
    spread = {name: stored[name].float().repeat_interleave(group, 1) for name in ("scales", "biases")}
    want = codes * spread["scales"] + spread["biases"]

    for dim, cut in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        if dim == 1 and 128 // world % group:
            with pytest.raises(CutError, match="up"):
                cut(weights(stored, section, Rank(0, world)), "mlp.up")
            continue
        shares = [cut(weights(stored, section, rank), "mlp.up").dequantize() for rank in FakeWorld(world)]
        assert torch.equal(torch.cat(shares, dim), want)

    x = torch.arange(-192, 192).reshape(3, 128).float() / 64
    got = weights(stored, section).get_weights("mlp.up").get_linear()(x).double()
    magnitude = x.double().abs() @ want.double().abs().T
    assert bool(((got - x.double() @ want.double().T).abs() <= magnitude * 128 * 2.0**-24).all())


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_are_cut_between_their_groups(mode: Any) -> None:
    config = MLXFloatConfig(mode)
    bits, group = config.bits, config.group_size
    stored = {"weight": words(torch.arange(512).reshape(4, 128) % (16 if bits == 4 else 126), bits)}
    stored["scales"] = (torch.arange(4 * 128 // group).reshape(4, -1) % 5 + 110).to(torch.uint8)
    section = {"bits": bits, "group_size": group, "mode": mode}
    whole = weights(stored, section).get_weights("mlp.up").dequantize()

    for dim, cut in ((0, Weights.get_weights_col), (1, Weights.get_weights_row)):
        for world in (2, 4):
            shares = [cut(weights(stored, section, rank), "mlp.up").dequantize() for rank in FakeWorld(world)]
            assert torch.equal(torch.cat(shares, dim), whole)
    with pytest.raises(CutError, match="up"):
        Weights.get_weights_row(weights(stored, section, Rank(0, 128 // group * 2)), "mlp.up")


MIXED = {
    "group_size": 64, "bits": 4,
    "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 6},
    "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "lm_head": False,
}  # fmt: skip


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_entries_of_a_config_apply_to_their_modules(key: str, tmp_path: Path) -> None:
    lead, tensors = "model.layers.0.mlp", {"lm_head.weight": torch.ones(8, 64).bfloat16()}
    for name, bits, group in (("gate_proj", 4, 64), ("up_proj", 6, 32)):
        tensors |= {f"{lead}.{name}.{field}": each for field, each in affine(bits, group).items()}
    floats = {"weight": words(torch.arange(256).reshape(4, 64) % 16, 4)}
    floats["scales"] = torch.full((4, 2), 127, dtype=torch.uint8)
    tensors |= {f"{lead}.down_proj.{field}": each for field, each in floats.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: MIXED}))

    with open_checkpoint(tmp_path) as opened:
        found = {name: opened.get_weights(f"{lead}.{name}_proj").config for name in ("gate", "up", "down")}
        assert opened.get_weights("lm_head").format == "unquantized"
        assert opened.report().complete

    assert found == {"gate": MLXConfig(4, 64), "up": MLXConfig(6, 32), "down": MLXFloatConfig("mxfp4")}


def test_experts_of_a_stack_have_its_entry_and_transformers_names(tmp_path: Path) -> None:
    lead = "model.layers.0.mlp.switch_mlp"
    section = {"group_size": 64, "bits": 4, f"{lead}.down_proj": {"group_size": 32, "bits": 3}}
    tensors = {}
    for name, bits, group in (("gate_proj", 4, 64), ("up_proj", 4, 64), ("down_proj", 3, 32)):
        stored = affine(bits, group, lead=(2,))
        tensors |= {f"{lead}.{name}.{field}": each.contiguous() for field, each in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": section}))

    with open_checkpoint(tmp_path) as opened:
        up, down = (
            opened.get_weights(f"model.layers.0.mlp.experts.1.{name}_proj") for name in ("up", "down")
        )

    want = {bits: weights(affine(bits, group), {"bits": bits, "group_size": group}).get_weights("mlp.up")
            for bits, group in ((4, 64), (3, 32))}  # fmt: skip
    assert torch.equal(up.dequantize(), want[4].dequantize())
    assert torch.equal(down.dequantize(), want[3].dequantize())


def test_an_entry_of_a_stack_selects_its_experts_alone() -> None:
    entry = EntryModules(frozenset({"layers.0.mlp.switch_mlp.up_proj"}))

    names = ("mlp.switch_mlp.up_proj", "mlp.experts.12.up_proj", "mlp.switch_mlp.3.up_proj")
    assert all(entry(f"layers.0.{name}") for name in names)
    names = ("mlp.experts.up_proj", "mlp.experts.1.down_proj", "mlp.shared_experts.1.up_proj")
    assert not any(entry(f"layers.0.{name}") for name in names)


def test_a_module_with_an_entry_of_false_is_plain() -> None:
    """Codes under its name are no weight of a plain layer."""
    section = {"bits": 4, "group_size": 64, "mlp.up": False}

    plain = weights({"weight": torch.ones(4, 64).bfloat16()}, section)
    assert plain.get_weights("mlp.up").format == "unquantized"
    with pytest.raises(DtypeError, match=r"mlp\.up\.weight"):
        weights(affine(4, 64), section).get_weights("mlp.up")


@pytest.mark.parametrize(
    "module", ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]
)
def test_the_first_rule_of_a_module_is_that_of_its_entry(module: str) -> None:
    claims = read_claims(FoundConfig("config.json", "quantization", {"quant_method": "mlx", **MIXED}))

    rule = next(rule for rule in claims.rules if rule.selects(module))

    assert isinstance(rule.formats, tuple)
    configs = {"lm_head": [], "model.layers.0.mlp.down_proj": [MLXFloatConfig("mxfp4")]}
    assert [fmt.config for fmt in rule.formats] == configs.get(module, [MLXConfig(4, 64)])


@pytest.mark.parametrize("world", [1, 2])
def test_transformers_names_biases_of_codes_otherwise(world: int) -> None:
    """`bias` is then the bias of the outputs."""
    stored, section = affine(4, 64), {"bits": 4, "group_size": 64}
    want = weights(stored, section).get_weights("mlp.up").dequantize()
    renamed = {"qbiases" if name == "biases" else name: tensor for name, tensor in stored.items()}
    renamed["bias"] = torch.arange(4.0)

    ranks = [weights(renamed, {**section, "quant_method": "metal"}, rank) for rank in FakeWorld(world)]

    assert torch.equal(torch.cat([rank.get_weights_col("mlp.up").dequantize() for rank in ranks]), want)
    assert ranks[0].report().unused == ["mlp.up.bias"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"bits": 7}, "bits"),
        ({"group_size": 48}, "group_size"),
        ({"group_size": 16}, "group_size"),
        ({"mode": "mxfp6"}, "mode"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size"),
        ({"mode": "mxfp8", "group_size": 32}, "bits"),
        ({"lm_head": {"bits": 4}}, "lm_head.group_size"),
        ({"lm_head": {"bits": 8, "group_size": 16, "mode": "nvfp4"}}, "lm_head.bits"),
    ],
)
def test_an_error_names_the_key(section: dict[str, Any], key: str) -> None:
    values = {"quant_method": "mlx", "bits": 4, "group_size": 64, **section}

    with pytest.raises(ConfigError) as caught:
        read_claims(FoundConfig("config.json", "quantization", values))

    assert caught.value.key == f"quantization.{key}"


def test_codes_of_another_width_than_the_config_states_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"mlp\.up\."):
        weights(affine(4, 64), {"bits": 8, "group_size": 64}).get_weights("mlp.up")


def test_a_layer_without_a_config_is_refused_by_name() -> None:
    """Four bits in groups of 64, and eight in groups of 32, have equal shapes."""
    storage = MemoryStorage({f"up.{name}": tensor for name, tensor in affine(4, 64).items()})

    with pytest.raises(UnsupportedFormatError, match="MLX"):
        loader_from_config(None, storage)


def test_scales_and_biases_of_either_sign_are_sound(tmp_path: Path) -> None:
    stored = affine(4, 64)
    save_file({f"up.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": 4, "group_size": 64}}))

    report = verify(tmp_path)

    assert not [finding for finding in report.findings if finding.rule == "scale-value"]
