"""A stand-in for the Hugging Face hub on 127.0.0.1: the endpoints that `huggingface_hub` uses to download a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Repository:
    """files: name to content. gated: needs `token` for files; private: for anything. status: answer everything with it."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    private: bool = False
    status: int | None = None


@dataclass
class HubServer:
    """break_at: the first body of this file ends after so many bytes, and the connection with it. stall_at: a body stops there
    until `go_on` is set."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    break_at: dict[str, int] = field(default_factory=dict)
    stall_at: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def bodies(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [r.path.rsplit("/", 1)[-1] for r in self.requests if r.method == "GET" and "/resolve/" in r.path]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.state.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), token)
        else:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._file(name, revision, file, token)

    def _api(self, path: str, token: str | None) -> None:
        for verb in ("/tree/", "/revision/"):
            name, found, revision = path.partition(verb)
            if found:
                break
        else:
            name, revision = path, "main"
        repository = self._repository(name, revision, token, file=False)
        if repository is None:
            return
        if verb == "/tree/":
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in repository.files.items()
            ]
            self._json(200, entries)
        else:
            self._json(200, {"_id": "1", "id": name, "modelId": name, "sha": repository.commit, "siblings": []})

    def _repository(self, name: str, revision: str, token: str | None, *, file: bool) -> Repository | None:
        """The repository, or None after an error was sent, as the hub sends it."""
        repository = self.state.repositories.get(name)
        if repository is None or (repository.private and token != repository.token):
            self._json(401 if token is None else 404, {"error": "Repository not found"}, "RepoNotFound")
        elif repository.status is not None:
            self._json(repository.status, {"error": "told to"})
        elif revision not in (*repository.revisions, repository.commit):
            self._json(404, {"error": f"Invalid rev id: {revision}"}, "RevisionNotFound")
        elif file and repository.gated and token != repository.token:
            self._json(401 if token is None else 403, {"error": f"Access to model {name} is restricted"}, "GatedRepo")
        else:
            return repository
        return None

    def _file(self, name: str, revision: str, file: str, token: str | None) -> None:
        repository = self._repository(name, revision, token, file=True)
        if repository is None:
            return
        if file not in repository.files:
            self._json(404, {"error": "Entry not found"}, "EntryNotFound")
            return
        data = repository.files[file]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", revision if len(revision) == 40 else repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self._body(file, data[start:])

    def _body(self, file: str, data: bytes) -> None:
        stop = self.state.break_at.pop(file, None)
        if stop is not None:
            self.wfile.write(data[:stop])
            self.close_connection = True
            return
        stop = self.state.stall_at.get(file)
        if stop is not None:
            self.wfile.write(data[:stop])
            self.wfile.flush()
            self.state.stalled.set()
            self.state.go_on.wait(60)
            data = data[stop:]
        try:
            self.wfile.write(data)
        except OSError:  # the client was killed
            self.close_connection = True

    def _json(self, status: int, value: object, code: str | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code is not None:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
