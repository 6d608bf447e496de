"""Behaviour of every entry point (command or public callable) for a checkpoint with unread tensors.

Rule: a tensor without a format is never used as a value, never called equal, never copied. An entry point is
each command, and each public callable with a path, a storage or `Weights` as argument; the test fails for an
entry point outside the table. The table maps each one to a case:

- an error with the name of a tensor or the requested prefix;
- a report with the verdict `incomplete`;
- no values: headers, names and settings alone;
- tensors by name as they are stored (`RAW`), without an interpretation.
"""

import importlib
import inspect as signatures
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click import Command, Group
from click.testing import CliRunner
from torch import nn

from qload import (
    Fp8Quantizer,
    Load,
    QuantizingLoader,
    SafetensorsStorage,
    Weights,
    convert,
    diff,
    explain,
    inspect,
    layers,
    load_layers,
    open_checkpoint,
    plan,
    replace_linears,
    shard,
    verify,
    with_experts,
)
from qload.checkpoint import Account, Checkpoint, LayerIndex, account, check_all_read, info_of
from qload.cli.main import main
from qload.detect import for_target, read_model_config
from qload.errors import QloadError, UnreadTensorsError
from qload.loader import Heads, Part
from qload.models import Making, TextConfig, load_decoder, load_model, load_vision_model
from qload.pictures import layer_pictures
from qload.spec import Role
from qload.testing import make_checkpoint
from tests.annotations import parameters
from tests.support.unread import KINDS as CHECKPOINTS
from tests.support.unread import UnreadCheckpoint

MODULES = (
    "qload",
    "qload.engines.transformers",
    "qload.engines.vllm",
    "qload.hub",
    "qload.checkpoint",
    "qload.methods",
    "qload.models",
    "qload.pictures",
)
TAKEN = re.compile(
    r"\b(PathLike|Path|Weights|WeightStorage|SafetensorsStorage|TensorSource|HubId|HubFolder)\b"
)
Call = Callable[[UnreadCheckpoint, Path], object]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> UnreadCheckpoint:
    folder = tmp_path_factory.mktemp("unread") / "checkpoint"
    return CHECKPOINTS[request.param](folder)


# Commands


def incomplete(*options: str) -> Call:
    return lambda given, out: command(4, *options, given=given, out=out)


def command(code: int, *options: str, given: UnreadCheckpoint, out: Path) -> None:
    """Run a command: its exit code is `code`, and its output names an unread tensor."""
    texts = {"{path}": str(given.folder), "{out}": str(out / "made")}
    result = CliRunner().invoke(main, [texts.get(option, option) for option in options])
    assert result.exit_code == code, result.output
    assert any(name in result.output for name in given.unread), result.output
    assert not (out / "made").exists()


NO_CHECKPOINT = None  # without a checkpoint as argument
COMMANDS: dict[str, list[Call] | None] = {
    "inspect": [incomplete("inspect", "{path}")],
    "verify": [
        incomplete("verify", "{path}"),
        incomplete("verify", "{path}", "--tier", "headers"),
        incomplete("verify", "{path}", "--against", "{path}"),
    ],
    "diff": [incomplete("diff", "{path}", "{path}")],
    "plan": [incomplete("plan", "{path}", "--tp", "1")],
    "explain": [incomplete("explain", "{path}", "--arch", "sm90")],
    "convert": [incomplete("convert", "{path}", "--to", "bf16", "--round", "-o", "{out}")],
    "shard": [incomplete("shard", "{path}", "--tp", "1", "-o", "{out}")],
    "run": [incomplete("run", "{path}", "--prompt-ids", "1,2")],
    "bench-load": [incomplete("bench-load", "{path}")],
    "formats": NO_CHECKPOINT,
    "layout": NO_CHECKPOINT,
    "doctor": NO_CHECKPOINT,
    "make-checkpoint": NO_CHECKPOINT,
    "scoreboard": NO_CHECKPOINT,
    "selftest": NO_CHECKPOINT,
    "vectors": NO_CHECKPOINT,
}


def test_every_command_is_in_the_table() -> None:
    assert isinstance(main, Group)
    assert COMMANDS.keys() == main.commands.keys()


@pytest.mark.parametrize("name", [name for name, calls in COMMANDS.items() if calls is None])
def test_what_is_said_to_take_no_checkpoint_has_no_argument_for_one(name: str) -> None:
    kinds = [type(param.type).__name__ for each in commands_of(name) for param in each.params]

    assert "CheckpointPath" not in kinds


def commands_of(name: str) -> list[Command]:
    found = main.commands[name]
    return [found, *found.commands.values()] if isinstance(found, Group) else [found]


@pytest.mark.parametrize("name", [name for name, calls in COMMANDS.items() if calls])
def test_a_command_says_incomplete_or_refuses(name: str, given: UnreadCheckpoint, tmp_path: Path) -> None:
    for at, call in enumerate(COMMANDS[name] or ()):
        (tmp_path / str(at)).mkdir()
        call(given, tmp_path / str(at))


# Python


def opened(given: UnreadCheckpoint) -> Weights:
    return open_checkpoint(given.folder)


def refuses(call: Callable[[Weights, str], object]) -> Call:
    """Expect an error for each prefix of an unread tensor."""

    def refused(given: UnreadCheckpoint, _: Path) -> None:
        with opened(given) as weights:
            for prefix in given.prefixes:
                with pytest.raises(QloadError) as caught:
                    call(weights, prefix)
                text = str(caught.value)
                assert prefix in text or any(name in text for name in given.unread), text

    return refused


def refuses_whole(call: Callable[[Weights], object]) -> Call:
    """Expect UnreadTensorsError of the whole checkpoint, from its `Weights`."""

    def refused(given: UnreadCheckpoint, _: Path) -> None:
        with opened(given) as weights, pytest.raises(UnreadTensorsError) as caught:
            call(weights)
        assert_told(given, caught.value)

    return refused


def refuses_path(call: Callable[[Path, Path], object]) -> Call:
    def refused(given: UnreadCheckpoint, out: Path) -> None:
        with pytest.raises(UnreadTensorsError) as caught:
            call(given.folder, out / "made")
        assert_told(given, caught.value)
        assert not (out / "made").exists()

    return refused


def assert_told(given: UnreadCheckpoint, error: UnreadTensorsError) -> None:
    """Check an error: all tensors by name, the first in its text, their bytes and the reason."""
    assert error.unread.keys() == given.unread.keys()
    assert error.nbytes == given.nbytes
    assert min(given.unread) in str(error)
    assert given.reason in str(error)


def says_incomplete(call: Callable[[Path], Any]) -> Call:
    def said(given: UnreadCheckpoint, _: Path) -> None:
        report = call(given.folder)
        assert (report.verdict, report.exit_code) == ("incomplete", 4)
        assert any(name in str(report.to_json()) for name in given.unread)

    return said


def no_values(call: Callable[[UnreadCheckpoint], object]) -> Call:
    return lambda given, _: call(given)


def hands_out_raw(call: Callable[[Weights, str], torch.Tensor]) -> Call:
    """Expect the bytes of a stored tensor, requested by name."""

    def raw(given: UnreadCheckpoint, _: Path) -> None:
        with opened(given) as weights:
            name, stored = max(given.unread.items(), key=lambda item: item[1].nbytes)
            got = call(weights, name)
            assert got.dtype == stored.dtype
            assert torch.equal(got.view(torch.uint8), stored.view(torch.uint8))

    return raw


def describes_without_values(given: UnreadCheckpoint) -> None:
    with opened(given) as weights:
        listed = {info.prefix: info for info in layers(weights)}
        groups = LayerIndex(weights)
        read = [
            info_of(weights, layer) for layer in groups.layers.values() if not isinstance(layer, QloadError)
        ]
    assert all(info.error is not None for prefix, info in listed.items() if prefix in given.prefixes)
    assert given.unread.keys().isdisjoint(name for info in read for name in info.tensors)


def accounts_for_all(given: UnreadCheckpoint) -> None:
    with opened(given) as weights:
        found: Account = account(LayerIndex(weights))
    assert found.report.unread.keys() == given.unread.keys()
    assert found.coverage.unread == given.nbytes
    assert given.unread.keys().isdisjoint(found.report.used)


def accounts_for_all_when_collected(given: UnreadCheckpoint) -> None:
    with Checkpoint.open(given.folder, collect=True) as checkpoint:
        found = checkpoint.account
    assert found.report.unread.keys() == checkpoint.unread.keys() == given.unread.keys()
    assert given.unread.keys().isdisjoint(found.report.used)


def stays_as_stored(given: UnreadCheckpoint) -> None:
    with SafetensorsStorage(given.folder) as storage:
        shown = with_experts(storage, read_model_config(given.folder))
        assert {*given.unread} <= {*shown.keys()}


def draws_nothing(given: UnreadCheckpoint) -> None:
    drawn = layer_pictures(given.folder)
    assert not any(prefix in drawn for prefix in given.prefixes)


def transformers_refuses(given: UnreadCheckpoint, _: Path) -> None:
    engine = pytest.importorskip("qload.engines.transformers")
    if given.model:  # transformers has no class for unknown types
        with pytest.raises(UnreadTensorsError) as caught:
            engine.load(given.folder)
        assert_told(given, caught.value)


def decoder(weights: Weights) -> object:
    config: Any = TextConfig
    return load_decoder(weights, config, Making(torch.float32))


def streams(weights: Weights, prefix: str) -> object:
    return list(weights.stream([Load(prefix)]))


def reads_into(weights: Weights, name: str) -> torch.Tensor:
    info = weights.info(name)
    out = torch.empty(info.shape, dtype=info.dtype)
    weights.read_into(name, (), out, role=Role.WORD)
    return out


def reads_rows(weights: Weights, name: str) -> torch.Tensor:
    info = weights.info(name)
    out = torch.empty((1, *info.shape), dtype=info.dtype)
    weights.read_rows([([name], (), out)])
    return out[0]


def begins_rows(weights: Weights, name: str) -> torch.Tensor:
    info = weights.info(name)
    out = torch.empty((1, *info.shape), dtype=info.dtype)
    weights.begin_rows([([name], (), out)]).finish()
    return out[0]


LOADS: dict[str, Callable[[Any, str], object]] = {
    "get_weights": lambda it, prefix: it.get_weights(prefix),
    "get_weights_col": lambda it, prefix: it.get_weights_col(prefix),
    "get_weights_row": lambda it, prefix: it.get_weights_row(prefix),
    "get_multi_weights_col": lambda it, prefix: it.get_multi_weights_col([prefix]),
    "get_weights_col_packed": lambda it, prefix: it.get_weights_col_packed(prefix, 2),
}
LOADERS: dict[str, Callable[[Any], Any]] = {
    "WeightsLoader": lambda loader: loader,
    "FormatLoader": lambda loader: loader,
    "QuantizingLoader": lambda loader: QuantizingLoader(loader, Fp8Quantizer()),
    "RepackingLoader": lambda loader: for_target(loader, "auto"),
}
WRAPPING = ("QuantizingLoader", "RepackingLoader")
SHARED = ("shape", "describe", "settle")  # their methods of one base
ASKED: dict[str, Callable[[Any, str], object]] = {
    "load": lambda it, prefix: it.load([Part(prefix)], None),
    "plan": lambda it, prefix: it.plan([Part(prefix)], None).finish(it.weights),
    "shape": lambda it, prefix: it.shape(prefix),
    "describe": lambda it, prefix: it.describe(prefix),
    "settle": lambda it, prefix: it.settle(it.describe(prefix)),
}


def by_loader(kind: str, name: str) -> Call:
    """Expect an error from a method of a loader; its first argument is `Weights`."""
    ask = {**LOADS, **ASKED}[name]
    return refuses(lambda weights, prefix: ask(Asked(LOADERS[kind](weights.loader), weights), prefix))


def by_wrapping_loaders(name: str) -> Call:
    """Expect an error from a method that the loaders around another one share."""
    calls = [by_loader(kind, name) for kind in WRAPPING]

    def call(given: UnreadCheckpoint, tmp_path: Path) -> None:
        for each in calls:
            each(given, tmp_path)

    return call


def load_of(kind: str) -> Callable[[Weights, str], object]:
    """Return a call of `load` of a layer of `qload.methods`."""
    return lambda weights, prefix: method(kind).load(weights, prefix)


# By qualified name; several classes of loaders share the methods of their base.
DOORS: dict[str, Call] = {
    "convert": refuses_path(lambda path, out: convert(path, out, to="bfloat16", rounding=True)),
    "shard": refuses_path(lambda path, out: shard(path, out, tp=1)),
    "diff": says_incomplete(lambda path: diff(path, path)),
    "explain": says_incomplete(lambda path: explain(path, arch="sm90")),
    "plan": says_incomplete(lambda path: plan(path, tp=1)),
    "inspect": says_incomplete(inspect),
    "verify": says_incomplete(lambda path: verify(path, against=path)),
    "load_layers": refuses_whole(lambda weights: list(load_layers(weights))),
    "check_all_read": refuses_whole(check_all_read),
    "load_model": refuses_path(lambda path, _: load_model(path)),
    "load_vision_model": refuses_whole(lambda weights: load_vision_model(weights, {"model_type": "llama"})),
    "load_decoder": refuses_whole(decoder),
    "replace_linears": refuses_whole(lambda weights: replace_linears(nn.Linear(2, 2), weights)),
    "open_checkpoint": no_values(accounts_for_all),
    "account": no_values(accounts_for_all),
    "opened": no_values(accounts_for_all),
    "Checkpoint": no_values(accounts_for_all_when_collected),
    "Checkpoint.open": no_values(accounts_for_all_when_collected),
    "LayerIndex": no_values(describes_without_values),
    "FormatLoader.complete": refuses(
        lambda it, prefix: it.loader.complete(it, it.loader.describe(it, prefix))
    ),
    "layers": no_values(describes_without_values),
    "info_of": no_values(describes_without_values),
    "loader_from_config": no_values(describes_without_values),
    "with_experts": no_values(stays_as_stored),
    "SafetensorsStorage": no_values(stays_as_stored),
    "Making.of": no_values(lambda given: None),  # names and a dtype, of a config
    "layer_pictures": no_values(draws_nothing),
    "Weights": no_values(accounts_for_all),
    "HubFolder": no_values(lambda given: None),  # names and locations of files
    "cached_folder": no_values(lambda given: None),
    "fetch": no_values(lambda given: None),
    "open_folder": no_values(lambda given: None),
    "RemoteFolder.real": no_values(lambda given: None),
    "saved_lora_config": no_values(lambda given: None),  # reads the folder of an adapter
    "QuantizationConfigMixin.to_json_file": no_values(lambda given: None),  # writes a config
    "load": transformers_refuses,
    **{f"WeightsLoader.{name}": by_loader("WeightsLoader", name) for name in LOADS},
    **{
        f"{kind}.{name}": by_loader(kind, name)
        for kind in LOADERS for name in ASKED if kind not in WRAPPING or name not in SHARED
    },
    **{f"WrappingLoader.{name}": by_wrapping_loaders(name) for name in SHARED},
    # Delegated to the loader of the module.
    "ModuleLoader.describe": by_loader("FormatLoader", "describe"),
    **{f"{kind}.load": refuses(load_of(kind)) for kind in (
        "ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear", "VocabParallelEmbedding",
        "ParallelExperts")},
    "MergedColumnParallelLinear.load": refuses(
        lambda weights, prefix: method("MergedColumnParallelLinear").load(weights, [prefix])),
    "QKVParallelLinear.load": refuses(
        lambda weights, prefix: method("QKVParallelLinear").load(
            weights, [prefix] * 3, Heads(2, 2), head_size=8)),
    "ParallelLMHead.load": refuses(
        lambda weights, prefix: method("ParallelLMHead").load(weights, prefix, vocab=8)),
}  # fmt: skip
RAW = hands_out_raw
NAMES_AND_NUMBERS = (
    "exempt", "exempt_by", "get_shape", "get_tensor_shard", "has_tensor", "info", "ledger",
    "file_elements", "headers", "is_single_layer", "names", "readable", "whole", "nonfinite",
    "at_end", "device",
    "loader", "missing", "names_under", "note", "of_group", "place", "report", "take", "use_loader",
)  # fmt: skip
SETTINGS = no_values(accounts_for_all)
METHODS: dict[str, Call] = {
    **{name: refuses(load) for name, load in LOADS.items()},
    "get_weights_col_packed_qkv": refuses(lambda it, prefix: it.get_weights_col_packed_qkv(prefix, 2, 2)),
    "get_weights_col_packed_gate_up": refuses(lambda it, prefix: it.get_weights_col_packed_gate_up(prefix)),
    "get_partial_weights_col": refuses(lambda it, prefix: it.get_partial_weights_col(prefix)),
    "get_experts": refuses(lambda it, prefix: it.get_experts(prefix)),
    "stream": refuses(streams),
    "get_tensor": RAW(lambda it, name: it.get_tensor(name)),
    "get_sharded": RAW(lambda it, name: it.get_sharded(name, 0)),
    "get_partial_sharded": RAW(lambda it, name: it.get_partial_sharded(name, 0)),
    "get_packed_sharded": RAW(lambda it, name: it.get_packed_sharded(name, 0, 1)),
    "read": RAW(lambda it, name: it.read(name)),
    "read_fact": RAW(lambda it, name: it.read_fact(name)),
    "read_into": RAW(reads_into),
    "read_rows": RAW(reads_rows),
    "begin_rows": RAW(begins_rows),
    **dict.fromkeys(NAMES_AND_NUMBERS, SETTINGS),
}  # fmt: skip


class Asked:
    """Methods of a loader without the leading argument `Weights`, as methods of `Weights`."""

    def __init__(self, loader: Any, weights: Weights) -> None:
        self.loader, self.weights = loader, weights

    def __getattr__(self, name: str) -> Any:
        return lambda *more: getattr(self.loader, name)(self.weights, *more)


def method(kind: str) -> Any:
    return getattr(importlib.import_module("qload.methods"), kind)


def public_doors() -> Iterator[str]:
    """Return the qualified names of all public callables with a path, a storage or `Weights` as argument."""
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an engine that is not installed
            continue
        for public in module.__all__:
            value = getattr(module, public)
            members = signatures.getmembers(value) if signatures.isclass(value) else []
            shown = [each for key, each in members if not key.startswith("_") and callable(each)]
            yield from (each.__qualname__ for each in (value, *shown) if callable(each) and takes(each))


def takes(function: Callable[..., Any]) -> bool:
    try:
        annotated = parameters(function).values()
    except (ValueError, TypeError):
        return False
    return any(TAKEN.search(str(each.annotation)) for each in annotated)


def test_every_public_callable_is_in_the_table() -> None:
    missing = {*public_doors()} - DOORS.keys()

    assert not missing, f"say in DOORS what each of {sorted(missing)} does with tensors that are not read"


def test_every_method_of_weights_is_in_the_table() -> None:
    shown = {name for name in dir(Weights) if not name.startswith("_")}

    assert shown == METHODS.keys(), "say in METHODS what each does with tensors that are not read"


@pytest.mark.parametrize("name", DOORS)
def test_a_door_gives_no_value_of_what_is_not_read(
    name: str, given: UnreadCheckpoint, tmp_path: Path
) -> None:
    DOORS[name](given, tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_no_value_of_what_is_not_read(
    name: str, given: UnreadCheckpoint, tmp_path: Path
) -> None:
    METHODS[name](given, tmp_path)


def test_the_names_of_the_table_are_public() -> None:
    """Compare the table with the package, except for engines without an installation."""
    there = {*public_doors()}
    engines = {"load", "saved_lora_config", "QuantizationConfigMixin.to_json_file"}

    assert DOORS.keys() - there - engines <= {"open_folder", "fetch", "cached_folder", "account"}


def test_the_same_checkpoint_without_those_tensors_passes_all_doors(tmp_path: Path) -> None:
    """Check that the unread tensors alone cause the errors."""
    folder = tmp_path / "sound"
    make_checkpoint("fp8-block", folder, model="qwen3_moe")

    assert verify(folder, against=folder).verdict == diff(folder, folder).verdict == "ok"
    assert plan(folder, tp=1).verdict == explain(folder, arch="sm90").verdict == "ok"
    with open_checkpoint(folder) as weights:
        check_all_read(weights)
        assert [*load_layers(weights)]
    load_model(folder)
    assert convert(folder, tmp_path / "converted", to="bfloat16", rounding=True).verdict == "ok"
    assert shard(folder, tmp_path / "shared", tp=1).verdict == "ok"
