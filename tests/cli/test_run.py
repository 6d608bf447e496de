"""`qload run`: text of the engine, output as in docs/cli.md, and errors in one line."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qload.cli import main
from qload.cli.output import UnsupportedCommandError
from qload.cli.run import Generation, refuse_model_types, speed_lines
from qload.engines.model_types import ModelSizes, sizes_of_any_type
from qload.errors import ConfigError, UnreadTensorsError
from qload.models import Engine, Sampler, load_model
from qload.models import memory as memory_module
from tests.models import drawn
from tests.support.unread import unknown_type

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by the number of bits of a mantissa
PROMPT = [3, 1, 4, 1, 5]
CONFIG = drawn.config("llama", eos_token_id=None, torch_dtype="float32")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(drawn.tensors(CONFIG), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def engine() -> Engine:
    return Engine(load_model(drawn.weights(CONFIG, drawn.tensors(CONFIG)), CONFIG), max_tokens=16)


def changed(folder: Path, **said: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **said}))
    return folder


@pytest.mark.parametrize(
    "sampling", [[], ["--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "5"]]
)
def test_the_last_line_is_the_new_ids_and_the_speed_is_said_beside_it(
    folder: Path, sampling: list[str]
) -> None:
    sampler = Sampler(1.0, 9, 0.9, 5) if sampling else Sampler()
    want = engine().generate(PROMPT, 8, sampler)

    result = run(folder, "--prompt-ids", "3,1, 4,1,5", "--tokens", 8, *sampling)

    assert (result.exit_code, result.stdout) == (0, f"{','.join(map(str, want))}\n")
    assert [line.split(":")[0] for line in result.stderr.splitlines()[1:]] == ["prompt", "steps"]


@pytest.mark.parametrize(
    ("said", "options", "dtype"),
    [
        ("bfloat16", [], torch.bfloat16),
        ("float16", [], torch.float16),
        (None, [], torch.float32),
        ("bfloat16", ["--dtype", "float16"], torch.float16),
    ],
)
def test_the_dtype_is_that_of_the_option_or_of_the_config_or_float32(
    said: str | None, options: list[str], dtype: torch.dtype, folder: Path
) -> None:
    result = run(
        changed(folder, torch_dtype=said), "--prompt-ids", "3,1", "--tokens", 0, "--logits", *options
    )

    logits = torch.tensor(json.loads(result.stdout.splitlines()[0]))
    exact = [other for other in DTYPES if torch.equal(logits.to(other).float(), logits)]
    assert exact[0] == dtype


def test_a_system_that_tells_no_free_memory_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_bytes", lambda device: None)

    assert run(folder, "--prompt-ids", "3,1", "--tokens", 1).exit_code == 0


def test_logits_are_those_after_the_prompt_as_json_above_the_ids(folder: Path) -> None:
    want = engine().prefill(PROMPT)[0].tolist()

    lines = run(folder, "--prompt-ids", "3,1,4,1,5", "--tokens", 1, "--logits").stdout.splitlines()
    none = run(folder, "--prompt-ids", "3,1,4,1,5", "--tokens", 0, "--logits").stdout.splitlines()

    assert json.loads(lines[0]) == want
    assert lines[1] == str(max(range(len(want)), key=want.__getitem__))
    assert none == [lines[0], ""]


def test_text_is_read_and_written_by_the_checkpoints_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    words = {f"w{n}": n for n in range(CONFIG["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    ids = run(folder, "--prompt-ids", "3,1,4,1,5", "--tokens", 4).stdout.strip()

    said = run(folder, "--prompt", "w3 w1 w4 w1 w5", "--tokens", 4).stdout.splitlines()

    assert said == [" ".join(f"w{each}" for each in ids.split(",")), ids]


def refused(*arguments: Any) -> str:
    """Return the one line on standard error of an invalid command; standard output has it as an object."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    told = json.loads(result.stdout)
    assert (told["verdict"], told["exit_code"]) == ("error", 2)
    return result.stderr


def test_a_type_without_a_model_is_refused_with_those_there_are(folder: Path) -> None:
    said = refused(changed(folder, model_type="mambo"), "--prompt-ids", "1")

    assert "model_type" in said
    assert "llama, mistral" in said
    assert "mambo" in said


def test_an_unread_tensor_is_refused_before_the_type_of_the_model(tmp_path: Path) -> None:
    unknown_type(tmp_path / "model")

    assert run(tmp_path / "model", "--prompt-ids", "1").exit_code == 4
    with pytest.raises(UnreadTensorsError):
        load_model(tmp_path / "model")


def test_no_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()

    assert "config.json" in refused(folder, "--prompt-ids", "1")


@pytest.mark.parametrize(
    ("ids", "tokens", "said"),
    [
        pytest.param("3,40", 1, "ids of a vocabulary of 40: 0 to 39, got 40", id="outside of the vocabulary"),
        pytest.param(",".join(["1"] * 65), 0, "1 to 64 ids, got 65 ids", id="longer than the positions"),
        pytest.param(
            ",".join(["1"] * 60), 5, "0 to 4 after a prompt of 60, got 5", id="more than the positions"
        ),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(
    folder: Path, ids: str, tokens: int, said: str
) -> None:
    assert said in refused(folder, "--prompt-ids", ids, "--tokens", tokens)


def test_too_little_memory_is_refused_with_both_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "free_bytes", lambda device: 1000)
    weights = sum(each.nbytes for each in drawn.tensors(CONFIG).values())
    cache = 2 * 2 * (2 * 16) * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * 4  # two layers, two pages

    said = refused(folder, "--prompt-ids", "1", "--tokens", 8)

    assert said == f"Error: cpu: too little memory, needed {weights + cache} bytes, free 1000 bytes\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "either --prompt-ids or --prompt", id="no prompt"),
        pytest.param(["--prompt-ids", "1", "--prompt", "a"], "either --prompt-ids or --prompt", id="two"),
        pytest.param(["--prompt-ids", "1,x"], "'1,x' is not a list of token ids", id="no numbers"),
        pytest.param(["--prompt-ids", "-1"], "'-1' is not a list of token ids", id="negative"),
        pytest.param(["--prompt-ids", "1", "--device", "tpu"], "device", id="no such device"),
        pytest.param(["--prompt-ids", "1", "--temperature", "-1"], "temperature", id="temperature"),
    ],
)
def test_options_that_cannot_be_are_usage_errors(folder: Path, arguments: list[str], said: str) -> None:
    result = run(folder, *arguments)

    assert result.exit_code == 2
    assert said in result.stderr


def test_a_checkpoint_that_cannot_be_read_is_no_wrong_command(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")

    assert run(folder, "--prompt-ids", "1").exit_code == 1


@pytest.mark.parametrize("lead", ["", "base_model.model."])
def test_a_model_with_adapters_that_are_not_merged_is_refused_with_their_place(
    folder: Path, lead: str
) -> None:
    tensors, name = drawn.tensors(CONFIG), "model.layers.0.self_attn.q_proj"
    weight = tensors.pop(f"{name}.weight")
    tensors[f"{name}.base_layer.weight"] = weight
    tensors[f"{name}.lora_A.default.weight"] = torch.ones(2, weight.shape[1])
    tensors[f"{name}.lora_B.default.weight"] = torch.ones(weight.shape[0], 2)
    save_file({f"{lead}{each}": tensor for each, tensor in tensors.items()}, folder / "model.safetensors")

    result = run(folder, "--prompt-ids", "1")

    assert result.exit_code == 1
    assert f"{lead}{name}.lora_A.default.weight is an unmerged adapter" in result.stderr
    assert f"of {lead}{name}.base_layer; remedy: merge them with PEFT" in result.stderr


def test_the_lines_of_speed_name_their_numbers() -> None:
    generation = Generation([5, 6, 7], None, loading=1.5, seconds=[0.5, 2.0, 4.5], bytes=3_000_000_000)

    assert list(speed_lines(7, generation)) == [
        "loaded 3.000 GB of weights in 1.5 s, warm",
        "prompt: 7 tokens in 0.500 s, 14 tokens/s",
        "steps: 2 in 4.000 s, 0.5 tokens/s, 1.5 GB/s of weights",
    ]


@pytest.mark.parametrize(("seconds", "lines"), [([], 1), ([0.5], 2), ([0.5, 0.5], 2)])
def test_lines_of_speed_without_steps_are_left_out(seconds: list[float], lines: int) -> None:
    generation = Generation([], None, loading=1.5, seconds=seconds, bytes=3)

    assert len(list(speed_lines(7, generation))) == lines


def test_an_error_about_the_model_type_is_one_of_the_command() -> None:
    for key in ("model_type", "text_config.model_type"):
        with pytest.raises(UnsupportedCommandError, match=key), refuse_model_types():
            raise ConfigError("config.json", key, "a known type", "x")
    with pytest.raises(ConfigError), refuse_model_types():
        raise ConfigError("config.json", "model_type.x", "a known type", "x")


def test_a_text_needs_a_tokenizer_that_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text")
    assert refused(folder, "--prompt", "a") == (
        "Error: prompt, expected a checkpoint with tokenizer.json, or --prompt-ids, got none\n"
    )

    (folder / "tokenizer.json").write_text("{}")
    result = run(folder, "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: tokenizer.json: file, expected a tokenizer, got ")

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refused(folder, "--prompt", "a").startswith(
        "Error: prompt, expected ids (--prompt-ids), or tokenizers installed: "
        "pip install 'qload-weights[text]', got a text ("
    )


def test_without_transformers_the_refusal_of_a_type_names_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qload.engines.transformers.generation", None)

    result = run(changed(folder, model_type="granite"), "--prompt-ids", "3,1")

    assert result.exit_code == 2
    assert "pip install 'qload-weights[transformers]'" in result.stderr


def test_sizes_of_another_type_are_read_from_the_folder_and_by_the_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, read = ModelSizes("granite", "transformers 1", 2, 64, 256, 128, None), Mock()
    read.read_sizes.side_effect = [sizes, None]
    monkeypatch.setitem(sys.modules, "qload.engines.transformers.generation", read)

    assert sizes_of_any_type(folder, {"model_type": "granite"}) is sizes
    with pytest.raises(ConfigError, match="model_type"):
        sizes_of_any_type(folder, {"model_type": "unheard"})
    assert [each.args for each in read.read_sizes.call_args_list] == [
        (folder, "granite"),
        (folder, "unheard"),
    ]
