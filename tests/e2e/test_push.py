"""`atropos export --push`, by the real huggingface_hub, to a stand-in of the hub's HTTP API on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_core.storage.checkpoint import Checkpoints
from atropos_testing.samples import make_group
from tests.conftest import REPOSITORY
from tests.recorded_runs import recorded

pytestmark = pytest.mark.slow
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
TOKEN = "hf_a_token_that_may_write"


class Hub(ThreadingHTTPServer):
    """Repositories by kind and name: their files, and whether they are private."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}  # large files, by SHA-256
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def answer(self, status: int, value: Any = None) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if status == 404:
            self.send_header("x-error-code", "RepoNotFound")  # as the hub says it
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        hub.calls.append(f"{self.command} {path}")
        if path.startswith("/stored/"):
            hub.stored[path.rpartition("/")[2]] = body
            return self.answer(200)
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid user token."})
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made.get('organization') or 'me'}/{made['name']}"
            key = f"{made.get('type') or 'model'}s/{name}"
            hub.repositories[key] = {"private": made.get("private", made.get("visibility") == "private"), "files": {}}
            return self.answer(200, {"url": f"{hub.url}/{'datasets/' if key.startswith('dataset') else ''}{name}"})
        if found := re.fullmatch(r"/(?:(datasets)/)?(\w+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            made = [{**one, "actions": {"upload": {"href": f"{hub.url}/stored/{one['oid']}"}}} for one in objects]
            return self.answer(200, {"transfer": "basic", "objects": made})
        if found := re.fullmatch(r"/api/((?:models|datasets)/\w+/[\w.-]+)(?:/(preupload|commit)/main)?", path):
            repository = hub.repositories.get(found[1])
            if repository is None:
                return self.answer(404, {"error": "Repository not found"})
            if found[2] == "preupload":
                files = json.loads(body)["files"]
                return self.answer(200, {"files": [
                    {"path": one["path"], "shouldIgnore": False,
                     "uploadMode": "lfs" if one["path"].endswith((".safetensors", ".parquet")) else "regular"} for one in files
                ]})  # fmt: skip
            if found[2] == "commit":
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        repository["files"][value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        repository["files"][value["path"]] = hub.stored[value["oid"]]
                return self.answer(
                    200,
                    {
                        "commitUrl": f"{hub.url}/{found[1].removeprefix('models/')}/commit/{'1' * 40}",
                        "commitOid": "1" * 40,
                        "success": True,
                    },
                )
            return self.answer(200, {"id": found[1].partition("/")[2], "private": repository["private"]})
        return self.answer(404, {"error": f"this stand-in has no {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def log_message(self, format: str, *arguments: object) -> None: ...


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    """Of somebody who is logged in."""
    own = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf")}
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, **own}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_a_data_set_is_pushed_in_one_private_repository_with_its_card(atropos, hub: Hub, tmp_path: Path) -> None:
    run = await recorded(tmp_path / "run", [make_group(0, [0, 1], failed=1)])
    logged_in = environment(hub, tmp_path)

    def export(name: str, *flags: str, **changed: str) -> Any:
        return atropos("export", str(run), "--as", "sft", "--out", name, *flags, **{**logged_in, **changed})

    for name, flags in (("sft.jsonl", ()), ("open.parquet", ("--public",))):
        ended = export(name, "--push", f"me/{name.partition('.')[0]}", *flags, "--json")
        assert ended.code == 0, (ended.err, hub.calls)
        assert json.loads(ended.out)["url"].startswith(f"{hub.url}/datasets/me/")
    private, public = hub.repositories["datasets/me/sft"], hub.repositories["datasets/me/open"]
    assert (private["private"], public["private"]) == (True, False)
    assert private["files"]["sft.jsonl"] == (tmp_path / "sft.jsonl").read_bytes()
    assert (
        hashlib.sha256(public["files"]["open.parquet"]).digest()
        == hashlib.sha256((tmp_path / "open.parquet").read_bytes()).digest()
    )
    _, metadata, text = private["files"]["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(metadata)["configs"][0]["data_files"] == [{"split": "train", "path": "sft.jsonl"}]
    assert "2 rows" in text and "- 1: the rollout failed" in text

    for name, changed, wanted in (
        ("a.jsonl", {"HF_TOKEN": ""}, "you are not logged in to the hub"),
        ("b.jsonl", {"HF_TOKEN": "hf_wrong"}, "the hub refused whoami"),
        ("c.jsonl", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub gave no answer to whoami"),
        ("d.jsonl", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE must not be set"),
    ):
        ended = export(name, "--push", "me/other", **changed)
        assert ended.code != 0 and wanted in ended.err and TOKEN not in ended.err, ended.err
        assert not (tmp_path / name).exists(), "before anything is written"
    ended = export("d.jsonl", "--push", "me/sft")
    assert ended.code != 0 and "the hub has a dataset me/sft already" in ended.err, ended.err
    assert export("e.jsonl", "--public").code == 2 and export("f.jsonl", "--push", "nonsense").code == 2
    assert set(hub.repositories) == {"datasets/me/sft", "datasets/me/open"}


async def test_a_policy_is_pushed_with_its_card_and_an_adapter_only_where_others_can_load_it(
    atropos, hub: Hub, tmp_path: Path
) -> None:
    run = await recorded(tmp_path / "run", [make_group(0, [0, 1])])

    async def whole(folder: Path) -> None:
        shutil.copytree(TINY, folder, dirs_exist_ok=True)
        (folder / "trainer_state.pt").write_bytes(b"moments")

    async def adapter(folder: Path) -> None:
        base = {"base_model_name_or_path": "/home/somebody/models/base", "r": 8}
        (folder / "adapter_config.json").write_text(json.dumps(base))
        (folder / "adapter_model.safetensors").write_bytes(b"weights")

    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    await checkpoints.save(1, {}, whole)
    await checkpoints.save(2, {}, adapter)
    logged_in = environment(hub, tmp_path)

    def export(*flags: str) -> Any:
        return atropos("export", str(run), "--as", "hf", *flags, **logged_in)

    ended = export("--step", "1", "--out", "whole", "--push", "me/policy")
    assert ended.code == 0, ended.err
    files = hub.repositories["models/me/policy"]["files"]
    assert files["model.safetensors"] == (TINY / "model.safetensors").read_bytes()
    assert set(files) == {path.name for path in TINY.iterdir()} | {"README.md"}, "and no trainer_state.pt"
    assert files["README.md"] == (tmp_path / "whole/README.md").read_bytes()
    metadata = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert (metadata["library_name"], metadata["tags"][0], "base_model" in metadata) == (
        "transformers",
        "atropos",
        False,
    )

    (run / "config.toml").write_text('model = "/home/somebody/models/base"\n')
    ended = export("--out", "local", "--push", "me/adapter")
    assert ended.code == 2 and "Push a whole model: --merged" in ended.err, ended.err
    assert "models/me/adapter" not in hub.repositories
    (run / "config.toml").write_text(
        'model = "Qwen/Qwen3-0.6B"\n[trainer]\nuse = "grpo"\ndevices = ["cpu"]\n[environment.gsm8k]\nsecret = "s3cret"\n'
    )
    ended = export("--out", "adapter", "--push", "me/adapter")
    assert ended.code == 0, ended.err
    files = hub.repositories["models/me/adapter"]["files"]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    card = files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["library_name"], metadata["base_model"], metadata["base_model_relation"]) == (
        "peft",
        "Qwen/Qwen3-0.6B",
        "adapter",
    )
    assert 'AutoPeftModelForCausalLM.from_pretrained("PATH_OR_ID", dtype="float32")' in card, "as it was trained"
    assert "s3cret" not in card and "somebody" not in card
    for flags, wanted in (
        (("--out", "adapter"), "adapter is there already"),
        (("--out", "x", "--step", "1", "--merged"), "--merged has no effect: this run trained the whole model"),
        (("--out", "x", "--step", "7"), "no checkpoint of step 7"),
        (("--out", "x", "--step", "1", "--step", "2"), "Give --step once"),
        (("--out", "x", "--only-correct"), "--only-correct has no effect with --as hf"),
    ):
        ended = export(*flags)
        assert ended.code != 0 and wanted in ended.err, ended.err
    assert not (tmp_path / "x").exists()
