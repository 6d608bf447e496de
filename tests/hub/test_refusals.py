"""Errors of huggingface_hub and of its server as qload's; errors of qload pass as they are."""

from types import SimpleNamespace

import pytest

from qload.errors import ArgumentError, QloadError, StorageError
from qload.errors.exceptions import HubUnreachableError

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
from qload.hub import RETRY_REMEDY, translate_errors

OWN = [
    StorageError("a.safetensors", "unreadable", "the server sent more than the 8 bytes asked for"),
    StorageError("a.safetensors", "file-length", "3 of 8 bytes", remedy=RETRY_REMEDY),
    HubUnreachableError("org/model", "unreadable", "the hub gave no answer", remedy=RETRY_REMEDY),
    ArgumentError("cache", "8 bytes free", "1 bytes"),
]


@pytest.mark.parametrize("own", OWN, ids=lambda error: type(error).__name__)
def test_an_error_of_qload_passes_as_it_is(own: QloadError) -> None:
    with pytest.raises(type(own)) as caught, translate_errors("org/model", "main", "a.safetensors"):
        raise own

    assert caught.value is own
    assert caught.value.__cause__ is None


class ServerError(Exception):
    """An error of an HTTP library: the answer's status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("status", "unreachable"),
    [
        (400, False),
        (404, False),
        (428, False),
        (429, True),
        (430, False),
        (499, False),
        (500, True),
        (503, True),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_status_says_whether_the_hub_is_asked_again(status: int, unreachable: bool, wrapped: bool) -> None:
    error: Exception = ServerError(status)
    if wrapped:
        cause, error = error, RuntimeError()
        error.__cause__ = cause

    with pytest.raises(StorageError) as caught, translate_errors("org/model", "main"):
        raise error

    assert type(caught.value) is (HubUnreachableError if unreachable else StorageError)
    assert (caught.value.rule, caught.value.detail) == (
        "unreadable",
        f"the hub answered with status {status}",
    )
    assert caught.value.remedy == (RETRY_REMEDY if unreachable else "")


@pytest.mark.parametrize(("file", "name"), [("", "org/model"), ("a.safetensors", "a.safetensors")])
def test_an_error_without_a_status_is_no_answer_about_the_file_or_the_model(file: str, name: str) -> None:
    with pytest.raises(HubUnreachableError) as caught, translate_errors("org/model", "main", file):
        raise TimeoutError("30 s\n passed")

    assert str(caught.value).startswith(f"{name}: the hub gave no answer: TimeoutError: 30 s passed")
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_an_interruption_is_not_taken_for_an_error_of_the_network() -> None:
    with pytest.raises(KeyboardInterrupt), translate_errors("org/model", "main"):
        raise KeyboardInterrupt
