"""What a failed assertion is about, put before what it says."""

from typing import Any


class prefixed:
    """`with prefixed(text)`: a failed assertion begins with `text`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Put the text before what it says."""
        if isinstance(error, AssertionError):
            error.args = (f"{self.text}{error}", *error.args[1:])
