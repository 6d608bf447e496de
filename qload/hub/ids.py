"""What a user types to mean a model of the hub: `org/model` or `org/model@revision`."""

import os
import re
from dataclasses import dataclass

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,254}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@({_REVISION}))?")
_FILES = (".safetensors", ".json")  # what ends so was meant as a file


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub, and a branch, a tag or a commit of it; None is the branch `main`."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def wanted(self) -> str:
        """The revision, spelled out."""
        return self.revision or "main"


def parse_id(text: str) -> HubId | None:
    """`org/model[@revision]`, where the text is that and no path that is there; else None.

    What begins with a dot, a slash or a tilde, has more than one slash before `@`, or ends as a file does is
    a path. So is `here/model` where `here` is a directory; `here/model@main` is not.
    """
    found = _ID.fullmatch(text)
    if found is None or os.path.lexists(text):
        return None
    repo, revision = found[1], found[2]
    if repo.endswith(_FILES) or ".." in text or "--" in repo:  # which no name on the hub has
        return None
    if revision is None and os.path.isdir(repo.partition("/")[0]):
        return None
    return HubId(repo, revision)
