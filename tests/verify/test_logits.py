"""Logits of models through kernels and through dequantized weights: valid models, and each fault by layer."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import e, log
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from qload.checkpoint import Checkpoint
from qload.cli import main
from qload.errors import ArgumentError, NotEnoughMemoryError
from qload.formats import UnquantizedWeight
from qload.kernel_formats import PanelsWeight
from qload.kernels import Linear
from qload.kernels.bounds import Bounded
from qload.parallel import Rank
from qload.repacking import RepackingLoader
from qload.spec import Layer, Weight
from qload.verify import Prompt, verify
from qload.verify.logits import compared_model, logit_check
from qload.verify.logits.compared_layers import CompareState, ProductFault, place_in_part
from qload.verify.logits.compared_model import ModelPrompt, load_compared
from qload.verify.logits.logit_check import (
    OutputDistance,
    check_logits,
    distance_note,
    find_outliers,
    logit_distances,
    product_message,
)
from tests.models import drawn
from tests.models.vision import seeing
from tests.verify.damage.model import Model
from tests.verify.damage.sound import Quantize
from tests.verify.damage.sound_floats import MORE

PROMPT = Prompt(ids=(3, 1, 4, 1, 5))
SIZES = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 256, "moe_intermediate_size": 128,
}  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj"
SEVERAL = "model.layers.{}.mlp.down_proj"
FLOAT = {"torch_dtype": "float32"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def quantized(form: str, kind: str = "llama", inputs: dict[str, Any] | None = None) -> Model:
    """Return a tiny model with its layers in a form; `inputs`: quantization of the activations."""
    config = drawn.config(kind, **SIZES)

    def made(quantize: Quantize, said: dict[str, Any] | None) -> Model:
        tensors = {}
        for name, tensor in drawn.tensors(config).items():
            prefix = name.removesuffix(".weight")
            if ".layers." in name and tensor.ndim == 2 and not prefix.endswith(".gate"):
                tensors |= {f"{prefix}.{field}": each for field, each in quantize(tensor).items()}
            else:
                tensors[name] = tensor
        if said is not None and inputs is not None:
            said["config_groups"]["group_0"]["input_activations"] = inputs
        return Model(tensors, {**config, **FLOAT, "quantization_config": said})

    return MORE[form](made)


def stored(folder: Path, form: str, kind: str = "llama", inputs: dict[str, Any] | None = None) -> Path:
    return quantized(form, kind, inputs).write(folder)


def plain(folder: Path, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> Path:
    config = drawn.config("llama", **SIZES)
    tensors = drawn.tensors(config)
    change(tensors)
    return Model(tensors, {**config, **FLOAT}).write(folder)


def with_vision(folder: Path, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> Path:
    tensors = seeing.sight() | seeing.text()
    change(tensors)
    return Model(tensors, {**seeing.CONFIG, **FLOAT}).write(folder)


def breaking(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], **changes: Callable[[Tensor], None]
) -> None:
    """Change tensors of repacked weights by name, as after an error in a repack or a kernel."""
    sound = RepackingLoader.repacked

    def broken(self: RepackingLoader, weight: Weight) -> Weight:
        made = sound(self, weight)
        if weight.layer.name not in names:
            return made
        held = {name: tensor.clone() for name, tensor in made.fields().items()}
        for name, change in changes.items():
            change(held[name])
        return made.holding(held)

    monkeypatch.setattr(RepackingLoader, "repacked", broken)


def word(tensor: Tensor) -> None:
    tensor[0, 0] ^= 0x7


def scale(tensor: Tensor) -> None:
    tensor[0, 3] *= 2


def rolled(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(16, 1))  # in panels each group has 16 columns


@pytest.mark.parametrize(
    ("form", "kind", "inputs"),
    [
        ("asymmetric", "llama", None),
        ("packed", "mixtral", None),
        ("int8", "qwen2", TOKENS),
        ("int8", "qwen3_moe", TOKENS),
        ("fp8", "qwen3", None),
    ],
)
def test_nothing_is_found_in_a_sound_model(form: str, kind: str, inputs: Any, tmp_path: Path) -> None:
    path = stored(tmp_path / "model", form, kind, inputs)

    found = check_logits(str(path), PROMPT)

    assert found.findings == []
    assert found.numbers["ids"] == [3, 1, 4, 1, 5]
    assert found.numbers["kernels"]["greedy"] == found.numbers["kernels"]["tokens"] == 5
    assert found.numbers["layers"]
    assert all(layer["share"] <= 1 for layer in found.numbers["layers"])


def test_a_wrong_word_of_a_kernel_is_named_with_its_layer_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "packed")
    breaking(monkeypatch, (DOWN,), qweight=word)

    (finding,) = check_logits(str(path), PROMPT).findings

    assert (finding.rule, finding.tensor, finding.severity) == ("kernel-product", DOWN, "error")
    assert f"{DOWN}: the kernel's product is off by" in finding.message
    assert f"at (n, k) = (0, 0) of {DOWN}, the checkpoint" in finding.message


def test_a_wrong_scale_of_a_kernel_is_found_in_the_part_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "asymmetric")
    gate_up = "model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj"
    breaking(monkeypatch, (gate_up,), scales=scale)

    (finding,) = check_logits(str(path), PROMPT).findings

    assert finding.tensor == "model.layers.0.mlp.gate_proj"
    assert "of model.layers.0.mlp.gate_proj, the checkpoint" in finding.message


def test_a_known_fault_of_a_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "model", "packed")
    breaking(monkeypatch, (DOWN,), scales=rolled)

    (finding,) = check_logits(str(path), PROMPT).findings

    assert "\nscales of the group before: explains 100 % of " in finding.message


def test_the_first_layer_that_departs_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "packed")
    breaking(monkeypatch, (SEVERAL.format(0), SEVERAL.format(1)), qweight=word)

    found = check_logits(str(path), PROMPT)

    assert [finding.tensor for finding in found.findings] == [SEVERAL.format(0)]
    assert "; later layers with wrong values: 1" in found.findings[0].message
    assert {each["name"] for each in found.numbers["departures"]} == {SEVERAL.format(0), SEVERAL.format(1)}


def test_a_wrong_word_of_an_expert_is_named_with_the_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "packed", "mixtral")
    names = tuple(f"model.layers.1.mlp.experts.{e}.down_proj" for e in range(4))
    names += tuple(f"model.layers.1.block_sparse_moe.experts.{e}.w2" for e in range(4))
    breaking(monkeypatch, names, qweight=word)

    (finding,) = check_logits(str(path), PROMPT).findings

    assert finding.rule == "kernel-product"
    assert finding.tensor is not None
    assert finding.tensor.startswith("model.layers.1.")
    assert finding.tensor.endswith(".experts")
    assert "at (n, k) = (0, 0) of model.layers.1." in finding.message


def test_a_kernel_that_only_adds_wrongly_is_found_though_its_weight_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "packed")
    sound = Linear.forward

    def forward(self: Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = sound(self, x, bias)
        several = (x != 0).sum(-1, keepdim=True) > 1
        return y * (1 + 0.01 * several) if self.typed.layer.name == DOWN else y

    monkeypatch.setattr(Linear, "forward", forward)

    (finding,) = check_logits(str(path), PROMPT).findings

    assert finding.tensor == DOWN
    assert "no value of its weight differs when it is read back alone" in finding.message


def exchange(tensors: dict[str, Tensor]) -> None:
    up, gate = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    tensors[up], tensors[gate] = tensors[gate], tensors[up]


def test_exchanged_gate_and_up_are_found_beside_the_reference(tmp_path: Path) -> None:
    reference, path = plain(tmp_path / "reference"), plain(tmp_path / "model", exchange)

    found = check_logits(str(path), PROMPT, reference)

    (finding,) = found.findings
    assert (finding.rule, finding.tensor) == ("against-output", "model.layers.1.mlp.gate_proj")
    assert "no closer to the reference's than zeros are" in finding.message
    assert "its weight differs most at (n, k) = (" in finding.message
    assert "of model.layers.1.mlp.gate_proj" in finding.message
    assert found.numbers["against"]["largest"] > 0.01


def test_a_layer_of_a_fused_one_and_an_expert_are_named_beside_the_reference(tmp_path: Path) -> None:
    config = drawn.config("mixtral", **SIZES)
    tensors = drawn.tensors(config)
    reference = Model(tensors, {**config, **FLOAT}).write(tmp_path / "reference")
    for prefix in ("model.layers.1.self_attn.k_proj", "model.layers.0.block_sparse_moe.experts.2.w2"):
        changed = dict(tensors)
        changed[f"{prefix}.weight"] = tensors[f"{prefix}.weight"].clone()
        changed[f"{prefix}.weight"][3, 5] += 100
        path = Model(changed, {**config, **FLOAT}).write(tmp_path / prefix)

        (finding,) = check_logits(str(path), Prompt(ids=tuple(range(24))), reference).findings

        assert finding.rule == "against-output"
        assert f"its weight differs most at (n, k) = (3, 5) of {prefix}: " in finding.message


def test_an_outlier_beside_its_siblings_is_found_and_no_quantized_layer_is(tmp_path: Path) -> None:
    reference, sound = plain(tmp_path / "reference"), stored(tmp_path / "sound", "fp8")
    assert check_logits(str(sound), PROMPT, reference).findings == []

    model = quantized("fp8")
    model.tensors[f"{DOWN}.weight_scale_inv"] *= 1.6
    path = model.write(tmp_path / "model")

    found = check_logits(str(path), PROMPT, reference)

    (finding,) = found.findings
    assert (finding.rule, finding.tensor) == ("against-output", DOWN)
    relative = {layer["prefix"]: layer["relative"] for layer in found.numbers["against"]["layers"]}
    assert finding.message.startswith(
        f"{DOWN}: its outputs have a relative error of {relative[DOWN]:.3g}, the 1 layers like it "
        f"{relative[SEVERAL.format(0)]:.3g} on average\nits weight differs most at (n, k) = ("
    )


def test_equal_checkpoints_agree_to_the_bit(tmp_path: Path) -> None:
    reference, path = plain(tmp_path / "reference"), plain(tmp_path / "model")

    found = check_logits(str(path), PROMPT, reference)

    assert found.findings == []
    assert found.numbers["against"]["largest"] == 0
    assert {layer["relative"] for layer in found.numbers["against"]["layers"]} == {0.0}


def test_another_model_is_no_reference(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")
    other = stored(tmp_path / "other", "packed", "qwen2")

    found = check_logits(str(path), PROMPT, other)

    assert found.findings == []
    assert "the reference is another model" in found.notes[-1]


def test_activations_beyond_their_type_are_a_note_and_no_finding(tmp_path: Path) -> None:
    def large(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e5

    path = plain(tmp_path / "model", large)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))

    found = check_logits(str(path), PROMPT)

    assert found.findings == []
    assert any("activations leave the range of float16" in note for note in found.notes)


def test_what_a_model_lacks_is_a_finding(tmp_path: Path) -> None:
    path = plain(tmp_path / "model", lambda tensors: tensors.pop(f"{DOWN}.weight"))

    report = verify(path, logits=PROMPT)

    assert report.verdict == "findings"
    assert "missing-tensor" in {finding.rule for finding in report.findings}


def test_the_report_has_the_numbers_and_no_others_without_a_model(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")

    with_model, without = verify(path, logits=PROMPT).to_json(), verify(path).to_json()

    assert with_model["logits"]["dtype"] == "float32"
    assert set(with_model["logits"]) == {"ids", "dtype", "layers", "departures", "kernels"}
    assert "logits" not in without


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        pytest.param((), "1 to 64, as there are positions", id="none"),
        pytest.param((1,) * 65, "1 to 64, as there are positions", id="too many"),
        pytest.param((1, 40), "numbers of tokens, 0 to 39", id="beyond the vocabulary"),
        pytest.param((-1,), "numbers of tokens, 0 to 39", id="below it"),
    ],
)
def test_ids_that_are_none_are_refused(ids: tuple[int, ...], said: str, tmp_path: Path) -> None:
    path = plain(tmp_path / "model")

    with pytest.raises(ArgumentError, match=said):
        verify(path, logits=Prompt(ids))


def test_a_model_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "model", "packed")
    tensors = quantized("packed").tensors
    codes = sum(each.nbytes for each in tensors.values() if not each.is_floating_point())
    floats = {name: each for name, each in tensors.items() if each.is_floating_point()}
    scales = sum(each.nbytes for name, each in floats.items() if name.endswith("scale"))
    plain = sum(4 * each.numel() for name, each in floats.items() if not name.endswith("scale"))
    needed_bytes = plain + scales + 2 * codes  # stored, and repacked

    for free, needed in ((needed_bytes - 1, True), (needed_bytes, False)):
        monkeypatch.setattr(compared_model, "free_bytes", lambda device, free=free: free)
        if needed:
            with pytest.raises(NotEnoughMemoryError):
                verify(path, logits=PROMPT)
        else:
            assert verify(path, logits=PROMPT).verdict == "ok"


def test_a_device_that_is_none_is_a_wrong_command(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")

    result = CliRunner().invoke(main, ["verify", str(path), "--logits", "--device", "toaster"])

    assert result.exit_code == 2
    assert "toaster" in result.stderr


def test_several_processes_are_refused(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")

    with pytest.raises(ArgumentError, match="one process"):
        verify(path, logits=PROMPT, process_group=Rank(0, 2))


def test_a_type_without_a_model_is_a_wrong_command_that_lists_those_with_one(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")
    (path / "config.json").write_text(json.dumps({"model_type": "bloomy"}))

    result = CliRunner().invoke(main, ["verify", str(path), "--logits", "--table"])

    assert result.exit_code == 2
    assert "bloomy" in result.stderr
    assert "llama, mistral" in result.stderr


def test_the_command_prints_what_it_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "model", "packed")
    command = ["verify", str(path), "--logits", "--prompt-ids", "3,1,4"]

    sound = CliRunner().invoke(main, command)
    breaking(monkeypatch, (DOWN,), qweight=word)
    broken = CliRunner().invoke(main, command)

    assert (sound.exit_code, broken.exit_code) == (0, 1)
    assert json.loads(sound.stdout)["logits"]["ids"] == [3, 1, 4]
    assert [each["rule"] for each in json.loads(broken.stdout)["findings"]] == ["kernel-product"]


def test_options_of_logits_want_them(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(tmp_path), "--prompt-ids", "1"])

    assert result.exit_code == 2
    assert "--logits" in result.stderr


def test_what_is_repacked_on_this_device_is_in_another_order(tmp_path: Path) -> None:
    """Check the premise of the tests above: their faults are not in the tensors of the checkpoint."""
    path = stored(tmp_path / "model", "packed")

    with Checkpoint.open(path) as checkpoint:
        model = load_compared(checkpoint, "cpu").model
    held = model.get_submodule("blocks.1.mlp.down_proj.typed_linear.kernel")

    assert isinstance(held, Linear)
    assert isinstance(held.typed, PanelsWeight)


FC2 = "model.vision_model.encoder.layers.1.mlp.fc2"
IMAGE = (95,) * 5  # the image tokens of one image


def test_a_prompt_without_ids_has_a_random_image_for_a_model_with_vision(tmp_path: Path) -> None:
    path = with_vision(tmp_path / "model")

    found = check_logits(str(path), Prompt())

    assert found.findings == []
    assert found.numbers["ids"][:6].count(95) == found.numbers["ids"].count(95) == 5
    assert found.notes[0] == "logits: 1 images of 35 x 35 random pixels in the prompt"
    shares = {layer["prefix"]: layer["share"] for layer in found.numbers["layers"]}
    assert max(shares.values()) <= 1
    assert {FC2, "model.connector.modality_projection.down_proj", "lm_head"} <= set(shares)


def test_logits_depend_on_the_image_files_of_a_prompt(tmp_path: Path) -> None:
    library = pytest.importorskip("PIL.Image")
    path, logits = with_vision(tmp_path / "model"), []
    (path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 28, "width": 21}}))
    for shade in (0, 255):
        library.new("RGB", (21, 28), (shade, 40, 90)).save(tmp_path / f"{shade}.png")
        prompt = Prompt((3, *IMAGE, 1), images=[tmp_path / f"{shade}.png"])
        known = ModelPrompt.of(prompt, path, seeing.CONFIG)
        with Checkpoint.open(path) as checkpoint, torch.no_grad():
            logits.append(load_compared(checkpoint, "cpu", vision=True).compute_logits(known))

    assert logits[0][0].equal(logits[1][0])  # before the image
    assert not logits[0][-1].equal(logits[1][-1])

    command = [
        "verify",
        path,
        "--logits",
        "--prompt-ids",
        "3,95,95,95,95,95,1",
        "--image",
        tmp_path / "0.png",
    ]
    result = CliRunner().invoke(main, list(map(str, command)))

    assert result.exit_code == 0, result.output
    assert not any("random pixels" in note for note in json.loads(result.stdout)["notes"])


def test_a_prompt_without_ids_has_the_tokens_of_each_image(tmp_path: Path) -> None:
    library = pytest.importorskip("PIL.Image")
    path = with_vision(tmp_path / "model")
    (path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 28, "width": 21}}))
    library.new("RGB", (21, 28), (7, 40, 90)).save(tmp_path / "a.png")

    files = ModelPrompt.of(Prompt(images=[tmp_path / "a.png"] * 2), path, seeing.CONFIG)
    drawn_images = ModelPrompt.of(Prompt((1, *IMAGE, 3, *IMAGE, 2)), path, seeing.CONFIG)

    assert tuple(files.ids[:10]) == 2 * IMAGE
    assert files.ids.count(IMAGE[0]) == 10
    assert [len(each.images[0]) for each in (files, drawn_images)] == [2, 2]


def test_a_prompt_without_image_tokens_runs_the_text_of_a_model_with_vision(tmp_path: Path) -> None:
    path = with_vision(tmp_path / "model")

    found = check_logits(str(path), PROMPT)

    assert found.findings == []
    assert not any("vision_model" in layer["prefix"] for layer in found.numbers["layers"])


def test_a_wrong_kernel_of_a_vision_tower_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sound = with_vision(tmp_path / "model"), Linear.forward

    def forward(self: Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return sound(self, x, bias) * (1.01 if self.typed.layer.name == FC2 else 1)

    monkeypatch.setattr(Linear, "forward", forward)

    (finding,) = check_logits(str(path), Prompt((1, *IMAGE, 2))).findings

    assert (finding.rule, finding.tensor) == ("kernel-product", FC2)


def test_a_layer_of_a_vision_tower_is_compared_with_the_reference(tmp_path: Path) -> None:
    def exchange(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FC2}.weight"] = tensors[f"{FC2}.weight"].flip(0)

    reference, path = with_vision(tmp_path / "reference"), with_vision(tmp_path / "model", exchange)

    (finding,) = check_logits(str(path), Prompt(), reference).findings

    assert (finding.rule, finding.tensor) == ("against-output", FC2)


def test_a_text_model_is_no_reference_of_a_model_with_vision(tmp_path: Path) -> None:
    path = with_vision(tmp_path / "model")
    text = {name.replace(seeing.TEXT, "model"): each for name, each in seeing.text().items()}
    other = Model(text, {**seeing.CONFIG["text_config"], **FLOAT}).write(tmp_path / "other")

    assert "the reference is another model" in check_logits(str(path), Prompt(), other).notes[-1]


@pytest.mark.parametrize("count", [4, 6])
def test_another_number_of_image_tokens_than_images_have_is_refused(count: int, tmp_path: Path) -> None:
    path = with_vision(tmp_path / "model")

    with pytest.raises(ArgumentError, match="tokens 95, 5 for each of"):
        verify(path, logits=Prompt((1, *[95] * count)))


def test_an_image_for_a_model_without_vision_is_refused(tmp_path: Path) -> None:
    path = plain(tmp_path / "model")

    with pytest.raises(ArgumentError, match="a type with vision for images: idefics2"):
        verify(path, logits=Prompt((1, 2), images=[tmp_path / "a.png"]))


def test_an_image_without_logits_is_a_wrong_command(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()

    result = CliRunner().invoke(main, ["verify", str(tmp_path), "--image", str(tmp_path / "a.png")])

    assert result.exit_code == 2
    assert "options of --logits" in result.stderr


@pytest.mark.parametrize(
    ("n", "found"), [(0, ("q", (0, 7))), (1, ("q", (1, 7))), (2, ("k", (0, 7))), (4, ("k", (2, 7)))]
)
def test_a_place_of_a_fused_layer_is_one_of_its_parts(n: int, found: tuple[str, tuple[int, int]]) -> None:
    layer = Layer((2, 3), 8, (5, 8), "q, k")
    weight = UnquantizedWeight(weight=torch.zeros(5, 8), layer=layer)

    assert place_in_part(weight, (n, 7)) == found
    alone = replace(weight, layer=replace(layer, name="qk"))
    assert place_in_part(alone, (n, 7)) == ("qk", (n, 7))


def test_inputs_and_results_beyond_the_range_of_a_type_are_no_faults() -> None:
    """Of the second token the result, or the input, is beyond it; of the first both are within."""
    x, exact = torch.ones(2, 3), Bounded(torch.ones(2, 4).double(), torch.zeros(2, 4).double())
    state, y = CompareState(), torch.ones(2, 4).half()
    assert state.compare("sound", x.half(), y, exact) is None
    assert state.overflown == {}

    large = Bounded(exact.value * torch.tensor([[1.0], [1e5]]), exact.error)
    assert (
        state.compare("result", x.half(), torch.tensor([[1.0], [torch.inf]]).half().expand(2, 4), large)
        is None
    )
    infinite = torch.tensor([[1.0], [torch.inf]]).expand(2, 3).half()
    assert state.compare("input", infinite, y, exact) is None
    assert [*state.overflown] == ["result", "input"]

    wrong = y.clone()
    wrong[1, 2] = 2
    found = state.compare("wrong", x.half(), wrong, exact)
    assert found is not None
    assert (found[:2], found[3]) == ((1, 2), 1)
    assert [*state.overflown] == ["result", "input"]


def test_a_config_of_a_type_without_a_model_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        compared_model.read_sizes(plain(tmp_path / "model"), {"model_type": "bloomy"})

    assert caught.value.argument == "logits: model_type of config.json"
    assert caught.value.got.startswith("'bloomy'")


def test_the_message_of_a_wrong_product_has_all_its_numbers() -> None:
    fault = ProductFault("a.q_proj", token=3, output=5, got=1.5, want=1.25, budget=0.125, wrong=7, total=9)
    first = (
        "a.q_proj: the kernel's product is off by 0.25 at (token, n) = (3, 5), and rounding explains 0.125; "
        "7 of 9 values are wrong"
    )

    assert product_message(fault, None, 0) == (
        f"{first}\nno value of its weight differs when it is read back alone"
    )
    assert product_message(fault, (("a.k_proj", (2, 4)), 0.5, 0.75, "a cause"), 2) == (
        f"{first}; later layers with wrong values: 2\n"
        "its kernel has 0.5 at (n, k) = (2, 4) of a.k_proj, the checkpoint 0.75\na cause"
    )


def test_distances_of_logits_by_hand() -> None:
    want = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0]])
    got = torch.tensor([[0.0, 2.5], [4.0, 3.0], [2.0, 0.0]])
    pairs = [([1 / (1 + e), e / (1 + e)], 2.5), ([1 / (1 + e**3), e**3 / (1 + e**3)], -1.0)]
    terms = [sum(p * log(p / q) for p, q in zip(ps, softmax(d), strict=True)) for ps, d in pairs]

    numbers = logit_distances(got, want)

    assert (numbers["largest"], numbers["greedy"], numbers["tokens"]) == (4 / 3, 2, 3)
    assert numbers["kl"] == pytest.approx(sum(terms) / 3)
    assert distance_note({**numbers, "largest": 0.25, "kl": 0.0125}, "one and two") == (
        "logits of one and two differ by 0.25 of their range at most, the likeliest token agrees in 2 of 3, "
        "mean KL divergence 0.0125"
    )


def softmax(difference: float) -> tuple[float, float]:
    """Return the shares of two logits by their difference."""
    return 1 / (1 + e**difference), 1 / (1 + e**-difference)


@pytest.mark.parametrize(
    ("errors", "named"),
    [
        ((0.1, 0.1, 0.1), None),
        ((1.0, 1.0, 1.0), "no closer to the reference's than zeros are"),
        ((0.1, 0.1, 0.9), "the 2 layers like it 0.1 on average"),
        ((0.1, 0.02, 0.9), "the 2 layers like it 0.0721 on average"),
    ],
)
def test_the_first_outlier_is_named_with_its_siblings(
    errors: tuple[float, ...], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_check, "_worst_weight", lambda layer, model, reference: "")
    layers = [OutputDistance(f"{at}.up_proj", "plain", "", each) for at, each in enumerate(errors)]
    others = [OutputDistance("2.down_proj", "plain", "", 0.99), OutputDistance("3.up_proj", "gptq", "", 0.99)]
    model: Any = None

    found = [finding.message for finding in find_outliers([*others, *layers], model, model)]

    at = next((at for at, error in enumerate(errors) if error > 0.5), 0)
    want = f"{at}.up_proj: its outputs have a relative error of {errors[at]:.3g}, {named}"
    assert found == ([] if named is None else [want])
