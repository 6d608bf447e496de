"""What a model's config says of its routers, as hostile input.

Keys and defaults are those of transformers 5.23.0. What a type's own code does not read is not read here,
but where it names another way to choose than that type has, the config is refused: no way is guessed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qload.architecture import Architecture, architecture_of
from qload.detect.files import MODEL_CONFIG, FoundConfig, value_text
from qload.detect.validation import Excerpt, validate
from qload.errors import ArgumentError, ConfigError, checked
from qload.experts.routing import Method, Routing

Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]

KEYS = {  # of the fields of `Routing`
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
    "factor": "routed_scaling_factor",
}


class _Router(Excerpt):
    """What the config of one type says; `fields` makes the fields of `Routing` of it."""

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


ROUTERS: Mapping[str, type[_Router]] = {
    "mixtral": _Mixtral,
    "qwen2_moe": _Qwen2,
    "qwen3_moe": _Qwen3,
    "gpt_oss": _GptOss,
    "llama4_text": _Llama4,
    "deepseek_v2": _DeepseekV2,
    "deepseek_v3": _DeepseekV3,
}


@checked
def routing_of(config: Mapping[str, Any]) -> Routing:
    """How the routers of a model choose and weigh experts, by its `model_type`.

    `config`: the whole `config.json`; of a model that sees or hears too, its text model is meant. ConfigError
    names the key for a type that is not known to have experts, and for values that no router can act on.
    """
    model, found = _model(config)
    size = model.table.sizes["experts"]
    key = next((key for key in size.keys if key in model.config), size.keys[0])
    experts, said = model.sizes["experts"], validate(ROUTERS[model.type], found)
    if experts is None:
        raise ConfigError(
            found.file, found.key(key), "a number of experts", value_text(model.config.get(key))
        )
    try:
        return Routing(said.method, experts, said.num_experts_per_tok, **said.fields())
    except ArgumentError as error:
        name = found.key(KEYS.get(error.argument, key))
        raise ConfigError(found.file, name, error.expected, error.got) from error


def _model(config: Mapping[str, Any]) -> tuple[Architecture, FoundConfig]:
    """The model with experts that a config describes, and where in it that model's own config stands."""
    model = architecture_of(config)
    if model is None or model.type not in ROUTERS:
        kind = value_text(config.get("model_type") if model is None else model.type)
        raise ConfigError(MODEL_CONFIG, "model_type", f"a type with experts: {', '.join(ROUTERS)}", kind)
    inner = next((key for key, held in config.items() if held is model.config), "")
    return model, FoundConfig(MODEL_CONFIG, inner, model.config)
