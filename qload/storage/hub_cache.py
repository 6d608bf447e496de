"""The folders in which the library huggingface_hub keeps what it downloaded.

    models--org--name/refs/main                 a text file: the commit that a branch or a tag was at
    models--org--name/snapshots/COMMIT/...      the files of that commit, as links into ../../blobs

Source: "Understand caching" in the guides of huggingface_hub.
"""

import os
from pathlib import Path

from qload.errors import StorageError
from qload.storage.files import is_directory, listed, read_whole, status

SNAPSHOTS = "snapshots"
MAIN = "main"  # the branch that a name without a revision means
MAX_REF = 4096  # bytes


def snapshot(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Of a model's folder in the cache, or of its `snapshots`, the one that `refs/main` names; else the path.

    StorageError where none is named and there are several.
    """
    place = Path(path)
    whole = Path(os.path.abspath(place)) if "\0" not in str(place) else place  # of "." too
    top = whole.parent if whole.name == SNAPSHOTS else whole
    if not top.name.startswith("models--") or not is_directory(top / SNAPSHOTS):
        return path
    commits = [entry.name for entry in listed(top / SNAPSHOTS)]
    ref = top / "refs" / MAIN
    if status(ref, f"refs/{MAIN}") is None:
        if len(commits) == 1:
            return top / SNAPSHOTS / commits[0]
        words = f"has {len(commits)} snapshots, and no refs/{MAIN} that names one of them"
    else:
        commit = read_whole(ref, f"refs/{MAIN}", MAX_REF, "unreadable").decode(errors="replace").strip()
        if commit in commits:
            return top / SNAPSHOTS / commit
        words = f"refs/{MAIN} names {commit!r:.80}, which is none of its {len(commits)} snapshots"
    some = ", ".join(f"{SNAPSHOTS}/{commit:.80}" for commit in commits[:4])
    more = f" and {len(commits) - 4} more" if len(commits) > 4 else ""
    remedy = f"name one of them: {some}{more}" if commits else "fetch the model again"
    raise StorageError(str(place), "no-files", words, remedy=remedy)
