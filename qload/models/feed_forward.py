"""The feed-forward part of a decoder layer: one gated pair of products, or experts that a router chooses."""

import torch
from torch import Tensor, nn

from qload.errors import ShapeError
from qload.experts import ExpertSplit, GatedActivation, Routing
from qload.kernels.cuda import step
from qload.methods import MergedColumnParallelLinear, ParallelExperts, RowParallelLinear
from qload.methods.loaded import LinearFactory
from qload.methods.parallel_experts import ExpertsFactory
from qload.models.config import TextConfig
from qload.models.norm import vector
from qload.models.stored_layers import check_biases, check_matrix, first_stored, stored_parts
from qload.parallel import Collectives, collectives_of
from qload.spec import Role
from qload.weights import Weights


class GatedFeedForward(nn.Module):
    """x (T, H) -> (T, H): down(activation(gate(x), up(x))).

    Parameters
    ----------
    gate_up, down
        The matrices: this rank's outputs of both, and its inputs of down.
    activation
        What gate and up become.
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: GatedActivation) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.activation: GatedActivation = activation

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        inner: int,
        *,
        make: LinearFactory | None = None,
        reduce_results: bool = True,
    ) -> "GatedFeedForward":
        """Gate, up and down under `prefix`, with `inner` outputs between; `reduce_results`: of all ranks."""
        names, down = (
            stored_parts(weights, prefix, ("gate_proj", "up_proj"), "gate_up_proj"),
            f"{prefix}.down_proj",
        )
        check_matrix(weights, names, (inner, inner), config.hidden)
        check_matrix(weights, down, [config.hidden], inner)
        check_biases(weights, names, config.biases)
        check_biases(weights, down, config.biases)
        return cls(
            MergedColumnParallelLinear.load(weights, names, make=make),
            RowParallelLinear.load(weights, down, reduce_results=reduce_results, make=make),
            config.activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the tokens x (T, H) become."""
        both = self.gate_up_proj(x)
        y = step.gated(both, self.activation)
        return self.down_proj(self.activation(*both.chunk(2, dim=-1)) if y is None else y)  # type: ignore[no-any-return]


class Router(nn.Module):
    """x (T, H) -> the experts of each token, `topk_ids` (T, k), and their `topk_weights` (T, k).

    Parameters
    ----------
    routing
        How they are chosen.
    weight
        (E, H), whole on every rank.
    bias, correction_bias
        (E,): of the logits, and of the choice alone; None: there is none.
    """

    weight: Tensor
    bias: Tensor | None
    correction_bias: Tensor | None

    def __init__(
        self,
        routing: Routing,
        weight: Tensor,
        bias: Tensor | None = None,
        correction_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.routing: Routing = routing
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("correction_bias", correction_bias)

    @classmethod
    def load(cls, weights: Weights, prefix: str, config: TextConfig, dtype: torch.dtype) -> "Router":
        """The router under `prefix`; its correction bias keeps the type that it is stored in."""
        routing = config.routing
        if routing is None:
            raise ShapeError(prefix, "a model with experts", (0,))
        check_matrix(weights, prefix, [routing.experts], config.hidden)
        weight = weights.get_weights(prefix).dequantize(dtype)
        name, bias = f"{prefix}.bias", None
        if "router" in config.biases:
            bias = vector(weights, name, routing.experts).to(dtype)
        name, correction = f"{prefix}.e_score_correction_bias", None
        if routing.corrected:
            correction = vector(weights, name, routing.experts, Role.SCALE)  # which no cast rounds
        return cls(routing, weight, bias, correction)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts that the tokens x (T, H) go to."""
        return self.routing.route(self.routing.logits(x, self.weight, self.bias), self.correction_bias)


class SparseFeedForward(nn.Module):
    """x (T, H) -> (T, H): the sum of the chosen experts, and of the expert of all tokens where there is one.

    Parameters
    ----------
    router, experts
        Who chooses, and what is chosen among: a rank's summand.
    shared
        The expert of all tokens, a rank's summand, which no routing weight and no factor reaches.
    collectives
        By which the summands of all ranks become one, once.
    """

    def __init__(
        self, router: Router, experts: nn.Module, shared: GatedFeedForward | None, collectives: Collectives
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.collectives: Collectives = collectives

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        dtype: torch.dtype,
        *,
        make: LinearFactory | None = None,
        make_experts: ExpertsFactory | None = None,
        split: ExpertSplit | None = "tensor",
    ) -> "SparseFeedForward":
        """Router, experts and shared expert under `prefix`; `split`: how ranks share the experts."""
        family = config.family
        shared = None
        if config.shared_inner:
            name, inner = f"{prefix}.{family.shared}", config.shared_inner
            shared = GatedFeedForward.load(weights, name, config, inner, make=make, reduce_results=False)
        router = Router.load(weights, f"{prefix}.{family.router}", config, dtype)
        experts = ParallelExperts.load(
            weights,
            first_stored(weights, prefix, ("experts", "switch_mlp")),
            split=split,
            facts=config.facts,
            reduce_results=False,
            make_experts=make_experts,
        )
        return cls(router, experts, shared, collectives_of(weights.process_group))

    def forward(self, x: Tensor) -> Tensor:
        """What the tokens x (T, H) become."""
        y = self.experts(x, *self.router(x))
        return self.collectives.summed(y if self.shared is None else y + self.shared(x))
