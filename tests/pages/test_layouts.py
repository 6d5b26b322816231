"""Each layout of docs/launchers.md is rendered, for both schedulers, into the files in layouts/.
`python -m tests.pages.test_layouts` writes these anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.pages.blocks import BLOCKS

GOLDEN = Path(__file__).with_name("layouts")
NAMES = ("1-by-8", "4-by-8", "workers")
SCHEDULERS = ("slurm", "kubernetes")
TEXTS = [one.text for one in BLOCKS if one.page == "docs/launchers.md" and one.language == "toml"]
RUNS = [text for text in TEXTS if "[engine]" in text]
OLDEST, NEWEST = "1.31", "1.37"  # of Kubernetes: what the manifests need, and the newest whose schemas there are
CASES = [(layout, scheduler) for layout in NAMES for scheduler in SCHEDULERS]


def run_file(layout: str, scheduler: str) -> str:
    """What a reader of the page puts together."""
    tables = [
        text
        for text in TEXTS
        if tomllib.loads(text).get("launcher", {}).get("use") == scheduler and "[engine]" not in text
    ]
    at = NAMES.index(layout)
    return RUNS[at] + tables[at]


def rendered(layout: str, scheduler: str, folder: Path, *more: str) -> str:
    """As `atropos run` prints it where vLLM is installed, of which only that is looked at; without what differs from one machine to
    another, and without most of the run file."""
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm/__init__.py").touch()
    (folder / "run.toml").write_text(run_file(layout, scheduler))
    done = subprocess.run(
        [sys.executable, "-m", "atropos_core", "run", "run.toml", "--model", "tiny", "--dir", "big", *more],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(folder: Path) -> str:
    files = sorted(
        path for path in (folder / "big").rglob("*") if path.is_file() and path.name not in ("config.toml", "token")
    )
    text = "".join(f"=== {path.relative_to(folder / 'big')}\n{path.read_text()}" for path in files)
    text = text.replace(str(folder), "/shared").replace(sys.executable, "/shared/venv/bin/python")
    text = re.sub(r"(?s)(  run\.toml: \|\n).*?(?=^---$|^=== |\Z)", r"\1    ...\n", text, flags=re.M)
    return re.sub(r'"[\w-]{43}"|"[0-9a-f]{64}"', '"..."', text)


@pytest.mark.parametrize(("layout", "scheduler"), CASES)
def test_a_layout_of_the_page_is_rendered_as_recorded(layout: str, scheduler: str, tmp_path: Path) -> None:
    said = rendered(layout, scheduler, tmp_path)
    assert (
        "nothing was started. To start it: " + {"slurm": "sbatch", "kubernetes": "kubectl apply -f"}[scheduler] in said
    )
    assert shown(tmp_path) == (GOLDEN / f"{layout}.{scheduler}").read_text()


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifests_of_a_layout_are_what_kubernetes_own_schemas_allow(
    version: str, layout: str, tmp_path: Path
) -> None:
    rendered(layout, "kubernetes", tmp_path)
    documents = [
        one for path in (tmp_path / "big/manifests").glob("*.yaml") for one in yaml.safe_load_all(path.read_text())
    ]
    assert len(documents) >= 5
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_manifest_with_a_field_that_there_is_not_is_refused_by_these_schemas(tmp_path: Path) -> None:
    rendered("1-by-8", "kubernetes", tmp_path)
    [job, *_] = yaml.safe_load_all((tmp_path / "big/manifests/roles.yaml").read_text())
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, NEWEST, strict=True)


@pytest.mark.parametrize("layout", NAMES)
def test_the_scripts_of_a_layout_are_bash(layout: str, tmp_path: Path) -> None:
    rendered(layout, "slurm", tmp_path)
    for script in (tmp_path / "big/job").glob("*.sbatch"):
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_dry_run_prints_the_files_and_writes_none(scheduler: str, tmp_path: Path) -> None:
    said = rendered("1-by-8", scheduler, tmp_path, "--dry-run")
    assert "nothing was written" in said and not (tmp_path / "big").exists()
    assert {"slurm": "#SBATCH --gpus-per-node=8", "kubernetes": 'kind: "Job"'}[scheduler] in said


def test_secrets_are_new_each_time_and_a_file_of_their_own(tmp_path: Path) -> None:
    made = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        rendered("workers", "kubernetes", folder)
        made.append(yaml.safe_load((folder / "big/manifests/secrets.yaml").read_text())["stringData"])
        assert (folder / "big/manifests/secrets.yaml").stat().st_mode & 0o077 == 0
        others = "".join(
            path.read_text() for path in (folder / "big/manifests").glob("*.yaml") if path.name != "secrets.yaml"
        )
        assert not [secret for secret in made[-1].values() if secret in others]
    assert made[0].keys() == made[1].keys() == {"engine", "trainer", "token"}
    assert not set(made[0].values()) & set(made[1].values()) and len(set(made[0].values())) == 3


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for layout, scheduler in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rendered(layout, scheduler, Path(folder))
            (GOLDEN / f"{layout}.{scheduler}").write_text(shown(Path(folder)))
