"""`qload run` on types without a decoder of qload; only `nox -s transformers` collects this file."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from torch import Tensor

from qload.cli import main
from qload.models import Sampler
from tests.models.with_transformers import theirs
from tests.models.with_transformers.formats import quantized
from tests.support import torchrun
from tests.verify.damage.model import Model

PROMPT = [5, 3, 9, 20]
TOKENS = 6
RANGE = 1e-5  # of the logits: sums of float32 in another order
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MIXED = {"full_attn_idxs": [1]}
KINDS: dict[str, dict[str, Any]] = {"granite": {}, "lfm2": MIXED, "olmoe": EXPERTS}
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def checkpoint(kind: str) -> Path:
    """A folder of a tiny quantized model, `stored`, and the same with plain weights, `means`."""
    folder = Path(mkdtemp(prefix="qload-run-"))
    config = theirs.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    model = quantized(theirs.written(config, folder / "plain"), folder, "w4a16")
    Model(model.tensors, model.config).write(folder / "stored")
    return folder


def plain_model(kind: str) -> Any:
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return theirs.AutoModelForCausalLM.from_pretrained(checkpoint(kind) / "means", **options).eval()


def run(path: Path, *options: Any) -> Result:
    ids = ",".join(map(str, PROMPT))
    command = ["run", path, "--prompt-ids", ids, "--tokens", TOKENS, "--dtype", "float32", *options]
    return CliRunner().invoke(main, [*map(str, command)])


def printed_ids(result: Result) -> list[int]:
    assert result.exit_code == 0, result.output
    return [int(token) for token in result.stdout.splitlines()[-1].split(",")]


@torch.no_grad()
def continued(model: Any, sampler: Sampler, tokens: int = TOKENS) -> tuple[list[int], Tensor]:
    """The ids that a sampler chooses from the logits of whole sequences, and the first of these logits."""
    ids, numbers, rows = list(PROMPT), sampler.numbers(0), []
    while len(ids) < len(PROMPT) + tokens:
        rows.append(model(torch.tensor([ids]), use_cache=False).logits[:, -1])
        ids += sampler.choose(rows[-1], torch.tensor([next(numbers)])).tolist()
    return ids[len(PROMPT) :], rows[0]


@every_kind
def test_ids_and_logits_are_those_of_the_plain_weights(kind: str) -> None:
    want, logits = continued(plain_model(kind), Sampler())

    result = run(checkpoint(kind) / "stored", "--logits")

    assert printed_ids(result) == want
    got = torch.tensor(json.loads(result.stdout.splitlines()[0]))
    assert (got - logits[0]).abs().max() <= RANGE * (logits.max() - logits.min())
    assert f"{kind}: transformers {transformers.__version__} runs it" in result.stderr


def test_ids_are_drawn_by_the_sampler() -> None:
    want, _ = continued(plain_model("granite"), Sampler(0.9, 20, 0.95, 7))

    options = ("--temperature", 0.9, "--top-k", 20, "--top-p", 0.95, "--seed", 7)
    assert printed_ids(run(checkpoint("granite") / "stored", *options)) == want
    assert want != continued(plain_model("granite"), Sampler())[0]


def changed(tmp_path: Path, name: str, **values: Any) -> Path:
    """A copy of the quantized model with other values in a file."""
    for file in (checkpoint("granite") / "stored").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **values}))
    return tmp_path


def test_text_ends_with_an_id_of_the_generation_config(tmp_path: Path) -> None:
    want, _ = continued(plain_model("granite"), Sampler(1.0, seed=3))
    last = next(index for index in range(1, TOKENS) if want[index] not in want[:index])

    folder = changed(tmp_path, "generation_config.json", eos_token_id=[63, want[last]])
    got = printed_ids(run(folder, "--temperature", 1.0, "--seed", 3))

    assert got == want[: last + 1]


def test_a_generation_config_changes_no_choice(tmp_path: Path) -> None:
    folder = changed(
        tmp_path, "generation_config.json", repetition_penalty=50.0, do_sample=True, suppress_tokens=[3]
    )

    assert printed_ids(run(folder)) == printed_ids(run(checkpoint("granite") / "stored"))


def test_two_ranks_share_the_model() -> None:
    ids = ",".join(map(str, PROMPT))
    command = ["-m", "qload", "run", str(checkpoint("granite") / "stored"), "--prompt-ids", ids]
    result = torchrun.ended(2, *command, "--tokens", str(TOKENS), "--dtype", "float32")

    want = printed_ids(run(checkpoint("granite") / "stored"))
    assert result.stdout.splitlines()[-1] == ",".join(map(str, want)), result.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"model_type": "granitx"}, "a supported type: llama", id="unknown type"),
        pytest.param({"hidden_size": "many"}, "a model that transformers", id="refused config"),
        pytest.param({"max_position_embeddings": 9}, "tokens", id="positions"),
    ],
)
def test_a_model_that_cannot_run_is_refused_in_one_line(
    values: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    result = run(changed(tmp_path, "config.json", **values))

    assert result.exit_code == 2
    assert expected in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("Error")]) == 1


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "config.json", logits_scaling=1e-45)

    result = run(folder)

    assert result.exit_code == 2
    assert "logits must be finite" in result.stderr
