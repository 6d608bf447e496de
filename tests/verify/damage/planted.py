"""Damage that a model's own values tell of: each kind once, for a model of any format.

A function changes the model in place, or raises DoesNotApplyError with the reason why it cannot.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from qload.layouts import STORED_MINUS_ONE, Packing, Stored, ZeroPoints, awq, compressed_tensors, gptq
from tests.verify.damage.model import DoesNotApplyError, Model, bytes_of

Plant = Callable[[Model], None]
HOLE = 4096
EVEN_FIRST = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
SWAPPED = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])


# Never filled


def codes_never_filled(model: Model) -> None:
    name = _of_several(model)
    bytes_of(model.tensors[name]).zero_()


def scales_all_one(model: Model) -> None:
    scales = model.scales(_of_several(model))
    _is_filled_with(model, scales, 1.0)


def never_filled(model: Model) -> None:
    codes_never_filled(model)
    scales_all_one(model)


def embedding_zero(model: Model) -> None:
    model.tensors[model.embedding()].zero_()


def head_zero(model: Model) -> None:
    model.tensors[model.head()].zero_()


def head_half_zero(model: Model) -> None:
    head = model.tensors[model.head()]
    head[len(head) // 2 :].zero_()


def projection_zero(model: Model) -> None:
    """A plain matrix of a layer."""
    found = [name for name in model.tensors if name.endswith("q_proj.weight") and _is_plain(model, name)]
    if not found:
        raise DoesNotApplyError("no plain projection")
    model.tensors[found[-1]].zero_()


def norm_zero(model: Model) -> None:
    found = [name for name in model.tensors if name.endswith("input_layernorm.weight")]
    if not found:
        raise DoesNotApplyError("no norm")
    model.tensors[found[-1]].zero_()


# Holes and repetitions


def hole_of_a_page(model: Model) -> None:
    data = bytes_of(model.tensors[model.target(least=2 * HOLE)])
    data[1000 : 1000 + HOLE] = 0


def hole_of_half(model: Model) -> None:
    data = bytes_of(model.tensors[model.target(least=2048)])
    data[len(data) // 2 :] = 0


def block_twice(model: Model) -> None:
    data = bytes_of(model.tensors[model.target(least=2048)])
    data[1024:1536] = data[:512].clone()


# Copies


def layer_copied(model: Model) -> None:
    """All matrices of a layer over those of the next, which keeps the norms that it was trained to."""
    for name, other in pairs_of_layers(model).items():
        if "norm" not in name:
            model.tensors[name] = model.tensors[other].clone()
        elif bytes_of(model.tensors[name]).equal(bytes_of(model.tensors[other])):
            model.tensors[name].view(-1)[0] *= 2


def projection_copied(model: Model) -> None:
    """`up_proj` of one layer over that of another."""
    codes = _of_several(model)
    _copy_layer(model, next(model.like(codes)), codes)


def gate_over_up(model: Model) -> None:
    for codes in model.codes():
        for gate, up in (("gate_proj", "up_proj"), ("w1", "w3")):
            if gate in codes.split("."):
                _copy_layer(model, codes, codes.replace(f"{gate}.", f"{up}."))
                return
    raise DoesNotApplyError("no gate_proj of codes")


# Zero points and orders


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


# Sizes


def scales_inverted(model: Model) -> None:
    _scale(model, [model.target()], lambda scales: torch.where(scales != 0, 1 / scales, scales))


def all_scales_inverted(model: Model) -> None:
    if not model.codes():
        raise DoesNotApplyError("no scales")
    _scale(model, model.codes(), lambda scales: torch.where(scales != 0, 1 / scales, scales))


def scales_times_a_thousand(model: Model) -> None:
    _scale(model, [model.target()], lambda scales: scales * 1000)


def a_third_of_the_scales_zero(model: Model) -> None:
    def change(scales: Tensor) -> Tensor:
        if scales.numel() < 32:
            raise DoesNotApplyError("too few scales")
        flat = scales.flatten().clone()
        flat[::3] = 0
        return flat.reshape(scales.shape)

    _scale(model, [model.target()], change)


def scale_times_256(model: Model) -> None:
    def change(scales: Tensor) -> Tensor:
        if scales.numel() < 8:
            raise DoesNotApplyError("too few scales")
        flat = scales.flatten().clone()
        flat[flat.abs().argsort()[len(flat) * 3 // 4]] *= 256
        return flat.reshape(scales.shape)

    _scale(model, [model.target()], change)


def embedding_of_the_other_type(model: Model) -> None:
    """Bits of fp16 under a header that says bf16, or the reverse."""
    name = model.embedding()
    model.tensors[name] = _retyped(model.tensors[name])


def scales_of_the_other_type(model: Model) -> None:
    name = model.scales(model.target())
    model.tensors[name] = _retyped(model.tensors[name])


def value_of_1e30(model: Model) -> None:
    name = model.embedding()
    if model.tensors[name].dtype is torch.float16:
        raise DoesNotApplyError("fp16 has no 1e30")
    model.tensors[name].view(-1)[77] = 1e30


# bitsandbytes and claims


def offset_negated(model: Model) -> None:
    """What is added to quantized scales."""
    name = next((name for name in model.tensors if "quant_state.bitsandbytes" in name), None)
    state = {} if name is None else json.loads(bytes(model.tensors[name].tolist()))
    if name is None or not state.get("nested_offset"):
        raise DoesNotApplyError("no quantized scales")
    state["nested_offset"] *= -1
    model.tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def block_without_an_end(model: Model) -> None:
    """The largest weight of a block has the code of a smaller one."""
    name = _bnb(model)
    data = bytes_of(model.tensors[name])
    block = data[: int(model.quantization.get("blocksize", 64)) // 2]
    high, low = block >> 4, block & 15
    high[(high == 0) | (high == 15)] = 9
    low[(low == 0) | (low == 15)] = 9
    block.copy_((high << 4) | low)


def double_quant_claimed(model: Model) -> None:
    _bnb(model)
    nested = any("nested_absmax" in name for name in model.tensors)
    model.quantization["bnb_4bit_use_double_quant"] = not nested


def e4m3_claimed(model: Model) -> None:
    """Tensors of e5m2 beside a config that says e4m3."""
    names = [name for name in model.codes() if model.tensors[name].dtype is torch.float8_e4m3fn]
    if not names or model.quantization.get("quant_method") != "fp8":
        raise DoesNotApplyError("no e4m3 that the config could claim")
    for name in names:
        model.tensors[name] = model.tensors[name].view(torch.float8_e5m2)
        data = bytes_of(model.tensors[name])
        data[(data & 127) > 0x7B] = 0x7B
    model.quantization["fmt"] = "e4m3"


PLANTS: tuple[Plant, ...] = (
    codes_never_filled, scales_all_one, never_filled, embedding_zero, head_zero, head_half_zero,
    projection_zero, norm_zero, hole_of_a_page, hole_of_half, block_twice, layer_copied, projection_copied,
    gate_over_up, zeros_one_higher, zeros_one_lower, all_zeros_beside_the_middle, even_codes_first,
    nibbles_swapped, act_order_lost, act_order_of_one_lost, act_order_permuted,
    group_size_times_five_fourths, scales_inverted, all_scales_inverted, scales_times_a_thousand,
    a_third_of_the_scales_zero, scale_times_256, embedding_of_the_other_type, scales_of_the_other_type,
    value_of_1e30, offset_negated, block_without_an_end, double_quant_claimed, e4m3_claimed,
)  # fmt: skip


def _of_several(model: Model) -> str:
    codes = model.target("up_proj") if any("up_proj" in name for name in model.codes()) else model.target()
    if not any(model.tensors[other].shape == model.tensors[codes].shape for other in model.like(codes)):
        raise DoesNotApplyError("no other layer is like it")
    return codes


def _is_filled_with(model: Model, name: str, value: float) -> None:
    scales = model.tensors[name]
    if scales.dtype is torch.uint8 or scales.numel() < 32:
        raise DoesNotApplyError("no scales that are floats, or too few")
    model.tensors[name] = torch.full(scales.shape, value).to(scales.dtype)


def _is_plain(model: Model, name: str) -> bool:
    return model.tensors[name].dtype in (torch.float16, torch.bfloat16, torch.float32)


def pairs_of_layers(model: Model) -> dict[str, str]:
    """The tensors of the second layer, and those of the first that they could be."""
    lead = next((name.split("0.")[0] for name in model.tensors if ".layers.0." in name), None)
    ours = {name for name in model.tensors if name.startswith(f"{lead}1.")}
    pairs = {name: name.replace(f"{lead}1.", f"{lead}0.", 1) for name in ours}
    if not pairs or any(_unlike(model, *pair) for pair in pairs.items()):
        raise DoesNotApplyError("layers 0 and 1 are not alike")
    return pairs


def _unlike(model: Model, one: str, other: str) -> bool:
    if other not in model.tensors:
        return True
    here, there = model.tensors[one], model.tensors[other]
    return (here.shape, here.dtype) != (there.shape, there.dtype)


def _copy_layer(model: Model, source: str, target: str) -> None:
    """All tensors of a quantized layer over another's."""
    for end in (".qweight", ".weight_packed", "_blocks", ".weight", ".B", ".q_weight"):
        if source.endswith(end):
            lead, other = source.removesuffix(end), target.removesuffix(end)
            for name in [name for name in model.tensors if name.startswith(f"{lead}.")]:
                model.tensors[other + name.removeprefix(lead)] = model.tensors[name].clone()
            model.tensors[target] = model.tensors[source].clone()
            return


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


def _scale(model: Model, codes: list[str], change: Callable[[Tensor], Tensor]) -> None:
    """Other scales; of scales that have another beside them, that one."""
    for each in codes:
        name = model.scales(each)
        for outer in (".weight_global_scale", ".weight_scale_2"):
            lead = name.removesuffix(".weight_scale")
            name = lead + outer if lead + outer in model.tensors else name
        scales = model.tensors[name]
        if scales.dtype is torch.uint8 and each.endswith(("_blocks", "_packed")):
            made = change(2.0 ** (scales.float() - 127))
            made = torch.where(made > 0, made.log2().round() + 127, 0).clamp(0, 254)
            model.tensors[name] = made.to(torch.uint8)
        elif scales.dtype is torch.uint8:
            raise DoesNotApplyError("scales that are codes")
        else:
            exact = change(scales.float())
            limit = torch.finfo(scales.dtype).max
            model.tensors[name] = exact.clamp(-limit, limit).to(scales.dtype)


def _retyped(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float16:
        return tensor.view(torch.bfloat16)
    if tensor.dtype is torch.bfloat16:
        return tensor.to(torch.float16).view(torch.bfloat16)
    raise DoesNotApplyError("no floats of 16 bits")


def _bnb(model: Model) -> str:
    found = [name for name in model.codes() if model.scales(name).endswith("absmax")]
    if not found:
        raise DoesNotApplyError("not bitsandbytes")
    return found[0]
