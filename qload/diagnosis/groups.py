"""Mistakes in which group an input is of: another group size, act order ignored."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from qload.diagnosis.misreading import Misreading
from qload.spec import Codes


def in_order(codes: Codes) -> Iterator[Misreading]:
    """The codes of a layer with act order, with groups as if there were none."""
    if codes.k_group is None or codes.scales.shape[1] < 2 or bool((codes.k_group.diff() >= 0).all()):
        return
    size, inputs = _runs(codes)
    yield _grouped(codes, "act-order-ignored", "groups in order", inputs // size)


def misreadings(codes: Codes) -> Iterator[Misreading]:
    """The codes with groups of other sizes, or in the reverse order."""
    if codes.k_group is None or codes.scales.shape[1] < 2:
        return
    count, (size, inputs) = codes.scales.shape[1], _runs(codes)
    sorted_ = bool((codes.k_group.diff() >= 0).all())
    if sorted_ and not bool((codes.k_group == inputs // size).all()):
        return
    for half, words in ((size // 2, "half"), (size * 2, "twice")):
        if half:
            fault, said = "group-size", f"groups {words} as large"
            yield _grouped(codes, fault, said, (inputs // half).clamp(max=count - 1))
            yield _grouped(codes, fault, said, inputs // half % count)
    yield _grouped(codes, "groups-reversed", "groups in the reverse order", count - 1 - codes.k_group)


def act_order(codes: Codes) -> Iterator[tuple[str, str, Tensor]]:
    """Which inputs lie where those of a layer with act order should: (fault, words, (K,) int64).

    A kernel holds rows sorted by their groups, and permutes inputs alike; it may do so not at all, or by the
    inverse.
    """
    if codes.k_group is None or bool((codes.k_group.diff() >= 0).all()):
        return
    order = codes.k_group.long().argsort(stable=True)
    yield "act-order-ignored", "rows sorted by their groups, inputs in order", order
    yield "act-order-inverse", "act order's permutation undone twice", order[order]
    yield "act-order-inverse", "inputs sorted by act order, rows in order", order.argsort()
    yield (
        "act-order-inverse",
        "act order's permutation in the wrong direction",
        order.argsort()[order.argsort()],
    )


def _runs(codes: Codes) -> tuple[int, torch.Tensor]:
    """How many inputs a group has, if all have as many, and each input's place (K,)."""
    K = codes.codes.shape[1]
    return -(-K // codes.scales.shape[1]), torch.arange(K, device=codes.scales.device)


def _grouped(codes: Codes, fault: str, words: str, k_group: Tensor) -> Misreading:
    return Misreading(fault, words, lambda: replace(codes, k_group=k_group))
