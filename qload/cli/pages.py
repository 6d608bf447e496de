"""Files that verbs write a page of HTML to."""

import os
from importlib import util
from pathlib import Path
from typing import Any

import click


class PageFile(click.Path):
    """A file that can be written, and Jinja, told before the work begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a folder that is not there or cannot be written to, or no Jinja, is a usage error."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} is no directory that can be written to", param, ctx)
        if util.find_spec("jinja2") is None:
            self.fail('pages need Jinja: pip install "qload-weights[pictures]"', param, ctx)
        return path
