"""The call that every door shares: x times the tensors of one layer, decided but for x when it is made.

`Linear`, the kernels of `mp_linear` and the methods of engines hold a `PreparedLinear` and their tensors, and
hand the latter to it:

- plain weights of x's dtype: torch's own product, and nothing else, traced too;
- torch traces, records, or wants gradients: the operator `qload::linear`;
- a CUDA device whose kernels read the layer: a launch that was planned for so many tokens;
- a CPU whose module reads the layer in panels: a call that was planned for where they lie;
- all else: `reference.linear`, which also says what is wrong with x.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from qload.devices.tensors import PLAIN
from qload.kernel_formats.panels import PanelsWeight
from qload.kernels import operator, reference
from qload.kernels.cpu import PanelsPlan, plan_of
from qload.kernels.cpu_rows import KeptRows
from qload.kernels.cuda.plans import LinearPlan
from qload.kernels.declared import Activations, Maximum
from qload.kernels.dtypes import Notice
from qload.kernels.meaning import known, over, share, without_tensors
from qload.spec import Weight


class PreparedLinear:
    """One layer's call, without its tensors: those are a module's, and move with it.

    Attributes
    ----------
    blueprint
        The typed weight, of tensors without memory.
    names
        Its fields, in the order in which a call takes their tensors.
    meaning
        The key of `qload::linear`; empty where only this process can find the largest inputs.
    """

    def __init__(
        self, weight: Weight, activations: Activations = "declared", maximum: Maximum = None
    ) -> None:
        self.blueprint = without_tensors(weight)
        self.activations: Activations = activations
        self.maximum: Maximum = maximum
        self.names = tuple(self.blueprint.fields())
        self._shared = share(weight, activations, maximum)
        self._traces = not callable(maximum)
        self.meaning = self._shared.key if self._traces else ""
        self._N, self._K = weight.shape
        plain = weight.plain and not reference.quantizes(weight, activations)
        self._plain_dtype = weight.fields()["weight"].dtype if plain else None
        self._planned: tuple[tuple[Any, ...], LinearPlan | None] = (), None  # for what was seen to fit
        self._in_panels = isinstance(weight, PanelsWeight) and not reference.quantizes(weight, activations)
        self._planned_here: tuple[tuple[Any, ...], PanelsPlan | None] = (), None  # for tensors that lie there
        self._rows = KeptRows()
        self._notice = Notice()

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew: another process has to learn what the key means."""
        return PreparedLinear, (self.blueprint, self.activations, self.maximum)

    def typed(self, held: Sequence[Tensor]) -> Weight:
        """The typed weight over `held`."""
        return over(self.blueprint, held)

    def forget(self) -> None:
        """Let go of tensors that calls on a CPU have seen: they were moved, and their memory is free."""
        self._rows, self._planned_here = KeptRows(), ((), None)

    def __call__(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y (..., N) of x (..., K), in its dtype; `held`: a tensor for each of `names`.

        ArgumentError where x or `bias` is no tensor.
        """
        if not reference.are_tensors(x, bias):
            reference.check_tensors(self.blueprint, x, bias)
        if self._plain_dtype is not None and self._takes_plain(x, held[0], bias):
            return torch_linear(x, held[0], bias)
        if torch.compiler.is_compiling():
            if self._traces:
                return operator.linear(x, held, bias, self.meaning, self._N)
            from qload.kernels.while_traced import linear_eagerly

            y: Tensor = linear_eagerly(self, x, held, bias)
            return y
        if not self._traces or torch._C._functorch.peek_interpreter_stack() is not None:
            return self._otherwise(x, held, bias)
        if _is_watched(x, bias):
            reference.check(x, self.typed(held), bias)
            self._notice.of(self.blueprint, x, bias)
            return operator.linear(x, held, bias, self.meaning, self._N)
        made = self._natively(x, held, bias) if x.is_cuda else self._in_place(x, held, bias)
        return self._otherwise(x, held, bias) if made is None else made

    def _takes_plain(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> bool:
        if x.dtype != self._plain_dtype or matrix.dtype != x.dtype or x.device != matrix.device:
            return False
        if x.ndim == 0 or x.shape[-1] != self._K:
            return False
        return bias is None or (bias.dtype == x.dtype and tuple(bias.shape) == (self._N,))

    def _natively(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
        """By a planned launch, or None; tensors are looked at again where they or their types are others."""
        pointers = [tensor.data_ptr() for tensor in held]
        added = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape)
        seen = (x.get_device(), x.dtype, added, pointers, _types(held))
        before, plan = self._planned
        if seen != before:
            if not self._shared.fits(x, held, bias):
                return None
            plan = self._shared.plan(x, held)
            self._planned = seen, plan
        return None if plan is None else plan.multiply(x, held, pointers, bias, self._shared.typed)

    def _in_place(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
        """By a planned call of the CPU module, or None."""
        if not self._in_panels:
            return None
        seen = [tensor.data_ptr() for tensor in held], _types(held)
        before, plan = self._planned_here
        if seen != before:
            plan = plan_of(self.typed(held))
            self._planned_here = seen, plan
        return None if plan is None else plan.multiply(x, bias)

    def _otherwise(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        self._notice.of(self.blueprint, x, bias)
        return _eager_product(self, x, held, bias)


def traced(x: Tensor, held: Mapping[str, Tensor | None], meaning: str) -> Tensor:
    """The same where a module's tensors, `held` by name, are traced; `meaning`: the key of a prepared call.

    Of a module torch looks at nothing but these before each call of a compiled model, and each look costs.
    """
    from qload.kernels.while_traced import facts

    names, N, K, plain = facts(meaning)
    tensors: list[Any] = [held[name] for name in names]
    bias = held["bias"]
    if not reference.are_tensors(x, bias):
        reference.check_tensors(known(meaning).blueprint, x, bias)
    alike = plain and x.dtype == tensors[0].dtype
    alike = alike and (bias is None or (bias.dtype == x.dtype and bias.ndim == 1 and bias.shape[0] == N))
    if alike and x.ndim and x.shape[-1] == K:
        return torch_linear(x, tensors[0], bias)
    return operator.linear(x, tensors, bias, meaning, N)


def _types(held: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    """What is to be the same of tensors that lie where others lay, besides their numbers."""
    return [(tensor.dtype, tensor.shape) for tensor in held]


def _is_watched(x: Tensor, bias: Tensor | None) -> bool:
    """Whether somebody but the kernel wants to know of this call: gradients, a mode, x of another type."""
    if (
        type(x) not in PLAIN
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    ):
        return True
    return operator.wants_gradients(x, bias)


def _eager_product(call: PreparedLinear, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return reference.linear(x, call.typed(held), bias, call.activations, call.maximum, call._rows)
