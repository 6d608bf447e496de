"""A server may answer anything: one of qload's errors comes of it, and no more memory than was asked for."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from qload.cli import main
from qload.detect.config_reader import MAX_BYTES
from qload.errors import StorageError
from qload.hub import MAX_FILES, HubId, open_folder
from qload.storage import read_header
from qload.storage.checkpoint_files import INDEX, MAX_INDEX
from tests.hub.server import RANGE, Fault, Hub, Model, Request

SHARD = "model-00003-of-00004.safetensors"
WHOLE = 1 << 26  # bytes of an answer that nobody asked for


def of_the_shard(answer: Callable[[Request], None]) -> Fault:
    """Answers in place of the server where the third shard is read."""

    def fault(request: Request) -> bool:
        concerned = request.place.endswith(SHARD) and request.command == "GET"
        if concerned:
            answer(request)
        return concerned

    return fault


def asked(request: Request) -> tuple[int, int]:
    """The first and the last byte that a request asks for."""
    wanted = RANGE.fullmatch(request.headers["Range"])
    assert wanted
    return int(wanted[1]), int(wanted[2])


def partial(request: Request, content: bytes, said: str | None = None, **headers: str) -> None:
    first, last = asked(request)
    length = len(request.hub.models["org/sound"].files[SHARD])
    headers["Content_Range"] = said or f"bytes {first}-{last}/{length}"
    request.answer(206, content, **headers)


def a_short_body(request: Request) -> None:
    partial(request, b"\0\0\0")


def a_body_that_breaks_off(request: Request) -> None:
    partial(request, b"\0\0\0", Content_Length="8")
    request.close_connection = True


def a_long_body(request: Request) -> None:
    partial(request, bytes(WHOLE))


def an_endless_body(request: Request) -> None:
    request.send_response(206)
    first, last = asked(request)
    length = len(request.hub.models["org/sound"].files[SHARD])
    request.send_header("Content-Range", f"bytes {first}-{last}/{length}")
    request.end_headers()
    request.close_connection = True
    try:
        for _ in range(WHOLE >> 16):
            request.wfile.write(bytes(1 << 16))
    except OSError:  # nobody reads on
        pass


def the_whole_file(request: Request) -> None:
    request.answer(200, bytes(WHOLE))


def another_range(request: Request) -> None:
    first, last = asked(request)
    partial(request, bytes(last - first + 1), f"bytes {first + 1}-{last + 1}/999999")


def another_length_of_the_file(request: Request) -> None:
    first, last = asked(request)
    partial(request, bytes(last - first + 1), f"bytes {first}-{last}/77")


def no_range(request: Request) -> None:
    request.answer(206, bytes(8))


def a_packed_body(request: Request) -> None:
    partial(request, b"\x1f\x8b\x08", Content_Encoding="gzip")


def a_failure(request: Request) -> None:
    request.answer(500)


def a_redirect_to_itself(request: Request) -> None:
    request.answer(302, Location=request.path)


def a_redirect_to_a_file(request: Request) -> None:
    request.answer(302, Location="file:///etc/passwd")


def a_redirect_to_nobody(request: Request) -> None:
    request.answer(302, Location="http://127.0.0.1:9/model.safetensors")


def a_redirect_that_says_nothing(request: Request) -> None:
    request.answer(302)


def an_unknown_status(request: Request) -> None:
    request.answer(418)


def nothing_at_all(request: Request) -> None:
    request.close_connection = True


ANSWERS = {
    a_short_body: "sent 3 of the 8 bytes from 0 on",
    a_body_that_breaks_off: "the hub gave no answer",
    a_long_body: "sent more than the 8 requested bytes",
    an_endless_body: "sent more than the 8 requested bytes",
    the_whole_file: "does not support ranges: it sent the whole file",
    another_range: ", expected 'bytes 0-7/411744'",
    another_length_of_the_file: ", expected 'bytes 0-7/411744'",
    no_range: ", expected 'bytes 0-7/411744'",
    a_packed_body: "sent 3 of the 8 bytes",
    a_failure: "the hub answered with status 500",
    a_redirect_to_itself: "the hub gave no answer: TooManyRedirects",
    a_redirect_to_a_file: "the hub gave no answer",
    a_redirect_to_nobody: "the hub gave no answer: ConnectError",
    a_redirect_that_says_nothing: "the server answered with status 302",
    an_unknown_status: "the hub answered with status 418",
    nothing_at_all: "the hub gave no answer: RemoteProtocolError",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_an_answer_that_was_not_asked_for_is_a_finding(hub: Hub, answer: Callable[[Request], None]) -> None:
    hub.faults.append(of_the_shard(answer))
    result = run("inspect", "org/sound")

    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["file"] == SHARD
    assert finding["message"].startswith(SHARD)
    assert ANSWERS[answer] in finding["message"]
    assert ("the hub gave no answer" in finding["message"]) == ("gave no answer" in ANSWERS[answer])
    assert result.exit_code == 1


AGAIN = (a_body_that_breaks_off, a_failure, a_redirect_to_a_file, a_redirect_to_nobody, nothing_at_all)


@pytest.mark.parametrize(
    "answer",
    [each for each in ANSWERS if each is not a_redirect_to_itself],
    ids=lambda answer: answer.__name__,
)
def test_a_range_is_asked_for_again_where_there_was_no_answer_and_once_elsewhere(
    hub: Hub, answer: Callable[[Request], None]
) -> None:
    hub.faults.append(of_the_shard(answer))
    run("inspect", "org/sound")

    tries = [place for command, place in hub.asked if command == "GET" and place.endswith(SHARD)]
    assert len(tries) == (3 if answer in AGAIN else 1)


@pytest.mark.parametrize("answer", [a_long_body, an_endless_body, the_whole_file], ids=lambda a: a.__name__)
def test_no_more_is_held_than_was_asked_for(hub: Hub, answer: Callable[[Request], None]) -> None:
    with open_folder(HubId("org/sound")) as folder:
        shard = folder.places[SHARD]
        hub.faults.append(of_the_shard(answer))
        tracemalloc.start()
        with pytest.raises(StorageError):
            read_header(shard, SHARD)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    served = WHOLE if answer is not an_endless_body else 0  # by the server, which is in this process
    assert held - served < WHOLE / 8


def test_one_failure_is_passed_over(hub: Hub) -> None:
    failed: list[str] = []

    def once(request: Request) -> bool:
        if failed or not request.place.endswith(SHARD):
            return False
        failed.append(request.path)
        request.answer(503)
        return True

    hub.faults.append(once)

    assert run("inspect", "org/sound").exit_code == 0
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("length", "rule"), [(2**62, "header-length"), (99_999_999, "header-length"), (2, "header-json")]
)
def test_a_header_is_as_long_as_the_file_allows(hub: Hub, length: int, rule: str) -> None:
    files = dict(hub.models["org/sound"].files)
    files[SHARD] = length.to_bytes(8, "little") + bytes(1000)
    hub.models["org/long"] = Model(files)
    result = run("inspect", "org/long")

    assert [finding["rule"] for finding in json.loads(result.stdout)["findings"]] == [rule]
    assert hub.sent[SHARD] <= 10


def test_a_length_that_the_hub_lies_about_does_not_fit_the_header(hub: Hub) -> None:
    sound = hub.models["org/sound"]
    content = json.loads(json.dumps({"id": "org/sound", "sha": sound.commit, "siblings": []}))
    sizes = {name: len(held) + 8 * (name == SHARD) for name, held in sound.files.items()}
    content["siblings"] = [{"rfilename": name, "size": size} for name, size in sizes.items()]
    hub.faults.append(listing(content))
    result = run("inspect", "org/sound")

    assert ", expected 'bytes" in json.loads(result.stdout)["findings"][0]["message"]


def listing(content: Any) -> Fault:
    """The API's answer to which files there are."""

    def fault(request: Request) -> bool:
        concerned = "/revision/" in request.place
        if concerned:
            request.answer(200, json.dumps(content).encode(), Content_Type="application/json")
        return concerned

    return fault


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param([], "the hub gave no answer", id="a list"),
        pytest.param({"id": "a/b", "siblings": []}, "returned an invalid commit: None", id="no commit"),
        pytest.param({"id": "a/b", "sha": "../../x", "siblings": []}, "an invalid commit", id="a path"),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "a.safetensors", "size": "9"}]},
            "invalid length of its file a.safetensors", id="a length that is text",
        ),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "a.safetensors", "size": -1}]},
            "invalid length of its file a.safetensors", id="a negative length",
        ),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 1 << 40}]},
            "config.json: 1099511627776 bytes long, larger than", id="a large config",
        ),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": MAX_BYTES + 1}]},
            f"config.json: {MAX_BYTES + 1} bytes long, larger than {MAX_BYTES}", id="a byte too many",
        ),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": f"a{INDEX}", "size": MAX_INDEX + 1}]},
            f"a{INDEX}: {MAX_INDEX + 1} bytes long, larger than {MAX_INDEX}", id="a large index",
        ),
        pytest.param({"id": "a/b", "sha": COMMIT[1:], "siblings": []}, "invalid commit", id="a digit fewer"),
        pytest.param({"id": "a/b", "sha": COMMIT + "0", "siblings": []}, "invalid commit", id="a digit more"),
        pytest.param({"id": "a/b", "sha": COMMIT.upper(), "siblings": []}, "invalid commit", id="capitals"),
        pytest.param(
            {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": f"{n}"} for n in range(MAX_FILES + 1)]},
            f"has {MAX_FILES + 1} files on the hub, more than {MAX_FILES}", id="many files",
        ),
    ],
)  # fmt: skip
def test_a_listing_that_cannot_be_is_one_line(
    hub: Hub, content: Any, said: str, golden: SnapshotAssertion
) -> None:
    hub.faults.append(listing(content))
    result = run("inspect", "org/sound")

    assert said in result.stderr
    assert result.stderr.partition("TypeError")[0] == golden  # huggingface_hub words the rest
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "error")


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/a.safetensors",
        "a/../../b.safetensors",
        "a\\b",
        "a:b.json",
        "a\n.json",
        "a" * 251,
    ],
)
def test_no_file_is_made_outside_of_the_folder(hub: Hub, name: str) -> None:
    siblings = [{"rfilename": name, "size": 8}, {"rfilename": "in/model.safetensors", "size": 0}]
    hub.faults.append(listing({"id": "org/sound", "sha": COMMIT, "siblings": siblings}))
    with open_folder(HubId("org/sound")) as folder:
        made = [path.relative_to(folder.folder).as_posix() for path in folder.folder.rglob("*")]
        held = list(folder.places)

    assert sorted(made) == ["in", "in/model.safetensors"]
    assert held == ["in/model.safetensors"]


def test_a_file_of_another_length_than_the_listed_one_is_not_taken_from_the_cache(hub: Hub) -> None:
    sound = hub.models["org/sound"]
    siblings = [
        {"rfilename": name, "size": len(content) + 8 * (name == SHARD)}
        for name, content in sound.files.items()
    ]
    hub.faults.append(listing({"id": "org/sound", "sha": sound.commit, "siblings": siblings}))

    result = run("verify", "org/sound")

    length = len(sound.files[SHARD]) + 8
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"Error: {SHARD}: was fetched, but the cache has no file of its length of {length} bytes; "
        "remedy: run it again"
    )


def test_a_file_and_a_folder_of_one_name_cannot_be_written(hub: Hub) -> None:
    siblings = [{"rfilename": "a", "size": 1}, {"rfilename": "a/b.safetensors", "size": 1}]
    hub.faults.append(listing({"id": "org/sound", "sha": COMMIT, "siblings": siblings}))

    with pytest.raises(StorageError) as caught, open_folder(HubId("org/sound")):
        pytest.fail("the folder was opened")

    assert str(caught.value) == "b.safetensors: cannot be written to a temporary folder: File exists"


def test_an_empty_config_is_not_asked_for(hub: Hub) -> None:
    hub.models["org/empty"] = Model({**hub.models["org/sound"].files, "config.json": b""})
    with open_folder(HubId("org/empty")) as folder:
        assert (folder.folder / "config.json").read_bytes() == b""

    assert ("GET", f"/org/empty/resolve/{hub.models['org/empty'].commit}/config.json") not in hub.asked


def test_a_model_without_tensors_is_fetched_no_further(hub: Hub) -> None:
    hub.models["org/config"] = Model({"config.json": b"{}"})
    result = run("verify", "org/config")

    assert [finding["rule"] for finding in json.loads(result.stdout)["findings"]] == ["no-files"]
    assert result.exit_code == 1
    assert "fetching" not in result.stderr
