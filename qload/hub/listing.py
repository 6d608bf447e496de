"""Which commit a revision is, which files that has, and which of them the local cache holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qload.hub.errors import refusals, unreadable
from qload.hub.ids import HubId

MAX_FILES = 100_000
TIMEOUT = 30.0  # seconds
COMMIT_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Listing:
    """The files of a model at one commit, with their lengths in bytes."""

    repo: str
    commit: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"

    def cached(self, name: str) -> Path | None:
        """A file as the local cache holds it, if it is there in its whole length."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        if not isinstance(found, str):
            return None
        place = Path(found)
        try:
            return place if place.stat().st_size == self.sizes[name] else None
        except OSError:
            return None


def list_files(model: HubId) -> Listing:
    """One question to the hub; StorageError where it refuses, HubUnreachableError where nobody answers."""
    from huggingface_hub import HfApi

    with refusals(str(model), model.wanted):
        info = HfApi(library_name="qload").model_info(
            model.repo, revision=model.wanted, files_metadata=True, timeout=TIMEOUT
        )
        commit, siblings = info.sha, info.siblings or []
    if not isinstance(commit, str) or len(commit) != 40 or not COMMIT_DIGITS.issuperset(commit):
        raise unreadable(str(model), f"the hub names no commit of it: {commit!r:.80}")
    if len(siblings) > MAX_FILES:
        raise unreadable(str(model), f"has {len(siblings)} files on the hub, more than {MAX_FILES}")
    sizes = {one.rfilename: one.size for one in siblings if _is_plain(one.rfilename)}
    if unknown := [name for name, size in sizes.items() if type(size) is not int or size < 0]:
        raise unreadable(str(model), f"the hub names no length of its file {unknown[0]:.80}")
    return Listing(model.repo, commit, {name: size for name, size in sizes.items() if size is not None})


def _is_plain(name: object) -> bool:
    """Whether a name is that of a file in the model's folder or in one below, on every system."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 250:
        return False
    return not set(name) & set('\\:*?"<>|') and all(part.strip(". ") for part in name.split("/"))
