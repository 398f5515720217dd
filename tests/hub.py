"""A server on loopback that speaks the calls of the Hub, and a process that takes it for the Hub.

The calls are: creating a repository or a branch, reading a file, checking the metadata of a card, choosing how each
file goes up, the batch call of Git LFS, and the commit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_a_test"


@dataclass
class Hub:
    """What the server has been told.

    Attributes:
        files: Content of each file, by repository and path.
        commits: The repositories committed to, with the message.
        large: Content uploaded through LFS, by its SHA-256.
        unknown: Requests that the server has no answer to.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unauthorised: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, data: Any) -> None:
        self.answer(200, json.dumps(data).encode(), Content_Type="application/json")

    @property
    def here(self) -> str:
        return f"http://{self.headers['Host']}"

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        match parts:
            case ["api", "whoami-v2"]:
                self.answer_json({"name": "me", "type": "user", "orgs": []})
            case ["api", "models", owner, name]:
                self.answer_json({"id": f"{owner}/{name}", "private": name != "public"})
            case ["api", "agent-harnesses"]:
                # The client describes itself in a header; this list tells it how.
                self.answer_json({"standardEnvVars": [], "harnesses": {}})
            case [owner, name, "resolve", "main", path]:
                content = self.hub.files.get(f"{owner}/{name}", {}).get(path)
                if content is None:
                    self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                else:
                    etag = f'"{hashlib.sha1(content).hexdigest()}"'
                    self.answer(200, content, ETag=etag, X_Repo_Commit=COMMIT)
            case _:
                self.hub.unknown.append(f"{self.command} {self.path}")
                self.answer(404)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.large[hashlib.sha256(content).hexdigest()] = content
        self.answer(200)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length is not None else self.read_chunks()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.hub.unauthorised.append(self.path)
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                self.hub.files.setdefault(repo, {})
                self.answer_json({"url": f"{self.here}/{repo}"})
            case ["api", "validate-yaml"]:
                self.answer_json({"errors": [], "warnings": []})
            case ["api", "models", _, _, "branch", branch]:
                self.hub.commits.append(("branch", branch))
                self.answer_json({})
            case ["api", "models", _, _, "preupload", _]:
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = ["lfs" if path.endswith(".safetensors") else "regular" for path in paths]
                pairs = zip(paths, modes, strict=True)
                self.answer_json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in pairs]})
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                for wanted in objects:
                    wanted["actions"] = {"upload": {"href": f"{self.here}/storage/{wanted['oid']}"}}
                self.answer_json({"transfer": "basic", "objects": objects})
            case ["api", "models", owner, name, "commit", branch]:
                if branch != "main":
                    self.hub.commits.append(("on", branch))
                self.commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
                self.answer_json({"commitUrl": f"{self.here}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            case _:
                self.hub.unknown.append(f"{self.command} {self.path}")
                self.answer(404)

    def read_chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.commits.append((repo, value["summary"]))
                case "file":
                    self.hub.files[repo][value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    self.hub.files[repo][value["path"]] = self.hub.large[value["oid"]]
                case other:
                    self.hub.unknown.append(f"commit line {other}")


@contextlib.contextmanager
def serving(hub: Hub, folder: Path) -> Iterator[Hub]:
    """Serve a hub to this process, with the cache of its files in a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in {
            "ENDPOINT": here,
            "HUGGINGFACE_CO_URL_TEMPLATE": here + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(folder / "hub"),
            "AGENT_HARNESSES_PATH": str(folder / "harnesses.json"),
            "HF_HUB_OFFLINE": False,
            # Xet talks to servers of its own; the Hub offers LFS as well.
            "HF_HUB_DISABLE_XET": True,
        }.items():
            patch.setattr(constants, name, value)
        # Clients outlive a test, and each keeps the address that it was made with.
        patch.setattr(HfApi, "endpoint", property(lambda self: here, lambda self, value: None), raising=False)
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
