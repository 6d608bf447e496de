"""Trials of one type: `verify`, transformers with qload's layers, and `qload run` on each format; damage."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qload import architecture_of, convert, verify
from qload.architecture.generated_tables import read_file
from qload.architecture.model_tables import TABLES
from qload.cli import main
from tests.engines.transformers.models import RANGE, Stored
from tests.engines.transformers.tiny_types import stored_model, tiny_config
from tests.model_tables.build import transposed_names
from tests.model_tables.draw import make_config
from tests.model_tables.tiny import MAX_BYTES, class_of, fill, tiny_changes
from tests.models.recorded import off
from tests.verify.damage.any_type import AGAINST, ALONE
from tests.verify.damage.model import DoesNotApplyError, Model
from tests.verify.damage.planting import found_against, found_alone

FORMATS = {"plain": "", "w4a16": "", "gptq": "", "fp8 block": "", "nvfp4": ".experts."}  # -> layers
DECLARED = ("fp8 block",)  # `run` quantizes inputs as these declare, and gives other tokens
IDS, TOKENS = [3, 1, 4, 1, 5, 9, 2, 6], 3
SEED, SHOWN = 3, 160


@dataclass
class Trial:
    """Outcome of a type.

    Attributes
    ----------
    formats
        Format -> error; empty for none.
    seconds
        The most CPU seconds of `verify` of a sound model.
    uncompared
        Tensors whose shape the table does not state.
    alone, against, silent, inapplicable
        Kinds of damage that `verify` alone found, that it found next to a sound copy, that it did not find,
        and that the type has no place for.
    """

    formats: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    uncompared: int = 0
    alone: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    inapplicable: list[str] = field(default_factory=list)


def model_types() -> dict[str, str]:
    """Return each type with a table -> the name of its class."""
    classes = {kind: entry["class"] for kind, entry in read_file()["types"].items()}
    for kind in TABLES:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        classes[kind] = name if isinstance(name, str) else name[0]
    return classes


def build_model(kind: str) -> PreTrainedModel:
    """Build the first tiny model of a type that computes finite logits."""
    model_class = class_of(model_types()[kind])
    error: Exception = ValueError("no config")
    makers: tuple[Callable[[], Any], ...] = (
        lambda: tiny_config(kind),
        lambda: make_config(model_class.config_class, tiny_changes(model_class, 0)),
    )
    for make in makers:
        try:
            config = make()
            config._attn_implementation = config._experts_implementation = "eager"
            with torch.device("meta"):
                size = sum(tensor.nbytes for tensor in model_class(config).state_dict().values())
            if size > MAX_BYTES:
                raise ValueError(f"{size >> 20} MB are no tiny model")
            torch.manual_seed(SEED)
            model = model_class(config).eval()
            fill(model, SEED)
            if not torch.isfinite(logits(model)).all():
                raise ValueError("logits are not finite")
        except Exception as reason:  # a class refuses a config by any error
            error = reason
        else:
            return model
    raise error


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits after each of `IDS`."""
    found: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits
    return found


def try_type(kind: str, folder: Path) -> Trial:
    """Try all formats and all kinds of damage on a type."""
    trial, model = Trial(), build_model(kind)
    stored: dict[str, Stored | None] = {}
    for name in FORMATS:
        stored[name] = None
        try:
            stored[name] = store(model, name, folder, stored.get("w4a16"))
        except Exception as error:
            trial.formats[name] = f"written: {brief(error)}"
    for name, each in stored.items():
        if each is not None:
            trial.formats[name] = "; ".join(errors_of(trial, name, each))
    trial.uncompared = count_uncompared(folder / "plain")
    damage(trial, stored, folder)
    return trial


def count_uncompared(plain: Path) -> int:
    """Count the tensors of a plain model whose shape the table of the type does not state."""
    model = Model.read(plain)
    architecture = architecture_of(model.config)
    assert architecture is not None
    prefixes = {name: name.removesuffix(".weight") for name in model.tensors}
    return sum(
        architecture.shape(name) is None
        and architecture.expected(prefix) is None
        and architecture.expected(name) is None
        for name, prefix in prefixes.items()
    )


def store(model: PreTrainedModel, name: str, folder: Path, packed: Stored | None) -> Stored | None:
    """Write a model in a format, GPTQ by a conversion of `packed`; None if no layer is quantized."""
    if name == "plain":
        model.save_pretrained(folder / "plain")
        return Stored(folder / "plain", folder / "plain", type(model))
    if name == "gptq":
        if packed is None:
            return None
        report = convert(packed.path, folder / name, to="gptq")
        if report.verdict != "ok":
            raise ValueError("convert refuses it")
        return replace(packed, path=folder / name)
    if name == "fp8 block" and transposed_names(model):  # FP8 is of linear layers alone
        return None
    found = stored_model(model, name, folder, only=FORMATS[name])
    sizes = [
        sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (found.path, found.means)
    ]
    return None if sizes[0] >= sizes[1] else found


def brief(error: Exception) -> str:
    """Return the start of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]


def errors_of(trial: Trial, name: str, stored: Stored) -> Iterator[str]:
    """Yield the errors of `verify`, of the transformers door and of `run` on a stored model."""
    checks: dict[str, Callable[[], str]] = {
        "verify": lambda: verified(trial, stored.path),
        "transformers": lambda: loaded(stored),
        "run": lambda: generated(stored),
    }
    for step, check in checks.items():
        if step == "run" and name in DECLARED:
            continue
        try:
            error = check()
        except Exception as reason:
            error = brief(reason)
        if error:
            yield f"{step}: {' '.join(error.split())[:SHOWN]}"


def verified(trial: Trial, path: Path) -> str:
    """Verify a sound model."""
    began = time.process_time()
    report = verify(path)
    trial.seconds = max(trial.seconds, round(time.process_time() - began, 2))
    if report.findings:
        return f"{report.findings[0].rule}: {report.findings[0].message}"
    assert report.coverage is not None
    if report.coverage.explained != report.coverage.total:
        return f"{report.coverage.explained} of {report.coverage.total} bytes are explained"
    return ""


def loaded(stored: Stored) -> str:
    """Compare the logits of transformers with qload's layers to those of the plain weights."""
    apart = off(logits(stored.load().eval()), logits(stored.plain()))
    return "" if apart < RANGE else f"logits differ by {apart:.1e} of their range"


def generated(stored: Stored) -> str:
    """Compare the tokens of `qload run` to those of transformers with the plain weights."""
    ids = ",".join(map(str, IDS))
    command = ["run", str(stored.path), "--prompt-ids", ids, "--tokens", str(TOKENS), "--dtype", "float32"]
    result = CliRunner().invoke(main, command)
    if result.exit_code:
        return (result.stderr.strip().splitlines() or [repr(result.exception)])[-1]
    got = [int(token) for token in result.stdout.splitlines()[-1].split(",")]
    plain = stored.plain()
    ends = plain.generation_config.eos_token_id
    plain.generation_config = GenerationConfig()
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=0)
    prompt = torch.tensor([IDS])
    sequence = plain.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    want = sequence[0].tolist()
    want = want[len(IDS) :] if want[: len(IDS)] == IDS else want
    return "" if got == want else f"tokens are {got}, and {want} of transformers"


def damage(trial: Trial, stored: Mapping[str, Stored | None], folder: Path) -> None:
    """Plant each kind of damage in a quantized model, or else in the plain one."""
    paths = [each.path for name in ("w4a16", "plain") if (each := stored[name])]
    sound = {path: Model.read(path) for path in paths}
    for plant in (*ALONE, *AGAINST):
        outcome = "inapplicable"
        for path, model in sound.items():
            damaged = copy.deepcopy(model)
            with suppress(DoesNotApplyError):
                reference = plant(damaged)
                outcome = place_of(damaged, reference or path, folder / plant.__name__)
                break
        getattr(trial, outcome).append(plant.__name__)


def place_of(model: Model, sound: Model | Path, folder: Path) -> str:
    """Return where damage is found: `alone`, `against` a sound model, or `silent`."""
    if found_alone(model, folder / "damaged"):
        return "alone"
    if isinstance(sound, Model):
        sound = sound.write(folder / "sound")
    return "against" if found_against(model, sound, folder / "damaged") else "silent"
