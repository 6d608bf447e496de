"""`qload inspect` and `verify` of a model of the hub: what is found, what is transferred, what is said."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

import qload
from qload.cli import main
from qload.errors import StorageError
from qload.hub import HubId, fetch, open_folder, parse_id
from tests.hub.conftest import SOUND
from tests.hub.server import Hub, Model
from tests.paths import ROOT

FACTS = (".g_idx", ".qzeros")  # small tensors by which a layer of GPTQ is described


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def described(folder: Path) -> dict[str, int]:
    """file -> bytes that tell what its layers are: JSON, headers, and the facts in them."""
    needed = {path.name: path.stat().st_size for path in folder.glob("*.json")}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        length = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:length])
        spans = [e["data_offsets"] for name, e in entries.items() if name.endswith(FACTS)]
        needed[path.name] = length + sum(end - begin for begin, end in spans)
    return needed


def test_inspect_of_a_name_says_what_inspect_of_its_files_says(hub: Hub) -> None:
    result = run("inspect", "org/sound", "--json")

    of_files = json.loads(json.dumps(qload.inspect(SOUND).to_json()))
    assert json.loads(result.stdout) == {**of_files, "path": f"org/sound@{hub.models['org/sound'].commit}"}
    assert result.exit_code == 0


def test_inspect_transfers_json_headers_and_facts_alone(hub: Hub) -> None:
    result = run("inspect", "org/sound")

    assert hub.sent == described(SOUND)
    assert sum(hub.sent.values()) < sum(path.stat().st_size for path in SOUND.iterdir()) / 20
    assert f"read {sum(hub.sent.values())} bytes (" in result.stderr


def test_standard_error_says_the_commit_and_that_it_is_the_hubs(hub: Hub) -> None:
    result = run("inspect", "org/sound@main")

    commit = hub.models["org/sound"].commit
    assert result.stderr.splitlines()[0] == f"reading org/sound at commit {commit} from the hub"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize(("name", "rules"), [("org/sound", []), ("org/damaged", ["symmetry"])])
def test_the_sound_model_is_sound_and_the_damaged_one_is_not(
    hub: Hub, verb: str, name: str, rules: list[str]
) -> None:
    result = run(verb, name)

    found = [finding["rule"] for finding in json.loads(result.stdout)["findings"]]
    assert found == (rules if verb == "verify" else [])
    assert result.exit_code == (1 if found else 0)


def test_a_damaged_name_is_compared_with_a_sound_one(hub: Hub) -> None:
    result = run("verify", "org/damaged", "--against", "org/sound")

    messages = [finding["message"] for finding in json.loads(result.stdout)["findings"]]
    assert any("read with zero points one lower, it agrees" in message for message in messages)


def test_verify_fetches_into_the_cache_and_never_again(hub: Hub) -> None:
    first = run("verify", "org/sound")
    whole = {path.name: path.stat().st_size for path in SOUND.glob("*.safetensors")}
    fetched = {name: count for name, count in hub.sent.items() if name in whole}
    hub.sent.clear()
    again = run("verify", "org/sound")

    assert fetched == whole
    assert f"fetching {sum(whole.values())} bytes of org/sound into the cache, in 4 files" in first.stderr
    assert hub.sent == {}
    assert again.stdout == first.stdout


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_offline_the_cache_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    online = run("verify", "org/sound")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    result = run(verb, "org/sound")

    assert hub.asked == []
    assert json.loads(result.stdout)["layers"] == json.loads(online.stdout)["layers"]
    commit = hub.models["org/sound"].commit
    assert result.stderr.startswith(f"reading org/sound at commit {commit} from the local cache: HF_HUB_OFF")
    assert result.exit_code == 0


def test_without_an_answer_the_cache_is_enough_and_asks_no_more(hub: Hub) -> None:
    online = run("verify", "org/sound")
    hub.asked.clear()

    def fail(request: Any) -> bool:
        request.answer(503)
        return True

    hub.faults.append(fail)
    result = run("inspect", "org/sound")

    assert hub.asked == [("GET", "/api/models/org/sound/revision/main")]
    assert json.loads(result.stdout)["layers"] == json.loads(online.stdout)["layers"]
    assert "from the local cache: the hub answered with status 503" in result.stderr


@pytest.mark.parametrize("spare", [0, -1])
def test_a_config_of_the_limit_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    size = len(hub.models["org/sound"].files["config.json"])
    monkeypatch.setattr("qload.hub.MAX_BYTES", size + spare)
    result = run("inspect", "org/sound")

    assert (result.exit_code == 0) == (spare == 0)
    assert (f"config.json: {size} bytes long, larger than {size - 1}" in result.stderr) == (spare != 0)


def test_offline_without_the_model_in_the_cache_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("inspect", "org/sound")

    assert (
        "HF_HUB_OFFLINE forbids requests to the hub, and the local cache has no snapshot of it"
        in result.stderr
    )
    assert "; remedy: unset HF_HUB_OFFLINE" in result.stderr
    assert "no such path, HF_HUB_OFFLINE" in result.stderr
    assert (result.exit_code, hub.asked) == (1, [])
    assert json.loads(result.stdout)["verdict"] == "error"


def test_offline_a_part_of_a_model_is_not_taken_for_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    run("verify", "org/sound")
    (place,) = Path("cache").glob("models--org--sound/snapshots/*/model-00002-of-00004.safetensors")
    place.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("inspect", "org/sound")

    assert "the local cache has only a part of it" in result.stderr
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "error")


def test_what_the_cache_has_is_not_transferred_again(hub: Hub) -> None:
    run("verify", "org/sound")
    (place,) = Path("cache").glob("models--org--sound/snapshots/*/model-00002-of-00004.safetensors")
    place.unlink()
    hub.sent.clear()
    result = run("inspect", "org/sound")

    assert hub.sent == {place.name: described(SOUND)[place.name]}
    assert result.exit_code == 0


def test_another_commit_is_another_model(hub: Hub) -> None:
    damaged, sound = hub.models["org/damaged"], hub.models["org/sound"]
    damaged.revisions, older = ("main",), Model(sound.files, ("v1",))
    hub.models["org/both"] = older
    result = run("verify", "org/both@v1")

    assert result.exit_code == 0
    assert f"at commit {older.commit} from the hub" in result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/sound@v9", "org/sound@v9: has no revision 'v9' on the hub; remedy: name a branch"),
        ("org/none", "org/none: no such path, and no such model on the hub"),
        ("org/gated", "org/gated: is gated: the hub requires a login; remedy: log in by `hf auth login`"),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_what_the_hub_refuses_is_one_line_with_a_remedy(
    hub: Hub, verb: str, name: str, said: str, golden: SnapshotAssertion
) -> None:
    hub.models["org/gated"] = Model(hub.models["org/sound"].files, gated=True)
    result = run(verb, name)

    assert said in result.stderr
    assert result.stderr == golden
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "error")


def test_without_the_extra_the_way_to_install_it_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = run("inspect", "org/sound")

    assert "pip install 'qload-weights[hub]'" in result.stderr
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, hub.asked) == (2, [])


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    result = run("verify", "org/sound")

    assert "bytes free, for the files of org/sound, got 1 bytes" in result.stderr
    assert not {name for name in hub.sent if name.endswith(".safetensors")}
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("a/b", "a/b", None),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B", None),
        ("a_1/b-2.c_", "a_1/b-2.c_", None),
        ("a/b@v1.0/x+y", "a/b", "v1.0/x+y"),
        (f"{'a' * 96}/{'b' * 96}@{'c' * 255}", f"{'a' * 96}/{'b' * 96}", "c" * 255),
    ],
)
def test_a_model_is_its_organization_name_and_revision(text: str, repo: str, revision: str | None) -> None:
    assert parse_id(text) == HubId(repo, revision)
    assert str(HubId(repo, revision)) == text
    assert HubId(repo, revision).wanted == (revision or "main")


@pytest.mark.parametrize(
    "text",
    [
        "a", "a/", "/b", "a/b/c", "-a/b", "a/.b", "a/b.", "a./b", "a/b@", "a/b@-v", "a/b@.v", "a/b c",
        "a/b@a@b", "a--x/b", "a/b--c", "a/b..c", "a/b@v..1", "a/b.safetensors", "a/b.json", "a/b.json@v",
        f"{'a' * 97}/b", f"a/{'b' * 97}", f"a/b@{'c' * 256}",
    ],
)  # fmt: skip
def test_other_text_is_a_path(text: str) -> None:
    assert parse_id(text) is None


def test_a_model_that_changes_while_it_is_fetched_is_refused(hub: Hub) -> None:
    with open_folder(HubId("org/sound")) as folder:
        older, hub.models["org/sound"] = hub.models["org/sound"], hub.models["org/damaged"]
        with pytest.raises(StorageError) as caught:
            fetch(HubId("org/sound"), folder)

    newer = hub.models["org/sound"]
    assert str(caught.value) == (
        f"org/sound: changed on the hub from commit {older.commit} to {newer.commit} meanwhile\n"
        "  remedy   run it again"
    )


def test_a_path_that_is_there_wins(hub: Hub) -> None:
    shutil.copytree(SOUND, Path("org/sound"))
    result = run("inspect", "org/sound")

    summary = "ok  org/sound: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained\n"
    assert (result.exit_code, result.stderr, hub.asked) == (0, summary, [])


@pytest.mark.parametrize(
    "text", ["./org/sound", "a/b/c", "org/model.safetensors", "none", "~/sound", "/org/x"]
)
def test_a_path_that_is_not_there_asks_nobody(hub: Hub, text: str) -> None:
    result = run("inspect", text)

    assert json.loads(result.stdout)["verdict"] == "unreadable"
    assert (result.exit_code, hub.asked) == (1, [])


def test_a_name_in_a_directory_that_is_here_is_a_path_and_the_way_out_is_said(hub: Hub) -> None:
    Path("org").mkdir()
    beside, meant = run("inspect", "org/sound"), run("inspect", "org/sound@main")

    assert beside.stderr == (
        "org/sound is read as a path, because org is a directory; org/sound@main names the model of the hub\n"
        "unreadable  org/sound: 1 error\n"
        "error  no-files  org/sound: no such file\n"
    )
    assert (beside.exit_code, meant.exit_code) == (1, 0)


def test_a_program_asks_for_the_hub_by_name_and_a_string_never_does(hub: Hub) -> None:
    with open_folder(HubId("org/sound")) as folder:
        by_name = qload.inspect(folder)
        with qload.open_checkpoint(folder) as weights:
            layer = weights.get_weights("model.layers.0.mlp.down_proj")
    hub.asked.clear()
    by_text = qload.inspect("org/sound")

    assert by_name.layers == qload.inspect(SOUND).layers
    with qload.open_checkpoint(SOUND) as weights:
        same = weights.get_weights("model.layers.0.mlp.down_proj")
    assert layer.dequantize().equal(same.dequantize())
    assert (by_text.verdict, hub.asked) == ("unreadable", [])


def test_the_token_is_not_told_to_where_the_hub_leads(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    told: dict[str, set[str | None]] = {"org": set(), "elsewhere": set()}

    def note(request: Any) -> bool:
        told.setdefault(request.place.split("/")[1], set()).add(request.headers.get("Authorization"))
        return False

    hub.faults.append(note)
    result = run("inspect", "org/sound")

    assert result.exit_code == 0
    assert (told["org"], told["elsewhere"]) == ({"Bearer hf_secret"}, {None})


@pytest.mark.slow
def test_a_process_of_its_own_reads_the_variables_of_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "qload", "inspect", "org/sound"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **variables},
    )  # fmt: skip

    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "ok"
    assert hub.sent == described(SOUND)
    assert f"read {sum(hub.sent.values())} bytes (" in done.stderr
