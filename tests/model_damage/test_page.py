"""docs/types.md against the stored outcomes of trials."""

from tests.model_damage.page import PAGE, page, read_outcomes


def test_the_page_has_the_outcomes() -> None:
    assert PAGE.read_text() == page(read_outcomes())
