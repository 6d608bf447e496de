"""What the page about other projects shows runs, and prints what it says.

Only `nox -s outsiders` collects this file.
"""

import re

import pytest

from tests.meta.test_readme import OUTSIDERS, Block, blocks

SHOWN = [block for block in blocks() if block.page == OUTSIDERS and block.language == "python"]


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_a_block_of_the_page_prints_what_it_says(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    block.execute()

    said = re.findall(r"print\(.*\)  # (.*)", block.text)
    printed = capsys.readouterr().out
    assert said
    assert all(each in printed for each in said)
