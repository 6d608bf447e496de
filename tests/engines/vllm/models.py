"""Models in vLLM's own classes, loaded by its own loader with `--quantization qload`: `nox -s vllm`."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.vllm import ranks, running  # first, as vLLM looks for its platform when it is imported
from tests.engines.vllm.checkpoints import RANGE, answers, built, off, refused, same
from tests.models.with_transformers.asked import IDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM and torch import

PAIRS = [
    *(("llama", name) for name in ("gptq", "awq", "w4a16", "nf4", "fp8 block", "w8a8")),
    ("qwen2", "gptq"),
    ("mixtral", "gptq"),
    ("mixtral", "nf4"),
    ("qwen3_moe", "fp8 block"),
    ("qwen3_moe", "w4a16"),
    ("deepseek_v2", "gptq"),
    ("deepseek_v2", "awq"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_the_logits_are_those_of_what_the_codes_mean(
    kind: str, name: str, world: int, tmp_path: Path
) -> None:
    folder, want = built(kind, name, tmp_path)

    assert same(answers(world, folder), want)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mixtral", "gptq"), ("mixtral", "fp8 block"), ("qwen3_moe", "w4a16"), ("deepseek_v2", "awq")],
)
def test_whole_experts_on_two_ranks(kind: str, name: str, tmp_path: Path) -> None:
    folder, want = built(kind, name, tmp_path)

    assert same(answers(2, folder, expert_parallel=True), want)


def test_experts_that_ranks_share_unevenly(tmp_path: Path) -> None:
    folder, want = built("mixtral", "w4a16", tmp_path, num_local_experts=7)

    assert same(answers(2, folder, expert_parallel=True), want)


def test_a_head_that_is_tied_is_the_embedding(tmp_path: Path) -> None:
    folder, want = built("llama", "gptq", tmp_path, tie_word_embeddings=True)

    assert same(answers(1, folder), want)


def test_a_world_that_cannot_be_cut_is_refused_on_all_ranks_before_a_weight_is_read(tmp_path: Path) -> None:
    folder, _ = built("llama", "awq", tmp_path, intermediate_size=48)  # groups of 16, and shares of 24
    (folder / "model.safetensors").unlink()  # not one tensor is there

    assert "model.layers.0." in refused(2, folder, "CutError")


def test_a_tools_own_file_says_what_config_json_does_not(tmp_path: Path) -> None:
    folder, want = built("llama", "gptq", tmp_path)
    said = json.loads((folder / "config.json").read_text())
    section = said.pop("quantization_config")
    del section["quant_method"]
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "quantize_config.json").write_text(json.dumps(section))

    assert same(answers(1, folder), want)


def test_every_layer_is_finished_by_its_last_tensor(tmp_path: Path) -> None:
    folder, _ = built("mixtral", "gptq", tmp_path)

    def work() -> list[bool]:
        from vllm.model_executor.model_loader import base_loader

        seen: list[bool] = []

        def look(model: Any, *rest: Any) -> None:
            linears = [each for each in model.modules() if hasattr(each, "parameter_buffer")]
            experts = [each for each in model.modules() if hasattr(each, "expert_buffer")]
            seen.extend(hasattr(each, "typed_linear") for each in linears)
            seen.extend(hasattr(each, "typed_experts") for each in experts)

        base_loader.process_weights_after_loading = look
        running.loaded(running.config_of(folder, 1))
        return seen

    (found,) = ranks.run(1, work)
    assert isinstance(found, list), found
    assert len(found) == 3  # queries, keys and values; what they make; the experts
    assert all(found)


def test_a_layer_is_one_graph_for_torchs_compiler(tmp_path: Path) -> None:
    folder, _ = built("llama", "gptq", tmp_path)

    def work() -> list[Tensor]:
        model = running.loaded(running.config_of(folder, 1, activations="unquantized"))
        layer: Any = model.model.layers[0].mlp.down_proj  # type: ignore[union-attr]
        merged: Any = model.model.layers[0].mlp.gate_up_proj  # type: ignore[union-attr]
        made = []
        for each in (layer, merged):
            call = torch.compile(lambda x, each=each: each.quant_method.apply(each, x), fullgraph=True)
            x = torch.randn(5, each.input_size)
            made += [call(x), each.quant_method.apply(each, x)]
        return made

    (found,) = ranks.run(1, work)
    assert isinstance(found, list), found
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


def test_without_the_flag_a_checkpoint_is_vllms_own(tmp_path: Path) -> None:
    folder, _ = built("llama", "w4a16", tmp_path)

    own = running.config_of(folder, 1, quantization=None).model_config.quantization
    asked = running.config_of(folder, 1)

    assert own != "qload"
    assert asked.model_config.quantization == "qload"
    assert repr(pickle.loads(pickle.dumps(asked.quant_config))) == repr(asked.quant_config)


def test_qloads_kernel_runs_a_checkpoint_that_vllm_reads(tmp_path: Path) -> None:
    folder, want = built("llama", "w4a16", tmp_path)

    def work() -> list[Any]:
        from vllm.platforms import PlatformEnum

        from qload.engines.vllm.kernel import QloadLinearKernel, put_first

        put_first(PlatformEnum.CPU)
        put_first(PlatformEnum.CPU)
        config = running.config_of(folder, 1, quantization=None)
        model = running.loaded(config)
        kernels = [getattr(getattr(each, "scheme", None), "kernel", None) for each in model.modules()]
        ours = sum(isinstance(each, QloadLinearKernel) for each in kernels)
        return [running.logits(model, config, IDS), ours]

    (found,) = ranks.run(1, work)
    assert isinstance(found, list), found
    assert found[1] == 4 * 2  # linear layers
    assert off(found[0], want) < RANGE
