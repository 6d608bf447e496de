"""Models whose layers are quantized, against transformers' own with what the codes mean.

Only `nox -s models` collects this file. gpt-oss and Llama 4 keep their experts in one tensor, which programs
that quantize linear layers leave plain: so they are here, for GPTQ, AWQ, block FP8 and bitsandbytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qload.errors import CutError
from qload.kernels import bounds, declared
from qload.kernels.declared import Maximum
from qload.models import Decoder, load_model
from qload.parallel import ALONE, Collectives, FakeWorld, ProcessGroup
from qload.spec import Weight
from tests.models import drawn
from tests.models.recorded import logits, off
from tests.models.with_transformers import theirs
from tests.models.with_transformers.asked import IDS, UNQUANTIZED
from tests.models.with_transformers.stored import FORMATS

RANGE = 1e-5  # of the logits: sums of float32 in another order
SPARSE = (
    "mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "glm4_moe", "glm4_moe_lite",
)  # fmt: skip
STACKED = ("gpt_oss", "llama4_text")  # experts in one tensor (E, K, N)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
every_pair = pytest.mark.parametrize(("kind", "name"), [(k, n) for n in FORMATS for k in theirs.KINDS])


@dataclass(frozen=True)
class Quantized:
    """A model as it is stored, with its config, and the folder of the same with what it means."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    means: Path

    def load(self, group: ProcessGroup = ALONE, **options: Any) -> Decoder:
        """The model, or a rank's share of it, in float32."""
        held = drawn.weights(self.config, self.tensors, group, dtype=torch.float32)
        return load_model(held, self.config, **options)


def built(kind: str, name: str, folder: Path, **said: Any) -> Quantized:
    """A random model of a type, every linear layer of which is stored in a format; `said`: other sizes."""
    form = FORMATS[name]
    sizes = {**SIZES, "intermediate_size": form.inner, "moe_intermediate_size": form.inner}
    sizes |= {"intermediate_size_mlp": form.inner} if kind == "llama4_text" else {}
    sizes |= (LATENT if kind in theirs.LATENT else {}) | said
    plain = theirs.written(theirs.config(kind, 3, **sizes), folder / "plain")
    return quantized(plain, folder, name)


def quantized(plain: Mapping[str, Tensor], folder: Path, name: str) -> Quantized:
    """The model of `folder`/plain with each linear layer of its tensors in a format."""
    form, said = FORMATS[name], json.loads((folder / "plain" / "config.json").read_text())
    kind = said["model_type"]
    if kind in STACKED and form.experts:
        plain = apart(plain, interleaved=kind == "gpt_oss")
    generator = torch.Generator().manual_seed(1)
    stored = dict(plain)
    layers = [one.removesuffix(".weight") for one, tensor in plain.items() if is_linear(one, tensor)]
    orders: dict[str, Tensor] = {}
    for prefix in layers:
        fields = dict(form.layer(*stored.pop(f"{prefix}.weight").shape, generator))
        if "g_idx" in fields and ".experts." in prefix:  # one order for all that multiply one input
            inputs = f"{prefix.rpartition('.')[0]} {len(fields['g_idx'])}"
            fields["g_idx"] = orders.setdefault(inputs, fields["g_idx"])
        stored |= {f"{prefix}.{suffix}": tensor for suffix, tensor in fields.items()}
    config = {**said, "quantization_config": dict(form.section)}
    means = folder / "means"
    means.mkdir()
    (means / "config.json").write_text(json.dumps(said))
    held = drawn.weights(config, stored)
    dequantized = {f"{prefix}.weight": held.get_weights(prefix).dequantize() for prefix in layers}
    full = {**plain, **dequantized}
    full = together(full, kind == "gpt_oss") if kind in STACKED and form.experts else full
    contiguous = {one: tensor.contiguous() for one, tensor in full.items()}
    save_file(contiguous, means / "model.safetensors", {"format": "pt"})
    return Quantized(config, stored, means)


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a layer that tools quantize."""
    routers = ("gate.weight", "router.weight")
    inside = name.startswith("model.layers.") and name.endswith(".weight")
    return inside and tensor.ndim == 2 and not name.endswith(tuple(f".{one}" for one in routers))


def apart(plain: Mapping[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """Experts of their own names, outputs first, as llm-compressor writes them."""
    found = {}
    for name, tensor in plain.items():
        lead, experts, last = name.partition(".experts.")
        if not experts:
            found[name] = tensor
            continue
        suffix = "bias" if last.endswith("_bias") else "weight"
        for e, one in enumerate(tensor):
            own = one if suffix == "bias" else one.T
            parts = {"down_proj": own}
            if last.startswith("gate_up"):
                gate, up = (own[0::2], own[1::2]) if interleaved else own.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            found |= {f"{lead}.experts.{e}.{part}.{suffix}": each.clone() for part, each in parts.items()}
    return found


def together(found: dict[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """The opposite of `apart`."""
    full = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    for lead in {name.partition(".experts.")[0] for name in found if ".experts." in name}:
        for suffix, ending in (("weight", ""), ("bias", "_bias")):
            names = [f"{lead}.experts.{e}.{{}}.{suffix}" for e in range(64)]
            names = [each for each in names if each.format("down_proj") in found]
            if not names:
                continue
            gate, up, down = (
                torch.stack([found[each.format(part)] for each in names])
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            both = torch.stack([gate, up], 2).flatten(1, 2) if interleaved else torch.cat([gate, up], 1)
            turn = (lambda stack: stack) if suffix == "bias" else (lambda stack: stack.transpose(1, 2))
            full |= {f"{lead}.experts.gate_up_proj{ending}": turn(both)}
            full |= {f"{lead}.experts.down_proj{ending}": turn(down)}
    return full


@every_pair
def test_inputs_as_they_come_give_the_logits_of_what_the_codes_mean(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = built(kind, name, tmp_path)
    want = theirs.logits(model.means, IDS)

    assert off(logits(model.load(**UNQUANTIZED), IDS), want) < RANGE
    experts = [(2, "experts")] if kind in SPARSE else []
    for ranks, split in [*((ranks, "tensor") for ranks in FORMATS[name].worlds[1:]), *experts]:

        def work(group: Collectives, split: Any = split) -> Tensor:
            share = model.load(group, expert_split=split, **UNQUANTIZED)
            return logits(share, IDS, ranks=group.size())

        first, *others = FakeWorld(ranks).run(work)
        assert all(torch.equal(first, other) for other in others)
        assert off(first, want) < RANGE


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.refused])
def test_a_world_that_cuts_inside_of_what_is_shared_is_refused_by_the_tensors_name(
    name: str, tmp_path: Path
) -> None:
    model, ranks = built("llama", name, tmp_path), FORMATS[name].refused
    assert ranks is not None
    with pytest.raises(CutError) as refusal:
        FakeWorld(ranks).run(lambda group: model.load(group, **UNQUANTIZED))
    assert refusal.value.tensor.startswith("model.layers.0.")
    assert refusal.value.world == ranks
    assert set(FORMATS[name].worlds) <= {1, *refusal.value.lawful}


class Watched(nn.Module):
    """A layer, each result of which is within what rounding can cost the reference's inputs."""

    def __init__(self, weight: Weight, bias: Tensor | None, maximum: Maximum) -> None:
        super().__init__()
        self.linear = weight.get_linear(bias, maximum=maximum, dtype=torch.float32)
        self.weight, self.bias, self.maximum, self.calls = weight, bias, maximum, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.weight.activations is not None:
            ((made, outputs),) = declared.quantized(x, self.weight, self.maximum)
            assert outputs == slice(0, self.weight.layer.N)
            assert not torch.equal(made.dequantize(), x)
        want = bounds.of_linear(x, self.weight, self.bias, maximum=self.maximum)
        assert bool((bounds.excess(y, want) <= 1).all())
        self.calls += 1
        return y


@cache
def declaring() -> list[tuple[str, str]]:
    return [(kind, name) for name, form in FORMATS.items() if form.declares for kind in theirs.KINDS]


@pytest.mark.parametrize(("kind", "name"), declaring())
def test_declared_inputs_are_those_of_the_reference_in_every_layer(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = built(kind, name, tmp_path)

    def work(group: Collectives) -> tuple[Tensor, int]:
        watched: list[Watched] = []

        def make(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
            watched.append(Watched(weight, bias, maximum))
            return watched[-1]

        made = logits(model.load(group, make=make), IDS, ranks=group.size())
        assert all(each.calls for each in watched)
        return made, sum(each.weight.activations is not None for each in watched)

    for ranks in (1, 2):
        (first, count), *others = FakeWorld(ranks).run(work)
        assert count >= 2 * 2  # queries, keys and values as one, and what they make
        assert all(torch.equal(first, other) for other, _ in others)
