"""The mixed-precision kernels over one typed weight, and the choice of one for a layer."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from qload.errors import (
    AmbiguousIndexError,
    ArgumentError,
    DtypeError,
    NoKernelError,
    ShapeError,
    check_type,
    check_values,
)
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import exllama, marlin, strips
from qload.kernel_formats.marlin import GROUP_SIZES, count_locks, split_group
from qload.kernels import cuda, dtypes
from qload.kernels.chips import multiprocessors
from qload.kernels.linear import LinearCall
from qload.kernels.mp_linear.contract import (
    MPLinearKernel,
    MPLinearLayerConfig,
    malformed,
    missing_rows,
    refusal,
)
from qload.kernels.products import wants_gradients
from qload.kernels.scalar_type import ScalarType, integer_type
from qload.kernels.scratch import ScratchRequest, add_scratch_request, multiply
from qload.layouts import STORED_MINUS_ONE, Packing, awq, gptq
from qload.spec import Codes, Layer, Weight


def permute_param_layout_(
    param: Tensor, input_dim: int, output_dim: int, *, packed_dim: int | None = None
) -> Tensor:
    """Transpose a parameter in place to the given axes, and set its attributes.

    A parameter with one attribute has the other at its other axis. ArgumentError if only a repack could move
    the packed axis.

    Parameters
    ----------
    param
        A matrix with attributes `input_dim`, `output_dim` and perhaps `packed_dim`; without them inputs are
        first.
    input_dim, output_dim
        New axes of inputs and outputs, 0 and 1.
    packed_dim
        New axis along which a word has several codes; None: either.
    """
    if {input_dim, output_dim} != {0, 1} or packed_dim not in (None, 0, 1):
        got = f"{input_dim}, {output_dim}, {packed_dim}"
        raise ArgumentError("input_dim, output_dim, packed_dim", "the axes 0 and 1 of a matrix", got)
    attrs: Any = param
    in_axis, out_axis = _axes_of(param)
    packed = getattr(attrs, "packed_dim", None)
    order = {input_dim: in_axis, output_dim: out_axis}
    if packed_dim is not None and (packed is None or order[packed_dim] != packed):
        raise ArgumentError("param", f"packed along the new axis {packed_dim}", f"packed along axis {packed}")
    if (in_axis, out_axis) != (input_dim, output_dim):
        param.data = param.data.t().contiguous()
    attrs.input_dim, attrs.output_dim = input_dim, output_dim
    if packed is not None:
        attrs.packed_dim = next(axis for axis, source in order.items() if source == packed)
    return param


def read_layer(
    config: MPLinearLayerConfig,
    name: str,
    w_q: Tensor,
    w_s: Tensor,
    w_zp: Tensor | None,
    g_idx: Tensor | None,
) -> GPTQWeight:
    """Read the parameters of an engine's layer as a typed weight, and check every shape."""
    for part, tensor in (("weight", w_q), ("scales", w_s), ("zero points", w_zp), ("g_idx", g_idx)):
        if tensor is not None:
            check_values(f"{name}: {part}", tensor)
    if w_s.dtype != config.scale_dtype:
        stated, got = (str(dtype).removeprefix("torch.") for dtype in (config.scale_dtype, w_s.dtype))
        hint = f"remedy   choose a kernel for a config whose scale_type is {got}"
        raise DtypeError(f"{name}: scales", [stated], got, hint=hint)
    K, N = config.partition_weight_shape
    bits, groups = config.weight_type.size_bits, config.groups
    codes = _codes(config, w_q)
    _expect(f"{name}: weight", codes, (K, N), "(K, N) codes")
    scales = _rows_first(w_s)
    _expect(f"{name}: scales", scales, (groups, N), "(G, N)")
    if w_zp is None:
        zeros = torch.full_like(scales, config.weight_type.bias, dtype=torch.int32)
    else:
        zeros = (config.zeros or STORED_MINUS_ONE).read(_packed(w_zp), _along_n(config, bits))
        _expect(f"{name}: zero points", zeros, (groups, N), "(G, N)")
    base = GPTQConfig(bits, config.group_size, config.zeros or STORED_MINUS_ONE)
    if g_idx is not None and not g_idx.numel() and not config.is_k_partitioned:
        g_idx = None  # rows in order; for a share the first group is unknown
    if g_idx is not None and g_idx.numel() > config.group_size and groups > 1 and not g_idx.any():
        problem, expected = "all zero, with two readings", f"the group of each row, 0 to {groups - 1}"
        raise AmbiguousIndexError(f"{name}: g_idx", problem, expected, f"0 for all {K} rows")
    rows = base.in_order(K, codes.device) if g_idx is None else g_idx.long()
    _expect(f"{name}: g_idx", rows, (K,), "(K,)")
    whole = (config.full_weight_shape[1], config.full_weight_shape[0])
    typed = Codes(bits, codes.T, scales.T, zeros.T, rows)
    own_config = replace(base, positional=groups > 1 and g_idx is None)
    return GPTQWeight.from_codes(typed, scales.data, Layer((N,), K, whole, name), own_config)


def _codes(config: MPLinearLayerConfig, param: Tensor) -> Tensor:
    bits, (in_axis, _) = config.weight_type.size_bits, _axes_of(param)
    along_k = getattr(param, "packed_dim", in_axis) == in_axis
    words = param.data if in_axis == 0 else param.data.t()
    if along_k and config.order == "awq":
        raise ArgumentError("weight", "packed along N, as AWQ's words are", "packed along K")
    packing = gptq.rows(bits) if along_k else _along_n(config, bits)
    return packing.unpack(words.contiguous())


def _packed(param: Tensor) -> Tensor:
    in_axis, out_axis = _axes_of(param)
    if getattr(param, "packed_dim", out_axis) != out_axis:
        raise ArgumentError("zero points", "packed along N", f"packed along axis {in_axis}")
    return _rows_first(param)


def _along_n(config: MPLinearLayerConfig, bits: int) -> Packing:
    return awq.columns(bits) if config.order == "awq" else gptq.columns(bits)


def _rows_first(param: Tensor) -> Tensor:
    return (param.data if _axes_of(param)[0] == 0 else param.data.t()).contiguous()


def _axes_of(param: Tensor) -> tuple[int, int]:
    """Return (input_dim, output_dim) of a matrix; (0, 1) without attributes."""
    in_axis, out_axis = getattr(param, "input_dim", None), getattr(param, "output_dim", None)
    if in_axis is None:
        in_axis = 0 if out_axis is None else 1 - out_axis
    if out_axis is None:
        out_axis = 1 - in_axis
    if param.ndim != 2 or {in_axis, out_axis} != {0, 1}:
        expected = "a matrix with input_dim and output_dim 0 and 1"
        raise ArgumentError("param", expected, f"{tuple(param.shape)}: {in_axis}, {out_axis}")
    return in_axis, out_axis


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], formula: str) -> None:
    """Raise ShapeError for a tensor of another shape."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, f"{shape} = {formula}", tuple(tensor.shape))


OTHER_KERNEL = "another kernel, which scales in float32: DequantizeLinearKernel"
OWNERS = "mp_linear_owners"  # attribute of a module: the weight of each prepared tensor, by names


class TypedLinearKernel(MPLinearKernel):
    """Kernel that reads parameters as a GPTQ weight, repacks it, and keeps its tensors in the layer.

    A module may have several weights: each tensor belongs to one of them, and a prepared tensor is not
    prepared again.
    """

    bits: ClassVar[tuple[int, ...]]
    groups: ClassVar[tuple[int, ...] | None] = None  # None: of any size
    act_types: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    min_capability: ClassVar[int] = 0

    _prepared: LinearCall | None = None

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a CUDA device, times 10; 0: any device."""
        return cls.min_capability

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return (True, None) for a supported layer `c`, or (False, reason)."""
        reason = refusal(c, cls.bits, cls.groups, cls.act_types) or cls._own_refusal(c)
        return reason is None, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """Return the `weight` in the order of the kernel."""
        return weight

    def check_range(self, weight: GPTQWeight) -> None:
        """Raise CastError if a value of `weight` is out of the range of the dtype of the product."""
        dtypes.check_range(weight, self.config.act_type, self.w_q_name, OTHER_KERNEL)

    @classmethod
    def _own_refusal(cls, c: MPLinearLayerConfig) -> str | None:
        """Return this kernel's own reason to refuse a config without general faults, or None."""
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the parameters of `layer` by the repacked tensors, under the same names if possible.

        ArgumentError for a second call, and for a parameter of another weight. CastError for weights outside
        of the range of the dtype of the product.
        """
        if self._prepared is not None:
            raise ArgumentError(type(self).__name__, "weights to be processed once", "a second time")
        params = {
            "qweight": self.w_q_name,
            "scales": self.w_s_name,
            "qzeros": self.w_zp_name,
            "g_idx": self.w_gidx_name,
        }
        check_unprepared(layer, params.values())
        weight = read_layer(self.config, self.w_q_name, *self._get_weight_params(layer))
        act_type = self.config.act_type if self.config.act_type in dtypes.DTYPES else None
        typed = dtypes.for_activations(self.repacked(weight), act_type, OTHER_KERNEL)
        tensors = typed.fields()
        names = {field: params.get(field) or free_name(layer, self.w_q_name, field) for field in tensors}
        unread = [name for name in params.values() if name is not None and name not in names.values()]
        for name in unread:  # the kernel reads no such tensor
            self._transform_param(layer, name, _without_elements)
        for field, tensor in tensors.items():
            self._transform_param(layer, names[field], lambda _, values=tensor: values)  # type: ignore[misc]
        set_owner(layer, self.w_q_name, [*names.values(), *unread])
        self._names = tuple(names.values())
        self._types = tuple((tensor.dtype, tensor.shape) for tensor in tensors.values())
        self._prepared = LinearCall(typed)

    def typed(self, layer: nn.Module) -> Weight:
        """Return the typed weight over the parameters of `layer`, which may have moved to another device.

        ArgumentError before they are processed; DtypeError or ShapeError if they were cast or replaced.
        """
        return self._call(layer).typed(self._tensors(layer))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x; sums in float32."""
        return self._call(layer)(x, self._tensors(layer), bias)

    def _call(self, layer: nn.Module) -> LinearCall:
        if self._prepared is None or owners(layer).get(self.w_q_name) != self.w_q_name:
            first = "process_weights_after_loading before the first call"
            raise ArgumentError(type(self).__name__, first, "a call")
        return self._prepared

    def _tensors(self, layer: nn.Module) -> list[Tensor]:
        """Return the prepared tensors; DtypeError or ShapeError if one was cast or replaced."""
        params, names = layer._parameters, self._names
        own = [params.get(name) for name in names]
        tensors = [
            self._tensor_of(layer, name) if t is None else t for t, name in zip(own, names, strict=True)
        ]
        for tensor, name, (dtype, shape) in zip(tensors, names, self._types, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                _raise_changed(name, tensor, dtype, shape)
        return tensors


def owners(layer: nn.Module) -> Mapping[str, str]:
    """Return the weight of each prepared tensor of a module, by names."""
    return getattr(layer, OWNERS, {})


def check_unprepared(layer: nn.Module, names: Iterable[str | None]) -> None:
    """Raise ArgumentError for a tensor that a kernel has prepared."""
    known = owners(layer)
    for name in names:
        if name is not None and name in known:
            got = f"what was prepared for {known[name]} already"
            raise ArgumentError(name, "a checkpoint's tensor", got)


def free_name(layer: nn.Module, weight: str, field: str) -> str:
    """Return a free name of a module for a further tensor: `field`, or with the weight's name in front."""
    for name in (field, f"{weight}_{field}"):
        if not hasattr(layer, name):
            return name
    raise ArgumentError(f"{weight}_{field}", "a name that is free on the module", "a name in use")


def set_owner(layer: nn.Module, weight: str, names: Iterable[str]) -> None:
    """Note tensors as those of a prepared weight; copies of the module keep the note."""
    setattr(layer, OWNERS, {**owners(layer), **dict.fromkeys([weight, *names], weight)})


def _without_elements(old: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if old is None else old.data.new_empty(0)


def _raise_changed(name: str, tensor: Tensor, dtype: torch.dtype, shape: torch.Size) -> NoReturn:
    if tensor.dtype != dtype:
        expected, got = (str(each).removeprefix("torch.") for each in (dtype, tensor.dtype))
        raise DtypeError(name, [expected], got, hint="remedy   move a prepared layer, but do not cast it")
    raise ShapeError(name, f"{tuple(shape)}, as it was prepared", tuple(tensor.shape))


class MarlinLinearKernel(TypedLinearKernel):
    """Kernel of weights in Marlin's order, of any shape by padding.

    4 and 8 bits, with or without zero points, also in act order. A group of a multiple of 32 rows is read as
    several.
    """

    name = "marlin"
    bits = (4, 8)
    min_capability = 80  # Ampere

    def repacked(self, weight: GPTQWeight) -> Weight:
        """Return the `weight` in Marlin's order, padded to its thread blocks; CastError if out of range."""
        self.check_range(weight)
        return marlin.from_integers(weight.to_integers(), self.config.zero_points)

    @classmethod
    def _own_refusal(cls, c: MPLinearLayerConfig) -> str | None:
        if c.groups > 1 and split_group(c.group_size) is None:
            sizes = ", ".join(str(size) for size in GROUP_SIZES if size > 0)
            return f"reads groups of {sizes}, multiples of them, or one group, got {c.group_size}"
        bits = c.weight_type.size_bits
        highest = c.zeros.span(bits)[1] if c.zero_points and c.zeros else 0
        if highest >= 2**bits:
            return f"a zero point of {highest}, which `zeros` can say, does not fit {bits} bits"
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer`, and add a zeroed workspace of locks."""
        super().process_weights_after_loading(layer)
        device, N = getattr(layer, self.w_q_name).device, self.config.partition_weight_shape[1]
        locks = torch.zeros(count_locks(N, multiprocessors(device)), dtype=torch.int32, device=device)
        layer.register_buffer(free_name(layer, self.w_q_name, "workspace"), locks, False)


class StripsLinearKernel(TypedLinearKernel):
    """Kernel of weights in strips of 64 columns, from Ampere on; limits are those of Marlin's."""

    name = "strips"
    bits = MarlinLinearKernel.bits
    min_capability = strips.CAPABILITY

    def repacked(self, weight: GPTQWeight) -> Weight:
        """Return the `weight` in strips of 64 columns, padded; CastError if out of range."""
        self.check_range(weight)
        return strips.from_integers(weight.to_integers(), self.config.zero_points)

    @classmethod
    def gains(cls, compute_capability: int | None) -> bool:
        """Return True from Ampere on: Marlin's order has kernels for few tokens alone."""
        return strips.are_faster(compute_capability)

    @classmethod
    def _own_refusal(cls, c: MPLinearLayerConfig) -> str | None:
        return MarlinLinearKernel._own_refusal(c) or missing_rows(c)


class ExllamaLinearKernel(TypedLinearKernel):
    """Kernel of weights in ExLlama's order, or dequantized into scratch space that `warm_up` allocates.

    Weights without zero points get those of their type's bias, stored minus one. Scales have the dtype of the
    activations, or are fp16, which bf16 can represent in range: others might lose values.
    `SUPPORTED_QUANT_TYPES` lists the types of codes, those without zero points first.
    """

    name = "exllama"
    bits = (2, 3, 4, 8)
    min_capability = 60  # Pascal
    SUPPORTED_QUANT_TYPES: ClassVar[tuple[ScalarType, ...]] = tuple(
        integer_type(size, zero_points=stored) for stored in (False, True) for size in (2, 3, 4, 8)
    )

    def repacked(self, weight: GPTQWeight) -> Weight:
        """Return the `weight` with the rows of a group together and shuffled words; checks the range."""
        self.check_range(weight)
        return exllama.from_integers(weight.to_integers())

    @classmethod
    def _own_refusal(cls, c: MPLinearLayerConfig) -> str | None:
        if c.scale_dtype not in (torch.float16, c.act_type):
            expected = "float16" if c.act_type == torch.float16 else f"float16 or {c.act_type}"
            return f"multiplies by scales of {expected}, got {c.scale_dtype}".replace("torch.", "")
        return missing_rows(c)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer`, and note the scratch space that it needs."""
        super().process_weights_after_loading(layer)
        add_scratch_request(layer, ScratchRequest(self.w_q_name, *self.config.partition_weight_shape))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) fp16 or bf16 -> (..., N) of the same dtype; sums in float32.

        By a CUDA kernel without scratch space, or by a weight rounded to that dtype in it: then NotWarmError
        before `warm_up`.
        """
        if torch.compiler.is_compiling() or wants_gradients(x, bias):
            return super().apply_weights(layer, x, bias)
        weight = self.typed(layer)
        if weight.activations is not None or (x.is_cuda and cuda.can_multiply(x, weight, bias)):
            return super().apply_weights(layer, x, bias)
        return multiply(layer, x, weight, self.w_q_name, bias)


class DequantizeLinearKernel(TypedLinearKernel):
    """Kernel for every width, group size, order, dtype and device, by dequantizing; slow."""

    name = "dequantize"
    bits = (2, 3, 4, 8)
    act_types = (torch.float16, torch.bfloat16, torch.float32)


KERNELS: tuple[type[MPLinearKernel], ...] = (  # by preference
    StripsLinearKernel,
    MarlinLinearKernel,
    ExllamaLinearKernel,
    DequantizeLinearKernel,
)


def choose_mp_linear_kernel(
    config: MPLinearLayerConfig, compute_capability: int | None = None
) -> type[MPLinearKernel]:
    """Return the first kernel of `KERNELS` that supports a layer.

    Parameters
    ----------
    config
        The layer.
    compute_capability
        The device's, times 10; None: no CUDA device.

    Raises
    ------
    NoKernelError
        If no kernel supports the layer, with the reason of each.
    ArgumentError
        If the compute capability is not an integer.

    Examples
    --------
    >>> import torch
    >>> from qload import MPLinearLayerConfig, choose_mp_linear_kernel, scalar_types
    >>> config = MPLinearLayerConfig(
    ...     full_weight_shape=(4096, 4096),
    ...     partition_weight_shape=(4096, 2048),
    ...     weight_type=scalar_types.uint4b8,
    ...     act_type=torch.float16,
    ...     group_size=128,
    ...     zero_points=False,
    ... )
    >>> choose_mp_linear_kernel(config, compute_capability=80).__name__
    'StripsLinearKernel'
    """
    if type(compute_capability) is not int and compute_capability is not None:
        raise ArgumentError("compute_capability", "a whole number, such as 90", repr(compute_capability))
    check_type("config", config, MPLinearLayerConfig)
    reasons = {}
    for kernel in KERNELS:
        least = kernel.get_min_capability()
        able, reason = kernel.can_implement(config)
        if able and not kernel.gains(compute_capability):
            able, reason = False, f"gains nothing below compute capability {least}"
        elif able and compute_capability is not None and compute_capability < least:
            able, reason = False, f"needs compute capability {least}, this device has {compute_capability}"
        if able:
            return kernel
        reasons[kernel.__name__] = reason or ""
    if malformed(config):
        raise NoKernelError("a malformed config", reasons)
    K, N = config.partition_weight_shape
    raise NoKernelError(f"{config.weight_type} (K, N) = ({K}, {N})", reasons)
