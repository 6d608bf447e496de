"""`qload::experts`: product of tokens with their chosen experts, stacked in strips, by csrc/cuda/experts.

Sorting by expert, gate and up, the activation, down and the weighted sum of a token's choices are launches on
one stream, none of which the host waits for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda import byte_strips, launch, module
from qload.kernels.cuda.dispatch import ACTIVATIONS, WHOLE
from qload.kernels.cuda.experts_launches import GATES, ExpertMatrix, ExpertsCall, multiply_few, multiply_many
from qload.kernels.cuda.module import check_operands, operator, pointer
from qload.kernels.cuda.quantize import reads_stored, takes
from qload.spec import ActivationScheme

MOST_EXPERTS = 4096
BITS = (4, 8)  # of integers
GROUP_SIZES = {  # by code; -1: one scale a column
    **dict.fromkeys(BITS, (-1, 32, 64, 128)),
    **{
        code: tuple(size or -1 for size in sizes)
        for code, sizes in byte_strips.GROUP_SIZES.items()
        if code != byte_strips.FP8["e5m2"]  # no checkpoint has experts of e5m2
    },
}
MANY = 8  # pairs of an expert, on average over all ranks, from which many is faster on an H100;
MANY_OF_SMALL = 2  # and of integers in groups of 32 or 64

WAYS: Mapping[str, Callable[[ExpertsCall], Tensor]] = {"few": multiply_few, "many": multiply_many}


def why_not(device: torch.device) -> str | None:
    """Return why no kernel multiplies experts on a device, or None; `module.why_not` comes first."""
    return launch.why_not_hopper(device)


def multiply(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    weighs_inputs: bool = False,
    expert_map: Tensor | None = None,
    way: str = "",
    early: bool = True,
) -> Tensor:
    """x (M, H) through experts -> (M, H), the weighted sum over each token's choices, in x's dtype.

    By one `way` a token's result has the same bits whatever other tokens there are. ArgumentError for
    tensors that do not fit.

    Parameters
    ----------
    topk_ids
        int32 or int64 (M, top): experts by their number among all; one of no expert makes its token's result
        NaN, as no host looks at it.
    topk_weights
        float32, float16 or bfloat16 (M, top).
    gate_up, down
        (E, 2 I, H) and (E, H, I) in strips.
    activation, alpha, limit
        A name of `GATES`; alpha and limit of "clamped_swiglu".
    weighs_inputs
        The weights multiply x, not what comes out, as in Llama 4.
    expert_map
        int32 (total,): the place here of each expert of all ranks, -1: elsewhere. None: all are here.
    way
        A name of `WAYS`; "": the fastest for so many tokens.
    early
        Kernels may start before the one ahead of them has ended.
    """
    read = topk_ids.contiguous(), topk_weights.contiguous(), expert_map
    y: Tensor = torch.ops.qload.experts(
        x.contiguous(), *read, *tensors(gate_up), *tensors(down), *sizes(gate_up, down),
        activation, alpha, limit, weighs_inputs, way=way, early=early,
    )  # fmt: skip
    return y


def tensors(matrix: ExpertMatrix) -> tuple[Tensor | None, ...]:
    """Tensors of a matrix in the order of the operator's arguments."""
    return matrix.weights, matrix.scales, matrix.zeros, matrix.perm, matrix.bias


def sizes(gate_up: ExpertMatrix, down: ExpertMatrix) -> tuple[int, list[int], list[int]]:
    """Return the intermediate size, and codes and group sizes of both matrices."""
    return down.K, [gate_up.code, down.code], [gate_up.group_size, down.group_size]


def _experts(*read: Any, way: str = "", early: bool = True) -> Tensor:
    x, ids, weights, expert_map = read[:4]
    inner, codes, groups, activation, alpha, limit, weighs_inputs = read[14:]
    if activation not in GATES:
        raise ArgumentError("activation", " or ".join(GATES), repr(activation))
    if way and way not in WAYS:
        raise ArgumentError("way", " or ".join(WAYS), repr(way))
    H = x.shape[-1]
    gate_up = _matrix(read[4:9], 2 * inner, H, codes[0], groups[0])
    down = _matrix(read[9:14], H, inner, codes[1], groups[1])
    gate = GATES[activation], alpha, limit
    return run(ExpertsCall(x, ids, weights, expert_map, gate_up, down, gate, weighs_inputs, early), way)


def _matrix(operands: tuple[Any, ...], N: int, K: int, code: int, group_size: int) -> ExpertMatrix:
    weights, scales, zeros, perm, bias = operands
    return ExpertMatrix(weights, scales, zeros, perm, bias, N, K, code, group_size)


def run(call: ExpertsCall, way: str = "") -> Tensor:
    """Check a call and multiply: y (M, H)."""
    check(call)
    if not call.pairs or not call.x.shape[1]:
        return torch.zeros_like(call.x)
    x = call.x.clone() if pointer(call.x) % launch.ALIGNED else call.x
    # Weights are made float32 before all launches: the last reads them before the one ahead of it has ended.
    return WAYS[way or fastest(call)](replace(call, x=x, weights=call.weights.float()))


def fastest(call: ExpertsCall) -> str:
    """Fastest way for a number of tokens, independent of their experts."""
    small = any(each.code in BITS and each.group < WHOLE for each in (call.gate_up, call.down))
    return "few" if call.pairs < (MANY_OF_SMALL if small else MANY) * call.total else "many"


def check(call: ExpertsCall) -> None:
    """Check all operands; ArgumentError with the name of the wrong one."""
    x, tokens = call.x, tuple(call.ids.shape)
    if x.ndim != 2 or call.ids.ndim != 2 or tokens[0] != x.shape[0]:
        raise ArgumentError("topk_ids", f"(M, top) for x {tuple(x.shape)}", str(tokens))
    check_operands(
        x,
        ("x", x, ACTIVATIONS, tuple(x.shape)),
        ("topk_ids", call.ids, (torch.int32, torch.int64), tokens),
        ("topk_weights", call.weights, (torch.float32, *ACTIVATIONS), tokens),
        ("expert_map", call.map, (torch.int32,), (call.total,)),
        *(("input_scales", scale, (torch.float32,), (call.down.experts,)) for scale in call.input_scales),
    )
    _check_matrix("gate_up", call.gate_up, x)
    _check_matrix("down", call.down, x)
    if call.gate_up.experts != call.down.experts or call.down.experts > MOST_EXPERTS:
        counts = f"{call.gate_up.experts} and {call.down.experts}"
        raise ArgumentError("down", f"as many experts as gate_up, at most {MOST_EXPERTS}", counts)


def _check_matrix(name: str, matrix: ExpertMatrix, x: Tensor) -> None:
    bits, code, size = matrix.bits, matrix.code, matrix.group_size
    byte_strips.check_group_size(f"{name}.group_size", code, size, GROUP_SIZES)
    shape = tuple(matrix.weights.shape)
    if len(shape) != 3 or shape[2] % (256 * bits) or matrix.rows % matrix.group:
        raise ArgumentError(
            f"{name}.weights", f"(E, N / 64, K * {2 * bits}), K of whole groups of 128", str(shape)
        )
    E, K, N = matrix.experts, matrix.rows, matrix.columns
    if not (0 <= matrix.K <= K and 0 <= matrix.N <= N):
        raise ArgumentError(f"{name}.weights", f"at least {matrix.N} x {matrix.K}", f"{N} x {K}")
    groups, ints, is_scaled = K // matrix.group, (torch.int32,), byte_strips.is_scaled(code)
    scales: tuple[torch.dtype, tuple[int, ...]] = x.dtype, (groups, N)
    zeros: tuple[torch.dtype, tuple[int, ...]] = torch.int32, (groups, N * bits // 32)
    if code not in BITS:
        scales, zeros = byte_strips.scales_of(code, K, N, max(size, 0)), (torch.float32, (N,))
        if is_scaled != (matrix.zeros is not None) or matrix.perm is not None:
            expected = "scales of columns" if is_scaled else "None"
            got = ("None" if each is None else "a tensor" for each in (matrix.zeros, matrix.perm))
            raise ArgumentError(
                f"{name}.zeros",
                f"{expected} for {byte_strips.name_code(code)}, and perm None",
                ", and perm ".join(got),
            )
    check_operands(
        x,
        (f"{name}.weights", matrix.weights, ints, shape),
        (f"{name}.scales", matrix.scales, scales[:1], (E, *scales[1])),
        (f"{name}.zeros", matrix.zeros, zeros[:1], (E, *zeros[1])),
        (f"{name}.perm", matrix.perm, ints, (E, K)),
        (f"{name}.bias", matrix.bias, (x.dtype,), (E, matrix.N)),
    )
    for field in ("weights", "scales", "zeros"):
        tensor = getattr(matrix, field)
        if tensor is not None and pointer(tensor) % launch.ALIGNED:
            raise ArgumentError(
                f"{name}.{field}", f"memory from a multiple of {launch.ALIGNED} bytes on", "another place"
            )


def _fake(x: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(x)


MATRIX = "Tensor {0}, Tensor {0}_scales, Tensor? {0}_zeros, Tensor? {0}_perm, Tensor? {0}_bias, "
operator(
    "experts",
    "(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, "
    + MATRIX.format("gate_up")
    + MATRIX.format("down")
    + "int inner, int[] codes, int[] group_sizes, str activation, float alpha, float limit, "
    "bool weighs_inputs, "
    '*, str way="", bool early=True) -> Tensor',
    _experts,
    _fake,
)


STACKS = ("gate_up", "down")


def why_no_experts(
    weight: Any, dtype: torch.dtype, device: torch.device, *, declared: bool = False
) -> str | None:
    """Return why no grouped kernel supports an `ExpertsWeight`, dtype and device, or None.

    `declared`: inputs are quantized as the stacks declare.
    """
    reason = module.why_not()
    if reason is not None:
        return reason
    if device.type != "cuda":
        return f"needs a CUDA device, got {device}"
    if dtype not in ACTIVATIONS:
        return f"x has to be float16 or bfloat16, got {dtype}"
    for name in STACKS:
        stack = getattr(weight, name)
        reason = _why_not_stack(stack, getattr(weight, f"{name}_bias"), dtype)
        if reason is None and declared and stack.layer.activations is not None:
            reason = _why_not_scheme(stack, stack.layer.activations)
        if reason is not None:
            return f"{name}: {reason}"
    if weight.local.total > MOST_EXPERTS:
        return f"at most {MOST_EXPERTS} experts, got {weight.local.total}"
    return why_not(device)


def can_multiply_experts(x: Tensor, topk_weights: Tensor, weight: Any, *, declared: bool = False) -> bool:
    """Return whether `experts_linear` supports the stacks and dtypes; False if a gradient is wanted."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    if wanted or topk_weights.dtype not in (torch.float32, *ACTIVATIONS):
        return False
    return why_no_experts(weight, x.dtype, x.device, declared=declared) is None


def experts_linear(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Any, *, declared: bool = False
) -> Tensor:
    """(..., H) -> (..., H) in x's dtype, sums in float32; call `can_multiply_experts` first.

    The host does not wait for ids, and so does not check them: an id without an expert makes the result of
    its token NaN. `declared`: inputs are quantized as the stacks declare.
    """
    local, activation, stacks = weight.local, weight.facts.activation, (weight.gate_up, weight.down)
    gate_up, down = map(_stacked_matrix, stacks, (weight.gate_up_bias, weight.down_bias))
    call = ExpertsCall(
        x.reshape(-1, x.shape[-1]).contiguous(),
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        None if len(local) == local.total else _map(local, x.device),
        gate_up,
        down,
        # alpha and limit are 0 where the kind has none
        (GATES[activation.kind], activation.alpha or 0.0, activation.limit or 0.0),
        weight.facts.side == "input",
    )
    if declared:
        schemes = gate_up_scheme, down_scheme = stacks[0].layer.activations, stacks[1].layer.activations
        scales = _stored_scales(stacks[0], gate_up_scheme), _stored_scales(stacks[1], down_scheme)
        call = replace(call, schemes=schemes, input_scales=scales)
    return run(call).reshape(x.shape)


def _stored_scales(stack: Any, scheme: ActivationScheme | None) -> Tensor | None:
    """Return the stored scales (E,) of inputs that a scheme reads, in float32, or None."""
    if scheme is None or scheme.scale is None or not reads_stored(scheme):
        return None
    scales: Tensor = stack.tensors[scheme.scale].float().reshape(len(stack))
    return scales


def _why_not_stack(stack: Any, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    tensors = stack.fields()
    if not issubclass(stack.weight_type, (StripsWeight, byte_strips.ByteStripsWeight)):
        return f"no kernel reads experts as {stack.format}"
    code, group_size = _code_of(stack)
    if group_size not in GROUP_SIZES.get(code, ()):
        return f"no kernel reads experts as {stack.format} of {stack.config}"
    if "offsets" in tensors:
        return "no kernel reads experts with offsets"
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        return "stacks that are not contiguous"
    others = [tensors["scales"].dtype] if code in BITS else []  # those of other codes are float32 or bytes
    others += [] if bias is None else [bias.dtype]
    if any(other != dtype for other in others):
        return f"x is {dtype}, scales and biases are {', '.join(map(str, others))}"
    return None


def _why_not_scheme(stack: Any, scheme: ActivationScheme) -> str | None:
    """Return why no kernel quantizes the inputs of all experts by a scheme, or None."""
    stored = stack.tensors[scheme.scale] if reads_stored(scheme) and scheme.scale else None
    if scheme.zero_point is not None and not scheme.dynamic:
        return "each expert has a stored zero point of its inputs"
    if stored is not None and stored.numel() != len(stack):
        return "gate and up have stored scales of inputs that differ"
    if not takes(scheme, stack.layer.K):
        return f"no launch rounds {stack.layer.K} inputs by {scheme}"
    return "quantized inputs of act order" if "perm" in stack.tensors else None


def _code_of(stack: Any) -> tuple[int, int]:
    """Return the code number of a stack in strips, and the rows of a scale; -1: all rows."""
    if issubclass(stack.weight_type, StripsWeight):
        return stack.config.bits, stack.config.group_size
    code, group_size = byte_strips.code_of(stack.config)
    return code, group_size or -1


def _stacked_matrix(stack: Any, bias: Tensor | None) -> ExpertMatrix:
    tensors, (_, N, K) = stack.tensors, stack.shape
    zeros = tensors.get("qzeros", tensors.get("column_scales"))
    return _matrix(
        (tensors["qweight"], tensors["scales"], zeros, tensors.get("perm"), bias), N, K, *_code_of(stack)
    )


@cache
def _map(local: Any, device: torch.device) -> Tensor:
    """Copy the map of local experts to the device once: a captured graph cannot."""
    places: Tensor = local.map
    return places.to(torch.int32).to(device)
