"""Checkpoints broken on purpose: each kind of damage once, as a function of tensors, config or file."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.layouts import STORED_MINUS_ONE, Stored, awq, gptq

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A checkpoint folder in memory, and the quantized layer that damage is done to."""

    tensors: Tensors
    config: Config
    prefix: str

    @property
    def quantization(self) -> Config:
        section: Config = self.config["quantization_config"]
        return section

    @property
    def is_gptq(self) -> bool:
        return bool(self.quantization["quant_method"] == "gptq")

    def of(self, name: str) -> str:
        return f"{self.prefix}.{name}"


CODES = (".qweight", ".B", ".B_24")  # what a quantized layer has


def read_case(folder: Path) -> Case:
    """The tensors and the config of a fixture, and its first quantized layer."""
    case = read_tensors(folder)
    prefix = next(name for name in sorted(case.tensors) if name.endswith(CODES)).rpartition(".")[0]
    return replace(case, prefix=prefix)


def read_tensors(folder: Path) -> Case:
    """The tensors and the config of a fixture; of a model, all of its shards."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return Case(tensors, json.loads((folder / "config.json").read_text()), "")


def write_case(case: Case, folder: Path) -> Path:
    """The case as a checkpoint folder of one file; returns the folder."""
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in case.tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(case.config))
    return folder


# Damage to the file


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def lying_shape(file: Path) -> None:
    """A header that says another shape, of more bytes."""
    _edit_header(file, lambda entry: entry.update(shape=[*entry["shape"][:-1], entry["shape"][-1] + 1]))


def lying_dtype(file: Path) -> None:
    """A header that says another dtype of the same size."""
    _edit_header(file, lambda entry: entry.update(dtype="F32"))


def lying_offsets(file: Path) -> None:
    """A header whose tensor reaches beyond the file."""
    _edit_header(file, lambda entry: entry.update(data_offsets=[entry["data_offsets"][0], 1 << 40]))


def _edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(next(entry for name, entry in header.items() if name.endswith("qweight")))
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])


# Damage to tensors and config, which a checkpoint can hold with valid headers


def missing_scales(case: Case) -> None:
    del case.tensors[case.of("scales")]


def missing_codes(case: Case) -> None:
    del case.tensors[case.of("qweight")]


def missing_zeros(case: Case) -> None:
    del case.tensors[case.of("qzeros")]


def missing_projection(case: Case) -> None:
    for name in [name for name in case.tensors if name.startswith(f"{case.prefix}.")]:
        del case.tensors[name]


def missing_norm(case: Case) -> None:
    del case.tensors["model.layers.1.input_layernorm.weight"]


def scale_nan(case: Case) -> None:
    case.tensors[case.of("scales")][0, 3] = float("nan")


def scale_inf(case: Case) -> None:
    case.tensors[case.of("scales")][-1, 0] = float("inf")


def scale_negative(case: Case) -> None:
    case.tensors[case.of("scales")][0, -1] *= -1


def index_out_of_range(case: Case) -> None:
    case.tensors[case.of("g_idx")][5] = case.tensors[case.of("scales")].shape[0]


def index_negative(case: Case) -> None:
    case.tensors[case.of("g_idx")][5] = -1


def index_counts(case: Case) -> None:
    g_idx = case.tensors[case.of("g_idx")]
    g_idx[0] = (g_idx[0] + 1) % case.tensors[case.of("scales")].shape[0]


def index_all_zero(case: Case) -> None:
    case.tensors[case.of("g_idx")].zero_()


def act_order_denied(case: Case) -> None:
    """Rows in act order, while the config says that they are not."""
    case.quantization["desc_act"] = False
    index_shuffled(case)


def symmetric_zeros_off(case: Case) -> None:
    zeros, packing = _zeros(case)
    _write_zeros(case, zeros + 1, packing)


def bits_claim(case: Case) -> None:
    case.quantization["bits"] = 8 if case.quantization["bits"] != 8 else 4


def group_claim(case: Case) -> None:
    size = case.quantization["group_size"]
    case.quantization["group_size"] = 16 if size != 16 else 32


def plain_nan(case: Case) -> None:
    case.tensors["model.norm.weight"][7] = float("nan")


def stranger(case: Case) -> None:
    case.tensors[case.of("weight_scale")] = torch.ones(4)


# Damage that only another checkpoint can tell


def nibble_order(case: Case) -> None:
    """Words as the other method orders them: AWQ's even columns first, GPTQ's codes as they come."""
    bits = case.quantization["bits"]
    words = case.tensors[case.of("qweight")]
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    packing = gptq.rows(bits) if case.is_gptq else awq.columns(bits)
    codes = packing.unpack(words)
    if case.is_gptq:
        swapped = codes.reshape(-1, 8, codes.shape[1])[:, order].reshape_as(codes)
    else:
        swapped = codes.reshape(codes.shape[0], -1, 8)[:, :, order].reshape_as(codes)
    case.tensors[case.of("qweight")] = packing.pack(swapped)


def asymmetric_zeros_off(case: Case) -> None:
    zeros, packing = _zeros(case)
    highest = 2**packing.bits - 1
    _write_zeros(case, torch.where(zeros < highest, zeros + 1, zeros), packing)


def scales_rolled(case: Case) -> None:
    case.tensors[case.of("scales")] = case.tensors[case.of("scales")].roll(1, 0)


def index_shuffled(case: Case) -> None:
    """Other rows in each group, as many as before."""
    g_idx = case.tensors[case.of("g_idx")]
    order = torch.randperm(g_idx.numel(), generator=torch.Generator().manual_seed(0))
    case.tensors[case.of("g_idx")] = g_idx[order]


def _convention(case: Case) -> Any:
    v2 = case.quantization.get("checkpoint_format") == "gptq_v2"
    return STORED_MINUS_ONE if case.is_gptq and not v2 else Stored()


def _zeros(case: Case) -> Any:
    bits = case.quantization["bits"]
    packing = gptq.columns(bits) if case.is_gptq else awq.columns(bits)
    return _convention(case).read(case.tensors[case.of("qzeros")], packing), packing


def _write_zeros(case: Case, zeros: Tensor, packing: Any) -> None:
    case.tensors[case.of("qzeros")] = _convention(case).write(zeros, packing)
