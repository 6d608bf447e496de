"""`verify(logits=...)` on types without a decoder of qload; only `nox -s transformers` collects this file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qload import ArgumentError, verify
from qload.checkpoint import Checkpoint
from qload.verify.logits.compared_model import LayerFactory, ModelPrompt, load_compared
from qload.verify.report import Prompt
from tests.transformers.generation import RANGE, checkpoint, every_kind, plain_model

PROMPT = Prompt(ids=[5, 3, 9, 20, 44])
LAYERS = {"granite": 14, "lfm2": 12, "olmoe": 10}  # of two blocks, the experts of a block counting as one


@every_kind
def test_kernels_and_the_reference_agree_in_every_layer(kind: str) -> None:
    folder = checkpoint(kind)

    report = verify(folder / "stored", logits=PROMPT, against=folder / "means")

    assert report.findings == ()
    assert report.logits is not None
    assert len(report.logits["layers"]) == len(report.logits["against"]["layers"]) == LAYERS[kind]
    assert report.logits["kernels"]["greedy"] == report.logits["against"]["greedy"] == len(PROMPT.ids or ())


@every_kind
def test_a_reference_with_other_weights_is_told_by_the_first_layer_that_differs(
    kind: str, tmp_path: Path
) -> None:
    means = checkpoint(kind) / "means"
    tensors = load_file(means / "model.safetensors")
    endings = ("w2.weight", "down_proj.weight")
    changed = [name for name in tensors if ".layers.1." in name and name.endswith(endings)]
    tensors |= {name: tensors[name].flip(0).contiguous() for name in changed}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((means / "config.json").read_text())

    report = verify(checkpoint(kind) / "stored", logits=PROMPT, against=tmp_path)

    found = [finding.tensor for finding in report.findings if finding.rule == "against-output"]
    assert len(found) == 1
    assert changed[0].startswith(str(found[0]))


def test_a_wrong_kernel_is_found_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    make = LayerFactory.linear
    wrong = "model.layers.1.mlp.up_proj"

    class Doubled(nn.Module):
        """Kernel with doubled products."""

        def __init__(self, kernel: Any) -> None:
            super().__init__()
            self.kernel = kernel

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.kernel(x) * 2
            return y

    def made(self: LayerFactory, weight: Any, bias: Tensor | None, maximum: Any) -> nn.Module:
        layer: Any = make(self, weight, bias, maximum)
        if weight.layer.name == wrong:
            layer.kernel = Doubled(layer.kernel)
        return layer

    monkeypatch.setattr(LayerFactory, "linear", made)

    report = verify(checkpoint("granite") / "stored", logits=PROMPT)

    assert [(finding.rule, finding.tensor) for finding in report.findings] == [("kernel-product", wrong)]


def test_logits_are_those_of_transformers() -> None:
    path = checkpoint("lfm2") / "stored"
    with torch.no_grad(), Checkpoint.open(path) as opened:
        prompt = ModelPrompt.of(PROMPT, path, opened.model_config)
        got = load_compared(opened, "cpu", torch.float32).compute_logits(prompt)
        want = plain_model("lfm2")(torch.tensor([prompt.ids])).logits[0]

    assert (got - want).abs().max() <= RANGE * (want.max() - want.min())


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    vocab = json.loads((checkpoint("granite") / "stored" / "config.json").read_text())["vocab_size"]

    with pytest.raises(ArgumentError, match=f"0 to {vocab - 1}"):
        verify(checkpoint("granite") / "stored", logits=Prompt(ids=[vocab]))
