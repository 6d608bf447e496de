"""One layer from another tool, and checks against the weights of that tool."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import CutError, DivideError, RepackError
from qload.formats import (
    BNB4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    EETQWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    HQQWeight,
    Marlin24Weight,
    MarlinWeight,
    MLXFloatWeight,
    MLXWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
    QuantoWeight,
    TorchAOInt4Weight,
)
from qload.kernel_formats import LAYOUTS, repack, restore
from qload.kernel_formats.fp8_fnuz import to_fnuz
from qload.layouts import (
    Stored,
    StoredMinusOne,
    StoredMinusOnePerField,
    StoredMinusOneUnmasked,
    ZeroPoints,
    eetq,
    marlin_24,
)
from qload.layouts.bnb import TABLES
from qload.loader import FormatLoader
from qload.parallel import FakeWorld
from qload.spec import Codes, Weight
from qload.spec.integers import IntegerWeight
from qload.storage import MemoryStorage, SafetensorsStorage, WeightStorage
from qload.testing import assert_same_bits, assert_within_bound, emulators
from qload.weights import Weights
from tests.format_cases import lawful


class StorageWithHeader(MemoryStorage):
    """Storage in memory, with the metadata of a file's header."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = {"model.safetensors": metadata}


@dataclass(frozen=True)
class Owned:
    """A layer, its config, and the tensors of the tool (`expected.*`, `repacked.*`, `extra.*`)."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    owner: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return prefix_of(min(self.tensors))

    @property
    def in_memory(self) -> MemoryStorage:
        return StorageWithHeader(self.tensors, self.metadata)

    @property
    def loader(self) -> FormatLoader:
        return loader_from_config(self.config, self.in_memory)

    @property
    def weight(self) -> Any:
        return Weights(self.in_memory, loader=self.loader).get_weights(self.prefix)

    @property
    def expected(self) -> Tensor:
        """Expected weight (N, K) in the dtype of the tool; (E, N, K) for experts."""
        weight = self.owner["expected.weight"]
        names = {name.removeprefix(self.prefix) for name in self.tensors}
        return weight.mT if names & INPUTS_FIRST else weight

    @property
    def unmasked(self) -> Tensor:
        """Expected weight (N, K) of tools without a mask on v1 zero points: differs at zero points of 0."""
        others = [self.owner[name] for name in UNMASKED if name in self.owner]
        return others[0].T if others else self.expected

    def storages(self, folder: Path) -> list[WeightStorage]:
        file = folder / "model.safetensors"
        save_file(dict(self.tensors), file, metadata=dict(self.metadata) or None)
        return [self.in_memory, SafetensorsStorage(file)]


INPUTS_FIRST = {".qweight", ".q_weight", ".B", ".B_24", ".weight_scales", "_blocks"}  # inputs first
COMPARED = ("expected.weight", "expected.weight_f32", "expected.x", "expected.y")
# Compared by tests.kernels.test_activations.
ACTIVATIONS = ("x", "expected.x_codes", "expected.x_scale", "expected.x_dequant", "expected.x_zero_point")
UNMASKED = ("expected.weight_autogptq", "expected.weight_kernel_unmasked_zero")

# Each `repacked.*` of a tool by qload; None for an empty tensor of the tool and none of qload's.
REPACKED: dict[str, Callable[[Any], Tensor | None]] = {
    "shuffled.q_weight": lambda weight: packed(weight, "exllama", "q_weight"),
    "q_group_map": lambda weight: packed(weight, "exllama", "q_group_map"),
    "q_perm": lambda weight: repack(weight, "exllama").fields()["q_perm"].to(torch.int16),
    "unprocessed.int8": lambda weight: (weight.codes().codes.T - 128).to(torch.int8),
    "fnuz.weight_bytes": lambda weight: to_fnuz(weight).weight.view(torch.uint8),
    "fnuz.weight_scale": lambda weight: to_fnuz(weight).weight_scale,
    "fnuz.input_scale": lambda weight: to_fnuz(weight).input_scale,
    "vllm_exllama.qweight": lambda weight: packed(weight, "exllama", "qweight"),
    "exllamav2.q_weight": lambda weight: packed(weight, "exllama", "qweight"),
    "perm": lambda weight: packed(weight, "exllama", "q_perm"),
    "marlin.qweight": lambda weight: packed(weight, "marlin", "qweight"),
    "marlin.scales": lambda weight: packed(weight, "marlin", "scales"),
    "marlin.qzeros": lambda weight: packed(weight, "marlin", "qzeros"),
    "marlin.g_idx_sorted": lambda weight: packed(weight, "marlin", "g_idx"),
    "marlin.perm": lambda weight: packed(weight, "marlin", "perm"),
    "gptq.qweight": lambda weight: packed(weight, "gptq_v2", "qweight"),
    "unpermuted.scales": lambda weight: weight.plain_scales(),
    "compressed.q_24_comp": lambda weight: kept(weight).to(torch.uint8),
    "exllama_gptq_v1.qweight": lambda weight: packed(weight, "gptq", "qweight"),
    "exllama_gptq_v1.qzeros_autoawq_wordborrow": lambda weight: packed(
        weight, "gptq", "qzeros", StoredMinusOne()
    ),
    "gptq_v1.qzeros_tgi_fieldwise": lambda weight: packed(weight, "gptq", "qzeros", StoredMinusOnePerField()),
}
# Tensors of Marlin for FP8; the dtype of the activations is the dtype of the tool's scales.
REPACKED_FP8: dict[str, Callable[[Any, torch.dtype], Tensor]] = {
    "vllm011.weight": lambda weight, dtype: fp8_marlin(weight, dtype, "qweight", True),
    "vllm011.weight_scale_fused_expbias": lambda weight, dtype: fp8_marlin(weight, dtype, "scales", True),
    "tgi.qweight": lambda weight, dtype: fp8_marlin(weight, dtype, "qweight", False),
    "tgi.scales": lambda weight, dtype: fp8_marlin(weight, dtype, "scales", False),
}


def fp4_marlin(
    weight: Weight, name: str, layout: str = "marlin_vllm_0_11", dtype: str = "bfloat16"
) -> Tensor:
    return repack(weight, layout, dtype=getattr(torch, dtype)).fields()[name]


# Tensors of Marlin for four-bit floats; the cases of vLLM 0.11 have bfloat16 activations.
REPACKED_FP4: dict[str, Callable[[Any], Tensor]] = {
    "vllm011.weight": lambda weight: fp4_marlin(weight, "qweight"),
    "vllm011.weight_scale": lambda weight: fp4_marlin(weight, "scales"),
    "vllm011.weight_scale_2": lambda weight: fp4_marlin(weight, "global_scale"),
    **{
        f"vllm033.{dtype}.{name}": partial(fp4_marlin, name=field, layout="marlin_vllm_0_33", dtype=dtype)
        for dtype in ("float16", "bfloat16")
        for name, field in (
            ("weight", "qweight"),
            ("weight_scale", "scales"),
            ("weight_global_scale", "global_scale"),
        )
    },
}
EXTRA: dict[str, Callable[[Any], Tensor]] = {
    "absmax_f32": lambda weight: weight.absmax,
}
MARLIN = ("qweight", "scales", "qzeros", "g_idx_sorted", "perm")
MARLIN_GROUPS = (32, 64, 128)
FP8_SCALES = ("vllm011.weight_scale_fused_expbias", "tgi.scales")
FP4 = (CTNVFP4Weight, ModelOptNVFP4Weight, CTMXFP4Weight)
INTEGERS = (IntegerWeight,)
OWN_ORDERS = (HQQWeight, MLXWeight, QuantoWeight, TorchAOInt4Weight)  # of floats as zero points


def packed(weight: Weight, layout: str, name: str, zeros: ZeroPoints | None = None) -> Tensor | None:
    return repack(weight, layout, zeros=zeros).fields().get(name)


def fp8_marlin(weight: Fp8Weight, dtype: torch.dtype, name: str, exponent_bias: bool) -> Tensor:
    return repack(weight, "marlin", dtype=dtype, exponent_bias=exponent_bias).fields()[name]


def prefix_of(name: str) -> str:
    """Return the module of a stored name; its weight may have tensors of its own."""
    for last in (".weight", "_blocks", "_scales", "_bias"):
        if last in name and (last == ".weight" or name.endswith(last)):
            return name.partition(last)[0]
    return name.rpartition(".")[0]


def kept(weight: Marlin24Weight) -> Tensor:
    return marlin_24.rows(weight.config.bits).unpack(weight.B_24)


def check_whole(layer: Owned, folder: Path) -> None:
    """Check the values after one rounding, from memory and from a file, without unused tensors."""
    for storage in layer.storages(folder):
        with Weights(storage, loader=layer.loader) as weights:
            got = weights.get_weights(layer.prefix).dequantize()
            assert torch.equal(got.to(layer.expected.dtype), layer.expected)
            assert weights.report().unused == [name for name in layer.tensors if name.endswith("bias")]
            if "expected.weight_f32" in layer.owner:
                assert torch.equal(got, layer.owner["expected.weight_f32"])


def check_unmasked(layer: Owned) -> None:
    """Check v1 zero points without the mask, chosen explicitly, against the tools without it."""
    for name in UNMASKED:
        if name in layer.owner:
            loader = layer.loader.with_config(zeros=StoredMinusOneUnmasked())
            got = Weights(MemoryStorage(layer.tensors), loader=loader).get_weights(layer.prefix)
            assert torch.equal(got.dequantize().half(), layer.owner[name].T)


def check_shares(layer: Owned, folder: Path, world: int) -> None:
    """Check shares: permitted cuts join to the whole; for all others, every rank raises the same message.

    The result does not depend on the storage: with two ranks, the check also reads files.
    """
    config, expected = layer.weight.config, layer.expected
    turns = layer.config.get("transform_config", {}).get("config_groups", {})
    block = max((turn["head_dim"] for turn in turns.values()), default=1)  # of inputs and outputs
    for storage in layer.storages(folder) if world == 2 else [layer.in_memory]:
        for dim, load in (("N", Weights.get_weights_col), ("K", Weights.get_weights_row)):
            axis = "NK".index(dim) - 2
            whole_blocks = expected.shape[axis] % (world * block) == 0
            if whole_blocks and lawful(config, dim, expected.shape[axis], world, expected.shape[-1]):
                parts = [load(w, layer.prefix).dequantize() for w in _ranks(storage, layer, world)]
                whole = torch.cat(parts, axis)
                assert torch.equal(whole.to(expected.dtype), expected)
            else:
                assert len({_refusal(load, weights, layer) for weights in _ranks(storage, layer, world)}) == 1


def check_repacked(layer: Owned) -> None:
    """Compare every kernel tensor of a tool bit for bit; an unknown name of a tensor fails."""
    weight = layer.weight
    theirs = {
        name.removeprefix("repacked."): t for name, t in layer.owner.items() if name.startswith("repacked.")
    }
    scales = [theirs[name].dtype for name in FP8_SCALES if name in theirs]
    for name, tensor in theirs.items():
        if isinstance(weight, FP4):
            ours: Tensor | None = REPACKED_FP4[name](weight)
        else:
            ours = REPACKED_FP8[name](weight, scales[0]) if name in REPACKED_FP8 else REPACKED[name](weight)
        if tensor.numel():
            assert_same_bits(torch.empty(0) if ours is None else ours, tensor)
        else:
            assert ours is None
    if "marlin.qweight" in theirs:
        absent = {f"marlin.{name}" for name in MARLIN} - set(theirs)
        assert all(REPACKED[name](weight) is None for name in absent)
    if isinstance(weight, EETQWeight):
        assert_same_bits(eetq.pack(theirs["unprocessed.int8"].T.int() + 128), weight.weight)


def check_extras(layer: Owned) -> None:
    """Compare further tensors of the tool with the fields of the typed weight."""
    for name, ours in EXTRA.items():
        if f"extra.{name}" in layer.owner:
            assert_same_bits(ours(layer.weight), layer.owner[f"extra.{name}"])
    if {"expected.x", "expected.y"} <= set(layer.owner):  # without rounded inputs
        for kernel in (lambda _: layer.owner["expected.y"], layer.weight.get_linear()):
            assert_within_bound(kernel, layer.weight, layer.owner["expected.x"])


def check_model(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Check every dequantized layer of the tool, and the absence of unused tensors."""
    kinds = set()
    with open_checkpoint(folder) as weights:
        for prefix in sorted({prefix_of(name) for name in list(weights.storage.keys())}):
            weight = weights.get_weights(prefix)
            kinds.add(weight.plain)
            want = expected.get(f"dequant.{prefix}.weight")
            if want is not None:
                assert torch.equal(weight.dequantize().to(want.dtype), want)
        assert weights.report().complete
    assert kinds == {True, False}


def layouts(weight: Any) -> list[str]:
    """Return the mandatory layouts of a weight, from the requirements of their kernels and not from qload."""
    if isinstance(weight, Exl2Weight):
        return ["exllama"]
    if isinstance(weight, Fp8Weight):
        e4m3fn, fnuz = (
            weight.weight.dtype == dtype for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        )
        return [*["marlin"] * e4m3fn, *["strips"] * (not fnuz and has_whole_tiles(weight))]
    if isinstance(weight, MXFP8Weight) or mlx_mode(weight) == "mxfp8":
        return ["strips"] * has_near_exponents(weight, 21)
    if isinstance(weight, BNBWeight | EETQWeight) or is_plain_int8(weight):
        return ["strips"]
    if isinstance(weight, BNB4Weight):
        return ["strips"] * has_whole_blocks(weight)
    if is_fp4(weight):
        return [
            "marlin",
            "marlin_vllm_0_11",
            "marlin_vllm_0_33",
            *["strips"] * has_near_exponents(weight, 24),
        ]
    if not isinstance(weight, INTEGERS) or "input_scale" in weight.fields():
        return []
    codes, (N, K) = weight.codes(), weight.shape
    if isinstance(weight, OWN_ORDERS) or codes.bits in (5, 6):
        along_inputs = codes.n_group is None and has_whole_groups(weight, codes)
        if not along_inputs or codes.bits not in (2, 3, 4, 5, 6, 8):
            return []
        many = codes.scales.shape[1] > 1  # float32 scales, as of HQQ, are read by group alone
        fits = weight.config.group_size in MARLIN_GROUPS if many else not isinstance(weight, HQQWeight)
        return ["panels", *["strips"] * fits]
    fill = 32 if codes.bits == 3 else 32 // codes.bits
    words = codes.bits in (2, 3, 4, 8) and N % fill == 0 and K % fill == 0
    groups = codes.scales.shape[1] == 1 or weight.config.group_size in MARLIN_GROUPS
    fits = codes.bits in (4, 8) and groups
    whole = has_whole_groups(weight, codes)
    in_panels = codes.bits in (2, 3, 4, 8) and whole
    return [
        *["gptq", "gptq_v2", "exllama"] * words,
        *["marlin"] * fits,
        *["strips"] * (codes.bits in (2, 3, 4, 8) and groups and whole),
        *["panels"] * in_panels,
    ]


def has_whole_groups(weight: Any, codes: Codes) -> bool:
    """Return whether a layer has one group, or groups of one size, in any order of inputs."""
    if codes.scales.shape[1] == 1 or codes.k_group is None:
        return True
    expected = torch.arange(weight.shape[1]) // weight.config.group_size
    return torch.equal(codes.k_group.sort().values.long(), expected)


def has_whole_tiles(weight: Fp8Weight) -> bool:
    """Return whether FP8 scales multiply, and their blocks are whole tiles of 64 outputs and 128 inputs."""
    (N, K), block = weight.shape, weight.config.block
    if weight.config.divide or block is None or block[1] >= K:
        return not weight.config.divide
    return (block[0] % 64 == 0 or block[0] >= N) and block[1] % 128 == 0


def has_whole_blocks(weight: BNB4Weight) -> bool:
    """Return whether blocks of 64, or multiples of 128, are of one output, and the table is bitsandbytes'."""
    size, (N, K) = weight.config.blocksize, weight.shape
    table = torch.tensor(TABLES[weight.config.quant_type])
    if K % size or (size != 64 and size % 128) or not torch.equal(weight.quant_map, table):
        return False
    scales = weight.absmax.reshape(N, K // size).abs()
    near = (scales == 0) | (scales * 2.0**20 >= scales.amax(1, keepdim=True))
    return bool(near.all() and scales.isfinite().all())


def mlx_mode(weight: Any) -> str:
    """Return MLX's mode of floats, or ""."""
    return weight.config.mode if isinstance(weight, MLXFloatWeight) else ""


def is_fp4(weight: Any) -> bool:
    """Return whether a weight has four-bit floats."""
    return isinstance(weight, FP4) or mlx_mode(weight) in ("mxfp4", "nvfp4")


def has_near_exponents(weight: Any, span: int) -> bool:
    """Return whether the exponents of each output of MX are within 2**`span`, or 0; True for NVFP4."""
    if not isinstance(weight, CTMXFP4Weight | MXFP8Weight) and mlx_mode(weight) not in ("mxfp4", "mxfp8"):
        return True
    exponents = (weight.scales if mlx_mode(weight) else weight.exponents).int()
    return bool(((exponents == 0) | (exponents.amax(1, keepdim=True) - exponents <= span)).all())


def is_plain_int8(weight: Any) -> bool:
    """Return whether an int-quantized weight has 8 bits, one scale or one an output, and no zero points."""
    if not isinstance(weight, CTIntWeight) or weight.config.bits != 8:
        return False
    single = weight.config.block == (1, -1) or (
        weight.config.block is None and weight.weight_scale.numel() == 1
    )
    return single and "weight_zero_point" not in weight.fields()


def check_restored(layer: Owned) -> None:
    """Check the values and the inverse of every layout: `restore` returns the bits of the checkpoint."""
    weight = layer.weight
    held = layouts(weight)
    asked: dict[str, Any] = {}
    if isinstance(weight, Fp8Weight):
        asked = {"dtype": torch.bfloat16, "exponent_bias": False}
    if is_fp4(weight):
        asked = {"dtype": torch.bfloat16}
    for layout in {*LAYOUTS} - {*held, "awq", "marlin_24"}:
        with pytest.raises(RepackError):
            repack(weight, layout)
    for layout in held:
        other = repack(weight, layout, **({} if layout == "strips" else asked))
        back = restore(other)
        if not isinstance(weight, Fp8Weight) or layout == "strips":  # other scales are rounded
            assert_same_bits(other.dequantize(), weight.dequantize())
        assert (type(back), back.config, set(back.fields())) == (
            type(weight), weight.config, set(weight.fields()),
        )  # fmt: skip
        for name, tensor in weight.fields().items():
            assert_same_bits(back.fields()[name].view(torch.uint8), tensor.view(torch.uint8))


def check_emulated(layer: Owned) -> None:
    """Check the weight in the lanes of a kernel, by an independent reader of the layouts."""
    weight = layer.weight
    if isinstance(weight, CTPackTensorWeight):
        assert not layouts(weight)  # no kernel reads a single scale
        return
    assert isinstance(weight, INTEGERS)
    for read in emulated(weight):
        assert_reads(read, layer.expected.T)
    if isinstance(weight, GPTQWeight):
        shuffled = repack(weight, "exllama")
        offset = 0 if weight.config.zeros == Stored() else 1
        read = emulators.exllama_weight(**shuffled.fields(), bits=weight.config.bits, zero_offset=offset)
        assert_reads(read, layer.unmasked.T)


def emulated(weight: Any) -> Iterator[Tensor]:
    """Yield the weight (K, N) from each mandatory kernel layout, with plain zero points."""
    bits = weight.config.bits
    if "exllama" in layouts(weight):
        shuffled = repack(weight, "exllama", zeros=Stored())
        yield emulators.exllama_weight(**shuffled.fields(), bits=bits, zero_offset=0)
    if "marlin" in layouts(weight):
        other = repack(weight, "marlin")
        yield emulators.marlin_weight(**other.fields(), bits=bits, is_k_full=other.config.is_k_full)
    if isinstance(weight, MarlinWeight):
        yield emulators.marlin_weight(weight.B, weight.s, bits=bits)
    if isinstance(weight, Marlin24Weight):
        if weight.config.plain:  # the kernel expects another order of scales
            weight = repack(repack(weight, "gptq"), "marlin_24")
        yield emulators.marlin_24_weight(**weight.fields(), bits=bits)


def assert_reads(read: Tensor, want: Tensor) -> None:
    """Check the weight (K, N) of the tool after one rounding, and padding of value 0."""
    K, N = want.shape
    assert torch.equal(read[:K, :N].to(want.dtype), want)
    assert not read[K:].any()
    assert not read[:, N:].any()


def _ranks(storage: WeightStorage, layer: Owned, world: int) -> list[Weights]:
    return [Weights(storage, loader=layer.loader, process_group=rank) for rank in FakeWorld(world)]


def _refusal(load: Callable[..., Any], weights: Weights, layer: Owned) -> str:
    with pytest.raises((CutError, DivideError)) as caught:
        load(weights, layer.prefix)
    return str(caught.value)
