"""qload run as processes of torchrun: what one writes, and a refusal that is told once."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.models import drawn
from tests.support import torchrun

CONFIG = drawn.config("llama", eos_token_id=None, torch_dtype="float32")
ASKED = ("--prompt-ids", "3,1,4,1,5", "--tokens", "8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(drawn.tensors(CONFIG), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def launched(folder: Path, processes: int) -> tuple[int, str, str]:
    """What so many processes print, of one torchrun or without it."""
    done = torchrun.ended(processes, "-m", "qload", "run", str(folder), *ASKED)
    return done.returncode, done.stdout, done.stderr


def test_processes_write_what_one_writes_and_the_first_prints(folder: Path) -> None:
    one, two, four = (launched(folder, processes) for processes in (1, 2, 4))

    assert (one[0], one[1].count(",")) == (0, 7)
    assert one[:2] == two[:2] == four[:2]
    assert [each[2].count("loaded ") for each in (one, two, four)] == [1, 1, 1]


def test_a_world_that_cannot_cut_the_model_is_refused_once(folder: Path) -> None:
    code, printed, said = launched(folder, 3)

    assert code != 0  # torchrun's, of a first process that ends with 2
    assert json.loads(printed)["exit_code"] == 2
    assert [line for line in said.splitlines() if line.startswith("Error: ")] == [said.splitlines()[0]]
