"""What the options of a job say in its scripts, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.launchers import PlannedRun
from atropos_launcher_slurm.batch import files
from atropos_launcher_slurm.config import SlurmOptions

CPU = {"engine": ("cpu",), "trainer": ("cpu",)}


def made(run: PlannedRun | None = None, **options: object) -> dict[str, str]:
    return dict(
        files(SlurmOptions.model_validate(options), run or PlannedRun(Path("/shared/a run"), "seed = 0\n", CPU)).files
    )


def test_what_a_site_wants_is_in_the_script() -> None:
    script = made(
        partition="gpu", account="lab", time="1:00:00", save_s=90, sbatch=["--constraint=h100"], setup=["module load cuda"],
        nodes=3, node={"cpus": 8, "memory_gb": 1.5},
    )["job/run.sbatch"]  # fmt: skip
    for line in ("--partition=gpu", "--account=lab", "--time=1:00:00", "--signal=B:USR1@90", "--constraint=h100", "--nodes=3",
                 "--cpus-per-task=8", "--mem=1500M", "--requeue"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert script.index("module load cuda\n") < script.index("atropos_core resume '/shared/a run' &")


def test_the_run_file_is_that_of_the_run_directory() -> None:
    assert made()["config.toml"] == "seed = 0\n"


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        (("cuda:0",), {}, r"uses cuda:0 \(engine.devices\)"),
        (("cpu",), {"roles": {"engine": {"gpus": 1}}, "node": {"cpus": 4, "gpus": 1}}, "takes 1 GPUs of its node"),
    ],
)
def test_devices_that_a_role_does_not_get_are_refused(
    devices: tuple[str, ...], options: dict[str, object], said: str
) -> None:
    run = PlannedRun(Path("/shared/run"), "", {**CPU, "engine": devices})
    with pytest.raises(FitError, match=said):
        made(run, **options)


def test_workers_need_an_api_and_an_environment_of_the_run() -> None:
    run = PlannedRun(Path("/shared/run"), "", CPU, ["gsm8k"], has_api=True)
    with pytest.raises(FitError, match="nobody would run its environments"):
        made(run)
    with pytest.raises(FitError, match="no such environment"):
        made(run, workers={"other": {}})
    with pytest.raises(FitError, match=r"launcher\.workers has no effect"):
        made(workers={"gsm8k": {}})
    script = made(run, workers={"gsm8k": {"count": 3, "cpus": 2, "memory_gb": 4, "concurrency": 5, "partition": "cpu"}})
    for line in ("--array=0-2", "--cpus-per-task=2", "--mem=4000M", "--partition=cpu"):
        assert f"#SBATCH {line}\n" in script["job/workers-gsm8k.sbatch"]
    assert "--concurrency 5" in script["job/workers-gsm8k.sbatch"] and len(script["job/token"]) > 40


@pytest.mark.parametrize(
    "wrong", [{"time": "1:00\n#SBATCH --x"}, {"setup": ["a\nb"]}, {"roles": {"engine": {"cores": 1}}}, {"save_s": 1}]
)
def test_what_would_not_be_one_line_or_is_misspelt_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SlurmOptions.model_validate(wrong)
