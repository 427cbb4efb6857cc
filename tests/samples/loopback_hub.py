"""A Hugging Face hub on loopback for tests: datasets as files by revision, served as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import shutil
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import yaml


class LoopbackHub:
    """Serves `datasets`: the files of each, by name; `README.md` gives the card.

    Attributes:
        url: for HF_ENDPOINT.
        requests: methods and paths, in order.
        faults: paths (expressions) and the status that they are answered with.
        hang: paths (expressions) that are never answered.
    """

    def __init__(self, datasets: dict[str, dict[str, bytes]]) -> None:
        self.datasets = datasets
        self.requests: list[str] = []
        self.faults: dict[str, int] = {}
        self.hang = ""
        self.closing = threading.Event()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str) -> str:
        """Return the commit of a dataset, which depends on its files."""
        digest = hashlib.sha1()
        for file, data in sorted(self.datasets[name].items()):
            digest.update(file.encode() + b"\0" + hashlib.sha1(data).digest())
        return digest.hexdigest()

    def downloaded(self) -> list[str]:
        """Return the names of the files that were downloaded, in order."""
        found = (re.fullmatch(r"GET /datasets/.+/resolve/[^/]+/(.+)", request) for request in self.requests)
        return [match[1] for match in found if match]

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, *, body: bool) -> None:
        address = urllib.parse.urlsplit(handler.path)
        path = urllib.parse.unquote(address.path)
        self.requests.append(f"{handler.command} {path}")
        if self.hang and re.search(self.hang, path):
            self.closing.wait(60)
            handler.close_connection = True
            return
        status = next((code for pattern, code in self.faults.items() if re.search(pattern, path)), 0)
        headers: dict[str, str] = {}
        data = b'{"error": "injected"}'
        if not status:
            status, data, headers = self._find(path)
        given = handler.headers.get("Range")
        if given and status == 200:
            start, end = re.fullmatch(r"bytes=(\d+)-(\d*)", given).groups()
            last = int(end) if end else len(data) - 1
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            status, data = 206, data[int(start) : last + 1]
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def _find(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        match = re.fullmatch(r"/api/datasets/(.+?)(?:/revision/(.+))?", path)
        if match and match[1] in self.datasets:
            name, files = match[1], self.datasets[match[1]]
            commit = self.commit(name)
            if (match[2] or "main") not in ("main", "v1", commit):
                return 404, b"", {"X-Error-Code": "RevisionNotFound"}
            card = yaml.safe_load(files.get("README.md", b"").decode().partition("---")[2].partition("---")[0])
            siblings = [{"rfilename": file, "size": len(files[file])} for file in sorted(files)]
            info = {"id": name, "sha": commit, "private": False, "downloads": 0, "likes": 0, "tags": []}
            return 200, json.dumps({**info, "siblings": siblings, "cardData": card or {}}).encode(), {}
        match = re.fullmatch(r"/datasets/(.+?)/resolve/([^/]+)/(.+)", path)
        if match and match[3] in self.datasets.get(match[1], {}):
            data = self.datasets[match[1]][match[3]]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return 200, data, {"ETag": etag, "X-Repo-Commit": self.commit(match[1]), "Accept-Ranges": "bytes"}
        return 404, b"", {"X-Error-Code": "RepoNotFound" if "/api/" in path else "EntryNotFound"}


def cache_model(cache: Path, folder: Path, name: str = "org/model") -> None:
    """Put a model's folder into a cache of the hub."""
    model, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    shutil.copytree(folder, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
