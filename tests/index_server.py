"""A package index on 127.0.0.1 that speaks the simple API, and misbehaves where a test wants it to."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from pybuild.release import Pin


def make_pin(file: str, content: bytes) -> Pin:
    """The pin of a file with this content."""
    return Pin(file=file, sha256=hashlib.sha256(content).hexdigest(), size=len(content))


@dataclass
class Fault:
    """What goes wrong with one answer."""

    status: int | None = None
    """Answer with this status alone."""
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    ignore_range: bool = False
    """Send all of the file, whatever was asked for."""
    no_length: bool = False
    """Don't say how long the body is."""
    silent: bool = False
    """Send nothing until the server stops."""
    redirect: str | None = None
    """Send the client to this address."""


@dataclass
class IndexServer:
    """`files` are served by name; everything else is how."""

    files: dict[str, bytes] = field(default_factory=dict)
    declared: dict[str, str | None] = field(default_factory=dict)
    """The sha256 that the index gives for a file, where it is not the right one; None for none."""
    metadata: dict[str, str] = field(default_factory=dict)
    """PEP 658: metadata files by the file name of their wheel."""
    requires_python: dict[str, str] = field(default_factory=dict)
    yanked: set[str] = field(default_factory=set)
    faults: dict[str, Iterator[Fault]] = field(default_factory=dict)
    """For each path's last part, what goes wrong with its next answers."""
    html: bool = False
    user: str | None = None
    """`name:password`, without which all is refused."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """The last part of each path asked for, and its Range."""
    authorizations: list[str | None] = field(default_factory=list)
    sent: int = 0
    """Bytes of files sent."""
    stopping: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{f'{self.user}@' if self.user else ''}127.0.0.1:{self.port}/simple/"

    def asked(self, file: str) -> list[str | None]:
        """The ranges that `file` was asked for."""
        return [wanted for name, wanted in self.requests if name == file]

    def page(self, project: str) -> bytes | None:
        """The project's page; None where it has no file."""
        names = [n for n in self.files if canonicalize_name(n.split("-")[0]) == canonicalize_name(project)]
        if not names:
            return None
        entries: list[dict[str, Any]] = []
        for name in names:
            sha256 = self.declared.get(name, hashlib.sha256(self.files[name]).hexdigest())
            entries.append(
                {
                    "filename": name,
                    "url": f"/files/{name}",
                    "hashes": {"sha256": sha256} if sha256 else {},
                    "size": len(self.files[name]),
                    "requires-python": self.requires_python.get(name),
                    "yanked": name in self.yanked,
                }
            )
        if not self.html:
            return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": entries}).encode()
        links = []
        for e in entries:
            fragment = f"#sha256={e['hashes']['sha256']}" if e["hashes"] else ""
            yanked = " data-yanked" if e["yanked"] else ""
            links.append(f'<a href="..{e["url"][6:]}{fragment}"{yanked}>{e["filename"]}</a>')
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        index = self.server.index
        parts = unquote(self.path).strip("/").split("/")
        name = parts[-1]
        index.requests.append((name, self.headers.get("Range")))
        index.authorizations.append(self.headers.get("Authorization"))
        fault = next(index.faults.get(name, iter(())), Fault())
        if fault.silent:
            index.stopping.wait(30)
            return
        if index.user:
            wanted = "Basic " + base64.b64encode(index.user.encode()).decode()
            if self.headers.get("Authorization") != wanted:
                self.answer(401)
                return
        if fault.redirect:
            self.answer(302, headers={"Location": fault.redirect})
        elif fault.status:
            self.answer(fault.status)
        elif parts[0] == "simple" and name in index.files:  # relative links of HTML pages
            self.send_file(index.files[name], fault)
        elif parts[0] == "simple":
            page = index.page(name)
            kind = "text/html" if index.html else "application/vnd.pypi.simple.v1+json"
            self.answer(404 if page is None else 200, page or b"", {"Content-Type": kind})
        elif name in index.files:
            self.send_file(index.files[name], fault)
        elif name.endswith(".metadata") and name.removesuffix(".metadata") in index.metadata:
            self.answer(200, index.metadata[name.removesuffix(".metadata")].encode())
        else:
            self.answer(404)

    def send_file(self, content: bytes, fault: Fault) -> None:
        status, start, end = 200, 0, len(content)
        wanted = self.headers.get("Range")
        if wanted and not fault.ignore_range:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
            if start >= len(content):
                self.answer(416)
                return
            status = 206
        body = content[start:end]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if not fault.no_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body if fault.cut_after is None else body[: fault.cut_after]
        with contextlib.suppress(OSError):
            for at in range(0, len(body), 65536):
                self.wfile.write(body[at : at + 65536])
                self.server.index.sent += len(body[at : at + 65536])
        self.close_connection = True

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: IndexServer


@contextlib.contextmanager
def serve(index: IndexServer) -> Iterator[IndexServer]:
    """Serves `index` on a free port until the block is left."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.index = index
    index.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
