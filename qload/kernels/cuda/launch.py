"""Launch of the kernels on Marlin's tiles: refused calls, inputs in the order of the rows, the launch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.kernels.cuda.module import native, pointer, stream

ALIGNED = 16  # bytes that are loaded at once
HOPPER = 9
STAGED = 32  # tokens from which on inputs are put in order by way of shared memory


class Launch(NamedTuple):
    """A routine of the module with all arguments but addresses, and the float32 numbers of its scratch space.

    `start` takes pointers, 0 for what there is none of: x in the order of the weight's rows, weights, scales,
    zeros, g_idx, the memory to add up in, bias, factors of tokens, y; then the stream. Nothing of it depends
    on a layer but its shape and type. `coded`: x is codes of 8 bits by `RoundedInputs`.
    """

    start: Callable[..., None]
    scratch: int = 0
    coded: bool = False


def why_not_hopper(device: torch.device) -> str | None:
    """Why no kernel of Hopper's own instructions runs on a device, or None."""
    reason = why_not_chip(torch.cuda.get_device_capability(device))
    if reason or native().hopper:
        return reason
    return "the CUDA module was built without QLOAD_CUDA_ARCHS=90a"


def why_not_chip(capability: tuple[int, int]) -> str | None:
    """Why no chip of a capability has Hopper's own instructions, or None."""
    major, minor = capability
    return None if major == HOPPER else f"needs a device of capability {HOPPER}.0, got {major}.{minor}"


def why_not(call: Any, looks_up: bool = False) -> str | None:
    """Why kernels cannot read a weight as it lies, or None; `looks_up`: they read the group of each row."""
    if not (call.is_k_full or looks_up):
        return "rows of a permuted group are missing here, and it counts groups by their size"
    if any(pointer(tensor) % ALIGNED for tensor in (call.weights, call.scales, call.zeros)):
        return f"loads from multiples of {ALIGNED} bytes, the weight starts between two"
    return None


def sizes(call: Any, x: Tensor) -> list[int]:
    """As routines take them: M, K, N of the weight, inputs and outputs of the layer."""
    return [x.shape[0], call.rows, call.columns, x.shape[1], call.N]


def run(made: Launch, call: Any, x: Tensor) -> Tensor:
    """y (M, N) of a call with the prepared input `x`."""
    y: Tensor = x.new_empty(x.shape[0], call.N)
    parts = x.new_empty(made.scratch, dtype=torch.float32) if made.scratch else None
    g_idx = None if call.is_k_full else call.g_idx  # else groups are runs of rows
    operands = x, call.weights, call.scales, call.zeros, g_idx, parts, call.bias, call.token_scales, y
    with torch.cuda.device(x.device):
        made.start(*map(pointer, operands), stream(x))
    return y


def in_rows(call: Any, multiple: int) -> Tensor:
    """x (M, K) in the order of the weight's rows, padded with zeros to a multiple of inputs."""
    x = in_order(call)
    if x.shape[1] % multiple:
        return pad(x, (0, call.rows - x.shape[1]))
    return x.clone() if pointer(x) % ALIGNED else x


def in_order(call: Any) -> Tensor:
    """x (M, K), or (M, rows) for a weight with an order of rows."""
    x: Tensor = call.x
    return x if call.perm is None else gathered(x, call.perm, call.early)


def gathered(x: Tensor, perm: Tensor, early: bool = True, staged: bool | None = None) -> Tensor:
    """x (M, K) of 16 bits -> (M, rows): column i is input perm[i], or zeros for an index beyond K.

    Rows are a multiple of 8. `staged`: by way of shared memory; None: where that is faster.
    """
    M, rows = x.shape[0], perm.shape[0]
    if pointer(perm) % ALIGNED:
        perm, early = perm.clone(), False  # else it would be read before it is made
    y: Tensor = x.new_empty(M, rows)
    way = M >= STAGED if staged is None else staged
    with torch.cuda.device(x.device):
        native().gather_inputs(*map(pointer, (x, perm, y)), [M, x.shape[1], rows], way, early, stream(x))
    return y
