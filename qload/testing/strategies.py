"""Hypothesis strategies for layers with given traits, or with any valid content of a format's files.

The second kind follows from a strategy of configs and the declaration of tensors: sizes from its axes, dtypes
and fillings from its specs, group indices from the axis that they index.
"""

from dataclasses import replace
from math import lcm
from typing import Any

import torch

try:
    from hypothesis import strategies as st
except ModuleNotFoundError:
    raise ImportError(
        "strategies need Hypothesis, which the extra `testing` brings: pip install 'qload-weights[testing]'"
    ) from None

from qload.errors import ArgumentError
from qload.spec import LOGICAL, TensorSpec, Weight
from qload.testing.layer_factory import layer_of, weight_type_of
from qload.testing.random_layer import PREFIX, DrawnLayer, complete_sizes, fill_layer
from qload.testing.traits import WRAPPED, Traits, contract

FILLINGS = ("zeros", "count", "noise")  # simplest first; all but noise are exact in every dtype

__all__ = ["FILLINGS", "PREFIX", "DrawnLayer", "layers"]


def layers(
    format: str | type[Weight],
    configs: st.SearchStrategy[Any] | None = None,
    *,
    bits: int | None = None,
    groups: tuple[int, ...] | None = None,
    symmetric: bool | None = None,
    act_order: bool | None = None,
    zeros: str | None = None,
    variant: str | None = None,
    dtype: str = "float16",
    shapes: tuple[tuple[int, int], ...] | None = None,
    N: int | None = None,
    K: int | None = None,
    most: int = 4,
    fillings: tuple[str, ...] | None = None,
) -> st.SearchStrategy[DrawnLayer]:
    """Return a Hypothesis strategy for layers of a `format`, by default those of every kernel.

    `layers("gptq")` draws symmetric layers of 4 bits and groups of 128 in order. `act_order=True` or
    `zeros="wrapping"` selects an odd corner, and `layers(...) | layers(...)` draws from two.
    ArgumentError for traits that the format does not have.

    Parameters
    ----------
    format
        A format's name, or the type of its typed weights.
    configs
        A strategy for configs: draws any content of files with them, also wrapped zero points and act order,
        whether kernels support it or not. The parameters of traits are None then.
    bits, groups, symmetric, act_order, zeros, variant
        As in `Traits`, `groups` one or several group sizes; None: the common value of the format.
    dtype
        Of activations, and so of scales of 16 bits.
    shapes
        Pairs (N, K) to draw from; None: small ones that the format and its groups allow.
    N, K
        Sizes; None: at most `most` granules of the axes.
    most
        The largest number of granules.
    fillings
        The contents of tensors, simplest first: "zeros", "count", "coded" (any codes, and powers of two for
        scales), "noise".
    """
    weight_type = weight_type_of(format) if isinstance(format, str) else format
    traits: dict[str, Any] = {
        "bits": bits,
        "symmetric": symmetric,
        "act_order": act_order,
        "zeros": zeros,
        "variant": variant,
    }
    if configs is not None:
        for name, value in {**traits, "groups": groups, "shapes": shapes}.items():
            if value is not None:
                raise ArgumentError(name, "None together with configs", repr(value))
        return _layers_of_configs(weight_type, configs, N=N, K=K, most=most, fillings=fillings or FILLINGS)
    common = contract(weight_type.format).common(weight_type.format)
    stated = {name: value for name, value in traits.items() if value is not None}
    if zeros in WRAPPED:
        stated.setdefault("symmetric", False)
    sizes = groups or (common.group_size,)
    chosen = [replace(common, group_size=size, dtype=dtype, **stated) for size in sizes]
    for each in chosen:
        check_traits(each)
    return _layers_of_traits(chosen, shapes, N, K, most, fillings or ("coded", "noise"))


def check_traits(traits: Traits) -> None:
    """Raise ArgumentError for a value in `traits` outside of the format's contract."""
    allowed = contract(traits.format)
    for name, value, known in (
        ("symmetric", traits.symmetric, allowed.symmetric),
        ("act_order", traits.act_order, allowed.act_order),
        ("zeros", traits.zeros, allowed.zeros),
        ("variant", traits.variant, allowed.variants),
    ):
        if value not in known:
            raise ArgumentError(
                f"{traits.format}: {name}", f"one of {', '.join(map(repr, known))}", repr(value)
            )
    if traits.group_size != -1 and (traits.group_size < 1) == (allowed.groups != (0,)):
        raise ArgumentError(f"{traits.format}: groups", "sizes of at least 1, or -1", str(traits.group_size))


@st.composite
def _layers_of_traits(
    draw: st.DrawFn,
    choices: list[Traits],
    shapes: tuple[tuple[int, int], ...] | None,
    N: int | None,
    K: int | None,
    most: int,
    fillings: tuple[str, ...],
) -> DrawnLayer:
    traits = draw(st.sampled_from(choices))
    if shapes is not None:
        n, k = draw(st.sampled_from(shapes))
    else:
        unit = max(64, traits.group_size)  # whole words and groups, and tiles of most kernels
        n = N or 64 * draw(st.integers(1, most), label="64 outputs")
        k = K or lcm(unit, 64) * draw(st.integers(1, most), label="groups of inputs")
    filling = draw(st.sampled_from(fillings))
    return layer_of(traits, n, k, filling=filling, seed=draw(st.integers(0, 2**16)))


@st.composite
def _layers_of_configs(
    draw: st.DrawFn,
    weight_type: type[Weight],
    configs: st.SearchStrategy[Any],
    *,
    N: int | None,
    K: int | None,
    most: int,
    fillings: tuple[str, ...],
) -> DrawnLayer:
    config = draw(configs)
    specs = weight_type.tensors(config)
    sizes = draw(_sizes(specs, {"N": N, "K": K}, most))
    facts = weight_type.sample_facts(config, sizes)
    filling = draw(st.sampled_from(fillings))
    act_order = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return fill_layer(weight_type, config, sizes, facts, filling, act_order, generator)


@st.composite
def _sizes(
    draw: st.DrawFn, specs: tuple[TensorSpec, ...], given: dict[str, int | None], most: int
) -> dict[str, int]:
    axes = [axis for spec in specs for axis in spec.binding]
    flat = [axis.granule for axis in axes if axis.flat]
    # Blocks also end within rows.
    unit = lcm(*flat) // draw(st.sampled_from([1, 4, 7])) or 1 if flat else 1
    sizes: dict[str, int] = {}
    for dim in sorted({dim for axis in axes for dim in LOGICAL if axis.follows(dim)}):
        granule = lcm(unit, *(axis.exact_step for axis in axes if axis.dim == dim))
        sizes[dim] = given[dim] or granule * draw(st.integers(1, most), label=f"granules of {dim}")
    return complete_sizes(specs, sizes)
