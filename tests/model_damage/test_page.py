"""The page of types is that of the stored outcomes."""

from tests.model_damage.page import PAGE, page, read_outcomes


def test_the_page_has_the_outcomes() -> None:
    assert PAGE.read_text() == page(read_outcomes())
