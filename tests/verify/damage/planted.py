"""Damage that a model's own values tell of: each kind once, for a model of any format.

A function changes the model in place, or raises DoesNotApplyError with the reason why it cannot.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from tests.verify.damage.model import DoesNotApplyError, Model, bytes_of
from tests.verify.damage.planted_scales import (
    a_third_of_the_scales_zero,
    all_scales_inverted,
    scale_times_256,
    scales_inverted,
    scales_times_a_thousand,
)
from tests.verify.damage.planted_zeros import (
    act_order_lost,
    act_order_of_one_lost,
    act_order_permuted,
    all_zeros_beside_the_middle,
    even_codes_first,
    group_size_times_five_fourths,
    nibbles_swapped,
    zeros_one_higher,
    zeros_one_lower,
)

Plant = Callable[[Model], None]
HOLE = 4096


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


# Sizes


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
