"""Damage to zero points, orders and groups, that a model's own values tell of; `planted` has all of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from qload.layouts import STORED_MINUS_ONE, Packing, Stored, ZeroPoints, awq, compressed_tensors, gptq
from tests.verify.damage.model import DoesNotApplyError, Model

EVEN_FIRST = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
SWAPPED = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])


def zeros_one_higher(model: Model) -> None:
    _asymmetric(model)
    _change_zeros(model, lambda zeros, top: (zeros + 1).clamp(max=top))


def zeros_one_lower(model: Model) -> None:
    _asymmetric(model)
    _change_zeros(model, lambda zeros, top: (zeros - 1).clamp(min=0))


def all_zeros_beside_the_middle(model: Model) -> None:
    """A symmetric layer that is said to be asymmetric, and is off by one."""
    if model.quantization.get("quant_method") != "gptq":
        raise DoesNotApplyError("only of GPTQ")
    _change_zeros(model, lambda zeros, top: torch.full_like(zeros, top // 2))
    model.quantization["sym"] = False


def even_codes_first(model: Model) -> None:
    _reorder(model, EVEN_FIRST)


def nibbles_swapped(model: Model) -> None:
    _reorder(model, SWAPPED)


def act_order_lost(model: Model) -> None:
    for name in _indexed(model):
        model.tensors[name] = model.tensors[name].sort().values


def act_order_of_one_lost(model: Model) -> None:
    name = next(name for name in _indexed(model) if "k_proj" in name)
    model.tensors[name] = model.tensors[name].sort().values


def act_order_permuted(model: Model) -> None:
    name = next(name for name in _indexed(model) if "down_proj" in name)
    index = model.tensors[name]
    model.tensors[name] = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]


def group_size_times_five_fourths(model: Model) -> None:
    """Another group size that makes as many groups."""
    section = _groups_of(model)
    block = section.get("weight_block_size")
    if block:
        section["weight_block_size"] = [size * 5 // 4 for size in block]
    else:
        section["group_size"] = section["group_size"] * 5 // 4


def _bits(model: Model) -> int:
    return int(model.quantization.get("bits") or model.quantization.get("w_bit") or 4)


def _convention(model: Model) -> tuple[ZeroPoints, Packing]:
    method = model.quantization.get("quant_method")
    if method == "awq":
        return Stored(), awq.columns(_bits(model))
    if method == "gptq":
        v2 = model.quantization.get("checkpoint_format") == "gptq_v2"
        return Stored() if v2 else STORED_MINUS_ONE, gptq.columns(_bits(model))
    raise DoesNotApplyError("zero points of another format")


def _change_zeros(model: Model, change: Callable[[Tensor, int], Tensor]) -> None:
    for codes in model.codes():
        name = model.zeros(codes)
        stored = model.tensors[name]
        if codes.endswith(".weight_packed"):
            packed = stored.T.contiguous()
            N = 8 * packed.shape[1]
            made = change(compressed_tensors.unpack(packed, N, 4, True), 15)
            model.tensors[name] = gptq.columns(4).pack(made.int()).T.contiguous()
            continue
        zeros, packing = _convention(model)
        model.tensors[name] = zeros.write(change(zeros.read(stored, packing), 2**packing.bits - 1), packing)


def _asymmetric(model: Model) -> list[str]:
    """The codes of layers whose zero points differ."""
    found = [codes for codes in model.codes() if model.tensors[model.zeros(codes)].unique().numel() > 1]
    if not found:
        raise DoesNotApplyError("all zero points are one")
    return found


def _reorder(model: Model, order: Tensor) -> None:
    """The eight codes of every word along N; where codes lie along K, those of the zero points."""
    for codes in _asymmetric(model):
        along_n = model.quantization.get("quant_method") == "awq"
        name = codes if along_n else model.zeros(codes)
        words = model.tensors[name]
        if codes.endswith(".weight_packed"):
            words = words.T.contiguous()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        nibbles = (words[..., None] >> shifts) & 15
        made = (nibbles[..., order].long() << shifts.long()).sum(-1)
        made = torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)
        model.tensors[name] = made.T.contiguous() if codes.endswith(".weight_packed") else made


def _indexed(model: Model) -> list[str]:
    found = [name for name in model.tensors if name.endswith("g_idx")]
    if not any(bool((model.tensors[name].diff() < 0).any()) for name in found):
        raise DoesNotApplyError("no act order")
    return found


def _groups_of(model: Model) -> dict[str, object]:
    """The section that says the group size, where another makes as many groups everywhere."""
    section = model.quantization
    block = section.get("weight_block_size")
    groups = section.get("config_groups") or {}
    for group in groups.values():
        section = group.get("weights") or section
    size = block[1] if block else section.get("group_size")
    if not isinstance(size, int) or size < 4:
        raise DoesNotApplyError("no groups")
    wide, changed = size * 5 // 4, False
    for codes in model.codes():
        shape = model.tensors[model.scales(codes)].shape
        along = 0 if codes.endswith(".qweight") else -1
        for inner, axis in ((True, along), *(((False, 0),) if block else ())):
            whole = model.tensors[codes].shape[axis]
            K = whole * (
                8 if not block and not (inner and model.quantization.get("quant_method") == "awq") else 1
            )
            if -(-K // wide) != shape[axis]:
                raise DoesNotApplyError("another group size makes other groups")
            changed = changed or size < K
    if not changed:
        raise DoesNotApplyError("every layer is one group")
    return section
