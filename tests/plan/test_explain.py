"""What explain says is what loading makes and what calls choose, of chips that are here and that are not."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qload import MemoryStorage, Weights, explain, open_checkpoint
from qload.errors import ArgumentError, NonfiniteScaleError
from qload.kernels import cpu
from qload.native.modules import NativeModule
from qload.plan import ExplainedLayer
from qload.plan.explain import NO_DTYPE
from qload.plan.kernels import KernelChoice
from qload.repacking import loaders
from qload.spec import Weight
from tests.models.drawn import config
from tests.models.drawn import weights as drawn_weights
from tests.paths import FIXTURES, FOLDERS, cases
from tests.plan.test_plan import fused, gptq

FOUR_BITS = FIXTURES / "gptq" / "b4_g64_sym_noact_v1"
ROWS = FIXTURES / "eetq" / "128x64"
KERNELS = import_module("qload.plan.kernels")
ROUNDED = "quantized inputs"
ROUNDED_IN_STRIPS = [f"{ROUNDED}, then decode", f"{ROUNDED}, then many"]
ROUNDED_BY_MMA = [f"{ROUNDED}, then decode", f"{ROUNDED}, then mma"]
CHIPS = {"cpu": None, "sm80": 80, "sm90": 90}


def only(*args: Any, **options: Any) -> ExplainedLayer:
    (layer,) = explain(*args, **options).layers
    return layer


@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("folder", cases(*FOLDERS), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_kernel_format_is_the_one_that_loads(
    folder: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        layer.prefix: layer.kernel_format for layer in explain(folder, arch=arch).layers if not layer.error
    }

    monkeypatch.setattr(loaders, "compute_capability", lambda device: CHIPS[arch])
    with open_checkpoint(folder, target="auto") as weights:
        assert told == {prefix: weights.get_weights(prefix).format for prefix in told}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("arch", "kernels"),
    [("sm80", ["decode", "mma", "large"]), ("sm90", ["decode", "many", "many"])],
)
def test_kernels_by_hand(arch: str, kernels: list[str]) -> None:
    """Four bits in groups of 64: strips on both chips, with other kernels for many tokens."""
    layer = only(gptq(128, 128), arch=arch)

    assert [choice.kernel for choice in layer.choices] == kernels
    assert [choice.tokens for choice in layer.choices] == [1, 64, 1024]
    assert all(choice.seconds is None for choice in layer.choices)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("folder", "arch", "kernel_format", "kernels"),
    [
        ("fp8_block_group_dynamic", "sm90", "fp8_strips", ROUNDED_IN_STRIPS),
        ("fp8_block_group_dynamic", "sm80", "fp8_strips", ROUNDED_BY_MMA),
        ("fp8_tensor_static", "sm90", "fp8_strips", [f"{ROUNDED}, then decode", f"{ROUNDED}, then w8a8"]),
        ("w8a8_int8_token_dynamic_asym", "sm90", "int8_strips", ROUNDED_IN_STRIPS),
        ("w8a8_int8_tensor_static_asym", "sm90", "int8_strips", ROUNDED_IN_STRIPS),
    ],
)
def test_kernels_of_declared_inputs(folder: str, arch: str, kernel_format: str, kernels: list[str]) -> None:
    layer = only(FIXTURES / "activations" / folder, arch=arch, tokens=(1, 300))

    assert layer.kernel_format == kernel_format
    assert [choice.kernel for choice in layer.choices] == kernels
    assert all(choice.seconds is None for choice in layer.choices)


@pytest.mark.usefixtures("seen_texts")
def test_every_other_kernel_has_a_reason() -> None:
    few, _, many = only(gptq(128, 128), arch="sm80").choices

    assert few.refused == {
        "many": "needs a device of capability 9.0, got 8.0",
        "mma": "slower on timed shapes",
        "large": "slower on timed shapes",
    }
    assert many.refused["decode"] == "takes at most 24 tokens, got 1024"


@pytest.mark.usefixtures("seen_texts")
def test_on_hopper_a_kernel_of_its_own_refuses_none_for_the_chip() -> None:
    refused = {
        arch: " ".join(
            why for choice in only(gptq(128, 128), arch=arch).choices for why in choice.refused.values()
        )
        for arch in ("sm80", "sm89", "sm90")
    }

    assert {arch for arch, told in refused.items() if "needs a device of capability" in told} == {
        "sm80",
        "sm89",
    }


@pytest.mark.usefixtures("seen_texts")
def test_every_other_kernel_format_has_a_reason() -> None:
    assert only(gptq(128, 128), arch="sm80").formats == {
        "gptq_marlin": "could hold it as well; strips is preferred",
        "panels": "only the CPU module reads it",
        "exllama": "could hold it as well; strips is preferred",
    }


@pytest.mark.usefixtures("seen_texts")
def test_activations_that_no_kernel_takes_are_told_with_those_that_would_do() -> None:
    layer = only(gptq(128, 128), arch="sm90", dtype=torch.float32)

    assert {choice.kernel for choice in layer.choices} == {"dequantize, then torch's product"}
    assert layer.changes == ("activations of float16: decode, many", "activations of bfloat16: decode, many")


DEQUANTIZED = "dequantize, then torch's product"
# Of float32, which is asked for, and of the two other types: the kernels of 1 and of 64 tokens.
SUGGESTED: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "no kernel for either number": (
        {"float32": [DEQUANTIZED] * 2, "float16": ["decode", "many"], "bfloat16": [DEQUANTIZED] * 2},
        ["float16: decode, many"],
    ),
    "no kernel for the second number": (
        {"float32": ["decode", DEQUANTIZED], "float16": ["decode"] * 2, "bfloat16": ["decode", "many"]},
        ["float16: decode", "bfloat16: decode, many"],
    ),
    "no kernel for the first number": (
        {"float32": [DEQUANTIZED, "many"], "float16": [DEQUANTIZED, "many"], "bfloat16": ["many"] * 2},
        ["bfloat16: many"],
    ),
    "another dtype with a kernel for a part": (
        {"float32": [DEQUANTIZED] * 2, "float16": ["decode", DEQUANTIZED], "bfloat16": [DEQUANTIZED, "many"]},
        [],
    ),
    "kernels for both": (
        {"float32": ["decode", "many"], "float16": ["decode", "many"], "bfloat16": ["decode", "many"]},
        [],
    ),
}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("kernels", "suggested"), SUGGESTED.values(), ids=SUGGESTED)
def test_a_dtype_is_suggested_where_it_has_kernels_for_all_tokens_and_the_asked_one_has_not(
    kernels: dict[str, list[str]], suggested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(weight: Weight, dtype: torch.dtype, chip: Any, tokens: tuple[int, ...]) -> Any:
        found = kernels[str(dtype).removeprefix("torch.")]
        return tuple(KernelChoice(*pair) for pair in zip(tokens, found, strict=True))

    monkeypatch.setattr(import_module("qload.plan.explain"), "kernels_for", table)

    layer = only(gptq(128, 128), arch="sm90", dtype=torch.float32, tokens=(1, 64))

    assert layer.changes == tuple(f"activations of {each}" for each in suggested)


@pytest.mark.usefixtures("seen_texts")
def test_a_share_that_only_names_tell_has_a_note() -> None:
    notes = {tp: " ".join(explain(gptq(128, 128), arch="sm90", tp=tp).notes) for tp in (1, 2)}

    assert "cut by the last part" in notes[2]
    assert "cut by the last part" not in notes[1]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32", "text_config": {"torch_dtype": "torch.float16"}}, "float16"),
    ],
)
def test_activations_have_the_dtype_that_the_config_names(
    entries: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, entries)

    assert explain(path, arch="sm90").dtype == dtype
    assert NO_DTYPE not in explain(path, arch="sm90").notes
    assert explain(path, arch="sm90", dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("entries", [{}, {"dtype": None}, {"dtype": "float64"}, {"torch_dtype": 16}], ids=str)
def test_a_config_that_names_no_dtype_has_a_note(entries: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint(tmp_path, entries)

    assert explain(path, arch="sm90").dtype == "bfloat16"
    assert NO_DTYPE in explain(path, arch="sm90").notes
    assert NO_DTYPE not in explain(path, arch="sm90", dtype=torch.bfloat16).notes


@pytest.mark.usefixtures("seen_texts")
def test_the_config_of_an_open_checkpoint_names_the_dtype() -> None:
    with open_checkpoint(FIXTURES / "models" / "gptq_mixtral") as weights:
        assert explain(weights, arch="sm90").dtype == "float16"


def checkpoint(folder: Path, entries: dict[str, Any]) -> Path:
    """Write the tensors of a fixture beside a config.json of these entries."""
    known = json.loads((FOUR_BITS / "config.json").read_text())
    shutil.copy(FOUR_BITS / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(known | entries))
    return folder


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("arch", ["sm12", "sm19", "sm9", "90", "sm", "sm90a"])
def test_what_is_no_chip_is_an_argument_error(arch: str) -> None:
    with pytest.raises(ArgumentError):
        explain(gptq(128, 128), arch=arch)


@pytest.mark.usefixtures("seen_texts")
def test_the_first_chip_that_there_was_is_one() -> None:
    assert explain(gptq(128, 128), arch="sm20").arch == "sm20"


@pytest.mark.usefixtures("seen_texts")
def test_chips_without_kernels_dequantize() -> None:
    choices = only(gptq(128, 128), arch="sm75").choices

    assert {choice.kernel for choice in choices} == {"dequantize, then torch's product"}
    assert {*choices[0].refused} == {"CUDA kernels"}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the CPU module, which the calls of these tests do not reach."""
    monkeypatch.setattr(KERNELS, "load", lambda name: NativeModule(ModuleType(name)))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.usefixtures("built")
def test_on_a_cpu_the_product_that_runs_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[str]()
    plan_of = cpu.plan_of

    def planned(weight: Weight, *rest: Any) -> cpu.CpuPlan | None:
        seen.add(weight.format)  # also where the module is not there, which refuses nothing but that
        return plan_of(weight, *rest)

    monkeypatch.setattr(cpu, "plan_of", planned)
    monkeypatch.setattr(cpu, "most_tokens", lambda kind, bits, dtype: None)

    layer = only(FOUR_BITS, arch="cpu", dtype=torch.float32, tokens=(1,))
    with open_checkpoint(FOUR_BITS, target="auto") as weights:
        weight = weights.get_weights(layer.prefix)
        weight.get_linear()(torch.ones(1, weight.shape[1]))

    assert {choice.kernel for choice in layer.choices} == {"the CPU module"}
    assert seen == {layer.kernel_format} == {"panels"}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("path", [FOUR_BITS, ROWS], ids=["panels", "rows"])
def test_more_tokens_than_a_cpu_takes_are_told_to_go_to_torch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "most_tokens", lambda kind, bits, dtype: 16 if dtype == torch.bfloat16 else None)

    choices = only(path, arch="cpu", dtype=torch.bfloat16, tokens=(16, 17)).choices

    assert [choice.kernel for choice in choices] == ["the CPU module", "dequantize, then torch's product"]
    assert "16 tokens" in choices[1].refused["the CPU module"]
    choices = only(path, arch="cpu", dtype=torch.float32, tokens=(16, 17)).choices
    assert {choice.kernel for choice in choices} == {"the CPU module"}


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("path", [FOUR_BITS, ROWS], ids=["panels", "rows"])
def test_a_machine_without_the_cpu_module_dequantizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "load", lambda name: NativeModule(None, f"no {name} module"))

    choices = only(path, arch="cpu", dtype=torch.float32, tokens=(1, 64)).choices

    assert choices == tuple(
        KernelChoice(tokens, DEQUANTIZED, {"the CPU module": "no cpu module"}) for tokens in (1, 64)
    )


@pytest.mark.usefixtures("seen_texts")
def test_a_share_that_cannot_be_cut_says_what_the_load_says() -> None:
    layer = only(gptq(192, 64), arch="sm90", tp=2)

    assert layer.error.startswith("down_proj.qzeros: cannot cut K = 192 at 96 for 2 ranks")
    assert explain(gptq(192, 64), tp=2).verdict == "findings"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_scale_that_is_not_finite_says_what_the_load_says(tp: int) -> None:
    """The second of two layers alike is explained instead of the damaged first; its own values count then."""
    first, second = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    tensors = {"qweight": torch.full((32, 64), -0x77777778, dtype=torch.int32)}
    tensors |= {
        "qzeros": torch.full((4, 8), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(4, 64).half(),
    }
    stored = {
        f"{prefix}.{name}": tensor.clone() for prefix in (first, second) for name, tensor in tensors.items()
    }
    stored[f"{first}.scales"][1, 3] = torch.nan
    storage, loader = MemoryStorage(stored), gptq(64, 64).loader
    weights = Weights(storage, loader=loader)
    with pytest.raises(NonfiniteScaleError) as refused:
        weights.get_weights(first)

    explanation = explain(weights, arch="sm90", tp=tp)

    assert {layer.prefix: layer.error for layer in explanation.layers} == {
        first: str(refused.value),
        second: "",
    }
    assert explanation.verdict == "findings"
    allowed = Weights(storage, loader=loader, nonfinite="allow")
    assert explain(allowed, arch="sm90", tp=tp).verdict == "ok"


def large_scales(value: float) -> Weights:
    """Return a layer of four bits with bfloat16 scales of one value."""
    held = gptq(128, 128)
    stored = {name: held.storage.read(name) for name in held.storage.keys()}  # noqa: SIM118, it is no dict
    stored["down_proj.scales"] = torch.full((2, 128), value, dtype=torch.bfloat16)
    return Weights(MemoryStorage(stored), loader=held.loader)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("value", "fits"), [(2.0**15, True), (2.0**16, False)])
def test_scales_beyond_the_range_of_a_dtype_refuse_and_suggest_none(value: float, fits: bool) -> None:
    half = only(large_scales(value), arch="sm80", dtype=torch.float16)
    single = only(large_scales(value), arch="sm80", dtype=torch.float32)

    assert (half.kernel_format, bool(half.error), bool(half.choices)) == ("strips", not fits, fits)
    assert fits or half.error.startswith("down_proj")
    assert [change.partition(":")[0] for change in single.changes] == [
        f"activations of {dtype}" for dtype in (["float16"] * fits + ["bfloat16"])
    ]


@pytest.mark.usefixtures("seen_texts")
def test_the_parts_of_a_fused_layer_are_shared_by_its_outputs() -> None:
    """There are fewer outputs of queries, keys and values than inputs."""
    said = config("qwen3", hidden_size=256)
    held = drawn_weights(said, fused(said))

    errors = {layer.prefix: layer.error for layer in explain(held, arch="cpu", tp=2).layers}

    assert any(prefix.endswith("qkv_proj") for prefix in errors)
    assert {*errors.values()} == {""}


@pytest.mark.usefixtures("seen_texts")
def test_a_share_has_its_own_shape() -> None:
    assert only(gptq(256, 128), arch="sm90", tp=2).shape == (128, 128)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    "asked",
    [
        {"arch": "hopper"},
        {"arch": "sm9x"},
        {"tp": 0},
        {"tokens": ()},
        {"tokens": (0,)},
        {"dtype": torch.float64},
    ],
)
def test_what_cannot_be_asked_is_an_argument_error(asked: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        explain(gptq(64, 64), **asked)
