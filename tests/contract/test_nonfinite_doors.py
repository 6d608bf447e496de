"""Behaviour of every entry point for a scale of value NaN.

The test fails for an entry point of `test_doors` outside this table. An entry point raises an error with the
name of the tensor unless `nonfinite="allow"`; or it continues, as reports do; or it reads no values of
layers, or returns them by name.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from qload import (
    FakeWorld,
    Fp8Quantizer,
    Heads,
    Load,
    QuantizingLoader,
    Weights,
    convert,
    diff,
    explain,
    inspect,
    load_layers,
    open_checkpoint,
    plan,
    replace_linears,
    shard,
    verify,
)
from qload.cli.main import main
from qload.conversion.new_checkpoint import CERTIFICATE
from qload.detect import for_target
from qload.errors import NonfiniteScaleError
from qload.models import load_decoder, load_model, load_vision_model, text_config
from qload.models.stored_layers import Making
from qload.testing import make_checkpoint
from tests.contract.test_doors import (
    ASKED,
    COMMANDS,
    DOORS,
    LOADERS,
    LOADS,
    METHODS,
    SHARED,
    WRAPPING,
    Asked,
    method,
)
from tests.models.vision.seeing import CONFIG, sight, text
from tests.models.with_transformers.stored import FORMATS

ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.block_sparse_moe.experts"
LAYER, EXPERT = f"{ATTENTION}.q_proj", f"{EXPERTS}.3.w1"
SPOILED = (f"{LAYER}.scales", f"{EXPERT}.scales")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPTQ model with a NaN among the scales of a layer and of an expert."""
    made = tmp_path_factory.mktemp("nonfinite") / "checkpoint"
    make_checkpoint("gptq", made, model="mixtral")
    spoil(made)
    return made


def spoil(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in {*SPOILED} & tensors.keys():
            tensors[name][0, 3] = torch.nan
        save_file(tensors, file, {"format": "pt"})


# Commands

REFUSED, GOES_ON = 1, 0
VERBS: dict[str, tuple[int, list[str]] | None] = {
    "inspect": (GOES_ON, ["{path}"]),
    "verify": (1, ["{path}"]),
    "diff": (GOES_ON, ["{path}", "{path}"]),
    "plan": (GOES_ON, ["{path}", "--tp", "2"]),
    "explain": (REFUSED, ["{path}", "--arch", "sm90"]),
    "convert": (REFUSED, ["{path}", "--to", "bf16", "--round", "-o", "{out}"]),
    "shard": (REFUSED, ["{path}", "--tp", "2", "-o", "{out}"]),
    "run": (REFUSED, ["{path}", "--prompt-ids", "1,2"]),
    "bench-load": (REFUSED, ["{path}", "--rounds", "1"]),
    "formats": None,
    "layout": None,
    "doctor": None,
    "make-checkpoint": None,
    "scoreboard": None,
    "selftest": None,
    "vectors": None,
}
WRITERS = ("convert", "shard")
WITH_OPTION = ("convert", "shard", "run", "bench-load")


def test_every_command_is_in_the_table() -> None:
    assert VERBS.keys() == COMMANDS.keys()


def command(name: str, folder: Path, out: Path, *more: str) -> Any:
    texts = {"{path}": str(folder), "{out}": str(out / "made")}
    said = VERBS[name]
    assert said is not None
    return CliRunner().invoke(main, [name, *[texts.get(each, each) for each in said[1]], *more])


@pytest.mark.parametrize("name", [name for name, said in VERBS.items() if said is not None])
def test_a_command_refuses_by_the_name_of_the_tensor_or_goes_on(
    name: str, folder: Path, tmp_path: Path
) -> None:
    said = VERBS[name]
    assert said is not None
    result = command(name, folder, tmp_path)

    assert result.exit_code == said[0], result.output
    if said[0] == REFUSED:
        assert any(tensor in result.output for tensor in SPOILED)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", WITH_OPTION)
def test_a_command_that_is_told_so_takes_such_scales(name: str, folder: Path, tmp_path: Path) -> None:
    result = command(name, folder, tmp_path, "--nonfinite", "allow")

    assert "not finite\n  expected finite numbers" not in result.output
    assert result.exit_code == (2 if name == "run" else 0), result.output  # the logits are NaN
    assert ("written as stored: nan at (0, 3)" in result.stderr) == (name in WRITERS)
    certificates = [json.loads(path.read_text()) for path in tmp_path.rglob(CERTIFICATE)]
    assert bool(certificates) == (name in WRITERS)
    for certificate in certificates:
        notes = [note.partition(": written")[0] for note in certificate["notes"] if "as stored" in note]
        assert {*notes} == {*SPOILED}
        assert certificate["qload"]


# Python

Nonfinite = Any
Door = Callable[[Path, Path, Nonfinite], object]


def weights_of(folder: Path, nonfinite: Nonfinite, **options: Any) -> Weights:
    return open_checkpoint(folder, nonfinite=nonfinite, **options)


def by_weights(call: Callable[[Weights], object]) -> Door:
    def door(folder: Path, out: Path, nonfinite: Nonfinite) -> None:
        with weights_of(folder, nonfinite) as weights:
            call(weights)

    return door


def by_loader(kind: str, ask: Callable[[Any, str], object]) -> Door:
    return by_weights(lambda weights: ask(Asked(LOADERS[kind](weights.loader), weights), LAYER))


def written(call: Callable[..., Any], **options: Any) -> Door:
    """Expect a report of refused layers with the names of the tensors, and no output files."""

    def door(folder: Path, out: Path, nonfinite: Nonfinite) -> None:
        found = call(folder, out / "made", nonfinite=nonfinite, **options)
        refused = {layer.name: layer.detail for layer in found.layers if layer.outcome == "refused"}
        if refused:
            assert refused.keys() == {LAYER, EXPERT}
            assert (found.exit_code, (out / "made").exists()) == (1, False)
            raise NonfiniteScaleError(refused[LAYER].partition(":")[0], "", "", "")

    return door


def decoder(weights: Weights) -> object:
    assert weights.architecture is not None
    config = text_config({**weights.architecture.config, "model_type": "mixtral"})
    return load_decoder(weights, config, Making.of(weights, config, None, None, "tensor"))


def replaced(weights: Weights) -> object:
    N, K = weights.loader.shape(weights, LAYER)
    return replace_linears(nn.ModuleDict({"q": nn.Linear(K, N, bias=False)}), weights, {"q": LAYER})


def seeing(folder: Path, out: Path, nonfinite: Nonfinite) -> None:
    form, draw = FORMATS["gptq"], torch.Generator().manual_seed(3)
    tensors = sight() | text(quantize=lambda matrix: dict(form.layer(*matrix.shape, draw)))
    name = next(name for name in sorted(tensors) if name.endswith("self_attn.q_proj.scales"))
    tensors[name][0, 3] = torch.nan
    out.mkdir(exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": dict(form.section)}))
    load_vision_model(out, nonfinite=nonfinite)


def of_transformers(folder: Path, out: Path, nonfinite: Nonfinite) -> None:
    engine = pytest.importorskip("qload.engines.transformers")
    engine.load(folder, nonfinite=nonfinite)


def layer_load(kind: str, *arguments: Any, **options: Any) -> Door:
    return by_weights(lambda weights: method(kind).load(weights, *arguments, **options))


QKV = [f"{ATTENTION}.{each}_proj" for each in "qkv"]
REFUSE: dict[str, Door] = {
    "convert": written(convert, to="bfloat16", rounding=True),
    "shard": written(shard, tp=2),
    "load_layers": by_weights(lambda weights: list(load_layers(weights))),
    "load_model": lambda folder, out, nonfinite: load_model(folder, nonfinite=nonfinite),
    "load_vision_model": seeing,
    "load_decoder": by_weights(decoder),
    "replace_linears": by_weights(replaced),
    "load": of_transformers,
    **{f"WeightsLoader.{name}": by_loader("WeightsLoader", load) for name, load in LOADS.items()},
    **{f"{kind}.load": by_loader(kind, ASKED["load"]) for kind in LOADERS},
    **{f"{kind}.plan": by_loader(kind, ASKED["plan"]) for kind in LOADERS},
    **{
        f"{kind}.load": layer_load(kind, LAYER)
        for kind in (
            "ColumnParallelLinear",
            "ReplicatedLinear",
            "RowParallelLinear",
            "VocabParallelEmbedding",
        )
    },
    "MergedColumnParallelLinear.load": layer_load("MergedColumnParallelLinear", [LAYER]),
    "QKVParallelLinear.load": layer_load("QKVParallelLinear", QKV, Heads(4, 2), head_size=32),
    "ParallelLMHead.load": layer_load("ParallelLMHead", LAYER, vocab=128),
    "ParallelExperts.load": layer_load("ParallelExperts", EXPERTS),
}
REPORTS: dict[str, Callable[[Path], Any]] = {
    "diff": lambda path: diff(path, path),
    "explain": lambda path: explain(path, arch="sm90"),
    "inspect": inspect,
    "plan": lambda path: plan(path, tp=2),
    "verify": verify,
}
NO_VALUES = {
    *("open_checkpoint", "account", "LayerIndex", "layers", "info_of", "loader_from_config", "with_experts"),
    *("SafetensorsStorage", "Making.of", "layer_pictures", "Weights", "HubFolder", "cached_folder", "fetch"),
    *("open_folder", "RemoteFolder.real", "saved_lora_config", "QuantizationConfigMixin.to_json_file"),
    *("check_all_read", "ModuleLoader.describe", "FormatLoader.complete"),
    *("Checkpoint", "Checkpoint.open", "opened"),
    *(f"{kind}.{name}" for kind in (*LOADERS, "WrappingLoader") for name in SHARED if kind not in WRAPPING),
}
OF_WEIGHTS: dict[str, Door] = {
    **{name: by_weights(lambda weights, load=load: load(weights, LAYER)) for name, load in LOADS.items()},  # type: ignore[misc]
    "get_weights_col_packed_qkv": by_weights(lambda it: it.get_weights_col_packed_qkv(LAYER, 2, 1)),
    "get_weights_col_packed_gate_up": by_weights(lambda it: it.get_weights_col_packed_gate_up(LAYER)),
    "get_partial_weights_col": by_weights(lambda it: it.get_partial_weights_col(LAYER)),
    "get_experts": by_weights(lambda it: it.get_experts(EXPERTS)),
    "stream": by_weights(lambda it: list(it.stream([Load(LAYER)]))),
}
BY_NAME = {
    *("get_tensor", "get_sharded", "get_partial_sharded", "get_packed_sharded"),
    *("read", "read_fact", "read_into", "read_rows", "begin_rows"),
}
NAMES_AND_NUMBERS = {
    *("exempt", "exempt_by", "get_shape", "get_tensor_shard", "has_tensor", "info", "ledger"),
    *(
        "file_elements",
        "headers",
        "is_single_layer",
        "names",
        "readable",
        "whole",
        "nonfinite",
        "at_end",
        "device",
    ),
    *("loader", "missing", "names_under", "note", "of_group", "place", "report", "take", "use_loader"),
}


def test_every_callable_is_in_the_table() -> None:
    assert {*REFUSE, *REPORTS, *NO_VALUES} == DOORS.keys()


def test_every_method_of_weights_is_in_the_table() -> None:
    assert {*OF_WEIGHTS, *BY_NAME, *NAMES_AND_NUMBERS} == METHODS.keys()


@pytest.mark.parametrize("name", [*REFUSE, *(f"Weights.{name}" for name in OF_WEIGHTS)])
def test_a_door_refuses_unless_it_is_told(name: str, folder: Path, tmp_path: Path) -> None:
    door = {**REFUSE, **{f"Weights.{each}": call for each, call in OF_WEIGHTS.items()}}[name]

    with pytest.raises(NonfiniteScaleError) as caught:
        door(folder, tmp_path / "refused", "error")
    named = caught.value.tensor
    assert named in SPOILED or (name == "load_vision_model" and named.endswith("self_attn.q_proj.scales"))
    door(folder, tmp_path / "allowed", "allow")


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_goes_on_to_what_it_reports(name: str, folder: Path) -> None:
    found = REPORTS[name](folder)

    assert found.verdict == ("findings" if name in ("verify", "explain") else "ok")
    if name == "verify":
        assert {finding.tensor for finding in found.findings if finding.rule == "scale-value"} == {*SPOILED}


def test_what_is_asked_for_by_name_is_as_it_is_stored(folder: Path) -> None:
    with weights_of(folder, "error") as weights:
        assert weights.get_tensor(SPOILED[0])[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("target", [None, "auto", "marlin"])
def test_loaders_over_loaders_refuse(quantize: bool, target: Any, folder: Path) -> None:
    with weights_of(folder, "error") as weights:
        inner: Any = weights.loader
        loader = QuantizingLoader(inner, Fp8Quantizer()) if quantize else inner
        loader = loader if target is None else for_target(loader, target)
        with weights.use_loader(loader), pytest.raises(NonfiniteScaleError, match=SPOILED[0]):
            weights.get_weights(LAYER)


def of_ranks(folder: Path, world: int, call: Callable[[Weights], object]) -> Iterator[str]:
    for group in FakeWorld(world):
        with weights_of(folder, "error", process_group=group) as weights:
            with pytest.raises(NonfiniteScaleError) as caught:
                call(weights)
            yield str(caught.value)


@pytest.mark.parametrize("split", ["tensor", "experts", "both"])
def test_ranks_refuse_an_expert_of_any_rank_alike(split: Any, folder: Path) -> None:
    runs = 2 if split == "both" else None
    said = {*of_ranks(folder, 4, lambda it: it.get_experts(EXPERTS, split=split, expert_ranks=runs))}

    assert len(said) == 1
    assert said.pop().startswith(f"{EXPERT}.scales: ")
