"""Quantized models in a world of eight, by expert, as real processes, and with inputs quantized.

Only `nox -s models` collects this file.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qload.kernels.activations import quantize
from qload.kernels.declared import Maximum
from qload.parallel import Collectives, FakeWorld
from qload.spec import Weight
from tests.models import drawn
from tests.models.recorded import logits, off
from tests.models.with_transformers import theirs
from tests.models.with_transformers.asked import IDS, UNQUANTIZED
from tests.models.with_transformers.formats import RANGE, STACKED, Quantized, built
from tests.models.with_transformers.matrix import table
from tests.models.with_transformers.stored import FORMATS
from tests.paths import ROOT
from tests.support import torchrun
from tests.verify.damage.model import Model

EIGHT = {"inner": 512, "head_dim": 64, "v_head_dim": 64}  # of which an eighth ends no word, group or block
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
NAMED = ("llama", "qwen2", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
PROCESSES = [  # two formats of each type, each format of two types
    (kind, name) for i, kind in enumerate(NAMED) for j, name in enumerate(FORMATS) if (i + j) % 3 == 0
]
FIRST = ("q_proj", "o_proj", "gate_proj", "down_proj")  # of the layers of one input


def of_eight(kind: str, name: str, folder: Path) -> Quantized:
    """A model that eight ranks can share."""
    sizes: dict[str, Any] = {"intermediate_size": EIGHT["inner"], "moe_intermediate_size": EIGHT["inner"]}
    if kind in theirs.LATENT:
        sizes |= {"v_head_dim": EIGHT["v_head_dim"]}
    else:
        sizes |= {"head_dim": EIGHT["head_dim"]}
    return built(kind, name, folder, **sizes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", NAMED)
def test_eight_ranks_have_the_logits_of_what_the_codes_mean(kind: str, name: str, tmp_path: Path) -> None:
    model = of_eight(kind, name, tmp_path)
    want = theirs.logits(model.means, IDS)

    for split in ("tensor", "experts") if kind in SPARSE else ("tensor",):
        options = {"expert_split": split, **UNQUANTIZED}
        first, *others = FakeWorld(8).run(partial(answer, model, options))
        assert all(torch.equal(first, other) for other in others)
        assert off(first, want) < RANGE


def answer(model: Quantized, options: dict[str, Any], group: Collectives) -> Tensor:
    """A rank's logits."""
    return logits(model.load(group, **options), IDS, ranks=group.size())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as checkpoints, each in a folder of its own."""
    made = tmp_path_factory.mktemp("models")
    for kind, name in PROCESSES:
        path = made / f"{kind} {name}"
        model = of_eight(kind, name, path)
        Model(model.tensors, model.config).write(path / "stored")
    return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_processes_have_them_too_and_every_one_the_same(ranks: int, folder: Path) -> None:
    run = torchrun.ended(ranks, "-m", "tests.models.with_transformers.ranks", str(folder))
    assert run.returncode == 0, run.stderr[-4000:]

    for kind, name in PROCESSES:
        path = folder / f"{kind} {name}"
        want = theirs.logits(path / "means", IDS)
        first, *others = (load_file(path / f"{ranks}-{rank}.safetensors") for rank in range(ranks))
        for split, got in first.items():
            assert all(torch.equal(got, other[split]) for other in others)
            assert off(got, want) < RANGE


class Recorded(nn.Module):
    """A layer that quantizes its inputs, and keeps their codes."""

    def __init__(self, kept: list[Tensor], weight: Weight, bias: Tensor | None, maximum: Maximum) -> None:
        super().__init__()
        self.linear = weight.get_linear(bias, maximum=maximum, dtype=torch.float32)
        self.kept, self.scheme = kept, weight.activations

    def forward(self, x: Tensor) -> Tensor:
        if self.scheme is not None:
            self.kept.append(quantize(x, self.scheme).codes)
        y: Tensor = self.linear(x)
        return y


def quantizing(model: Quantized, kept: list[Tensor]) -> Any:
    """transformers' model, whose linear layers take inputs as the reference quantizes them, in float32."""
    held = drawn.weights(model.config, model.tensors)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    twin = AutoModelForCausalLM.from_pretrained(model.means, **options).eval()

    def taken(name: str, weight: Weight, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert weight.activations is not None
        made = quantize(inputs[0], weight.activations)
        if name.endswith(FIRST):
            kept.append(made.codes.flatten(0, 1))
        return (made.dequantize(), *inputs[1:])

    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(partial(taken, name, held.get_weights(name)))
    return twin


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.declares])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_declared_inputs_give_the_logits_of_linears_that_quantize(
    kind: str, name: str, tmp_path: Path
) -> None:
    """For every token up to one whose inputs, off by a sum's rounding, fall to the next code somewhere."""
    model, ours, others = built(kind, name, tmp_path), list[Tensor](), list[Tensor]()
    with torch.no_grad():
        want = quantizing(model, others)(IDS).logits
    got = logits(model.load(make=partial(Recorded, ours)), IDS)

    assert len(ours) == len(others) == 2 * len(FIRST)
    apart = torch.stack([(a != b).any(-1) for a, b in zip(ours, others, strict=True)]).any(0)
    same = apart.view(IDS.shape).int().cumsum(1) == 0
    assert bool(same.any())
    distance = (got - want).abs().amax(-1) / (want.max() - want.min())
    assert float(distance[same].max()) < RANGE
    assert off(want, theirs.logits(model.means, IDS)) > RANGE  # else nothing was quantized


def test_the_table_of_the_docs_is_the_matrix() -> None:
    assert table() in (ROOT / "docs" / "models.md").read_text()


def test_every_pair_of_the_matrix_that_is_whole_has_no_plain_experts(tmp_path: Path) -> None:
    for kind in STACKED:
        for name, form in FORMATS.items():
            model = built(kind, name, tmp_path / kind / name)
            stacks = [each for each in model.tensors if ".experts." in each and model.tensors[each].ndim == 3]
            assert bool(stacks) is not form.experts
