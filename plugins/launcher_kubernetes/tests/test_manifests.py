"""What the options of a run say in its manifests, and what is refused of them."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as some
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.launchers import PlannedRun
from atropos_launcher_kubernetes.config import KubernetesOptions
from atropos_launcher_kubernetes.manifests import files
from atropos_launcher_kubernetes.yaml_text import dump

CPU = {"engine": ("cpu",), "trainer": ("cpu",)}
NEEDED = {"image": "i", "claim": "c"}


def made(run: PlannedRun | None = None, **options: Any) -> dict[tuple[str, str], Any]:
    run = run or PlannedRun(Path("/here/a-run"), "seed = 0\n", CPU)
    text = files(KubernetesOptions.model_validate(NEEDED | options), run).files
    documents = [one for part in text.values() for one in yaml.safe_load_all(part)]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def container(objects: dict[tuple[str, str], Any], job: str) -> Any:
    return objects["Job", job]["spec"]["template"]["spec"]["containers"][0]


def test_the_options_of_the_cluster_are_in_the_manifests() -> None:
    asked = {"cpus": 2.5, "gpus": 2, "memory_gb": 3, "node_selector": {"pool": "a"}}
    run = PlannedRun(Path("/here/a-run"), "seed = 0\n", {**CPU, "engine": ("cuda:0", "cuda:1")})
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
    assert engine["command"][3:] == ["engine", "a-run:7000", "/data/runs/a-run", "--wait-s", "60"]
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
    assert command[-4:] == ["--concurrency", "5", "--", "gsm8k"] and "http://run:8123" in command
    assert job["spec"]["template"]["spec"]["volumes"][-1]["secret"]["items"] == [{"key": "token", "path": "token"}]
    [server] = objects["Job", "run-loop"]["spec"]["template"]["spec"]["initContainers"]
    assert server["restartPolicy"] == "Always"
    with pytest.raises(FitError, match="no such environment"):
        made(run, workers={"other": {}})
    with pytest.raises(FitError, match="no workers would run"):
        made(run)


TEXT = some.text(some.characters(codec="utf-8"))
LINES = some.lists(some.from_regex(r"[a-z =\[\]]{0,6}[a-z]", fullmatch=True), min_size=2).map(
    lambda lines: "\n".join(lines) + "\n"
)
VALUES = some.recursive(
    some.integers() | some.booleans() | TEXT | LINES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(some.dictionaries(TEXT, VALUES, min_size=1, max_size=4))
def test_a_reader_of_yaml_reads_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(dump(value)) == value


def as_kubernetes_starts(command: list[str], variables: dict[str, str]) -> list[str]:
    """`$(NAME)` is the value of a variable of the container, `$$` is `$`, and all else is as it stands."""
    replaced = re.compile(r"\$\$|\$\(([^)]*)\)")
    return [replaced.sub(lambda at: variables.get(at[1], at[0]) if at[1] is not None else "$", one) for one in command]


def words_of_shell(script: str) -> list[list[str]]:
    """The words with which a script would start each program. Runs it in a shell whose `exec`, `cat` and `umask` only print their words."""
    printing = "say() { printf '%s\\0' \"$@\"; printf '\\1\\0'; }; alias exec=say cat=: umask=:\n"
    said = subprocess.run(
        ["dash", "-c", f'{printing}eval "$1"', "sh", script], capture_output=True, check=True, cwd="/"
    )
    return [one.decode().split("\0")[:-1] for one in said.stdout.split(b"\1\0")[:-1]]


HOSTILE = ["a b", "$(touch X)y", "`id`", "'", '"', "--", "-x", "$HOME", "$$", "$(ATROPOS_POD_ADDRESS)", "x: y # z", "*", "é", "日本", "~",
           "%j", "2026", "A_run", "a.run", "x" * 200, "{host}", "a,b", "&& id", "null", "|", "\\", "!x"]  # fmt: skip
NAMES = some.text(some.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=60).filter(
    lambda text: text not in (".", "..")
)


def refused(values: list[str]) -> bool:
    return any(re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", one) for one in values)


def check_any_names(directory: str, environment: str, python: str) -> None:
    run = PlannedRun(Path("/here") / directory, "seed = 0\n", CPU, [environment], has_api=True)
    try:
        objects = made(run, workers={environment: {}}, python=python)
    except (FitError, ValidationError):
        assert refused([directory, environment, python])
        return
    assert not refused([directory, environment, python])
    there = f"/shared/runs/{directory}"
    variables = {"ATROPOS_POD_ADDRESS": "10.0.0.1", "HOME": "/root"}
    jobs = {name: one["spec"]["template"]["spec"] for (kind, name), one in objects.items() if kind == "Job"}
    started = [as_kubernetes_starts(one["containers"][0]["command"], variables) for one in jobs.values()]
    assert (
        sum(one[:3] == [python, "-m", "atropos_launcher_kubernetes.holder"] and one[5] == there for one in started) == 2
    )
    [loop] = [one for one in started if one[2].endswith(".loop")]
    assert loop[:1] == [python] and loop[4] == there
    [worker] = [one for one in started if one[2].endswith(".until_end")]
    assert worker[3:5] == [there, python] and worker[-2:] == ["--", environment]
    [server] = [one["initContainers"][0] for one in jobs.values() if "initContainers" in one]
    shell, option, script = as_kubernetes_starts(server["command"], variables)
    assert (shell, option) == ("sh", "-c")
    [words] = words_of_shell(script)
    assert words[:4] == [python, "-m", "atropos_core", "serve"] and words[words.index("--dir") + 1] == f"{there}/api"
    for name in (name for _, name in objects):
        assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    [submitted] = csv.reader(
        [files(KubernetesOptions.model_validate(NEEDED | {"workers": {environment: {}}}), run).submit[-1]]
    )
    assert submitted == [f"/here/{directory}/manifests"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_reaches_the_program_as_it_is_or_is_refused(name: str) -> None:
    check_any_names(name, name, name)


@settings(max_examples=20, deadline=None)
@given(NAMES, NAMES, NAMES)
@example("a\nb", "c", "d")
def test_any_name_reaches_the_program_as_it_is_or_is_refused(directory: str, environment: str, python: str) -> None:
    check_any_names(directory, environment, python)


def test_runs_and_roles_that_differ_have_objects_that_differ() -> None:
    names = [
        "a-run",
        "A-run",
        "a_run",
        "a.run",
        "a--run",
        "日本",
        "東京",
        "-",
        "1",
        "2",
        "run",
        "x" * 41,
        "x" * 42,
        f"{'x' * 41}-20260131",
        "x" * 200,
    ]
    services = {next(iter(made(PlannedRun(Path("/here") / name, "", CPU)))) for name in names}
    assert len(services) == len(names)
    roles = {f"engine-{name}": ("cpu",) for name in ("a_b", "a.b", "A-b", "x" * 100, "x" * 101)} | CPU
    jobs = [name for kind, name in made(PlannedRun(Path("/here/run"), "", roles)) if kind == "Job"]
    assert len(jobs) == len(roles) + 1


@pytest.mark.parametrize(
    "wrong",
    [{"namespace": "A b"}, {"namespace": "x" * 64}, {"claim": "a/b"}, {"image": "a b"}, {"image": "a\n"}, {"gpu": "a b"}, {"gpu": ""},
     {"mount": "/a:b"}, {"mount": "/a\nb"}, {"mount": "/"}, {"mount": "shared"}, {"python": ""}, {"python": "a\x00b"},
     {"loop": {"node_selector": {"a b": "c"}}}, {"loop": {"node_selector": {"a": "b c"}}}, {"loop": {"node_selector": {"a": "x" * 64}}},
     {"loop": {"cpus": 0.0001}}],
)  # fmt: skip
def test_what_kubernetes_would_refuse_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KubernetesOptions.model_validate(NEEDED | wrong)


def test_a_name_that_cannot_be_a_secrets_key_is_refused() -> None:
    with pytest.raises(FitError, match=r"engine\.replica\.a b cannot have a pod"):
        made(PlannedRun(Path("/here/run"), "", {"engine-a b": ("cpu",), **CPU}))


def test_little_is_not_rounded_to_nothing_and_much_not_to_less() -> None:
    requests = container(made(loop={"cpus": 1234567.5, "memory_gb": 0.0001}), "a-run-loop")["resources"]["requests"]
    assert requests == {"cpu": "1234567.5", "memory": "1M"}
