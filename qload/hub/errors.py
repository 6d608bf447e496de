"""What huggingface_hub and its server refuse, in qload's errors: one sentence, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from qload.errors import ArgumentError, QloadError, StorageError
from qload.errors.checkpoint import HubUnreachableError

LOGIN = "log in by `hf auth login`, as an account that may read it"
LATER = "try again later"


def need_library(name: str) -> None:
    """ArgumentError with the way to install it, where huggingface_hub is not here."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        expected = (
            "a path that is there, or huggingface_hub installed to look for it on the hub: "
            "pip install 'qload-weights[hub]'"
        )
        raise ArgumentError(name, expected, f"neither ({_line(error)})") from error


def unreadable(name: str, words: str, remedy: str = "") -> StorageError:
    """The error for what cannot be read from the hub."""
    return StorageError(name, "unreadable", words, remedy=remedy)


@contextmanager
def refusals(model: str, revision: str, file: str = "") -> Iterator[None]:
    """Inside, whatever huggingface_hub raises becomes a StorageError about the model or a file of it.

    Its versions raise the errors of three libraries for HTTP, which have no base in common.
    """
    from huggingface_hub import errors as theirs

    try:
        yield
    except QloadError:
        raise
    except theirs.GatedRepoError as error:
        raise unreadable(model, "is gated: the hub asks who reads it", LOGIN) from error
    except theirs.RepositoryNotFoundError as error:
        words = "there is no such path here, and no such model on the hub that you may read"
        remedy = f"check the spelling; if it is private, {LOGIN}"
        raise StorageError(model, "no-files", words, remedy=remedy) from error
    except theirs.RevisionNotFoundError as error:
        words = f"has no revision {revision!r} on the hub"
        raise StorageError(model, "no-files", words, remedy="name a branch, a tag or a commit") from error
    except theirs.OfflineModeIsEnabled as error:
        words = "HF_HUB_OFFLINE forbids to ask the hub"
        raise HubUnreachableError(model, "unreadable", words, remedy="unset HF_HUB_OFFLINE") from error
    except Exception as error:
        raise _refused(file or model, error) from error


def _refused(name: str, error: Exception) -> StorageError:
    """An answer that is no content, or none at all: worth another try, or not."""
    cause = error.__cause__ or error  # what its download says is in the cause
    status = getattr(getattr(cause, "response", None), "status_code", None)
    words = f"gave no answer: {_line(cause)}" if status is None else f"answered with status {status}"
    if status is None or status == 429 or status >= 500:
        return HubUnreachableError(name, "unreadable", f"the hub {words}", remedy=LATER)
    return unreadable(name, f"the hub {words}")


def _line(error: BaseException) -> str:
    """An error of another library as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.240}"
