"""Stacks are read by their tensors: drawn ones of many dialects have the values of plain formulas."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import (
    ExpertFacts,
    FakeWorld,
    MemoryStorage,
    Weights,
    convert,
    diff,
    layers,
    loader_from_config,
    open_checkpoint,
    plan,
    shard,
)
from qload.errors import ArgumentError, CutError, MismatchError, UnsupportedFormatError
from qload.experts import ExpertStacks, GatedActivation, with_experts
from qload.verify import inspect, verify
from tests.experts.mixtures import CONFIGS, config, lead, mixture

E, HIDDEN, INNER = 3, 128, 64
E4M3 = torch.float8_e4m3fn
FACTS = ExpertFacts(GatedActivation("silu"))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(scale: Tensor, N: int, K: int) -> Tensor:
    """Scales of groups or blocks, (E, n, k), for every element of (E, N, K)."""
    rows, columns = -(-N // scale.shape[1]), -(-K // scale.shape[2])
    return scale.float().repeat_interleave(rows, 1).repeat_interleave(columns, 2)[:, :N, :K]


def positive(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=generator(seed)) + 0.5).to(dtype)


@dataclass
class Drawn:
    """One stacked matrix, outputs first: its fields, and the values (E, N, K) in float32 by plain formulas.

    `turns`: the fields whose last two axes are exchanged where inputs come first.
    """

    fields: dict[str, Tensor]
    values: Tensor
    turns: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_inv")


def fp8(scale: Callable[[int, int, int], Tensor], name: str = "weight_scale") -> Callable[..., Drawn]:
    def draw(N: int, K: int, seed: int) -> Drawn:
        weight, scales = torch.randn(E, N, K, generator=generator(seed)).to(E4M3), scale(N, K, seed)
        wide = scales.float().reshape(E, *([1] * (3 - scales.ndim)), *scales.shape[1:])
        if scales.ndim == 2:
            wide = scales.float()[:, :, None]
        return Drawn({"weight": weight, name: scales}, weight.float() * spread(wide, N, K))

    return draw


def static(draw: Callable[..., Drawn], shape: tuple[int, ...] = (E,)) -> Callable[..., Drawn]:
    """The same with a scale of inputs, of each expert or of all."""

    def both(N: int, K: int, seed: int) -> Drawn:
        drawn: Drawn = draw(N, K, seed)
        drawn.fields["input_scale"] = positive(*shape, seed=seed + 1)
        return drawn

    return both


def int8(group: int, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Drawn]:
    def draw(N: int, K: int, seed: int) -> Drawn:
        weight = torch.randint(-128, 128, (E, N, K), generator=generator(seed), dtype=torch.int8)
        scale = positive(E, N, K // (group or K), seed=seed, dtype=dtype)
        return Drawn({"weight": weight, "weight_scale": scale}, weight.float() * spread(scale, N, K))

    return draw


def int8_of(scale: Tensor, N: int, K: int, seed: int) -> Drawn:
    weight = torch.randint(-128, 128, (E, N, K), generator=generator(seed), dtype=torch.int8)
    wide = scale if scale.ndim == 3 else scale[:, :, None]
    return Drawn({"weight": weight, "weight_scale": scale}, weight.float() * wide.float())


def halves_of_bytes(N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes of two four-bit floats, the first in the low bits, and what these are."""
    stored = torch.randint(0, 256, (E, N, K // 2), generator=generator(seed), dtype=torch.uint8)
    low, high = E2M1[stored.numpy() & 15], E2M1[stored.numpy() >> 4]
    return stored, torch.from_numpy(np.stack([low, high], -1).reshape(E, N, K))


def nvfp4(N: int, K: int, seed: int) -> Drawn:
    stored, codes = halves_of_bytes(N, K, seed)
    scale, second = positive(E, N, K // 16, seed=seed, dtype=E4M3), positive(E, seed=seed + 1)
    product = scale.float() * second[:, None, None]
    fields = {"weight": stored, "weight_scale": scale, "weight_scale_2": second}
    return Drawn(fields, codes * product.repeat_interleave(16, 2))


def ct_nvfp4(N: int, K: int, seed: int) -> Drawn:
    stored, codes = halves_of_bytes(N, K, seed)
    scale, second = positive(E, N, K // 16, seed=seed, dtype=E4M3), positive(E, 1, seed=seed + 1)
    fields = {"weight_packed": stored, "weight_scale": scale, "weight_global_scale": second}
    quotient = scale.float() / second[:, :, None]
    return Drawn(fields, codes * quotient.repeat_interleave(16, 2), ("weight_packed", "weight_scale"))


def ct_mxfp4(N: int, K: int, seed: int) -> Drawn:
    stored, codes = halves_of_bytes(N, K, seed)
    scale = torch.randint(120, 134, (E, N, K // 32), generator=generator(seed), dtype=torch.uint8)
    powers = torch.pow(2.0, scale.float() - 127).repeat_interleave(32, 2)
    fields = {"weight_packed": stored, "weight_scale": scale}
    return Drawn(fields, codes * powers, ("weight_packed", "weight_scale"))


def in_words(codes: np.ndarray) -> Tensor:
    """Four-bit codes along the last axis, eight to a word, the first in the low bits."""
    eight = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(eight.shape[:-1], dtype=np.uint32)
    for at in range(8):
        words |= eight[..., at] << np.uint32(4 * at)
    return torch.from_numpy(words.view(np.int32))


def pack(symmetric: bool, shape: str = "E N K") -> Callable[..., Drawn]:
    """compressed-tensors' 4 bits in groups of 32: codes are unsigned, less 8, or less a zero point."""

    def draw(N: int, K: int, seed: int) -> Drawn:
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 16, (E, N, K))
        zeros = np.full((E, N, K // 32), 8) if symmetric else rng.integers(0, 16, (E, N, K // 32))
        scale = positive(E, N, K // 32, seed=seed, dtype=torch.bfloat16)
        stated = {"E N K": [E, N, K], "N K": [N, K], "each": [[N, K]] * E}[shape]
        fields = {
            "weight_packed": in_words(codes),
            "weight_scale": scale,
            "weight_shape": torch.tensor(stated),
        }
        if not symmetric:
            fields["weight_zero_point"] = in_words(zeros.transpose(0, 2, 1)).transpose(1, 2).contiguous()
        difference = codes - zeros.repeat(32, 2)
        return Drawn(fields, torch.from_numpy(difference).float() * spread(scale, N, K), ())

    return draw


def gptq(N: int, K: int, seed: int) -> Drawn:
    """4 bits in groups of 32, as a layer of GPTQ stores them, zero points of 8 less one."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (E, N, K))
    scale = positive(E, K // 32, N, seed=seed, dtype=torch.float16)
    fields = {
        "qweight": in_words(codes).transpose(1, 2).contiguous(),
        "qzeros": in_words(np.full((E, K // 32, N), 7)),
        "scales": scale,
        "g_idx": (torch.arange(K) // 32).int().expand(E, K).contiguous(),
    }
    return Drawn(fields, torch.from_numpy(codes - 8).float() * spread(scale.transpose(1, 2), N, K), ())


def compressed(**weights: Any) -> dict[str, Any]:
    form = weights.pop("format")
    scheme = {"targets": ["Linear"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": scheme}}


@dataclass(frozen=True)
class Dialect:
    """How a tool stores stacks.

    `inputs_first`: whether a tool may store inputs first. `columns`: whether gate and up of one tensor stay
    one layer, since outputs are the last axis.
    """

    draw: Callable[..., Drawn]
    config: dict[str, Any]
    inputs_first: bool = True
    columns: bool = False


FP8_CHANNEL = compressed(format="float-quantized", num_bits=8, type="float", strategy="channel")
FP8_TENSOR = {"quant_method": "modelopt", "quant_algo": "FP8"}
INT8 = compressed(format="int-quantized", num_bits=8, type="int", strategy="channel")
INT8_GROUPS = compressed(format="int-quantized", num_bits=8, type="int", strategy="group", group_size=32)
INT4 = {"format": "pack-quantized", "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
DIALECTS = {
    "fp8 one for all": Dialect(fp8(lambda N, K, s: positive(E, seed=s)), FP8_TENSOR),
    "fp8 static": Dialect(static(fp8(lambda N, K, s: positive(E, seed=s))), FP8_TENSOR),
    "fp8 one input scale": Dialect(
        static(fp8(lambda N, K, s: positive(E, 1, 1, seed=s)), ()), FP8_TENSOR
    ),
    "fp8 outputs": Dialect(fp8(lambda N, K, s: positive(E, N, seed=s)), FP8_CHANNEL),
    "fp8 columns": Dialect(fp8(lambda N, K, s: positive(E, N, 1, seed=s)), FP8_CHANNEL),
    "fp8 blocks": Dialect(
        fp8(lambda N, K, s: positive(E, N // 32, K // 32, seed=s), "weight_scale_inv"), BLOCKS
    ),
    "int8 columns": Dialect(int8(0), INT8),
    "int8 one for all": Dialect(
        lambda N, K, s: int8_of(positive(E, 1, 1, seed=s, dtype=torch.bfloat16), N, K, s),
        compressed(format="int-quantized", num_bits=8, type="int", strategy="tensor"),
    ),
    "int8 outputs": Dialect(
        lambda N, K, s: int8_of(positive(E, N, seed=s, dtype=torch.bfloat16), N, K, s), INT8
    ),
    "int8 groups": Dialect(int8(32), INT8_GROUPS),
    "nvfp4": Dialect(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 static": Dialect(static(nvfp4), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "ct nvfp4": Dialect(
        ct_nvfp4,
        compressed(
            format="nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
    ),
    "ct mxfp4": Dialect(
        ct_mxfp4,
        compressed(
            format="mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
    ),
    "pack": Dialect(pack(True), compressed(**INT4), inputs_first=False),
    "pack with a shape of a layer": Dialect(pack(True, "N K"), compressed(**INT4), inputs_first=False),
    "pack with shapes of all": Dialect(pack(True, "each"), compressed(**INT4), inputs_first=False),
    "pack asymmetric": Dialect(
        pack(False), compressed(**INT4, symmetric=False), inputs_first=False
    ),
    "gptq": Dialect(
        gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, inputs_first=False, columns=True
    ),
}  # fmt: skip

# The matrices of a module: stored name -> the layers of an expert that it holds.
SPLIT = {"gate_proj": ("gate_proj",), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
NUMBERED = {"w1": ("w1",), "w3": ("w3",), "w2": ("w2",)}
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
ENGINE = {"w13": ("w1", "w3"), "w2": ("w2",)}
GRANITE = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}
NAMES = {
    "split": (SPLIT, "moe"),
    "numbered": (NUMBERED, "block_sparse_moe.experts"),
    "fused": (FUSED, "mlp.experts"),
    "engine": (ENGINE, "ffn.experts"),
    "granite": (GRANITE, "block_sparse_moe"),
}
DOWNS = ("down_proj", "w2", "output_linear")
KNOWN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": E,
    "moe_intermediate_size": INNER,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


@dataclass
class Checkpoint:
    """Tensors as they are stored, and the values of each layer of an expert and of each stacked matrix."""

    tensors: dict[str, Tensor]
    layers: dict[str, Tensor]
    matrices: dict[str, Tensor]
    module: str


def drawn_checkpoint(
    dialect: Dialect, names: str, inputs_first: bool, dotted: bool, halves: bool, seed: int = 7
) -> Checkpoint:
    """`halves`: whether gate and up of one tensor are told apart; else they are one layer."""
    matrices, lead = NAMES[names]
    made = Checkpoint({}, {}, {}, f"model.layers.0.{lead}")
    for at, (name, parts) in enumerate(matrices.items()):
        N, K = (HIDDEN, INNER) if name in DOWNS else (INNER * len(parts), HIDDEN)
        one = dialect.draw(N, K, seed + 10 * at)
        for own, tensor in one.fields.items():
            turned = inputs_first and own in one.turns and tensor.ndim == 3
            stored = tensor.transpose(1, 2).contiguous() if turned else tensor
            mark = "." if dotted else "_"
            made.tensors[f"{made.module}.{name}{mark}{own}"] = stored
        made.matrices[f"{made.module}.{name}"] = one.values
        whole = len(parts) > 1 and not (halves and not dialect.columns)
        shown = (name,) if whole else parts
        for expert in range(E):
            for part, values in zip(shown, one.values[expert].chunk(len(shown)), strict=True):
                made.layers[f"{made.module}.{expert}.{part}"] = values
    return made


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def combinations() -> Iterator[Any]:
    for dialect, told in DIALECTS.items():
        for names in NAMES:
            for turned in (False, True) if told.inputs_first else (False,):
                for kind in ("known", "unknown") if names == "fused" else ("unknown",):
                    dotted = (len(dialect) + len(names) + turned) % 2 == 0
                    case = f"{dialect}-{names}-{'turned' * turned or 'straight'}-{kind}"
                    yield pytest.param(dialect, names, turned, kind, dotted, id=case)


@pytest.mark.parametrize(("dialect", "names", "turned", "kind", "dotted"), [*combinations()])
def test_every_expert_has_its_values_whole_and_cut(
    dialect: str, names: str, turned: bool, kind: str, dotted: bool
) -> None:
    told = DIALECTS[dialect]
    halves = kind == "known" or names != "fused"
    made = drawn_checkpoint(told, names, turned, dotted, halves)
    config = {"hidden_size": HIDDEN, "quantization_config": told.config}
    config |= KNOWN if kind == "known" else {"model_type": "a_type_of_no_table"}
    storage = with_experts(MemoryStorage(made.tensors), config)
    loader = loader_from_config(told.config)

    def loaded(load: str, prefix: str, rank: Any = None) -> Tensor:
        weights = Weights(storage, loader=loader, process_group=rank)
        return getattr(weights, load)(prefix).dequantize()

    assert isinstance(storage, ExpertStacks)
    assert not storage.unread
    for prefix, values in made.layers.items():
        assert torch.equal(loaded("get_weights", prefix), values), prefix
    if not told.columns or names != "fused":
        for prefix, values in made.matrices.items():
            assert torch.equal(loaded("get_weights", prefix), values), prefix
    cut = 0
    for world in (2, 4):
        for prefix, values in list(made.layers.items())[-1:-4:-2]:
            for axis, load in enumerate(("get_weights_col", "get_weights_row")):
                with suppress(CutError):
                    shares = [loaded(load, prefix, rank) for rank in FakeWorld(world)]
                    assert torch.equal(torch.cat(shares, axis), values)
                    cut += 1
    assert cut


@pytest.mark.parametrize("kind", ["known", "unknown"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_of_a_checkpoint_is_read_and_nothing_is_accused(dialect: str, kind: str, tmp_path: Path) -> None:
    told = DIALECTS[dialect]
    made = drawn_checkpoint(told, "fused" if kind == "known" else "split", False, True, kind == "known")
    config = {"hidden_size": HIDDEN, "quantization_config": told.config, **(KNOWN if kind == "known" else {})}
    report = verify(write(tmp_path / "model", made.tensors, config), tier="headers")

    assert report.coverage is not None
    stored = sum(
        (one[-2:] if name.endswith("weight_shape") and one.ndim == 1 else one).nbytes
        for name, one in made.tensors.items()
    )  # of a stored [E, N, K] a layer has N and K
    assert report.coverage.read == report.coverage.total == stored
    assert {finding.rule for finding in report.findings} <= {"architecture-missing"}, report.findings
    with open_checkpoint(tmp_path / "model") as weights:
        for prefix in made.layers:
            weights.get_weights(prefix)
        assert weights.report().complete


@pytest.mark.parametrize("split", [None, "tensor", "experts"])
@pytest.mark.parametrize(
    ("dialect", "names"),
    [("nvfp4", "split"), ("pack asymmetric", "granite"), ("fp8 columns", "engine"), ("int8 groups", "fused")],
)
def test_get_experts_of_stacks(dialect: str, names: str, split: Any, tmp_path: Path) -> None:
    told = DIALECTS[dialect]
    made = drawn_checkpoint(told, names, False, True, halves=True)
    config = {
        "hidden_size": HIDDEN,
        "quantization_config": told.config,
        **(KNOWN if names == "fused" else {}),
    }
    path = write(tmp_path / "model", made.tensors, config)
    gates, downs = [], []
    for rank in FakeWorld(2):
        with open_checkpoint(path, process_group=rank) as weights:
            experts = weights.get_experts(made.module, split=split, facts=FACTS)
            gates.append(torch.stack([one.dequantize() for one in experts.gate_up]))
            downs.append(torch.stack([one.dequantize() for one in experts.down]))
    last = ("w1", "w3", "w2") if names == "engine" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        torch.stack([made.layers[f"{made.module}.{expert}.{name}"] for expert in range(E)]) for name in last
    )
    if split == "experts":
        assert torch.equal(torch.cat(gates), torch.cat([gate, up], 1))
        assert torch.equal(torch.cat(downs), down)
        return
    if split == "tensor":
        (a, b), (c, d) = (one.chunk(2, 1) for one in gates)
        assert torch.equal(torch.cat([a, c], 1), gate)
        assert torch.equal(torch.cat([b, d], 1), up)
        assert torch.equal(torch.cat(downs, 2), down)
        return
    assert torch.equal(gates[1], torch.cat([gate, up], 1))
    assert torch.equal(downs[1], down)


@pytest.mark.usefixtures("seen_texts")
def test_gate_and_up_of_unknown_order_are_refused_by_get_experts(tmp_path: Path) -> None:
    told = DIALECTS["nvfp4"]
    made = drawn_checkpoint(told, "fused", False, True, halves=False)
    path = write(tmp_path / "model", made.tensors, {"quantization_config": told.config})

    with open_checkpoint(path) as weights, pytest.raises(UnsupportedFormatError, match=r"0\.gate_up_proj"):
        weights.get_experts(made.module, facts=FACTS)


def stored(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> tuple[ExpertStacks, Callable[[str], Tensor]]:
    """The view of stacks, and what loads a layer of it."""
    storage = with_experts(MemoryStorage(tensors), config)
    weights = Weights(storage, loader=loader_from_config(config.get("quantization_config")))
    assert isinstance(storage, ExpertStacks)
    return storage, lambda prefix: weights.get_weights(prefix).dequantize()


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dotted", [False, True])
def test_axes_that_nothing_tells_stay_unread_and_are_not_accused(dotted: bool, tmp_path: Path) -> None:
    """One scale an expert, gate and up apart, and no size in the config."""
    told = DIALECTS["fp8 one for all"]
    made = drawn_checkpoint(told, "split", False, dotted, True)
    config = {"quantization_config": told.config}
    storage, load = stored(made.tensors, config)

    assert storage.unread.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        if tensor.ndim == 3:
            assert f"{name} of shape {list(tensor.shape)}" in storage.unread[name]
    with pytest.raises(UnsupportedFormatError, match=r"moe\.gate_proj.*outputs and inputs"):
        load("model.layers.0.moe.gate_proj")
    report = verify(write(tmp_path / "model", made.tensors, config), tier="headers")
    assert report.coverage is not None
    assert report.coverage.unread == report.coverage.total
    assert {finding.rule for finding in report.findings} <= {"unsupported-format"}


DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
SIZES = {"model_type": "deepseek_v4", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}


@pytest.mark.parametrize("dtypes", [(torch.int8, torch.float8_e8m0fnu), (torch.int8, torch.uint8)])
@pytest.mark.parametrize("name", ["m.experts.up_proj", "m.experts.up_proj.weight"])
def test_signed_bytes_beside_exponents_are_two_inputs(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """DeepSeek V4 stores four-bit floats as int8."""
    packed, values = halves_of_bytes(INNER, HIDDEN, 0)
    scale = torch.randint(120, 134, (E, INNER, HIDDEN // 32), generator=generator(0), dtype=torch.uint8)
    tensors = {name: packed.view(dtypes[0]), "m.experts.up_proj.scale": scale.view(dtypes[1])}
    storage = with_experts(MemoryStorage(tensors), SIZES)
    weights = Weights(storage, loader=loader_from_config(DEEPSEEK, storage))

    experts = [weights.get_weights(f"m.experts.{expert}.up_proj").dequantize() for expert in range(E)]

    assert torch.equal(torch.stack(experts), values * torch.exp2(spread(scale, INNER, HIDDEN) - 127))


@pytest.mark.parametrize("name", ["m.experts.up_proj", "m.experts.up_proj.weight"])
def test_signed_bytes_beside_other_scales_are_one_input_each(name: str) -> None:
    weight = torch.zeros(E, INNER, HIDDEN, dtype=torch.int8)
    tensors = {name: weight, "m.experts.up_proj.scale": positive(E, INNER, 1, seed=0)}

    storage = with_experts(MemoryStorage(tensors), SIZES)

    assert storage.info("m.experts.0.up_proj.weight").shape == (INNER, HIDDEN)


@pytest.mark.parametrize("turned", [False, True])
def test_gate_and_up_beside_down_tell_the_axes(turned: bool) -> None:
    """Twice as many outputs as down has inputs: neither a scale nor the config has to say it."""
    told = DIALECTS["fp8 one for all"]
    made = drawn_checkpoint(told, "fused", turned, True, False)
    _, load = stored(made.tensors, {"quantization_config": told.config})

    for prefix, values in made.layers.items():
        assert torch.equal(load(prefix), values)


@pytest.mark.parametrize("dialect", ["fp8 outputs", "fp8 columns", "int8 groups", "nvfp4"])
def test_scales_count_before_the_type_of_model(dialect: str) -> None:
    """Inputs first, of a type whose stacks have outputs first, and whose sizes the config does not say."""
    told = DIALECTS[dialect]
    made = drawn_checkpoint(told, "fused", True, True, True)
    config_ = {"model_type": "qwen3_moe", "num_experts": E, "quantization_config": told.config}
    _, load = stored(made.tensors, config_)

    for prefix, values in made.layers.items():
        assert torch.equal(load(prefix), values)


@pytest.mark.parametrize("turned", [False, True])
def test_scales_of_outputs_tell_the_axes_of_a_square_matrix_by_where_they_have_one(turned: bool) -> None:
    weight = torch.randn(E, 64, 64, generator=generator(1)).to(E4M3)
    scale = positive(E, 64, 1, seed=2)
    values = weight.float() * scale
    module = "model.layers.0.moe"
    tensors = {
        f"{module}.w2.weight": weight.transpose(1, 2).contiguous() if turned else weight,
        f"{module}.w2.weight_scale": scale.transpose(1, 2).contiguous() if turned else scale,
    }
    _, load = stored(tensors, {"quantization_config": FP8_CHANNEL})

    assert torch.equal(load(f"{module}.w2"), values)
    without = {**tensors, f"{module}.w2.weight_scale": scale[:, :, 0].contiguous()}
    assert stored(without, {"quantization_config": FP8_CHANNEL})[0].unread.keys() == without.keys()


@pytest.mark.parametrize("turned", [False, True])
def test_a_square_matrix_has_the_axes_of_another_whose_scales_fit_one_order_alone(turned: bool) -> None:
    """Scales of outputs may lie in the other order than their weight: of a square one both orders fit."""
    module, draw = "model.layers.0.moe", generator(1)
    gate_up, down = (
        torch.randn(E, 64, 64, generator=draw).to(E4M3),
        torch.randn(E, 64, 32, generator=draw).to(E4M3),
    )
    scales = [positive(E, 64, 1, seed=seed) for seed in (2, 3)]
    values = {"gate_up_proj": gate_up.float() * scales[0], "down_proj": down.float() * scales[1]}
    tensors = {
        f"{module}.gate_up_proj.weight": gate_up.transpose(1, 2).contiguous() if turned else gate_up,
        f"{module}.gate_up_proj.weight_scale": scales[0]
        if turned
        else scales[0].transpose(1, 2).contiguous(),
        f"{module}.down_proj.weight": down.transpose(1, 2).contiguous() if turned else down,
        f"{module}.down_proj.weight_scale": scales[1].transpose(1, 2).contiguous() if turned else scales[1],
    }

    storage, load = stored(tensors, {"quantization_config": FP8_CHANNEL})

    assert storage.unread == {}
    for name, expected in values.items():
        assert torch.equal(load(f"{module}.{name}"), expected)


@pytest.mark.parametrize("inner", [6, 10, 16, 32])
def test_zero_points_of_gate_and_up_in_one_word_leave_them_one_layer(inner: int) -> None:
    """Words of eight zero points; of six and of ten outputs the last word of the gate has some of up."""
    N, K = 2 * inner, 64
    rng = np.random.default_rng(inner)
    codes, zeros = rng.integers(0, 16, (E, N, K)), rng.integers(0, 16, (E, N, K // 32))
    padded = np.zeros((E, K // 32, -(-N // 8) * 8), dtype=np.int64)
    padded[..., :N] = zeros.transpose(0, 2, 1)
    scale = positive(E, N, K // 32, seed=inner, dtype=torch.bfloat16)
    prefix = "model.layers.0.block_sparse_moe"
    tensors = {
        f"{prefix}.input_linear.weight_packed": in_words(codes),
        f"{prefix}.input_linear.weight_scale": scale,
        f"{prefix}.input_linear.weight_zero_point": in_words(padded).transpose(1, 2).contiguous(),
        f"{prefix}.input_linear.weight_shape": torch.tensor([E, N, K]),
    }
    values = torch.from_numpy(codes - zeros.repeat(32, 2)).float() * spread(scale, N, K)
    storage, load = stored(tensors, {"quantization_config": compressed(**INT4, symmetric=False)})

    whole = inner * 4 % 32 != 0
    assert (f"{prefix}.0.gate_proj.weight_packed" in storage.keys()) != whole  # noqa: SIM118
    for expert in range(E):
        parts = {"input_linear": values[expert]}
        if not whole:
            parts = dict(zip(("gate_proj", "up_proj"), values[expert].chunk(2), strict=True))
        for name, want in parts.items():
            assert torch.equal(load(f"{prefix}.{expert}.{name}"), want)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("stated", [[E + 1, 2 * INNER, HIDDEN], [E, 2 * INNER - 1, HIDDEN]])
def test_a_shape_that_is_not_that_of_the_experts_is_found(stated: list[int]) -> None:
    made = drawn_checkpoint(DIALECTS["pack"], "granite", False, True, True)
    name = f"{made.module}.input_linear.weight_shape"
    made.tensors[name] = torch.tensor(stated)
    _, load = stored(made.tensors, {"quantization_config": compressed(**INT4)})

    wrong = r"input_linear\.weight_shape: not the shape of these experts"
    numbers = rf"expected \[{E}, N, K\], N of 2 layers of one size\n  got      {re.escape(str(stated))}"
    with pytest.raises(MismatchError, match=f"{wrong}\n  {numbers}"):
        load(f"{made.module}.0.gate_proj")


@pytest.mark.parametrize(
    ("inner", "rows", "layers"),
    [
        (64, 1, ("gate_up_proj",)),  # 128 outputs in one block of 128
        (64, 2, ("gate_proj", "up_proj")),  # more than that: a row each
        (96, 2, ()),  # a row each, or 128 outputs and 64
        (128, 2, ("gate_up_proj",)),
        (192, 3, ("gate_up_proj",)),  # the second block has outputs of both
        (192, 4, ("gate_proj", "up_proj")),
    ],
)
def test_scales_of_blocks_of_gate_and_up_of_an_unknown_type(
    inner: int, rows: int, layers: tuple[str, ...]
) -> None:
    hidden = 100
    weight = torch.randn(E, 2 * inner, hidden, generator=generator(inner)).to(E4M3)
    scale = positive(E, rows, 1, seed=inner)
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": weight, f"{prefix}.gate_up_proj_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    storage, load = stored(tensors, {"hidden_size": hidden, "quantization_config": config})

    assert storage.unread.keys() == (set() if layers else tensors.keys())
    for expert in range(E if layers else 0):
        stored_rows = scale[expert].split(rows // len(layers))
        parts = zip(layers, weight[expert].float().split(2 * inner // len(layers)), stored_rows, strict=True)
        for name, codes, scales in parts:
            spread_rows = scales.repeat_interleave(128, 0)[: len(codes)]
            assert torch.equal(load(f"{prefix}.{expert}.{name}"), codes * spread_rows)


def test_a_scale_for_each_of_gate_and_up() -> None:
    hidden = 100
    weight = torch.randn(E, 2 * INNER, hidden, generator=generator(3)).to(E4M3)
    scale = positive(E, 2, seed=4)
    prefix = "model.layers.0.ffn.experts"
    tensors = {f"{prefix}.w13_weight": weight, f"{prefix}.w13_weight_scale": scale}
    config = {"hidden_size": hidden, "quantization_config": FP8_TENSOR}
    _, load = stored(tensors, config)

    for expert in range(E):
        for at, name in enumerate(("w1", "w3")):
            want = weight[expert, at * INNER :][:INNER].float() * scale[expert, at]
            assert torch.equal(load(f"{prefix}.{expert}.{name}"), want)
    renamed = {name.replace("w13", "gate_up_proj"): tensor for name, tensor in tensors.items()}
    assert stored(renamed, config)[0].unread.keys() == renamed.keys()  # in halves, or in turns


@pytest.mark.parametrize("dialect", ["fp8 columns", "nvfp4", "int8 columns"])
@pytest.mark.parametrize("alone", ["weight", "weight_scale"])
def test_one_field_of_each_expert_beside_others_of_all(dialect: str, alone: str) -> None:
    told = DIALECTS[dialect]
    made = drawn_checkpoint(told, "split", False, True, True)
    tensors = {name.replace("moe.", "moe.experts."): tensor for name, tensor in made.tensors.items()}
    for name, tensor in list(tensors.items()):
        if name.endswith(f"_proj.{alone}"):
            lead, _, matrix = name.removesuffix(f".{alone}").rpartition(".")
            del tensors[name]
            tensors |= {f"{lead}.{expert}.{matrix}.{alone}": tensor[expert].clone() for expert in range(E)}
    _, load = stored(tensors, {"hidden_size": HIDDEN, "quantization_config": told.config})

    for prefix, values in made.layers.items():
        assert torch.equal(load(prefix.replace("moe.", "moe.experts.")), values)


def test_a_config_may_name_the_stacks(tmp_path: Path) -> None:
    """Targets by the names of the stored tensors, which no expert's own name has."""
    told = DIALECTS["int8 columns"]
    made = drawn_checkpoint(told, "granite", False, True, True)
    config = {"hidden_size": HIDDEN, "quantization_config": json.loads(json.dumps(told.config))}
    (group,) = config["quantization_config"]["config_groups"].values()
    group["targets"] = [r"re:.*block_sparse_moe\.(input|output)_linear"]
    with open_checkpoint(write(tmp_path / "model", made.tensors, config)) as weights:
        for prefix, values in made.layers.items():
            assert torch.equal(weights.get_weights(prefix).dequantize(), values)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("field", ["weight_scale", "weight_packed"])
def test_a_contradiction_of_a_known_format_is_found_as_one(field: str, tmp_path: Path) -> None:
    told = DIALECTS["pack"]
    made = drawn_checkpoint(told, "granite", False, True, True)
    name = f"{made.module}.output_linear.{field}"
    made.tensors[name] = torch.cat([made.tensors[name], made.tensors[name][:, :1]], 1)
    report = verify(
        write(tmp_path / "model", made.tensors, {"quantization_config": told.config}), tier="headers"
    )

    assert report.verdict == "findings"
    found = {(finding.rule, (finding.tensor or "").rpartition(".")[0]) for finding in report.findings}
    assert found == {("tensor-shape", f"{made.module}.{expert}.down_proj") for expert in range(E)}


@pytest.mark.usefixtures("seen_texts")
def test_floats_of_an_unknown_type_are_tensors_like_any_other(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.moe.{name}.weight": torch.randn(E, 64, HIDDEN, generator=generator(at)).bfloat16()
        for at, name in enumerate(SPLIT)
    }
    path = write(tmp_path / "model", tensors, {"model_type": "a_type_of_no_table", "hidden_size": HIDDEN})
    report = verify(path)

    assert report.verdict == "ok"
    assert report.coverage is not None
    assert (report.coverage.unread, report.coverage.read) == (0, report.coverage.total)
    with open_checkpoint(path) as weights:
        for name, tensor in tensors.items():
            assert torch.equal(weights.get_tensor(name), tensor)
        with pytest.raises(UnsupportedFormatError, match=r"moe\.gate_proj\.weight.*\[3, 64, 128\]"):
            weights.get_weights("model.layers.0.moe.gate_proj")
        with pytest.raises(UnsupportedFormatError, match=r"moe\.gate_proj\.weight.*\[3, 64, 128\]"):
            weights.get_experts("model.layers.0.moe", facts=FACTS)


@pytest.mark.usefixtures("seen_texts")
def test_a_stack_loads_by_its_name_cut_and_moves() -> None:
    told = DIALECTS["nvfp4"]
    made = drawn_checkpoint(told, "split", False, True, True)
    config = {"quantization_config": told.config}
    storage = with_experts(MemoryStorage(made.tensors), config)
    prefix = f"{made.module}.down_proj"
    for world in (2, 4):
        for axis, load in ((1, "get_weights_col"), (2, "get_weights_row")):
            shares = []
            for rank in FakeWorld(world):
                weights = Weights(storage, loader=loader_from_config(told.config), process_group=rank)
                share = getattr(weights, load)(prefix)
                assert share.to("cpu").fields().keys() == share.fields().keys()
                assert torch.equal(share.expert(1).dequantize(), share.dequantize()[1])
                shares.append(share.dequantize())
            assert torch.equal(torch.cat(shares, axis), made.matrices[prefix])
    weights = Weights(storage, loader=loader_from_config(told.config))
    stack = weights.get_weights(prefix)
    out = torch.empty(stack.shape, dtype=torch.bfloat16)
    assert stack.dequantize(out=out) is out
    assert torch.equal(out, made.matrices[prefix].bfloat16())
    with pytest.raises(UnsupportedFormatError) as caught:
        stack.codes()
    assert str(caught.value) == (
        f"{prefix}: modelopt_nvfp4 of several experts: not read by this qload\n"
        "  reason   codes are those of one layer\n  remedy   take expert(index).codes()"
    )
    assert repr(stack) == f"StackedWeight({stack.stack!r})"
    assert type(stack).tensors(stack.config) == ()
    twin = stack.holding({"weight_scale_2": 2 * stack.fields()["weight_scale_2"]})
    assert twin.fields()["weight"] is stack.fields()["weight"]
    assert torch.equal(twin.dequantize(), 2 * stack.dequantize())
    assert weights.report().twice == {}


@pytest.mark.usefixtures("seen_texts")
def test_gate_and_up_in_turns_or_together_are_not_cut_by_the_name_of_both() -> None:
    both = mixture("gpt_oss", "fp8_channel")
    config_ = {**config("gpt_oss"), "quantization_config": CONFIGS["fp8_channel"]}
    with pytest.raises(UnsupportedFormatError) as caught:
        stored(both.stacks, config_)[1](f"{lead('gpt_oss')}.gate_up_proj")
    assert str(caught.value) == (
        f"{lead('gpt_oss')}.gate_up_proj: interleaved outputs of gate_proj and up_proj: "
        "not read by this qload\n"
        "  reason   one layer cannot have both\n"
        f"  remedy   load {lead('gpt_oss')}.0.gate_proj and so on, or get_experts({lead('gpt_oss')!r})"
    )
    made = drawn_checkpoint(DIALECTS["nvfp4"], "granite", False, True, True)
    storage, _ = stored(made.tensors, {"quantization_config": DIALECTS["nvfp4"].config})
    weights = Weights(storage, loader=loader_from_config(DIALECTS["nvfp4"].config))
    with pytest.raises(ArgumentError) as refused:
        weights.get_weights_col(f"{made.module}.input_linear")
    one = f"{made.module}.0"
    assert str(refused.value) == (
        f"prefix\n  expected {one}.gate_proj or {one}.up_proj, or get_experts({made.module!r}, "
        f"split='tensor')\n  got      {made.module}.input_linear, which is several layers"
    )


VERBS = [
    ("nvfp4", "split", "unknown"),
    ("nvfp4", "fused", "unknown"),
    ("nvfp4", "fused", "known"),
    ("pack asymmetric", "granite", "unknown"),
    ("pack", "fused", "known"),
    ("fp8 blocks", "fused", "known"),
    ("int8 groups", "engine", "unknown"),
    ("gptq", "split", "unknown"),
]


@pytest.mark.parametrize(("dialect", "names", "kind"), VERBS)
def test_every_verb_ends_in_an_answer(dialect: str, names: str, kind: str, tmp_path: Path) -> None:
    """A conversion means the same, or is refused by the names of what it cannot write."""
    told = DIALECTS[dialect]
    made = drawn_checkpoint(told, names, False, True, kind == "known" or names != "fused")
    config_ = {
        "hidden_size": HIDDEN,
        "quantization_config": told.config,
        **(KNOWN if kind == "known" else {}),
    }
    path = write(tmp_path / "model", made.tensors, config_)

    assert inspect(path).verdict == "ok"
    assert verify(path, tp=2, tier="headers").coverage == inspect(path).coverage
    assert {layer.prefix for layer in layers(path)} == made.layers.keys()
    assert diff(path, path).verdict == "ok"
    assert {layer.prefix for layer in plan(path, tp=[2]).layers} == made.layers.keys()
    for verb, out in (
        (lambda to: convert(path, to, to="float32", accept=["architecture-missing"]), "plain"),
        (lambda to: shard(path, to, tp=2), "two"),
    ):
        found = verb(tmp_path / out)
        assert (found.verdict == "ok") == (kind == "known" and out == "plain")
        if found.verdict == "ok":
            assert diff(path, tmp_path / out).verdict == "ok"
            with open_checkpoint(tmp_path / out) as weights:
                for prefix, values in made.layers.items():
                    assert torch.equal(weights.get_weights(prefix).dequantize(), values)
        else:
            refused = {layer.name for layer in found.layers if layer.outcome == "refused"}
            assert refused
            assert refused <= made.layers.keys()
            assert not (tmp_path / out).exists()
