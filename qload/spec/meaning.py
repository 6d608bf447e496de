"""What codes mean, as a fused dequantize takes it: tables in float32, groups as runs where they are."""

from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qload import native

if TYPE_CHECKING:
    from qload.spec.weight import Codes, Weight

# What reads words as they lie on a device is to the right of this module: it is named, never imported.
STORED = ("qload.kernels.cuda", "as_stored")


def meaning_of(codes: "Codes") -> native.Meaning | None:
    """None where scales lie in a way that only torch reads."""
    N, K = codes.codes.shape
    scales, zeros, lookup = codes.scales, codes.zeros, codes.lookup
    tables = scales.shape[0] if codes.n_group is None else N
    if scales.ndim != 2 or tables not in (1, N) or (zeros is not None and zeros.shape != scales.shape):
        return None
    if codes.k_group is None and scales.shape[1] != 1:
        return None
    if lookup is not None and (lookup.numel() < 2**codes.bits or lookup.dtype != torch.float32):
        return None
    if not (_fits(codes.k_group, K, scales.shape[1]) and _fits(codes.n_group, N, scales.shape[0])):
        return None
    run, index = _runs(codes.k_group, max(K, 1))
    return native.Meaning(
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        lookup=None if lookup is None else lookup.contiguous(),
        n_group=None if codes.n_group is None else codes.n_group.to(torch.int32),
        k_group=index,
        run=run,
        divide=codes.divide,
        factor=codes.factor,
    )


def _fits(group: Tensor | None, count: int, groups: int) -> bool:
    """Whether an index has a group for each of so many; on a device nobody looks at its values."""
    if group is None or (group.numel() == count and (group.is_cuda or not count)):
        return True
    low, high = (int(end) for end in group.aminmax()) if group.numel() else (-1, -1)
    return group.numel() == count and low >= 0 and high < groups


def plainly(codes: "Codes", out: Tensor) -> Tensor:
    """What codes mean in plain torch, the reference: rows after rows, rounded once to `out`."""
    (N, K), count = codes.codes.shape, native.block(out)
    run = 0
    if codes.k_group is not None and count < N * K:  # several blocks: worth a look at the groups
        run, _ = _runs(codes.k_group, max(K, 1))
        run = 0 if run == 1 or K % run else run
    scales, zeros = codes.scales.float(), None if codes.zeros is None else codes.zeros.float()
    lookup = None if codes.lookup is None else codes.lookup.float()
    for rows, values in native.values(codes.codes, lookup, count):
        wide = values.view(-1, K // run, run) if run else values
        if zeros is not None:
            wide.sub_(_of_rows(codes, zeros, rows, run))
        scale = _of_rows(codes, scales, rows, run)
        wide = wide.div_(scale) if codes.divide else wide.mul_(scale)
        out[rows] = values if codes.factor == 1 else values.mul_(codes.factor)
    return out


def _of_rows(codes: "Codes", of_groups: Tensor, rows: slice, run: int) -> Tensor:
    """Scales or zeros of some rows, one for each code, or one for each `run` of codes."""
    if codes.n_group is not None:
        of_groups = of_groups[codes.n_group[rows]]
    elif of_groups.shape[0] > 1:
        of_groups = of_groups[rows]
    if codes.k_group is None:
        return of_groups
    if run:
        return of_groups[:, : codes.k_group.numel() // run, None]
    return of_groups.gather(1, codes.k_group.expand(of_groups.shape[0], -1))


def _runs(group: Tensor | None, K: int) -> tuple[int, Tensor | None]:
    """(rows of a group, None) where groups follow each other, else (1, the group of each row)."""
    if group is None or not group.numel():
        return K, None
    if group.is_cuda:  # whose values would have to be waited for
        return 1, group.to(torch.int32)
    run = run_of(group)
    return (run, None) if run else (1, group.to(torch.int32))


def run_of(group: Tensor) -> int:
    """How many rows a group has, where groups of one size follow each other, else 0; waits for a device."""
    if group.is_meta:
        return 0
    run = int((group == 0).sum()) or 1
    return run if bool((group == torch.arange(group.numel(), device=group.device) // run).all()) else 0


def as_stored(weight: "Weight", dtype: torch.dtype, out: Tensor | None) -> Tensor | None:
    """What a weight on a CUDA device means, from its words as they lie; None where that is not to be had."""
    tensors = list(weight.fields().values())
    if not (tensors[0].is_cuda and native.has_routines(*tensors)):
        return None
    made: Tensor | None = getattr(import_module(STORED[0]), STORED[1])(weight, dtype, out)
    return made
