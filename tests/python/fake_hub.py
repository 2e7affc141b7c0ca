"""A model hub on loopback, as far as a download needs one: refs, file lists, files, ranges, tokens.

It speaks the paths that huggingface_hub asks for: `GET /api/models/ID/revision/REV`,
`GET /api/models/ID/tree/REV`, and `HEAD` and `GET /ID/resolve/REV/FILE`.
"""

from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves the files of `folder` as the model `name`; a context manager.

    Attributes:
        token: the access token asked for; None: everybody may read.
        cut: the file whose first transfer ends half-way, and how many bytes of it are sent.
        asked: method, path and Range header of every request.
    """

    def __init__(
        self, name: str, folder: Path, revisions: tuple[str, ...] = ("main", "v1")
    ) -> None:
        self.name = name
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.revisions = ("main", "v1", COMMIT)
        self.token: str | None = None
        self.cut: tuple[str, int] | None = None
        self.asked: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        """Answers one request."""
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, request.headers.get("Range")))
        given = request.headers.get("Authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            code = "GatedRepo" if given is None else "RepoNotFound"
            return self.refuse(request, 401, code, body)
        listed = re.fullmatch(rf"/api/models/{self.name}/(revision|tree)/([^/]+)/?", path)
        wanted = re.fullmatch(rf"/{self.name}/resolve/([^/]+)/(.+)", path)
        if listed is None and wanted is None:
            return self.refuse(request, 404, "RepoNotFound", body)
        if (listed[2] if listed else wanted[1] if wanted else "") not in self.revisions:
            return self.refuse(request, 404, "RevisionNotFound", body)
        if listed:
            return self.send(request, json.dumps(self.listing(listed[1])).encode(), {}, body)
        assert wanted is not None
        return self.file(request, wanted[2], body)

    def listing(self, kind: str) -> object:
        """What the hub says of the model: its commit and files, or the tree of files alone."""
        if kind == "tree":
            return [
                {"type": "file", "path": name, "size": len(raw), "oid": etag(raw)}
                for name, raw in self.files.items()
            ]
        files = [{"rfilename": name, "size": len(raw)} for name, raw in self.files.items()]
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": files}

    def file(self, request: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        """Sends a file, or the part of it that is asked for, or half of it where it is cut."""
        raw = self.files.get(name)
        if raw is None:
            return self.refuse(request, 404, "EntryNotFound", body)
        headers = {"ETag": f'"{etag(raw)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        if first is None:
            return self.send(request, raw, headers, body, cut=self.cut_of(name, body))
        start, end = int(first[1]), int(first[2] or len(raw) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(raw)}"
        part = raw[start : end + 1]
        return self.send(request, part, headers, body, status=206, cut=self.cut_of(name, body))

    def cut_of(self, name: str, body: bool) -> int | None:
        """Bytes after which this transfer ends; once."""
        if not body or self.cut is None or self.cut[0] != name:
            return None
        bytes_sent, self.cut = self.cut[1], None
        return bytes_sent

    def refuse(self, request: BaseHTTPRequestHandler, status: int, code: str, body: bool) -> None:
        """The hub's errors carry their kind in a header."""
        raw = json.dumps({"error": code}).encode()
        self.send(request, raw, {"X-Error-Code": code}, body, status=status)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        raw: bytes,
        headers: dict[str, str],
        body: bool,
        *,
        status: int = 200,
        cut: int | None = None,
    ) -> None:
        """One answer, of which `cut` bytes are sent before the connection breaks."""
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        if body:
            request.wfile.write(raw if cut is None else raw[:cut])
        if cut is not None:
            request.close_connection = True


def etag(raw: bytes) -> str:
    """A file's tag: the hash of its content."""
    return hashlib.sha256(raw).hexdigest()
