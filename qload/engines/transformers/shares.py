"""Which share of a layer a rank has: transformers' plan says how, qload cuts, and all ranks refuse alike."""

from collections.abc import Mapping
from typing import Any

from transformers.distributed.parallel_utils import _get_parameter_plan

from qload.engines.transformers.placing import Places
from qload.errors import ArgumentError
from qload.experts import ExpertSplit
from qload.experts.load import plan_experts
from qload.quantize import QuantizingLoader
from qload.weights import Load, Weights
from qload.weights.loads import parts_of

COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input")
PACKED = "packed_colwise"  # gate and up in one layer, each cut for itself
WHOLE = (None, "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce", "local_params")
EXPERTS = "moe_tp_experts"
OTHERWISE = {  # ways of transformers to use ranks
    "ep_size": "ranks have a share of each expert",
    "fsdp_size": "quantized weights are no parameters that could be gathered",
    "dp_replicate_size": "quantized weights are no parameters that could be gathered",
    "pp_size": "every rank has a share of every layer",
}


class SharingPlan:
    """How the ranks share the layers of a model.

    ArgumentError for experts of which ranks have whole ones, as transformers then sends tokens among ranks,
    and for ranks that share parameters or have layers of their own.

    Parameters
    ----------
    model
        As transformers made it.
    """

    def __init__(self, model: Any) -> None:
        said = getattr(model.config, "distributed_config", None)
        self.ranks: int = 1 if said is None else said.tp_size
        own = dict(model.tp_plan or {}) if self.ranks > 1 else {}
        asked = getattr(said, "tp_plan", None)
        self._styles: Mapping[str, str] = own | (asked if isinstance(asked, dict) else {})
        for name, why in OTHERWISE.items():
            size = getattr(said, name, None) or 1
            if size > 1:
                raise ArgumentError(name, f"1: {why}", str(size))

    def load(self, name: str, prefix: str) -> Load:
        """The load of the layer `prefix` that stands as `name` in the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style in COLUMNS:
            return Load(prefix, "N")
        if style in ROWS:
            return Load(prefix, "K")
        if style == PACKED:
            return Load(prefix, "N", block_sizes=2)
        if style not in WHOLE:
            lawful = ", ".join(filter(None, (*COLUMNS, *ROWS, PACKED, *WHOLE)))
            raise ArgumentError(f"tp_plan: {name}", f"one of {lawful}", str(style))
        return Load(prefix)

    def split(self, name: str) -> ExpertSplit | None:
        """How the ranks share the experts that stand as `name` in the model."""
        style = _get_parameter_plan(name, self._styles, is_weight=False)
        if style not in (None, EXPERTS):
            raise ArgumentError(f"tp_plan: {name}", EXPERTS, str(style))
        return "tensor" if style == EXPERTS else None

    def check(self, weights: Weights, places: Places) -> None:
        """CutError or DivideError where the ranks cannot share a layer; no weight is read.

        Of layers that are quantized while they are loaded, each is checked when it is loaded.
        """
        if self.ranks == 1 or isinstance(weights.loader, QuantizingLoader):
            return
        for name, prefix in places.linears.items():
            load = self.load(name, prefix)
            weights.loader.plan(weights, parts_of(weights, weights.loader, load), load.split)
        for name, prefix in places.experts.items():
            plan_experts(weights, prefix, self.split(name))
