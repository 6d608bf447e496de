"""500 random combinations of a dialect of weights and scales, a form, a model type and an entry point.

Each checkpoint is valid: an entry point returns the values of numpy, or raises an error of qload with the
names of tensors or of the dialect, and no verdict is a finding. Damaged checkpoints follow, with findings.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import qload
from qload import ExpertFacts, FakeWorld, GatedActivation, QloadError, UnsupportedFormatError, open_checkpoint
from qload.cli import main
from tests.support.dialect_checkpoints import (
    DENSE,
    DIALECTS,
    DOTTED,
    EACH,
    JOINED,
    KNOWN,
    LINEAR,
    SPLIT,
    UNKNOWN,
    Case,
    Lie,
    Stored,
    Values,
    write,
)  # fmt: skip
from tests.support.dialect_forward import logits_of

COUNT = 500
PROMPT = (1, 5, 9)
LEADS = ("mlp.experts", "feed_forward.experts", "block_sparse_moe.experts", "moe")
LAWFUL = ("ok", "incomplete", "unsupported")
EXIT_CODES = {"ok": 0, "incomplete": 4, "unsupported": 4}


# ---------- random combinations ----------


def forms_of(kind: str) -> tuple[str, ...]:
    return {
        "llama": (DENSE,), "granitemoe": (LINEAR,), "gpt_oss": (EACH, JOINED),
        "mixtral": (EACH, DOTTED, JOINED), "qwen3_moe": (EACH, DOTTED, JOINED, SPLIT),
    }.get(kind, (DENSE, EACH, DOTTED, JOINED, SPLIT))  # fmt: skip


def drawn(seed: int) -> Case:
    """Draw a combination: each dialect in turn, all other choices at random."""
    draw = random.Random(seed)
    dialect = DIALECTS[seed % len(DIALECTS)]
    kinds = [kind for kind in (*KNOWN, *UNKNOWN) if set(forms_of(kind)) & set(dialect.forms)]
    kind = draw.choice(kinds)
    form = draw.choice([form for form in forms_of(kind) if form in dialect.forms])
    doors = [door for door in DOORS if form != DENSE or door != "experts"]
    lead = {"mixtral": LEADS[2], "granitemoe": "block_sparse_moe"}.get(kind, LEADS[0])
    if kind in UNKNOWN:
        lead = draw.choice(LEADS if form in (SPLIT, DOTTED) else LEADS[:3])
    named = ("w1", "w3", "w2") if kind == "mixtral" and form == EACH and draw.random() < 0.5 else Case.names
    turn = form in (JOINED, SPLIT, DOTTED) and dialect.codes == "weight" and not dialect.foreign
    lie = Lie(
        inputs_first=turn and (kind == "gpt_oss" or (draw.random() < 0.4 and form != DOTTED)),
        interleaved=kind == "gpt_oss" and form == JOINED,
        together=form == JOINED and "tensor" in dialect.name and draw.random() < 0.5,
    )
    return Case(seed, dialect, form, kind, draw.choice(doors), f"model.layers.0.{lead}", lie, named)


# ---------- checks of all entry points ----------


def equal(got: Tensor, want: Values) -> bool:
    """Compare values after one rounding to the type of the result."""
    exact = torch.from_numpy(np.ascontiguousarray(want)).to(torch.float32)
    return got.shape == exact.shape and torch.equal(got, exact.to(got.dtype))


def check_text(text: str, case: Case, stored: Stored) -> None:
    """Check the text of an error: the name of a tensor or layer, or the dialect of the whole checkpoint."""
    names = (case.lead, *stored.shown, *stored.plain, *stored.tensors)
    dialect = case.dialect.foreign and "not read" in text
    assert dialect or any(name in text for name in names), f"names no tensor: {text}"


def check_refusal(error: Exception, case: Case, stored: Stored) -> None:
    assert isinstance(error, QloadError), f"{type(error).__name__}: {error}"
    if not (isinstance(error, UnsupportedFormatError) and case.dialect.foreign):
        check_text(str(error), case, stored)


def command(*words: object) -> Result:
    """Run a command in this process; expect one line and an exit code for any input."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    return result


def load(path: Path, name: str, how: str = "get_weights", group: Any = None) -> Tensor:
    with open_checkpoint(path, process_group=group) as weights:
        return getattr(weights, how)(name).dequantize()  # type: ignore[no-any-return]


class Door:
    """VerifiedCheckpoint of a case, and the results of entry points."""

    def __init__(self, case: Case, path: Path) -> None:
        self.case, self.path = case, path / "checkpoint"
        self.stored = write(case, self.path)
        self.values = self.stored.shown | self.stored.plain
        self.report = qload.verify(self.path)
        self.verdict = str(self.report.verdict)
        self.unread = self._unread()

    def _unread(self) -> set[str]:
        """Return the unread names of the ledger after a complete load, and names without any reader."""
        codes = self.stored.codes if self.case.dialect.unread else []
        known = {name for name in codes if ".self_attn." not in name}
        try:
            with open_checkpoint(self.path) as weights:
                for layer in qload.layers(weights):
                    if layer.error is None:
                        weights.get_weights(layer.prefix)
                return known | set(weights.report().unread)
        except QloadError:
            return set(self.stored.tensors)  # the checkpoint cannot be opened

    def loaded(self, names: list[str]) -> dict[str, Tensor]:
        """Return the values of readable layers; expect an error by name for all others."""
        found: dict[str, Tensor] = {}
        for name in names:
            try:
                found[name] = load(self.path, name)
            except Exception as error:
                check_refusal(error, self.case, self.stored)
        return found

    def is_right(self, name: str, tensor: Tensor) -> bool:
        turned = self.stored.turned.get(name)
        return equal(tensor, self.values[name]) or (turned is not None and equal(tensor, turned))

    def check_verdict(self) -> None:
        report, coverage = self.report, self.report.coverage
        told = [f"{finding.rule} {finding.tensor}: {finding.message}" for finding in report.findings]
        assert self.verdict in LAWFUL, told[:3]
        if self.verdict == "ok":
            assert not told
        if coverage is not None:
            assert (coverage.unread > 0) == (self.verdict == "incomplete")
            assert coverage.unexplained == coverage.refused == 0
        assert self.verdict != "ok" or not self.case.dialect.unread, "ok, of what no reader can know"
        must = self.case.form in self.case.dialect.read
        assert self.verdict == "ok" or not must, "a form that is read"

    def check_values(self) -> None:
        """Check the values: all are right, none is of an unread tensor, none is missing after an ok."""
        names = list(self.values)
        found = self.loaded(names)
        wrong = [name for name, tensor in found.items() if not self.is_right(name, tensor)]
        assert not wrong, f"wrong values: {wrong[:3]}"
        silent = [name for name in found if self.unread.intersection(self.stored.sources.get(name, ()))]
        assert not silent, f"values of unread tensors: {silent[:3]}"
        if self.verdict == "ok":
            plain = self.case.dialect.plain and self.case.form not in (DENSE, EACH)
            needed = [] if plain else self.stored.choices  # a stack of floats stays one tensor
            missing = [c[0] for c in needed if not any(set(names) <= found.keys() for names in c)]
            assert not missing, f"ok, and not read: {missing[:3]}"

    @property
    def whole(self) -> bool:
        return self.verdict == "ok"


def shares(door: Door, how: str, axis: int) -> None:
    """Check halves of each layer: they join to the whole, or both ranks raise an error."""
    for name, want in door.stored.shown.items():
        if want.ndim != 2:
            continue
        parts, errors = [], []
        for rank in FakeWorld(2):
            try:
                parts.append(load(door.path, name, how, rank))
            except Exception as error:
                check_refusal(error, door.case, door.stored)
                errors.append(error)
        assert len(errors) in (0, 2)
        assert errors or equal(torch.cat(parts, axis), want), name


def experts(door: Door) -> None:
    """Check the experts of the layer, with the rows of gate above those of up."""
    facts = ExpertFacts(GatedActivation("silu"))
    try:
        with open_checkpoint(door.path) as weights:
            made = weights.get_experts(door.case.lead, facts=facts)
            both = [weight.dequantize() for weight in made.gate_up]
            downs = [weight.dequantize() for weight in made.down]
    except Exception as error:
        check_refusal(error, door.case, door.stored)
        return
    assert not door.unread.intersection(door.stored.tensors)
    lead, names, shown = door.case.lead, door.case.names, door.stored.shown
    for expert, (gate_up, down) in enumerate(zip(both, downs, strict=True)):
        gate, up, last = (shown[f"{lead}.{expert}.{name}"] for name in names)
        assert equal(gate_up, np.concatenate([gate, up]))
        assert equal(down, last)


def listed(door: Door) -> None:
    """Check `layers`: the expected shape of each layer, or an error by name."""
    try:
        found = qload.layers(door.path)
    except Exception as error:
        check_refusal(error, door.case, door.stored)
        return
    for layer in found:
        if layer.error is not None:
            check_refusal(layer.error, door.case, door.stored)
        elif layer.prefix in door.values:
            assert layer.shape == door.values[layer.prefix].shape


def streamed(door: Door) -> None:
    """Check `load_layers`: right values up to the first error."""
    try:
        with open_checkpoint(door.path) as weights:
            found = {name: weight.dequantize() for name, weight in qload.load_layers(weights)}
    except Exception as error:
        check_refusal(error, door.case, door.stored)
        return
    for name, tensor in found.items():
        assert name not in door.values or door.is_right(name, tensor), name
        assert not door.unread.intersection(door.stored.sources.get(name, ())), name


def verified(door: Door) -> None:
    """Check the command against the function, and its exit code against the verdict."""
    result = command("verify", door.path, "--json")
    told = json.loads(result.stdout)
    assert told["verdict"] == door.verdict
    assert told["schema"] == 2
    assert result.exit_code == EXIT_CODES[door.verdict]


def against_itself(door: Door) -> None:
    report = qload.verify(door.path, against=door.path)
    assert report.verdict == door.verdict, [finding.message for finding in report.findings][:3]


def copied(door: Door) -> Path:
    other = door.path.with_name("copy")
    shutil.copytree(door.path, other)
    return other


def outcome_of(door: Door, other: Path) -> dict[str, str]:
    """Return the outcome of `diff` by layer; empty for an incomparable checkpoint."""
    result = qload.diff(door.path, other)
    if result.verdict in ("unreadable", "unsupported"):
        check_text(str(result.to_json()), door.case, door.stored)
        return {}
    if not door.whole:
        assert result.verdict != "ok", "equal, though something is not read"
    return {layer.name: layer.outcome for layer in result.layers}


def compared(door: Door) -> None:
    """Compare with a copy: no difference, and unread layers are not equal."""
    for name, outcome in outcome_of(door, copied(door)).items():
        unread = door.unread.intersection((name, *door.stored.sources.get(name, ())))
        assert outcome == ("unread" if unread else "bits"), name


def changed(door: Door, other: Path) -> str:
    """Change one byte in a drawn tensor of codes, and thereby a value; return the tensor's name."""
    file = other / "model.safetensors"
    tensors = load_file(file)
    name = random.Random(door.case.seed).choice(door.stored.codes)
    flat = tensors[name].contiguous().view(-1).view(torch.uint8).clone()
    floats = tensors[name].dtype.is_floating_point
    small = (flat & 0x7F) < 0x70  # far from NaN for FP8, any byte for other types
    at = int(small.nonzero()[0]) if floats else 0
    flat[at] ^= 0x08 if floats else 0x11
    tensors[name] = flat.view(tensors[name].dtype).view(tensors[name].shape)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def compared_with_changed(door: Door) -> None:
    """Compare with a copy with one changed byte of codes: it is never equal."""
    other = copied(door)
    name = changed(door, other)
    outcomes = outcome_of(door, other)
    layers = [layer for layer, sources in door.stored.sources.items() if name in sources]
    assert qload.diff(door.path, other).verdict != "ok"
    assert not outcomes or any(outcomes.get(layer) in ("differs", "unread") for layer in (name, *layers))
    report = qload.verify(door.path, against=other)
    assert report.verdict != "ok"


def is_written(door: Door, folder: Path, write: Callable[[], Any]) -> bool:
    """Return whether a verb wrote its folder; an error must name a tensor and leave no files."""
    try:
        result = write()
    except QloadError as error:
        check_refusal(error, door.case, door.stored)
        return False
    if result.verdict == "ok":
        assert door.whole, "written, though something is not read"
        return True
    assert not list(folder.rglob("*.safetensors"))
    check_text(str(result.to_json()), door.case, door.stored)
    return False


def converted(door: Door) -> None:
    """Check a conversion to float32: the same values, or no output files."""
    folder = door.path.with_name("converted")
    if door.case.dialect.plain:
        with pytest.raises(QloadError, match="quantized layers"):
            qload.convert(door.path, folder, to="float32")
        return
    if not is_written(door, folder, lambda: qload.convert(door.path, folder, to="float32")):
        return
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {name.removesuffix(".weight"): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    right = {name for name in door.stored.shown if name in found and door.is_right(name, found[name])}
    for choices in door.stored.choices:
        if door.case.lie.inputs_first or door.case.form not in (DENSE, EACH):
            continue  # the form of stacks may differ: the values are compared below
        assert any(set(names) <= right for names in choices), choices[0]
    again = Door.__new__(Door)
    again.case, again.path, again.stored, again.values = door.case, folder, door.stored, door.values
    for name, tensor in again.loaded(list(door.stored.shown)).items():
        assert again.is_right(name, tensor), name


def sharded(door: Door) -> None:
    """Check folders of two ranks: the parts join to the whole, or no output files."""
    folder = door.path.with_name("sharded")
    if not is_written(door, folder, lambda: qload.shard(door.path, folder, tp=2)):
        return
    ranks = sorted(path.parent for path in folder.rglob("config.json"))
    assert len(ranks) == 2
    for name, want in door.stored.shown.items():
        if want.ndim != 2:
            continue
        parts = []
        for rank in ranks:
            try:
                parts.append(load(rank, name))
            except Exception as error:
                check_refusal(error, door.case, door.stored)
        if len(parts) == 2:
            both = [
                torch.cat(parts, axis) for axis in (0, 1) if parts[0].shape[1 - axis] == want.shape[1 - axis]
            ]
            assert any(equal(one, want) for one in (*both, parts[0])), name


def planned(door: Door) -> None:
    """Check a plan: a verdict, and a reason for each layer without shares."""
    try:
        assert door.whole or qload.plan(door.path, tp=(1, 2)).verdict != "ok"
    except QloadError as error:
        check_refusal(error, door.case, door.stored)
    assert command("plan", door.path, "--tp", "2", "--json").exit_code in (0, 1, 4)


def explained(door: Door) -> None:
    result = command("explain", door.path, "--arch", "sm90", "--json")
    assert result.exit_code in (0, 1, 2, 4)
    if not door.whole:
        assert result.exit_code != 0


def inspected(door: Door) -> None:
    assert command("inspect", door.path, "--json").exit_code in (0, 4)


def run(door: Door) -> None:
    """Compare the logits with numpy, or expect an error; no logits with an unread tensor."""
    words = ("run", door.path, "--prompt-ids", ",".join(map(str, PROMPT)), "--tokens", "1")
    result = command(*words, "--dtype", "float32", "--logits")
    if result.exit_code:
        assert result.exit_code in (1, 2, 4)
        return
    assert door.whole
    want = logits_of(door.case, door.stored, PROMPT)
    if want is None or not door.case.dialect.weight_only:
        return
    got = np.array(json.loads(result.stdout.strip().splitlines()[0]), dtype=np.float64).reshape(-1)
    terms = (
        sum(tensor.numel() for tensor in door.stored.tensors.values()) ** 0.5
    )  # additions on the longest path of the model
    bound = np.finfo(np.float32).eps * terms * np.abs(want).max()
    assert np.abs(got - want).max() < bound


DOORS: dict[str, Callable[[Door], None]] = {
    "whole": lambda door: None,  # checked for each case
    "col": lambda door: shares(door, "get_weights_col", 0),
    "row": lambda door: shares(door, "get_weights_row", 1),
    "experts": experts, "layers": listed, "load_layers": streamed, "verify": verified,
    "against": against_itself, "diff": compared, "diff byte": compared_with_changed, "convert": converted,
    "shard": sharded, "plan": planned, "explain": explained, "inspect": inspected, "run": run,
}  # fmt: skip

CASES = [drawn(seed) for seed in range(COUNT)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_drawn_dialect_is_right_or_refused_at_its_door(case: Case, tmp_path: Path) -> None:
    door = Door(case, tmp_path)
    door.check_verdict()
    door.check_values()
    DOORS[case.door](door)


def test_every_dialect_form_type_and_door_is_drawn() -> None:
    assert {case.dialect.name for case in CASES} == {dialect.name for dialect in DIALECTS}
    assert {case.door for case in CASES} == set(DOORS)
    assert {case.kind for case in CASES} == {*KNOWN, *UNKNOWN}
    stacks = {(case.form, case.kind in KNOWN) for case in CASES}
    assert stacks >= {
        (form, known) for form in (DENSE, EACH, JOINED, DOTTED, SPLIT) for known in (True, False)
    }


# ---------- damaged checkpoints ----------


def damages() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Return shapes and dtypes outside every dialect."""
    yield "a row more", lambda tensor: torch.cat([tensor, tensor[-1:]])
    yield "a row less", lambda tensor: tensor[:-1]
    yield "three axes", lambda tensor: tensor[None, None].repeat(1, 2, 1, 1)
    yield "booleans", lambda tensor: torch.ones(tensor.shape, dtype=torch.bool)
    yield "complex", lambda tensor: torch.ones(tensor.shape, dtype=torch.complex64)


READ = [dialect for dialect in DIALECTS if DENSE in dialect.read and dialect.section is not None]
DAMAGES = list(damages())
DAMAGED = [  # a row more or less is valid for a weight of one number per entry and one scale
    (dialect, *DAMAGES[2 + number % 3 if " tensor" in dialect.name else number % len(DAMAGES)])
    for number, dialect in enumerate(READ)
]


@pytest.mark.parametrize(("dialect", "what", "damage"), DAMAGED, ids=[f"{d.name}-{w}" for d, w, _ in DAMAGED])
def test_a_tensor_that_no_dialect_explains_is_a_finding(
    dialect: Any, what: str, damage: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    case = replace(drawn(0), dialect=dialect, form=DENSE, kind="llama")
    write(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    name = f"{layer}.{dialect.codes}"
    tensors[name] = damage(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    report = qload.verify(tmp_path)
    assert report.verdict == "findings"
    assert any(layer in f"{finding.tensor} {finding.message}" for finding in report.findings)
    with pytest.raises(QloadError, match=layer.replace(".", r"\.")):
        load(tmp_path, layer)
