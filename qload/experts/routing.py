"""Routing: the choice of experts for each token and their weights, as plain torch functions.

Each function takes the logits (..., E) of a router and returns `topk_ids` (..., k), int64, and `topk_weights`
(..., k), in the order of `torch.topk`, which also decides between equal scores. It repeats the operations of
its owner's module in the same order and dtypes: ids and weights are bit-equal.

Source: the routers of transformers 5.23.0, by type of model:

    softmax_top_k    mixtral, qwen2_moe, qwen3_moe
    top_k_softmax    gpt_oss
    top_k_sigmoid    llama4_text
    softmax_grouped  deepseek_v2
    sigmoid_grouped  deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite

`routed_scaling_factor` multiplies these weights alone; shared experts have no routing weight.

`routing_of` reads the config of a model, as hostile input. Keys and defaults are those of transformers
5.23.0. A config that names another method than its type has is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from qload.architecture import Architecture, architecture_of
from qload.configs import Excerpt, FoundConfig, validate, value_text
from qload.detect.config_reader import MODEL_CONFIG
from qload.errors import ArgumentError, ConfigError, DtypeError, ShapeError, check_fields, checked

Method = Literal["softmax_top_k", "top_k_softmax", "top_k_sigmoid", "softmax_grouped", "sigmoid_grouped"]
Chosen: TypeAlias = tuple[Tensor, Tensor]  # topk_ids, topk_weights

GROUPED = ("softmax_grouped", "sigmoid_grouped")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FACTORS = torch.finfo(torch.float32)
NO_ZERO = 1e-20  # what DeepSeek V3 adds to a sum before it divides by it


@dataclass(frozen=True)
class Routing:
    """Choice of experts by a layer, and their weights; `qload.routing_of` reads it from a model's config.

    ArgumentError, with the name of the field, for what no router can do: more experts for a token than there
    are, groups that do not divide them, a factor that is no float32.

    Attributes
    ----------
    method
        "softmax_top_k": a softmax over all experts, of which the largest are taken. "top_k_softmax": a
        softmax over those that were taken. "top_k_sigmoid": the sigmoid of each that was taken.
        "softmax_grouped": as the first, from the groups whose largest score is largest. "sigmoid_grouped":
        sigmoids, from the groups whose two largest have the largest sum; a correction bias takes part in the
        choice of groups and experts, and not in the weights.
    experts, top_k
        E, and how many of them a token goes to.
    renormalized
        Whether the weights of a token are divided by their sum; of "softmax_top_k" and "sigmoid_grouped".
    rounded
        Whether "softmax_top_k" rounds its weights, which are float32, to the dtype of the logits.
    groups, top_groups
        How many groups of neighbours the experts are, and from how many of them a token may choose.
    factor
        `routed_scaling_factor`: what the weights of a grouped method are multiplied by, once.
    """

    method: Method
    experts: int
    top_k: int
    renormalized: bool = False
    rounded: bool = False
    groups: int = 1
    top_groups: int = 1
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        _refuse(self.experts < 1, "experts", "1 or more", self.experts)
        _refuse(not 1 <= self.top_k <= self.experts, "top_k", f"1 to {self.experts} experts", self.top_k)
        sums = ("softmax_top_k", "sigmoid_grouped")
        _refuse(self.renormalized and self.method not in sums, "renormalized", "False", True)
        _refuse(self.rounded and self.method != "softmax_top_k", "rounded", "False", True)
        if self.method in GROUPED:
            self._check_groups()
            lawful = FACTORS.tiny <= self.factor <= FACTORS.max  # NaN is not
            _refuse(not lawful, "factor", "a float32 above 0", self.factor)
            return
        _refuse(self.groups != 1, "groups", f"1 for {self.method}", self.groups)
        _refuse(self.top_groups != 1, "top_groups", f"1 for {self.method}", self.top_groups)
        _refuse(self.factor != 1, "factor", f"1.0 for {self.method}", self.factor)

    def _check_groups(self) -> None:
        divides = self.groups >= 1 and self.experts % self.groups == 0
        _refuse(not divides, "groups", f"a divisor of {self.experts} experts", self.groups)
        size, least = self.experts // self.groups, 2 if self.corrected else 1
        _refuse(size < least, "groups", f"groups of {least} experts or more", f"{self.groups} of {size}")
        lawful = 1 <= self.top_groups <= self.groups
        _refuse(not lawful, "top_groups", f"1 to {self.groups} groups", self.top_groups)
        most = self.top_groups * size
        _refuse(self.top_k > most, "top_k", f"at most {most}, what {self.top_groups} groups have", self.top_k)

    @property
    def corrected(self) -> bool:
        """True if a correction bias (`e_score_correction_bias`) affects the choice."""
        return self.method == "sigmoid_grouped"

    @checked
    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the logits (..., E) of x (..., H), in float32 for a grouped method, else in x's dtype.

        `weight`: (E, H), as it is stored; `bias`: (E,) or None, which is no correction bias. ShapeError, and
        DtypeError where x and `weight` differ and nothing says which of them is to be cast.
        """
        if weight.ndim != 2 or weight.shape[0] != self.experts:
            raise ShapeError("router: weight", f"({self.experts}, H) = (E, H)", tuple(weight.shape))
        if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
            raise ShapeError("router: x", f"(..., {weight.shape[1]}) = (..., H)", tuple(x.shape))
        if self.method in GROUPED:
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        if x.dtype != weight.dtype:
            raise DtypeError("router: x", [f"{_plain(weight.dtype)}, as its weight"], _plain(x.dtype))
        return torch.nn.functional.linear(x, weight, bias)

    @checked
    def route(self, logits: Tensor, correction_bias: Tensor | None = None) -> Chosen:
        """The experts of each token, `topk_ids` (..., k), int64, and their `topk_weights` (..., k).

        `logits`: (..., E), floats. `correction_bias`: (E,), floats; given for "sigmoid_grouped" alone, else
        ArgumentError. Weights are float32; of "top_k_softmax", "top_k_sigmoid" and what is `rounded` they
        have the dtype of the logits. DtypeError, ShapeError.
        """
        if logits.dtype not in FLOATS:
            raise DtypeError("logits", list(map(_plain, FLOATS)), _plain(logits.dtype))
        if logits.ndim == 0 or logits.shape[-1] != self.experts:
            raise ShapeError("logits", f"(..., {self.experts}) = (..., E)", tuple(logits.shape))
        if (correction_bias is not None) != self.corrected:
            wanted = f"a tensor ({self.experts},)" if self.corrected else f"None for {self.method}"
            raise ArgumentError("correction_bias", wanted, "None" if self.corrected else "a tensor")
        if correction_bias is None:
            return METHODS[self.method](logits, self)
        if tuple(correction_bias.shape) != (self.experts,):
            raise ShapeError("correction_bias", f"({self.experts},) = (E,)", tuple(correction_bias.shape))
        return sigmoid_grouped(logits, correction_bias, self)


def softmax_top_k(logits: Tensor, routing: Routing) -> Chosen:
    """A softmax of `logits` (..., E) in float32 over all experts; the `top_k` largest, perhaps renormalized.

    `routing`: its `top_k`, `renormalized` and `rounded`. Source: `MixtralTopKRouter`, which renormalizes and
    keeps float32; `Qwen2MoeTopKRouter` and `Qwen3MoeTopKRouter`, which round to the dtype of the logits.
    """
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = scores.topk(routing.top_k, dim=-1)
    if routing.renormalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights.to(logits.dtype) if routing.rounded else weights


def top_k_softmax(logits: Tensor, routing: Routing) -> Chosen:
    """The `top_k` largest `logits` (..., E), and a softmax over them, in their dtype.

    `routing`: its `top_k`. Source: `GptOssTopKRouter`.
    """
    values, ids = logits.topk(routing.top_k, dim=-1)
    return ids, torch.softmax(values, dim=-1, dtype=logits.dtype)


def top_k_sigmoid(logits: Tensor, routing: Routing) -> Chosen:
    """The `top_k` largest `logits` (..., E), and the sigmoid of each in float32, rounded to their dtype.

    `routing`: its `top_k`. The sigmoid is taken of all logits where they stand, as the owner does: at another
    place of a tensor torch may round the same number otherwise. Source: `Llama4Router`.
    """
    ids = logits.topk(routing.top_k, dim=-1).indices
    return ids, torch.sigmoid(logits.float()).to(logits.dtype).gather(-1, ids)


def softmax_grouped(logits: Tensor, routing: Routing) -> Chosen:
    """A softmax of `logits` (..., E) in float32; the `top_k` largest of the groups with the largest scores.

    `routing`: its `top_k`, `groups`, `top_groups` and `factor`. Weights are not renormalized, whatever the
    config says. Scores of other groups count as 0.0. Source: `DeepseekV2TopkRouter`, of which `greedy` is one
    group of all experts.
    """
    scores = torch.softmax(logits.float(), dim=-1, dtype=torch.float32)
    allowed = scores.masked_fill(~_in_best_groups(scores, routing, 1), 0.0)
    weights, ids = allowed.topk(routing.top_k, dim=-1, sorted=False)
    return ids, weights * routing.factor


def sigmoid_grouped(logits: Tensor, correction_bias: Tensor, routing: Routing) -> Chosen:
    """Sigmoids of `logits` (..., E) in float32, chosen by their sums with a `correction_bias` (E,).

    `routing`: its `top_k`, `groups`, `top_groups`, `renormalized` and `factor`. A group's score is the sum of
    its two largest; experts of other groups are never chosen. The weights are sigmoids, without the bias.
    Source: `DeepseekV3TopkRouter`.
    """
    scores = logits.float().sigmoid()
    choice = scores + correction_bias
    allowed = choice.masked_fill(~_in_best_groups(choice, routing, 2), float("-inf"))
    ids = allowed.topk(routing.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if routing.renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NO_ZERO)
    return ids, weights * routing.factor


METHODS: Mapping[str, Callable[[Tensor, Routing], Chosen]] = {
    "softmax_top_k": softmax_top_k,
    "top_k_softmax": top_k_softmax,
    "top_k_sigmoid": top_k_sigmoid,
    "softmax_grouped": softmax_grouped,
}


def _in_best_groups(scores: Tensor, routing: Routing, largest: int) -> Tensor:
    """Mask (..., E) of the experts in the best groups, by the sums of their `largest` scores."""
    groups = scores.reshape(*scores.shape[:-1], routing.groups, -1)
    of_groups = groups.topk(largest, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(routing.top_groups, dim=-1, sorted=False).indices
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, best, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(-2)


def _refuse(wrong: bool, field: str, expected: str, got: object) -> None:
    if wrong:
        raise ArgumentError(field, expected, f"{got!s:.60}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]

KEYS = {  # of the fields of `Routing`
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
    "factor": "routed_scaling_factor",
}


class _Router(Excerpt):
    """Router keys of one model type; `fields` converts them to fields of `Routing`."""

    method: ClassVar[Method]

    num_experts_per_tok: Count

    def fields(self) -> dict[str, Any]:
        return {}


class _Mixtral(_Router):
    method = "softmax_top_k"
    num_experts_per_tok: Count = 2

    def fields(self) -> dict[str, Any]:
        return {"renormalized": True}


class _Qwen2(_Router):
    method = "softmax_top_k"
    num_experts_per_tok: Count = 4
    norm_topk_prob: bool = False

    def fields(self) -> dict[str, Any]:
        return {"renormalized": self.norm_topk_prob, "rounded": True}


class _Qwen3(_Qwen2):
    num_experts_per_tok: Count = 8


class _GptOss(_Router):
    method = "top_k_softmax"
    num_experts_per_tok: Count = 4


class _Llama4(_Router):
    method = "top_k_sigmoid"
    num_experts_per_tok: Count = 1


class _DeepseekV2(_Router):
    """`norm_topk_prob` is not read: V2 never renormalizes."""

    method = "softmax_grouped"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    n_group: Count | None = None
    topk_group: Count | None = None
    routed_scaling_factor: Number = 1.0

    def fields(self) -> dict[str, Any]:
        factor = {"factor": self.routed_scaling_factor}
        if self.topk_method == "greedy":
            return factor
        for key, count in (("n_group", self.n_group), ("topk_group", self.topk_group)):
            if count is None:
                raise ConfigError(MODEL_CONFIG, key, "a number, for group_limited_greedy", "nothing")
        return {**factor, "groups": self.n_group, "top_groups": self.topk_group}


class _DeepseekV3(_Router):
    method = "sigmoid_grouped"
    num_experts_per_tok: Count = 8
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    n_group: Count = 8
    topk_group: Count = 4
    norm_topk_prob: bool | None = True
    routed_scaling_factor: Number = 2.5

    def fields(self) -> dict[str, Any]:
        return {
            "renormalized": bool(self.norm_topk_prob),
            "groups": self.n_group,
            "top_groups": self.topk_group,
            "factor": self.routed_scaling_factor,
        }


class _Glm4Moe(_DeepseekV3):
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: Number = 1.0


class _Glm4MoeLite(_Glm4Moe):
    num_experts_per_tok: Count = 4
    routed_scaling_factor: Number = 1.8


ROUTERS: Mapping[str, type[_Router]] = {
    "mixtral": _Mixtral,
    "qwen2_moe": _Qwen2,
    "qwen3_moe": _Qwen3,
    "gpt_oss": _GptOss,
    "llama4_text": _Llama4,
    "deepseek_v2": _DeepseekV2,
    "deepseek_v3": _DeepseekV3,
    "deepseek_v32": _DeepseekV3,
    "glm4_moe": _Glm4Moe,
    "glm4_moe_lite": _Glm4MoeLite,
}


@checked
def routing_of(config: Mapping[str, Any]) -> Routing:
    """Read the routing of a model from its config, by its `model_type`.

    `config`: the whole `config.json`; of a model that sees or hears too, its text model is meant. ConfigError
    names the key for a type that is not known to have experts, and for values that no router can act on.
    """
    model, found = _model(config)
    size = model.table.sizes["experts"]
    key = next((key for key in size.keys if key in model.config), size.keys[0])
    experts, said = model.sizes["experts"], validate(ROUTERS[model.type], found)
    if experts is None:
        raise found.error(key, "a number of experts", value_text(model.config.get(key)))
    try:
        return Routing(said.method, experts, said.num_experts_per_tok, **said.fields())
    except ArgumentError as error:
        raise found.error(KEYS.get(error.argument, key), error.expected, error.got) from error


def _model(config: Mapping[str, Any]) -> tuple[Architecture, FoundConfig]:
    """Find the text model with experts in a config, and its own section."""
    model = architecture_of(config)
    if model is None or model.type not in ROUTERS:
        kind = value_text(config.get("model_type") if model is None else model.type)
        raise ConfigError(MODEL_CONFIG, "model_type", f"a type with experts: {', '.join(ROUTERS)}", kind)
    inner = next((key for key, value in config.items() if value is model.config), "")
    return model, FoundConfig(MODEL_CONFIG, inner, model.config)
