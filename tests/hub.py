"""A stand-in for the Hub: repositories, branches and files are read from a server on loopback; commits come by call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the Hub has been told.

    Attributes:
        files: Content of each file, by repository and path.
        commits: Repository, branch and message of each commit.
        unknown: Requests that the server has no answer to.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str | None, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def commit(
        self, repo_id: str, operations: Any, *, commit_message: str, revision: str | None = None, **_: Any
    ) -> Any:
        """Do as `HfApi.create_commit` does."""
        for operation in operations:
            with operation.as_file() as file:
                self.files[repo_id][operation.path_in_repo] = file.read()
        self.commits.append((repo_id, revision, commit_message))
        return SimpleNamespace(commit_url=f"http://hub/{repo_id}/commit/{COMMIT}")


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, data: Any) -> None:
        self.answer(200, json.dumps(data).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "repos", "create"]:
                repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                self.hub.files.setdefault(repo, {})
                self.answer_json({"url": f"http://{self.headers['Host']}/{repo}"})
            case ["api", "models", _, _, "branch", _]:
                self.answer_json({})
            case ["api", "models", owner, name]:
                self.answer_json({"id": f"{owner}/{name}", "private": name != "public"})
            case ["api", "whoami-v2"]:
                self.answer_json({"name": "me", "type": "user", "orgs": []})
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

    do_HEAD = do_POST = do_GET


@contextlib.contextmanager
def serving(hub: Hub, folder: Path) -> Iterator[Hub]:
    """Serve a hub to this process, with the cache of its files in a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_of_a_test")
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in {
            "ENDPOINT": here,
            "HUGGINGFACE_CO_URL_TEMPLATE": here + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(folder / "hub"),
            "AGENT_HARNESSES_PATH": str(folder / "harnesses.json"),
            "HF_HUB_OFFLINE": False,
        }.items():
            patch.setattr(constants, name, value)
        # Clients outlive a test, and each keeps the address that it was made with.
        patch.setattr(HfApi, "endpoint", property(lambda self: here, lambda self, value: None), raising=False)
        patch.setattr(HfApi, "create_commit", lambda self, *given, **named: hub.commit(*given, **named))
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
