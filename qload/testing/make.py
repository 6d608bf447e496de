"""`make_checkpoint`: a whole model in a few kilobytes, for tests that would else download one."""

import json
import os
from binascii import crc32
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from qload.architecture import architecture_of
from qload.errors import ArgumentError, ConfigError, checked
from qload.errors.exceptions import written_to
from qload.models.config import text_config
from qload.spec import Role, TensorSpec, named
from qload.testing.recipes import LEFT_OUT, RECIPES, Dialect
from qload.testing.stubs import stub_config

WORDS, MULTIPLIER, HALF = 1 << 32, 2654435761, 1 << 31  # an odd factor: no two words of a tensor are equal
SIZES: Mapping[str, int] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


@checked
def make_checkpoint(
    format: str,
    folder: str | PathLike[str],
    *,
    model: str = "llama",
    config: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write a tiny checkpoint of a `format` to a `folder`, and return its tensors by name.

    Every value tells where it lies: words of a tensor are a number of their place that no other place has,
    and floats are drawn from such numbers, so that what is read from a wrong place is wrong. The same
    arguments write the same bytes. All matrices of decoder layers are quantized but for routers; the values
    mean no language.

    Parameters
    ----------
    format
        A dialect, one of `qload.testing.recipes.RECIPES`.
    folder
        Which is made; ArgumentError where it has anything in it.
    model
        A `model_type` that `load_model` loads; those with experts have four.
    config
        Entries of `config.json` that are different.

    Raises
    ------
    ArgumentError
        For formats and types that there are none of, for what no model of the type can have, and for sizes
        that the format cannot say.
    """
    if format not in RECIPES:
        raise ArgumentError("format", f"one of {', '.join(RECIPES)}", repr(format[:80]))
    recipe, place, whole = RECIPES[format], Path(folder), _config(model, config or {})
    _believable(whole)
    if recipe.said is not None:
        whole["quantization_config"] = dict(recipe.said)
    tensors = _tensors(recipe, whole)
    place.mkdir(parents=True, exist_ok=True)
    if os.listdir(place):
        raise ArgumentError("folder", "one that is empty, or not there", str(place))
    said = json.dumps(whole, indent=2) + "\n"
    made = {"model.safetensors": save(tensors, {"format": "pt"}), "config.json": said.encode()}
    for name, content in made.items():
        with written_to(place / name):
            (place / name).write_bytes(content)
    return tensors


def _config(model: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Of sizes that every format can say: groups and blocks are whole."""
    own = stub_config(model)
    sizes = {key: size for key, size in SIZES.items() if key in own}
    return {**own, **sizes, "dtype": "bfloat16", **said}


def _believable(config: Mapping[str, Any]) -> None:
    """ArgumentError for what no model of the type can have."""
    try:
        text_config(config)
    except ConfigError as error:
        raise ArgumentError(f"config: {error.key}", error.expected, error.got) from error


def _tensors(recipe: Dialect, config: Mapping[str, Any]) -> dict[str, Tensor]:
    known = architecture_of(config)
    assert known is not None  # every type of a stub has a table
    found: dict[str, Tensor] = {}
    for name in known.required():
        expected, shape = known.expected(name), known.shape(name)
        if shape is not None:
            near = 1.0 if name.endswith("norm.weight") else 0.0
            found[name] = (near + _uniform(name, shape) / 8).bfloat16()
        elif expected is not None:
            left_out = ".layers." not in name or name.rpartition(".")[2] in LEFT_OUT
            plain = {f"{name}.weight": (_uniform(name, expected) * expected[1] ** -0.5).bfloat16()}
            kin = min(known.siblings(name), default=name)
            found |= plain if left_out else _layer(recipe, name, kin, *expected)
    return found


def _layer(recipe: Dialect, prefix: str, kin: str, N: int, K: int) -> dict[str, Tensor]:
    """Each tensor that the format declares, of the sizes that follow from N and K.

    `kin`: one of the layers with the same inputs, which have one act order.
    """
    sizes = {"N": N, "K": K}
    specs = [spec for spec in recipe.format.specs() if not spec.optional]
    for axis in (axis for spec in specs for axis in spec.axes if axis.free):
        sizes[axis.free or ""] = axis.size(sizes[axis.dim]) or 0
    return {
        named(prefix, spec.suffix): _tensor(
            recipe, f"{kin if spec.index_of else prefix}.{spec.name}", spec, sizes
        )
        for spec in specs
    }


def _tensor(recipe: Dialect, name: str, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    shape, dtype = _shape(name, spec, sizes), spec.dtypes[0]
    if spec.name == "weight_shape":
        return torch.tensor([sizes["N"], sizes["K"]])
    if spec.index_of:
        rows = torch.arange(sizes["K"]) // (sizes["K"] // sizes[spec.index_of])
        return (rows[_order(name, sizes["K"])] if recipe.act_order else rows).to(dtype)
    if spec.role is Role.SCALE:
        return (0.01 + 0.005 * _uniform(name, shape)).to(dtype)
    if dtype.is_floating_point:
        plain = spec.role is Role.FLOAT
        return (_uniform(name, shape) * (sizes["K"] ** -0.5 if plain else 256.0)).to(
            torch.bfloat16 if plain else dtype
        )
    if "zeros" in spec.name and recipe.middle is not None:
        bits = getattr(recipe.format.config, "bits", 4)
        word = sum(recipe.middle << at for at in range(0, 32, bits))
        return torch.full(shape, word - (WORDS if word >= HALF else 0), dtype=dtype)
    words = _places(name, shape)
    return torch.where(words >= HALF, words - WORDS, words).to(dtype)


def _shape(name: str, spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    extents = [axis.size(sizes[axis.free] if axis.free else axis.logical(sizes) or 0) for axis in spec.axes]
    extents = [
        sizes[axis.free] if axis.free else extent for axis, extent in zip(spec.axes, extents, strict=True)
    ]
    if None in extents:
        raise ArgumentError(
            "config", "sizes that the format can say", f"{name}: {spec.text} of {dict(sizes)}"
        )
    return tuple(extent for extent in extents if extent is not None)


def _places(name: str, shape: tuple[int, ...]) -> Tensor:
    """A number below 2**32 for each place, which no other place of the tensor has; int64."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * MULTIPLIER + crc32(name.encode())) % WORDS).reshape(shape)


def _uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """A number of [-1, 1) for each place, float64."""
    return _places(name, shape).double() / HALF - 1


def _order(name: str, K: int) -> Tensor:
    """The rows in an order that only their places say."""
    return torch.argsort(_places(name, (K,)))
