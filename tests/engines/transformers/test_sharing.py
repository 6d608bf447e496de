"""How ranks share a model by transformers' plan, without any rank; what a plan may not say.

Collected where transformers is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qload.engines.transformers.checkpoint import CheckpointReader
from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.layer_names import LayerMap, ModelNames, map_layers
from qload.engines.transformers.quantizer import TensorParallelPlan, check_sums
from qload.errors import ArgumentError, CutError
from qload.parallel import Rank
from qload.weights import Weights
from tests.engines.transformers.models import Stored, shared, stored

LAYER = "model.layers.0"


def empty(stored: Stored) -> Any:
    """The model without any weight."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(stored.means))


def shared_by(model: Any, ranks: int, **said: Any) -> TensorParallelPlan:
    """The plan of a model that so many ranks share; `said`: further settings of transformers."""
    settings = {"tp_size": ranks, "tp_plan": "auto", "ep_size": 1, **said}
    config = SimpleNamespace(distributed_config=SimpleNamespace(**settings))
    return TensorParallelPlan(SimpleNamespace(config=config, tp_plan=model.tp_plan))


@contextmanager
def opened(stored: Stored, ranks: int) -> Iterator[tuple[Weights, LayerMap]]:
    """The checkpoint as the first of the ranks sees it, and which layers of it go where."""
    file = str(stored.path / "model.safetensors")
    source, model = CheckpointReader([file], QloadConfig(), torch.float32), empty(stored)
    found, stacks = source.groups.found, source.stacks
    yield (
        source.weights("cpu", Rank(0, ranks), as_stored=True),
        map_layers(model, ModelNames(model), found, stacks, source.is_quantized, source.will_be_quantized),
    )
    source.close()


def test_layers_are_cut_as_transformers_plan_says() -> None:
    plan = shared_by(empty(shared("mixtral", "awq")), 2)

    splits = {
        name: plan.load(f"{LAYER}.self_attn.{name}", ("of the checkpoint",)).split
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert splits == {"q_proj": "N", "k_proj": "N", "v_proj": "N", "o_proj": "K"}
    assert plan.split(f"{LAYER}.mlp.experts") == "tensor"
    assert plan.load("of no plan", ("of the checkpoint",)).split is None


def test_one_rank_cuts_nothing() -> None:
    plan = shared_by(empty(shared("mixtral", "awq")), 1)

    assert plan.load(f"{LAYER}.self_attn.q_proj", ("of the checkpoint",)).split is None
    assert plan.split(f"{LAYER}.mlp.experts") is None


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_cut_that_a_format_has_not_is_refused_before_a_weight_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven, read = stored(kind, "awq", tmp_path, intermediate_size=48), list[str]()
    with opened(uneven, 2) as (weights, places):
        monkeypatch.setattr(weights.storage, "read", lambda name, *index: read.append(name))
        with pytest.raises(CutError, match=r"model\.layers\.0\."):
            shared_by(empty(uneven), 2).check(weights, places)

        shared_by(empty(uneven), 1).check(weights, places)
    assert not read


def test_what_a_plan_may_not_say_is_named() -> None:
    model = empty(shared("mixtral", "awq"))

    for name in ("ep_size", "fsdp_size", "dp_replicate_size", "pp_size"):
        with pytest.raises(ArgumentError, match=rf"^{name}\n"):
            shared_by(model, 2, **{name: 2})
    odd = shared_by(model, 2, tp_plan={"model.layers.*.self_attn.q_proj": "diagonal"})
    with pytest.raises(ArgumentError, match=r"tp_plan: model\.layers\.0\.self_attn\.q_proj\n.*colwise"):
        odd.load(f"{LAYER}.self_attn.q_proj", ("of the checkpoint",))
    odd = shared_by(model, 2, tp_plan={"model.layers.*.mlp.experts": "colwise"})
    with pytest.raises(ArgumentError, match=r"tp_plan: model\.layers\.0\.mlp\.experts"):
        odd.split(f"{LAYER}.mlp.experts")


def test_a_quantized_embedding_or_router_is_whole_on_every_rank() -> None:
    model = empty(shared("mixtral", "awq"))
    with opened(shared("mixtral", "awq"), 2) as (weights, _):
        for layers in (LayerMap(embeddings={"table": "table"}), LayerMap(matrices={"table.weight": "table"})):
            shared_by(model, 2, tp_plan={}).check(weights, layers)
            with pytest.raises(ArgumentError, match=r"tp_plan: table.*\n.*no style"):
                shared_by(model, 2, tp_plan={"table": "colwise"}).check(weights, layers)


def test_experts_of_a_class_are_cut_only_if_their_outputs_are_sums() -> None:
    class Experts(torch.nn.Module):
        config, has_post_expert_norm = None, False

        def _apply_gate(self) -> None: ...

    check_sums("experts", Experts())
    for wrong in ({"has_post_expert_norm": True}, {"_apply_gate": property()}):
        module = type("Experts", (Experts,), wrong)()
        with pytest.raises(ArgumentError, match=r"tp_plan: experts\n.*more than a sum"):
            check_sums("experts", module)
