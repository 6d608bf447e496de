"""Biases of experts: plain floats beside their matrices, all experts have one or none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qload.errors import DtypeError, MismatchError, ShapeError
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription, TensorSource
from qload.loader.cuts import Share
from qload.spec import Role, named


def bias_name(prefix: str) -> str:
    """`experts.0.down_proj` -> `experts.0.down_proj.bias`."""
    return named(prefix, "bias")


def check_biases(
    source: TensorSource,
    firsts: Sequence[LayerDescription],
    layers: Sequence[LayerDescription],
    expected: Sequence[bool],
    biased: Sequence[bool],
) -> None:
    """Gate, up and down have a bias where those of the first expert have one, of one float type each.

    `expected`, `biased`: which have one, of the first expert and of this one. MismatchError, ShapeError and
    DtypeError name what is wrong.
    """
    if biased[0] != biased[1]:
        has, lacks = layers[biased[1]], layers[biased[0]]
        raise MismatchError(lacks.prefix, "gate and up differ in bias", f"a bias as in {has.prefix}", "none")
    for first, layer, wanted, got in zip(firsts, layers, expected, biased, strict=True):
        if wanted != got:
            a, b = (f"{'a' if has else 'no'} bias" for has in (wanted, got))
            what = "experts of one layer differ in bias"
            raise MismatchError(layer.prefix, what, f"{a} as in {first.prefix}", b)
        if got:
            _check_bias(source, firsts[0] if layer is layers[1] else first, layer)


def read_biases(
    source: TensorSource, experts: Sequence[Sequence[str]], shares: Sequence[Share], device: torch.device
) -> Tensor | None:
    """(E, outputs that are here): of each expert the biases of some matrices, one after another.

    `experts`: the prefixes of these matrices; `shares`: this rank's of each, the same of all experts.
    """
    widths = [share.bounds.n1 - share.bounds.n0 for share in shares]
    stack: Tensor | None = None
    for row, prefixes in enumerate(experts):
        at = 0
        for prefix, share, width in zip(prefixes, shares, widths, strict=True):
            index = (slice(share.bounds.n0, share.bounds.n1),)
            bias = source.read(bias_name(prefix), index, role=Role.FLOAT)
            if stack is None:
                stack = torch.empty((len(experts), sum(widths)), dtype=bias.dtype, device=device)
            stack[row, at : at + width] = bias
            at += width
    source.take(bias_name(prefix) for prefixes in experts for prefix in prefixes)
    return stack


def _check_bias(source: TensorSource, first: LayerDescription, layer: LayerDescription) -> None:
    """A bias is a vector of its layer's outputs, plain, and of the type of the first expert's."""
    name, wanted = bias_name(layer.prefix), source.info(bias_name(first.prefix)).dtype
    info = source.info(name)
    got, plain = _plain(info.dtype), [_plain(dtype) for dtype in FLOATS]
    if info.shape != (layer.N,):
        raise ShapeError(name, f"({layer.N},) = (N,)", info.shape, info.file)
    if info.dtype not in FLOATS:
        raise DtypeError(name, plain, got, info.file)
    if info.dtype != wanted:
        what = "experts of one layer differ in the dtype of bias"
        raise MismatchError(layer.prefix, what, f"{_plain(wanted)} as in {first.prefix}", got)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
