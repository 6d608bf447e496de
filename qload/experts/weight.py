"""`ExpertsWeight`: the experts of a layer as typed weights, stacked, and what is to be known beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import torch
from torch import Tensor

from qload.errors import MismatchError, ShapeError, check_fields, checked
from qload.experts.facts import ExpertFacts
from qload.experts.local import LocalExperts
from qload.experts.repacking import repacked, restored
from qload.experts.stack import Stack
from qload.layouts import ZeroPoints
from qload.spec import Weight
from qload.spec.weight import EXPERTS_FACTORY, call_upward

if TYPE_CHECKING:
    from torch import nn


class Expert(NamedTuple):
    """The matrices of one expert: gate and up as one (2 I, H), and down (H, I)."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    """The experts of a layer that are on this rank, or its share of each: E of H inputs, I between.

    ShapeError and MismatchError for parts that are not of the same experts.

    Attributes
    ----------
    gate_up
        (E, 2 I, H): of each expert its gate's outputs, then its up's, two parts of one fused layer.
    down
        (E, H, I).
    facts
        The activation between, and where the routing weight goes.
    local
        Which experts of the layer are here.
    gate_up_bias
        (E, 2 I), as `gate_up`; None: there is none.
    down_bias
        (E, H), of the first of the ranks that cut the same experts, whose outputs are summed; None on the
        others, and where there is none.

    Examples
    --------
    >>> import torch
    >>> from qload import ExpertFacts, MemoryStorage, Weights, loader_from_config
    >>> from qload.experts import GatedActivation
    >>> names = [f"experts.{e}.{matrix}.weight" for e in range(3) for matrix in ("w1", "w3", "w2")]
    >>> storage = MemoryStorage({name: torch.full((4, 4), at + 1.0) for at, name in enumerate(names)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> experts = weights.get_experts("experts", facts=ExpertFacts(GatedActivation("silu")))
    >>> experts.shape, experts.gate_up.shape
    ((3, 4, 4), (3, 8, 4))
    >>> gate_up, down = experts.dequantize(2)
    >>> gate_up[:, 0], down[:, 0]
    (tensor([7., 7., 7., 7., 8., 8., 8., 8.]), tensor([9., 9., 9., 9.]))
    """

    gate_up: Stack
    down: Stack
    facts: ExpertFacts
    local: LocalExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        E, H, inner = self.shape
        gates, ups = self.gate_up.layer.parts if len(self.gate_up.layer.parts) == 2 else (0, 0)
        name = self.gate_up.layer.name
        if (len(self.gate_up), len(self.local)) != (E, E):
            counts = f"{len(self.gate_up)} of gate and up, {len(self.local)} local"
            raise MismatchError(name, "experts of a layer", f"{E}, as of down", counts)
        if (gates, ups, self.gate_up.layer.K) != (inner, inner, H):
            expected = f"({E}, {inner} + {inner}, {H}) = (E, I + I, H), as down is (E, H, I)"
            raise ShapeError(f"{name}: gate_up", expected, self.gate_up.shape)
        for field, bias, size in (
            ("gate_up_bias", self.gate_up_bias, 2 * inner),
            ("down_bias", self.down_bias, H),
        ):
            if bias is not None and tuple(bias.shape) != (E, size):
                raise ShapeError(f"{name}: {field}", f"({E}, {size})", tuple(bias.shape))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, H, I): experts that are here, their inputs, and what lies between that is here."""
        return self.down.shape

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.down.device

    def fields(self) -> dict[str, Tensor]:
        """All tensors: those of the stacks as `gate_up.qweight`, and the biases that there are."""
        held = {
            f"{name}.{f}": t for name in ("gate_up", "down") for f, t in getattr(self, name).fields().items()
        }
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return held | {name: bias for name, bias in biases.items() if bias is not None}

    @checked
    def expert(self, index: int) -> Expert:
        """The matrices of the expert `index`, counted from the first that is here: views, no copies.

        ArgumentError where there is no such expert.
        """
        return Expert(self.gate_up.expert(index), self.down.expert(index))

    @checked
    def dequantize(self, index: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Gate and up (2 I, H), and down (H, I), of the expert `index`: what they mean, in a `dtype`."""
        return self.gate_up.dequantize(index, dtype), self.down.dequantize(index, dtype)

    @checked
    def to(self, device: torch.device | str) -> Self:
        """The same experts on another `device`; no dtype changes."""
        biases = (self.gate_up_bias, self.down_bias)
        gate_up, down = (None if bias is None else bias.to(device) for bias in biases)
        return replace(
            self,
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
            gate_up_bias=gate_up,
            down_bias=down,
        )

    @checked
    def repack(
        self,
        layout: str,
        *,
        zeros: ZeroPoints | None = None,
        dtype: torch.dtype | None = None,
        exponent_bias: bool | None = None,
        whole: "ExpertsWeight | None" = None,
    ) -> Self:
        """Every expert in another layout, stacked, one expert at a time.

        RepackError where the layout cannot say one of them; MismatchError where it leaves out of one what it
        keeps of another.

        Parameters
        ----------
        layout, zeros, dtype, exponent_bias
            Those of `qload.repack`.
        whole
            The experts that these are a share of, whose facts then decide, on every rank alike.
        """
        options = {"zeros": zeros, "dtype": dtype, "exponent_bias": exponent_bias}
        return replace(
            self,
            gate_up=repacked(self.gate_up, layout, None if whole is None else whole.gate_up, **options),
            down=repacked(self.down, layout, None if whole is None else whole.down, **options),
        )

    def restore(self) -> Self:
        """Every expert as it was before it was repacked, bit for bit; what never was stays as it is."""
        return replace(self, gate_up=restored(self.gate_up), down=restored(self.down))

    def get_linear(
        self,
        *,
        activations: Literal["declared", "unquantized"] = "declared",
        maximum: Callable[[Tensor], Tensor] | Literal["own"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "nn.Module":
        """A module (x, topk_ids, topk_weights) -> y: x (M, H) through the experts that each token chose.

        ArgumentError for a scheme that has no quantizer, and for one whose scale covers all tokens: a token's
        result must not depend on other tokens. CastError for a scale that overflows or
        underflows in `dtype`.

        Parameters
        ----------
        activations
            Whether what goes into gate and up, and into down, is quantized as `layer.activations` of the
            stacks declares, by each expert's own stored scales, or taken as it comes.
        maximum
            Of a share by "tensor", whose down has some of its inputs only, where its scale covers all of a
            token: what `maximum_over` makes of the ranks that cut the same experts, one reduction for each
            token and expert; or "own", each rank by its own inputs. ArgumentError where it is missing.
        dtype
            Of the activations: scales and biases of experts in a kernel's order become of this type, as those
            of `Weight.get_linear`; None keeps them.
        """
        module: nn.Module = call_upward(EXPERTS_FACTORY, self, activations, maximum, dtype)
        return module

    def __repr__(self) -> str:
        return f"ExpertsWeight({self.gate_up.layer.name}, {self.shape}, {self.gate_up!r}, {self.down!r})"
