"""What the options of a run say in its manifests, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from atropos_core.errors import FitError
from atropos_core.launchers import PlannedRun
from atropos_launcher_kubernetes.config import KubernetesOptions
from atropos_launcher_kubernetes.manifests import files
from atropos_launcher_kubernetes.yaml_text import dump

CPU = {"engine": ("cpu",), "trainer": ("cpu",)}
NEEDED = {"image": "i", "claim": "c"}


def made(run: PlannedRun | None = None, **options: Any) -> dict[tuple[str, str], Any]:
    run = run or PlannedRun(Path("/here/A_run"), "seed = 0\n", CPU)
    text = files(KubernetesOptions.model_validate(NEEDED | options), run).files
    documents = [one for part in text.values() for one in yaml.safe_load_all(part)]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def container(objects: dict[tuple[str, str], Any], job: str) -> Any:
    return objects["Job", job]["spec"]["template"]["spec"]["containers"][0]


def test_the_options_of_the_cluster_are_in_the_manifests() -> None:
    asked = {"cpus": 2.5, "gpus": 2, "memory_gb": 3, "node_selector": {"pool": "a"}}
    run = PlannedRun(Path("/here/A_run"), "seed = 0\n", {**CPU, "engine": ("cuda:0", "cuda:1")})
    objects = made(
        run,
        namespace="lab",
        mount="/data",
        python="python3.12",
        gpu="amd.com/gpu",
        port=7000,
        wait_s=60,
        save_s=30,
        roles={"engine": asked},
        loop={**asked, "cpus": 7},
    )
    assert all(one["metadata"]["namespace"] == "lab" for one in objects.values())
    engine = container(objects, "a-run-engine")
    assert engine["command"][:3] == ["python3.12", "-m", "atropos_launcher_kubernetes.holder"]
    assert engine["command"][3:] == ["engine", "a-run:7000", "/data/runs/A_run", "--wait-s", "60"]
    assert engine["resources"]["requests"] == {"cpu": "2.5", "memory": "3000M", "amd.com/gpu": "2"}
    pod = objects["Job", "a-run-engine"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a"} and pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "c"}
    loop = objects["Job", "a-run-loop"]["spec"]["template"]["spec"]
    assert loop["terminationGracePeriodSeconds"] == 30 and loop["nodeSelector"] == {"pool": "a"}
    assert container(objects, "a-run-loop")["resources"]["requests"] == {
        "cpu": "7",
        "memory": "3000M",
        "amd.com/gpu": "2",
    }
    assert objects["ConfigMap", "a-run"]["data"] == {"run.toml": "seed = 0\n"}


def test_each_role_is_given_its_own_secret_and_no_other() -> None:
    objects = made()
    given_to = {job: container(objects, f"a-run-{job}")["env"][0]["valueFrom"]["secretKeyRef"]["key"] for job in CPU}
    assert given_to == {"engine": "engine", "trainer": "trainer"}
    values = objects["Secret", "a-run"]["stringData"]
    assert len(set(values.values())) == 2


def test_the_service_finds_the_run_and_no_other_pod() -> None:
    objects = made()
    wanted = objects["Service", "a-run"]["spec"]["selector"].items()
    found = [
        name
        for (kind, name), one in objects.items()
        if kind == "Job" and wanted <= one["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert found == ["a-run-loop"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "launcher.image is not set"),
        ({"claim": ""}, "launcher.claim is not set"),
        ({"roles": {"teacher": {}}}, "launcher.roles.teacher has no effect"),
        ({"roles": {"engine": {"gpus": 1}}}, "engine asks for 1 GPUs"),
        ({"workers": {"gsm8k": {}}}, "launcher.workers has no effect"),
    ],
)
def test_what_could_not_run_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FitError, match=said):
        made(**options)


def test_workers_are_as_many_as_requested_and_know_the_servers_token_alone() -> None:
    run = PlannedRun(Path("/here/run"), "", CPU, ["gsm8k"], has_api=True)
    asked = {"count": 3, "concurrency": 5, "cpus": 3, "gpus": 1, "memory_gb": 2, "node_selector": {"pool": "b"}}
    objects = made(run, workers={"gsm8k": asked}, server_port=8123)
    job = objects["Job", "run-workers-gsm8k"]
    assert container(objects, "run-workers-gsm8k")["resources"]["requests"] == {
        "cpu": "3",
        "memory": "2000M",
        "nvidia.com/gpu": "1",
    }
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "b"}
    assert job["spec"]["parallelism"] == 3 and "completions" not in job["spec"]
    command = container(objects, "run-workers-gsm8k")["command"]
    assert command[-2:] == ["--concurrency", "5"] and "http://run:8123" in command
    assert job["spec"]["template"]["spec"]["volumes"][-1]["secret"]["items"] == [{"key": "token", "path": "token"}]
    [server] = objects["Job", "run-loop"]["spec"]["template"]["spec"]["initContainers"]
    assert server["restartPolicy"] == "Always"
    with pytest.raises(FitError, match="no such environment"):
        made(run, workers={"other": {}})
    with pytest.raises(FitError, match="nobody would run"):
        made(run)


TEXT = some.text(
    some.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\x85\ufeff")
)
LINES = some.lists(some.from_regex(r"[a-z =\[\]]{0,6}[a-z]", fullmatch=True), min_size=2).map(
    lambda lines: "\n".join(lines) + "\n"
)
VALUES = some.recursive(
    some.integers() | some.booleans() | TEXT | LINES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(some.dictionaries(TEXT, VALUES, min_size=1, max_size=4))
def test_a_reader_of_yaml_reads_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(dump(value)) == value
