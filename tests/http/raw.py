"""A client that can leave whenever it wants: one POST over a bare socket."""

from __future__ import annotations

import json
import socket
from types import TracebackType

from tests.http_rig import MODEL, HttpRig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}


def completion_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hello", "temperature": 0, **fields}


class RawPost:
    """Sends the request; `received` is all that has been read."""

    def __init__(self, rig: HttpRig, path: str, body: dict[str, object], **headers: str) -> None:
        self.received = b""
        data = json.dumps(body).encode()
        fields = {"host": "rig", "content-type": "application/json", "content-length": str(len(data)), **headers}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in fields.items())
        self._socket = socket.create_connection(("127.0.0.1", rig.port), timeout=10.0)
        self._socket.sendall(head.encode() + b"\r\n" + data)

    def read_events(self, count: int) -> None:
        """Read until `count` server-sent events have arrived, or the stream ends."""
        while self.received.count(b"data: ") < count and b"data: [DONE]" not in self.received:
            data = self._socket.recv(65536)
            if not data:
                return
            self.received += data

    def leave(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawPost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
