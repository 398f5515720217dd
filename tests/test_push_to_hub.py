"""`push_to_hub` uploads everything that a converted model needs, in one commit.

The other side is a server on loopback that speaks the calls of the Hub: creating a repository, reading its card,
checking the card's metadata, choosing how each file goes up, the batch call of Git LFS, and the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_posenc

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_a_test"
OUR_SECTION = "<!-- hf_posenc begin -->"
THEIR_CARD = "---\nlicense: mit\ntags:\n- mine\n---\n\n# A model of mine\n\nText of mine.\n"

# What the pushing process runs; the fixture puts the server's address into its environment.
PUSHES = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_posenc

def model():
    torch.manual_seed(0)
    shape = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2)
    return hf_posenc.patch(LlamaForCausalLM(LlamaConfig(**shape)), "fire", threshold=64.0)

model().push_to_hub("me/fresh")
model().push_to_hub("me/with-card", commit_message="Convert", tags=["more"])
model().push_to_hub("me/sharded", max_shard_size="20KB")
model().save_pretrained(sys.argv[1], push_to_hub=True, repo_id="me/saved")
"""


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
            case ["api", "models", _, _, "preupload", "main"]:
                self.answer_json(
                    {
                        "files": [
                            {
                                "path": file["path"],
                                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                                "shouldIgnore": False,
                            }
                            for file in json.loads(body)["files"]
                        ]
                    }
                )
            case [_, _, "info", "lfs", "objects", "batch"]:
                self.answer_json(
                    {
                        "transfer": "basic",
                        "objects": [
                            {
                                "oid": wanted["oid"],
                                "size": wanted["size"],
                                "actions": {"upload": {"href": f"{self.here}/storage/{wanted['oid']}"}},
                            }
                            for wanted in json.loads(body)["objects"]
                        ],
                    }
                )
            case ["api", "models", owner, name, "commit", "main"]:
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


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """The server after four pushes from another process, to repositories of which one has a card."""
    folder = tmp_path_factory.mktemp("push")
    (folder / "saved").mkdir()
    hub = Hub(files={"me/with-card": {"README.md": THEIR_CARD.encode()}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": TOKEN,
        # Xet talks to servers of its own; the Hub offers LFS as well.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", PUSHES, str(folder / "saved")],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert hub.unknown == []
    return hub


def converted() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    return hf_posenc.patch(LlamaForCausalLM(config), "fire", threshold=64.0).eval()


REPOS = ["me/fresh", "me/with-card", "me/sharded", "me/saved"]


def test_each_push_is_one_authorised_commit(hub: Hub) -> None:
    assert [repo for repo, _ in hub.commits] == REPOS
    assert hub.commits[1] == ("me/with-card", "Convert")
    assert hub.unauthorised == []


@pytest.mark.parametrize("repo", REPOS)
def test_the_commit_holds_a_locked_config_weights_stub_and_card(hub: Hub, repo: str) -> None:
    files = hub.files[repo]
    assert {"config.json", "generation_config.json", "modeling_hf_posenc.py", "README.md"} <= set(files)
    weights = [name for name in files if name not in {"config.json", "generation_config.json", "README.md"}]
    weights.remove("modeling_hf_posenc.py")
    if repo == "me/sharded":
        weights.remove("model.safetensors.index.json")
        assert len(weights) > 2
        assert all(name.endswith(".safetensors") for name in weights)
    else:
        assert weights == ["model.safetensors"]
    config = json.loads(files["config.json"])
    assert config["model_type"] == "hf_posenc_llama"
    assert config["rope_parameters"]["rope_type"] == "hf_posenc"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_hf_posenc.PosencLlamaForCausalLM"
    assert b"PosencLlamaForCausalLM" in files["modeling_hf_posenc.py"]


@pytest.mark.parametrize("repo", REPOS)
def test_the_card_has_our_section_and_keeps_what_was_there(hub: Hub, repo: str) -> None:
    card = hub.files[repo]["README.md"].decode()
    assert card.count(OUR_SECTION) == 1
    for part in ("## Positional encoding", "`fire`", "threshold=64.0", "- start: break", "import hf_posenc"):
        assert part in card
    head = card.split("---")[1]
    assert "- hf_posenc" in head
    if repo == "me/with-card":
        assert "# A model of mine\n\nText of mine.\n" in card
        assert "license: mit" in head
        assert "- mine" in head
        assert "- more" in head


@pytest.mark.parametrize("repo", REPOS)
def test_what_was_pushed_loads_bit_equal(hub: Hub, repo: str, tmp_path: Path) -> None:
    for name, content in hub.files[repo].items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(14).view(2, 7)
    assert torch.equal(loaded(ids).logits, converted()(ids).logits)
