"""A server on this machine that speaks as much of the hub's API as huggingface_hub asks for.

It counts what it sends. `faults` answer in its place: each gets the request, and says whether it did.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

RANGE = re.compile(r"bytes=(\d+)-(\d+)")
Fault = Callable[["Request"], bool]


@dataclass
class Model:
    """The files of one commit, by name; `revisions` are what else it may be called."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False

    @property
    def commit(self) -> str:
        return sha1(b"".join(name.encode() + self.files[name] for name in sorted(self.files))).hexdigest()

    @classmethod
    def of(cls, folder: Path) -> "Model":
        return cls({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})


@dataclass
class Hub:
    """What the server has, and what it was asked and sent."""

    endpoint: str
    elsewhere: str  # the same server by another name, which is another host to its clients
    models: dict[str, Model] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # file -> bytes of its content
    listings: int = 0  # bytes


class Request(BaseHTTPRequestHandler):
    """One request; the class of each server has its `hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send it whole, without content where that was not asked for."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    @property
    def place(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _handle(self) -> None:
        self.hub.asked.append((self.command, self.place))
        if any(fault(self) for fault in self.hub.faults):
            return
        parts = self.place.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4] if len(parts) > 4 else "", "/".join(parts[5:]))
        elif parts[0] == "elsewhere":  # where large files are, as on the hub
            self._content("/".join(parts[1:3]), "/".join(parts[4:]))
        elif parts[2:3] == ["resolve"]:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.answer(404)

    def _model(self, repo: str, revision: str) -> Model | None:
        """The model; None once it was answered that there is none."""
        model = self.hub.models.get(repo)
        if model is None:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif revision not in (*model.revisions, model.commit):
            self.answer(404, X_Error_Code="RevisionNotFound")
        else:
            return model
        return None

    def _api(self, repo: str, what: str, revision: str) -> None:
        model = self._model(repo, revision or "main")
        if model is None:
            return
        if what == "tree":
            told: object = [{"type": "file", "path": n, **described(c)} for n, c in model.files.items()]
        else:
            files = [{"rfilename": name, **described(held)} for name, held in model.files.items()]
            told = {"id": repo, "modelId": repo, "sha": model.commit, "siblings": files}
        content = json.dumps(told).encode()
        self.hub.listings += len(content)
        self.answer(200, content, Content_Type="application/json")

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        model = self._model(repo, revision)
        if model is None:
            return
        if model.gated:
            self.answer(403, X_Error_Code="GatedRepo")
        elif name not in model.files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=model.commit)
        elif name.endswith(".safetensors"):
            linked = {"X_Linked_Size": str(len(model.files[name])), "X_Linked_ETag": etag(model.files[name])}
            place = f"{self.hub.elsewhere}/elsewhere/{repo}/{model.commit}/{name}"
            self.answer(302, Location=place, X_Repo_Commit=model.commit, **linked)
        else:
            self._content(repo, name, X_Repo_Commit=model.commit, ETag=etag(model.files[name]))

    def _content(self, repo: str, name: str, **headers: str) -> None:
        """A file or a range of it; HEAD counts nothing."""
        held = self.hub.models[repo].files[name]
        status, content = 200, held
        if wanted := RANGE.fullmatch(self.headers.get("Range", "")):
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(held))
            status, content = 206, held[start:end]
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(held)}"
        if self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(content)
        self.answer(status, content, Accept_Ranges="bytes", **headers)


def described(content: bytes) -> dict[str, object]:
    """A file as the API tells of it."""
    return {"size": len(content), "oid": sha1(content).hexdigest(), "blobId": sha1(content).hexdigest()}


def etag(content: bytes) -> str:
    return f'"{sha256(content).hexdigest()}"'


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine, for as long as the context lasts."""
    handler = type("Bound", (Request,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        ends = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
        hub = handler.hub = Hub(*ends)  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
