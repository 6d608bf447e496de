"""Feed-forward part of a decoder layer: a gated one, or a mixture of experts with a router."""

import torch
from torch import Tensor, nn

from qload.experts import GatedActivation, Routing
from qload.kernels.cuda import decoder_ops
from qload.methods import MergedColumnParallelLinear, ParallelExperts, RowParallelLinear
from qload.methods.checkpoint_linear import LinearFactory
from qload.models.config import TextConfig
from qload.models.norm import load_tensor
from qload.models.stored_layers import (
    EXPERTS,
    FUSED_GATE_UP,
    GATE_AND_UP,
    Making,
    check_biases,
    check_matrix,
    first_stored,
    padded_size,
    stored_parts,
)
from qload.parallel import Collectives, collectives_of
from qload.spec import Role
from qload.weights import Weights


class GatedFeedForward(nn.Module):
    """Gated feed-forward layer: x (T, H) -> (T, H), down(activation(gate(x), up(x))).

    Parameters
    ----------
    gate_up, down
        Fused gate and up projection, with this rank's outputs; down projection, with its inputs.
    activation
        Gated activation.
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
        sizes: tuple[int, int, int],
        activation: GatedActivation,
        *,
        biases: frozenset[str] = frozenset(),
        make: LinearFactory | None = None,
        reduce_results: bool = True,
    ) -> "GatedFeedForward":
        """Load gate, up and down under `prefix`; `sizes`: inputs, intermediate size, outputs.

        `biases`: last name parts of the matrices with a bias. `reduce_results`: whether the output is summed
        over the ranks.
        """
        features, inner, outputs = sizes
        names = stored_parts(weights, prefix, GATE_AND_UP, FUSED_GATE_UP)
        down = f"{prefix}.down_proj"
        inner = padded_size(weights, down, inner)
        check_matrix(weights, names, (inner, inner), features)
        check_matrix(weights, down, [outputs], inner)
        check_biases(weights, names, biases)
        check_biases(weights, down, biases)
        return cls(
            MergedColumnParallelLinear.load(weights, names, make=make),
            RowParallelLinear.load(weights, down, reduce_results=reduce_results, make=make),
            activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the tokens x (T, H)."""
        both = self.gate_up_proj(x)
        y = decoder_ops.gated(both, self.activation)
        return self.down_proj(self.activation(*both.chunk(2, dim=-1)) if y is None else y)  # type: ignore[no-any-return]


class Router(nn.Module):
    """Router: x (T, H) -> the experts of each token, `topk_ids` (T, k), and their `topk_weights` (T, k).

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the router.
    config
        Config of a model with experts.
    dtype
        Dtype of weight and bias; the correction bias keeps the stored one.

    Attributes
    ----------
    weight
        (E, H), replicated.
    bias, correction_bias
        (E,): bias of the logits, and of the selection alone; None: no bias.
    """

    weight: Tensor
    bias: Tensor | None
    correction_bias: Tensor | None

    def __init__(self, weights: Weights, prefix: str, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.routing is not None
        routing = config.routing
        self.routing: Routing = routing
        check_matrix(weights, prefix, [routing.experts], config.hidden)
        self.register_buffer("weight", weights.get_weights(prefix).dequantize(dtype))
        bias = correction = None
        if "router" in config.biases:
            bias = load_tensor(weights, f"{prefix}.bias", (routing.experts,)).to(dtype)
        if routing.corrected:
            name = f"{prefix}.e_score_correction_bias"
            correction = load_tensor(weights, name, (routing.experts,), Role.SCALE)  # never cast
        self.register_buffer("bias", bias)
        self.register_buffer("correction_bias", correction)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of the tokens x (T, H)."""
        chosen = decoder_ops.route(x, self.weight, self.bias, self.routing)
        if chosen is not None:
            return chosen
        return self.routing.route(self.routing.logits(x, self.weight, self.bias), self.correction_bias)


class SparseFeedForward(nn.Module):
    """Mixture of experts: x (T, H) -> (T, H), the weighted sum of each token's experts and a shared expert.

    Experts and shared expert return this rank's summand; the ranks' summands are added once.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of router, experts and shared expert.
    config
        Config of a model with experts; the shared expert has no routing weight.
    making
        Creation of the modules.
    reduce_results
        Whether the output is summed over the ranks.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: TextConfig,
        making: Making,
        *,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        family = config.family
        self.shared: GatedFeedForward | None = None
        if config.shared_inner:
            self.shared = GatedFeedForward.load(
                weights,
                f"{prefix}.{family.shared}",
                (config.hidden, config.shared_inner, config.hidden),
                config.activation,
                biases=config.biases,
                make=making.make,
                reduce_results=False,
            )
        self.router = Router(weights, f"{prefix}.{family.router}", config, making.dtype)
        self.experts = ParallelExperts.load(
            weights,
            first_stored(weights, prefix, EXPERTS),
            split=making.split,
            facts=config.facts,
            reduce_results=False,
            make_experts=making.make_experts,
        )
        ranks = collectives_of(weights.process_group) if reduce_results else None
        self.collectives: Collectives | None = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the tokens x (T, H)."""
        y: Tensor = self.experts(x, *self.router(x))
        y = y if self.shared is None else y + self.shared(x)
        return y if self.collectives is None else self.collectives.summed(y)
