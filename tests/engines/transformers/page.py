"""What the page about transformers and its docstrings show runs.

Only `nox -s transformers` collects this file.
"""

import doctest
from pathlib import Path

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from qload.engines.transformers import config
from tests.meta.test_readme import ENGINES, Block, blocks
from tests.paths import FIXTURES

SHOWN = [
    block for block in blocks() if block.page == ENGINES / "transformers.md" and block.language == "python"
]


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_a_block_of_the_page_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fixtures").symlink_to(FIXTURES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    before = dict(AUTO_QUANTIZATION_CONFIG_MAPPING)

    block.execute()

    assert before == AUTO_QUANTIZATION_CONFIG_MAPPING
    assert "tensor(" in capsys.readouterr().out or "print(" not in block.text


def test_the_examples_of_a_docstring_run() -> None:
    assert doctest.testmod(config) == (0, 3)
