"""`--html` of verify and explain, and `qload layout`: written pages, and usage errors."""

import json
from collections import Counter
from importlib import util
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qload import convert
from qload.storage import SafetensorsStorage
from qload.testing import make_checkpoint
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "models" / "gptq_mixtral"


@pytest.mark.parametrize("verb", ["verify", "explain"])
def test_a_page_is_written_beside_what_is_printed(verb: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(verb, MODEL, "--html", page)

    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"] == "ok"
    assert f"<title>qload {verb}</title>" in page.read_text()
    assert "model.layers.0.mlp.experts.1.up_proj" in page.read_text()


def test_a_page_of_several_checkpoints_is_a_usage_error(tmp_path: Path) -> None:
    result = run("verify", MODEL, MODEL, "--html", tmp_path / "page.html")

    assert result.exit_code == 2
    assert "a page of one PATH" in result.output
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("verb", ["verify", "explain"])
def test_a_place_that_cannot_be_written_is_told_first(verb: str, tmp_path: Path) -> None:
    assert run(verb, MODEL, "--html", tmp_path / "no" / "page.html").exit_code == 2


def test_without_jinja_a_page_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "jinja2" else find(name))
    result = run("verify", MODEL, "--html", tmp_path / "page.html")

    assert result.exit_code == 2
    assert "qload-weights[pictures]" in result.output


def test_a_layout_is_json_or_a_drawing() -> None:
    assert json.loads(run("layout", "awq").stdout)["words"]["0,0"][1] == [0, 2]
    assert run("layout", "marlin", "--bits", "8", "--svg").stdout.startswith("<svg")


@pytest.mark.parametrize("options", [["nothing"], ["awq", "--bits", "9"], ["marlin", "--bits", "3"]])
def test_what_there_is_no_layout_of_is_a_usage_error(options: list[str]) -> None:
    assert run("layout", *options).exit_code == 2


def test_a_page_beside_a_reference_has_maps_of_errors(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("verify", MODEL, "--against", MODEL, "--html", page).exit_code == 0

    (_, layers) = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    at = layers["columns"].index("error")
    assert layers["drawn"][str(at)] == "map"
    assert {row[at].split(":")[0] for row in layers["rows"] if row[1] == "gptq"} == {"0"}


def read_by(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, int]:
    """Return the tensor bytes read by a command, per folder."""
    read = Counter[str]()

    def counted(storage: SafetensorsStorage, nbytes: int) -> None:
        (file,) = storage.files.values()
        read[Path(str(file)).parent.name] += nbytes

    with monkeypatch.context() as patched:
        patched.setattr(SafetensorsStorage, "_count", counted)
        assert run(*arguments).exit_code in (0, 1)
    return dict(read)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_page_reads_a_reference_once_and_scales_again(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, plain = tmp_path / "one", tmp_path / "plain"
    make_checkpoint("gptq", one, config={"num_hidden_layers": 1})
    convert(one, plain, to="float32")
    stored = load_file(plain / "model.safetensors")
    if damaged:
        stored["lm_head.weight"][-1, -1] += 1
        save_file(stored, plain / "model.safetensors")
    command = ("verify", one, "--against", plain)

    told = read_by(monkeypatch, *command)
    with_page = read_by(monkeypatch, *command, "--html", tmp_path / "page.html")

    again = stored["lm_head.weight"].nbytes  # without a page, a different layer is read twice
    assert with_page["plain"] == told["plain"] - damaged * again
    assert with_page["one"] < told["one"] * 1.1
