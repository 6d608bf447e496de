"""Quantized matrices in place of a module's parameters, as operands of torch's functions.

Experts whose class has a gate, a norm or a loop of its own are computed by that class, and so are embeddings:
the code of the class stays, and the product or look-up of a quantized matrix is qload's.

    functional.linear(x, experts.down_proj[e])      the linear layer of expert e
    x @ experts.down_proj[e]                        the same, of a class with inputs first
    functional.embedding(ids, embedding.weight)     the rows of these ids, dequantized
    any other function of the operands              of the dequantized matrices
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from qload.engines.transformers.placeholder_layers import PlaceholderLayer, has_inputs_first
from qload.experts import ExpertsWeight
from qload.kernels.declared import Maximum
from qload.kernels.embedding import QuantizedRows
from qload.methods.checkpoint_linear import LinearFactory

PRODUCTS: Mapping[Any, bool] = {  # function (x, matrix) -> whether the matrix has its inputs first
    functional.linear: False,
    torch.matmul: True,
    torch.mm: True,
    Tensor.matmul: True,
    Tensor.mm: True,
    Tensor.__matmul__: True,
}


class Operand:
    """Base of operands: shape, dtype and device of a parameter; functions without a rule dequantize it."""

    _is_hf_initialized = True

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of the dequantized values, such as `float` or `view`."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.dequantize(), name)

    @property
    def device(self) -> torch.device:
        """Device of the quantized tensors."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: int | None = None) -> Any:
        """Shape, or the length of an axis."""
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dequantize(self) -> Tensor:
        """Values, in the parameter's shape and dtype."""
        raise NotImplementedError

    def call(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
        """Result of a function of `args` by a quantized layer; None for a function without a rule."""
        return None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type[Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with an operand among its arguments."""
        options = dict(kwargs or {})
        if len(args) > 1 and isinstance(args[1], Operand):
            result = args[1].call(func, args, options)
            if result is not None:
                return result
        return func(*tree_map(_dequantized, tuple(args)), **tree_map(_dequantized, options))


def _dequantized(value: Any) -> Any:
    return value.dequantize() if isinstance(value, Operand) else value


class Matrix(Operand):
    """Matrix (N, K) of a quantized layer.

    Parameters
    ----------
    owner
        The linear layer, or the placeholder that is filled with it.
    shape
        (N, K).
    dtype
        Of the activations.
    inputs_first
        Whether the operand is (K, N).
    """

    def __init__(
        self, owner: nn.Module, shape: tuple[int, int], dtype: torch.dtype, inputs_first: bool = False
    ) -> None:
        super().__init__(torch.Size(shape[::-1] if inputs_first else shape), dtype)
        self.owner, self.outputs_first, self.inputs_first = owner, shape, inputs_first

    @property
    def layer(self) -> Any:
        """The linear layer; ArgumentError before the placeholder is filled."""
        return self.owner.filled() if isinstance(self.owner, PlaceholderLayer) else self.owner

    @property
    def device(self) -> torch.device:
        """Device of the quantized tensors."""
        return next(self.layer.buffers()).device  # type: ignore[no-any-return]

    @property
    def T(self) -> "Matrix":
        """The same matrix with its axes exchanged."""
        return Matrix(self.owner, self.outputs_first, self.dtype, not self.inputs_first)

    def t(self) -> "Matrix":
        """The same matrix with its axes exchanged."""
        return self.T

    def transpose(self, first: int, second: int) -> "Matrix":
        """The same matrix with its axes exchanged."""
        return self.T if first % 2 != second % 2 else self

    def dequantize(self) -> Tensor:
        """Values; a product with them quantizes no inputs, also where the checkpoint declares it."""
        values: Tensor = self.layer.typed.dequantize(self.dtype)
        return values.T if self.inputs_first else values

    def call(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
        """Product of x and this matrix by the quantized layer."""
        if PRODUCTS.get(func) is not self.inputs_first or options.keys() - {"bias"}:
            return None
        y: Tensor = self.layer(args[0])
        bias = args[2] if len(args) > 2 else options.get("bias")
        return y if bias is None else y + bias


class MatrixSlot(PlaceholderLayer):
    """Placeholder of a parameter (N, K) of a class with a product of its own, such as a router."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.shape = shape

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.shape[0] * self.shape[1]

    def fill(self, linear: nn.Module) -> None:
        """Multiply by `linear`."""
        self.linear = linear


def replace_matrix(module: Any, name: str, dtype: torch.dtype) -> MatrixSlot:
    """Replace the parameter `name` (N, K) of a module by an operand."""
    N, K = module._parameters.pop(name).shape
    slot = MatrixSlot((N, K), dtype)
    setattr(module, f"quantized_{name}", slot)
    setattr(module, name, Matrix(slot, (N, K), dtype))
    return slot


class ExpertStack(Operand):
    """Matrices of all experts, in place of a parameter (E, N, K), or (E, K, N) with `inputs_first`."""

    def __init__(self, experts: "ClassExperts", name: str, shape: torch.Size, inputs_first: bool) -> None:
        super().__init__(shape, experts.dtype)
        self.experts, self.name, self.inputs_first = experts, name, inputs_first

    @property
    def device(self) -> torch.device:
        """Device of the quantized tensors."""
        return next(iter(self.experts.buffers())).device

    def __getitem__(self, expert: int | Tensor) -> Matrix:
        """Return the matrix of one expert."""
        _, *sizes = self.shape
        N, K = sizes[::-1] if self.inputs_first else sizes
        return Matrix(self.experts.layers(self.name)[int(expert)], (N, K), self.dtype, self.inputs_first)

    def dequantize(self) -> Tensor:
        """Values of all experts."""
        return torch.stack(
            [self[expert].dequantize() for expert in range(len(self.experts.layers(self.name)))]
        )


class ClassExperts(PlaceholderLayer):
    """Placeholder of experts that their class computes: a linear layer for each matrix of each expert.

    Parameters
    ----------
    stacks
        Parameters of the class for gate and up, or up, and for down -> their shapes.
    inputs_first
        Whether these shapes are (E, K, N).
    dtype
        Of the activations.
    """

    def __init__(self, stacks: Mapping[str, torch.Size], inputs_first: bool, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.stacks, self.inputs_first = dict(stacks), inputs_first

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, H, I) of the whole layer."""
        E, H, inner = self.stacks[list(self.stacks)[-1]]
        return (E, inner, H) if self.inputs_first else (E, H, inner)

    @property
    def first_shape(self) -> tuple[int, int]:
        """(N, K) of an expert's first matrix, gate and up or up."""
        _, *sizes = next(iter(self.stacks.values()))
        N, K = reversed(sizes) if self.inputs_first else sizes
        return N, K

    @property
    def numel(self) -> int:
        """Number of elements of the matrices."""
        return sum(shape.numel() for shape in self.stacks.values())

    def fill(self, experts: ExpertsWeight, make: LinearFactory, maximum: Maximum) -> None:
        """Multiply by the layers of `experts`, this rank's share; `maximum`: of a share along K of down."""
        self.linear = nn.ModuleDict()
        first, down = self.stacks
        self.linear[first] = nn.ModuleList(make(weight, None, None) for weight in experts.gate_up)
        self.linear[down] = nn.ModuleList(make(weight, None, maximum) for weight in experts.down)

    def linears(self) -> Iterator[nn.Module]:
        """Yield the layers of all matrices."""
        for name in self.stacks:
            yield from self.layers(name)

    def layers(self, name: str) -> nn.ModuleList:
        """Layers of the experts for one of the stacks; ArgumentError before the placeholder is filled."""
        layers = self.filled()[name]
        assert isinstance(layers, nn.ModuleList)
        return layers


def replace_stacks(module: Any, stacks: Sequence[str]) -> ClassExperts:
    """Replace the `stacks` in a module of experts, whose class computes them, by operands."""
    inputs_first = has_inputs_first(module)
    removed = {name: module._parameters.pop(name) for name in stacks}
    experts = ClassExperts(
        {name: parameter.shape for name, parameter in removed.items()},
        inputs_first,
        next(iter(removed.values())).dtype,
    )
    module.typed_experts = experts
    module._is_hf_initialized = True
    for name, parameter in removed.items():
        setattr(module, name, ExpertStack(experts, name, parameter.shape, inputs_first))
    if hasattr(module, "config"):
        module.config = copy(module.config)  # of this layer alone: another layer may have plain experts
        module.config._experts_implementation_internal = "eager"
    return experts


class EmbeddingRows(PlaceholderLayer):
    """Placeholder of an embedding (N, K), whose rows are dequantized for each call."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.shape = shape

    @property
    def numel(self) -> int:
        """Number of elements of the table."""
        return self.shape.numel()

    def fill(self, rows: QuantizedRows) -> None:
        """Look up rows in `rows`."""
        self.linear = rows

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., K) of `ids` (...); ArgumentError before the placeholder is filled."""
        vectors: Tensor = self.filled()(ids, self.dtype)
        return vectors


class EmbeddingTable(Operand):
    """Table in place of the parameter (N, K) of an embedding."""

    def __init__(self, rows: EmbeddingRows) -> None:
        super().__init__(rows.shape, rows.dtype)
        self.rows = rows

    @property
    def device(self) -> torch.device:
        """Device of the quantized tensors."""
        return next(self.rows.buffers()).device

    def dequantize(self) -> Tensor:
        """Values of all rows."""
        values: Tensor = self.rows.filled().typed.dequantize(self.dtype)
        return values

    def call(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
        """Look up rows; options that change a table, `max_norm` and gradients, have no rule."""
        if func is not functional.embedding or options.get("max_norm") is not None:
            return None
        return self.rows(args[0])  # type: ignore[no-any-return]


def replace_table(module: Any, dtype: torch.dtype) -> EmbeddingRows:
    """Replace the parameter of an embedding by a table that dequantizes rows."""
    rows = EmbeddingRows(module._parameters.pop("weight").shape, dtype)
    module.quantized_rows = rows
    module.weight = EmbeddingTable(rows)
    return rows
