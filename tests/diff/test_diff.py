"""Two checkpoints mean the same, or where they do not: across formats, dtypes, shards and names."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import diff, open_checkpoint
from qload.cli.verify import DIFF_OUTCOMES
from qload.diff import LayerDiff, comparison
from qload.diff.comparison import narrowest
from qload.diff.report import EQUAL_OUTCOMES
from tests.cli.test_several import run
from tests.models.drawn import config, tensors
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, comfy_convrot, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")

GROUPED = FIXTURES / "models" / "gptq_mixtral"


def made(folder: Path, stored: dict[str, Tensor], **said: object) -> Path:
    folder.mkdir()
    return model(folder, stored, **said)


def outcomes(one: Path, other: Path) -> dict[str, str]:
    return {layer.name: layer.outcome for layer in diff(one, other).layers}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """What a model of another tool means, in float32, in two shards, with experts by their other names."""
    folder, stored = tmp_path / "plain", {}
    folder.mkdir()
    with open_checkpoint(GROUPED) as weights:
        names = load_file(GROUPED / "model.safetensors")
        for prefix in {name.rpartition(".")[0] for name in names}:
            stored[f"{prefix}.weight"] = weights.get_weights(prefix).dequantize().contiguous()
    for gate, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        stored = {
            name.replace(f".{gate}.", f".{other}.") if ".experts." in name else name: tensor
            for name, tensor in stored.items()
        }
    half = len(stored) // 2
    index = {}
    for at, part in enumerate((sorted(stored)[:half], sorted(stored)[half:])):
        file = f"model-0000{at + 1}-of-00002.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    said = json.loads((GROUPED / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in said.items() if k != "quantization_config"})
    )
    return folder


def test_a_checkpoint_and_its_dequantized_shards_by_other_names_are_equal_bit_by_bit(plain: Path) -> None:
    found = diff(GROUPED, plain)

    assert found.verdict == "ok"
    assert {*found.counts} == {"bits"}
    pairs = {layer.name: layer.other for layer in found.layers}
    assert pairs["model.layers.0.mlp.experts.1.down_proj"] == "model.layers.0.mlp.experts.1.w2"
    assert found.to_json()["counts"] == {"bits": len(pairs)}


def test_a_copy_is_equal_whatever_it_means(tmp_path: Path) -> None:
    one = made(tmp_path / "a", {"a.weight": torch.tensor([[float("nan"), 1.0]])})

    assert outcomes(one, Path(shutil.copytree(one, tmp_path / "b"))) == {"a": "bits"}


def test_a_narrower_type_is_equal_after_one_rounding(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 24).reshape(4, 6)
    one = made(tmp_path / "a", {"a.weight": values, "a.bias": values[:, 0].contiguous()})
    other = made(tmp_path / "b", {"a.weight": values.bfloat16(), "a.bias": values[:, 0].bfloat16()})

    assert outcomes(one, other) == outcomes(other, one) == {"a": "rounded", "a.bias": "rounded"}


def test_equal_bytes_with_other_transforms_differ(tmp_path: Path) -> None:
    one, other = (made(tmp_path / str(size), comfy_convrot("a", size)) for size in (4, 16))

    assert outcomes(one, other) == {"a": "differs"}
    assert outcomes(one, Path(shutil.copytree(one, tmp_path / "copy"))) == {"a": "bits"}


def test_where_values_differ_is_told_first(tmp_path: Path) -> None:
    values = torch.ones(6, 4)
    changed = values.clone()
    changed[4, 2:] = 3
    one, other = made(tmp_path / "a", {"a.weight": values}), made(tmp_path / "b", {"a.weight": changed})

    (found,) = diff(one, other).layers

    assert (found.outcome, found.differing, found.total) == ("differs", 2, 24)
    assert found.detail.startswith(
        "first at (4, 2): 1 in the first checkpoint, 3 in the second; 2 of 24 differ"
    )


def test_a_known_mistake_is_named(tmp_path: Path) -> None:
    """Zero points that are one too high."""
    sound = made(tmp_path / "a", gptq("a", zero=7), quantization_config=GPTQ)
    wrong = made(tmp_path / "b", gptq("a", zero=6), quantization_config=GPTQ)

    (found,) = diff(wrong, sound).layers

    assert found.outcome == "differs"
    assert "zero point" in found.detail
    assert found.detail.endswith("it agrees")


def test_damaged_scales_of_either_checkpoint_are_named(tmp_path: Path) -> None:
    codes = torch.randint(2**31, (2, 8), generator=torch.Generator().manual_seed(1)).int()
    sound, damaged = ({**gptq("a"), "a.qweight": codes} for _ in range(2))
    damaged["a.scales"][1, 3] = torch.nan
    one, other = (
        made(tmp_path / name, stored, quantization_config=GPTQ)
        for name, stored in (("sound", sound), ("damaged", damaged))
    )

    (forth,), (back,) = diff(other, one).layers, diff(one, other).layers

    reading = "read with the reference's scales, it agrees"
    assert forth.detail.endswith(f"differ; {reading}")
    assert back.detail.endswith(f"differ; the second checkpoint against the first: {reading}")


def test_what_is_in_one_of_both_or_of_another_size_is_told(tmp_path: Path) -> None:
    one = made(tmp_path / "a", {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)})
    other = made(tmp_path / "b", {"b.weight": torch.ones(2, 3), "c.weight": torch.ones(2, 2)})

    found = {layer.name: layer for layer in diff(one, other).layers}

    assert found["a"] == LayerDiff("a", None, "missing", f"in {one} only")
    assert found["c"] == LayerDiff("c", "c", "missing", f"in {other} only")
    assert found["b"].detail == "(N, K) is (2, 2) in the first checkpoint, (2, 3) in the second"


def test_biases_are_compared_too(tmp_path: Path) -> None:
    said = config("llama")
    stored = tensors(said)
    name = next(name for name in stored if name.endswith("q_proj.bias"))
    one = made(tmp_path / "a", stored, **said)
    other = made(tmp_path / "b", {**stored, name: stored[name] + 1}, **said)

    differing = [layer for layer in diff(one, other).layers if not layer.same]

    assert [(layer.name, layer.outcome) for layer in differing] == [(name, "differs")]


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        ((torch.float32, torch.bfloat16), torch.bfloat16),
        ((torch.float32, None), torch.float32),
        ((None, None), None),
        ((torch.int32, torch.int32), None),
    ],
)
def test_values_are_rounded_to_the_narrower_type(dtypes: tuple[torch.dtype, ...], want: torch.dtype) -> None:
    assert narrowest(*dtypes) == want


def test_what_cannot_be_read_is_the_verdict(tmp_path: Path) -> None:
    found = diff(GROUPED, tmp_path)

    assert found.verdict == "unreadable"
    assert str(tmp_path) in found.unreadable


def test_progress_ends_with_all_bytes(plain: Path) -> None:
    told: list[tuple[str, int, int]] = []

    diff(GROUPED, plain, progress=lambda *step: told.append(step))

    assert {step[0] for step in told} == {"comparing"}
    assert told[-1][1] == told[-1][2] > 0


def test_the_command_prints_what_differs_and_ends_as_verify(plain: Path, tmp_path: Path) -> None:
    one = made(tmp_path / "a", {"a.weight": torch.ones(2, 2)})
    other = made(tmp_path / "b", {"a.weight": torch.zeros(2, 2)})

    assert run("diff", GROUPED, plain).exit_code == 0
    shown = run("diff", one, other, "--table")
    assert shown.exit_code == 1
    assert "different  a" in shown.stdout
    assert "first at (0, 0): 1 in the first checkpoint, 0 in the second; 4 of 4 differ" in shown.stdout
    assert json.loads(run("diff", one, other).stdout)["counts"] == {"differs": 1}
    assert run("diff", one).exit_code == 2
    assert {*EQUAL_OUTCOMES} < {*DIFF_OUTCOMES}


def test_alike_differences_are_one_line_with_the_numbers_of_the_first(tmp_path: Path) -> None:
    names = [f"l.{number}.weight" for number in range(12)]
    one, other = (
        made(tmp_path / name, {each: torch.randn(2, 1024) for each in names}) for name in ("a", "b")
    )

    shown = run("diff", one, other, "--table").stdout

    assert "different  12 layers\n    l.{0..11}\n" in shown
    assert f"for example l.0: {diff(one, other).layers[0].detail}" in " ".join(shown.split())
    assert shown.count("first at") == 1
    assert len(diff(one, other).layers) == 12


def test_a_damaged_layer_names_the_checkpoint_that_has_it(tmp_path: Path) -> None:
    sound = made(tmp_path / "a", gptq("up"), quantization_config=GPTQ)
    broken = {**gptq("up"), "up.scales": torch.ones(3, 8, dtype=torch.float16)}
    damaged = made(tmp_path / "b", broken, quantization_config=GPTQ)

    for one, other in ((sound, damaged), (damaged, sound)):
        (layer,) = diff(one, other).layers
        assert (layer.outcome, layer.detail.partition(":")[0]) == ("refused", f"in {damaged}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_tensor_outside_of_layers_is_compared_in_blocks(
    dtype: torch.dtype, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "TENSOR_BLOCK_ELEMENTS", 4)
    layer, bias = {"a.weight": torch.ones(10, 4)}, torch.arange(10.0)
    changed = bias.clone()
    changed[at] += 16
    one = made(tmp_path / "one", {**layer, "a.bias": bias})
    other = made(tmp_path / "other", {**layer, "a.bias": changed.to(dtype)})
    same = made(tmp_path / "same", {**layer, "a.bias": bias.to(dtype)})
    thirds = made(tmp_path / "thirds", {**layer, "a.bias": bias / 3})
    rounded = made(tmp_path / "rounded", {**layer, "a.bias": (bias / 3).to(dtype)})

    _, found = sorted(diff(one, other).layers, key=lambda each: each.same, reverse=True)

    assert outcomes(one, same) == {"a": "bits", "a.bias": "bits"}
    assert outcomes(thirds, rounded)["a.bias"] == ("bits" if dtype is torch.float32 else "rounded")
    assert (found.name, found.outcome, found.differing, found.total) == ("a.bias", "differs", 1, 10)
    assert found.detail == (
        f"first at ({at}): {at} in the first checkpoint, {at + 16} in the second; 1 of 10 differ"
    )


def test_a_reading_that_comes_closer_to_a_quantized_layer_is_no_cause(tmp_path: Path) -> None:
    """Zero points are one off, and one code is another: no reading of either checkpoint agrees."""
    stored, config = gptq("a"), {**GPTQ, "sym": False}
    stored["a.qweight"] = torch.arange(16, dtype=torch.int32).reshape(2, 8) * 0x01234567 % 0x70000000
    changed = {**stored, "a.qzeros": torch.full((2, 1), 0x66666666, dtype=torch.int32)}
    closer = made(tmp_path / "closer", changed, quantization_config=config)
    changed = {**changed, "a.qweight": stored["a.qweight"].clone()}
    changed["a.qweight"][1, 3] ^= 8
    neither = made(tmp_path / "neither", changed, quantization_config=config)
    one = made(tmp_path / "one", stored, quantization_config=config)

    (agreeing,), (apart,) = diff(one, closer).layers, diff(one, neither).layers

    assert "; read with zero points one" in agreeing.detail
    assert "read with" not in apart.detail
