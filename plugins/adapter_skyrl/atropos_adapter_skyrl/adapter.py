"""`atropos adapter skyrl`: write SkyRL's command line from a run file, and check if SkyRL works here."""

from __future__ import annotations

import asyncio
import json
import platform
import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from atropos_adapter_kit.versions import installed_version
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_core.config.run_file import RunConfig, dump, to_toml
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Finding
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.requirements import cuda_devices

T = TypeVar("T")
TESTED = {"skyrl": "0.3.0", "skyrl-gym": "0.4.0", "ray": "2.56.0"}
_SCRIPT = """#!/usr/bin/env bash
# Trains in SkyRL on the environments of run.toml, next to this file. Further arguments override these.
# SkyRL has its own settings for [trainer], [bridge], [engine], [curriculum], [teacher.*], [sink.*] and [health]: only the
# learning rate is carried over. Of [transform.*], group_advantage is carried over.
set -euo pipefail
cd "$(dirname "$0")"
exec python -m skyrl.train.entrypoints.main_base \\
"""


class SkyRLAdapter:
    def __init__(self, options: SkyRLOptions, context: RunContext) -> None:
        self._options = options
        self._context = context

    def export(self, run: RunConfig, out: Path) -> list[Path]:
        """Write `run.toml`, with every value resolved, and `skyrl.sh`, which starts SkyRL on it. Raises ConfigError for an
        option without effect."""
        self._options.refuse_for("an export, which writes its own run file", "run")
        config, script = out / "run.toml", out / "skyrl.sh"
        config.write_text(to_toml(dump(run)))
        lines = [
            f"  {key}={shlex.quote(shown(value))}"
            for key, value in arguments(run, self._options, str(self._context.model)).items()
        ]
        script.write_text(_SCRIPT + " \\\n".join([*lines, '  "$@"']) + "\n")
        script.chmod(0o755)
        return [config, script]

    def versions(self) -> Mapping[str, str]:
        found = {name: installed_version(name) or "not installed" for name in (*TESTED, "torch", "transformers")}
        return {"python": platform.python_version(), **found}

    def doctor(self) -> Sequence[Finding]:
        """Check versions, SkyRL's requirements, and one episode through its own classes. Raises ConfigError for any option."""
        self._options.refuse_for("`atropos adapter skyrl doctor`", *SkyRLOptions.model_fields)
        findings = []
        for name, tested in TESTED.items():
            if (found := installed_version(name)) is None:
                findings.append(Finding(name, False, "not installed", f"pip install --no-deps {name}=={tested}"))
            elif found != tested:
                findings.append(Finding(name, None, f"{found}; tested with {tested}", ""))
            else:
                findings.append(Finding(name, True, found))
        devices = cuda_devices()
        note = "SkyRL's workers need one each" if not devices else "visible to this process"
        findings.append(Finding("GPUs", None if not devices else True, f"{devices}: {note}"))
        if not any(finding.ok is False for finding in findings):
            findings.append(loaded := _tried("import", _import))
            findings += [*(_unknown() if loaded.ok else ()), _tried("ray starts", _ray)]
            findings.append(_tried("one episode", lambda: _episode(self._context.model)))
        return findings


def arguments(run: RunConfig, options: SkyRLOptions, model: str) -> dict[str, Any]:
    """SkyRL's key=value arguments for this run. `model`: a directory, or an id of the hub."""
    if run.warmup:
        raise ConfigError(
            "[warmup] is not carried over to SkyRL, which would train without it.",
            remedy="Run the warm start first, with training.steps=0, and name the policy that it exports as the model.",
        )
    if gold := [name for name, reward in run.reward.items() if reward.gold is not None]:
        raise ConfigError(
            f"[reward.{gold[0]}.gold] is not carried over to SkyRL, which would train on the tasks that it holds back.",
            remedy=f"Remove [reward.{gold[0]}.gold] and, unless it is to be trained on, [reward.{gold[0]}].",
        )
    training, evaluation, elsewhere = run.training, run.evaluation, options.source != "here"
    evaluated, steps = evaluation.problems > 0, max(training.steps, 1)
    made: dict[str, Any] = {
        "trainer.override_entrypoint": "atropos_adapter_skyrl.entrypoint",
        "atropos.run": "run.toml",
    }
    given = options.model_dump(mode="json", exclude={"run"}, exclude_defaults=True)
    made |= {f"atropos.{name}": value for name, value in given.items()}
    made |= {
        "trainer.policy.model.path": model,
        "trainer.seed": run.seed,
        "trainer.max_training_steps": steps,
        "trainer.epochs": steps,
        "trainer.train_batch_size": training.groups_per_step,
        "trainer.policy_mini_batch_size": training.groups_per_step,
        **_advantages(run),
        "trainer.algorithm.use_kl_loss": False,
        "trainer.placement.colocate_all": not elsewhere,
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.placement.ref_num_gpus_per_node": 1,
        "trainer.eval_interval": (evaluation.every or steps) if evaluated else -1,
        "trainer.eval_before_train": evaluated,
        "trainer.eval_batch_size": min(max(evaluation.problems, 1), 256),
        "trainer.ckpt_interval": run.checkpoint.interval(steps),
        "trainer.max_ckpts_to_keep": run.checkpoint.keep,
        "trainer.ckpt_path": "checkpoints",
        "trainer.export_path": "exports",
        "trainer.logger": "console",
        "generator.inference_engine.num_engines": 1,
        "generator.inference_engine.tensor_parallel_size": 1,
        "generator.n_samples_per_prompt": training.group_size,
        "generator.eval_n_samples_per_prompt": evaluation.samples,
        "data.dataloader.num_workers": 0,
    }
    if (rate := run.trainer.options.get("learning_rate")) is not None:
        made["trainer.policy.optimizer_config.lr"] = rate
    sampling = run.sampling.record()
    if sampling.stop:
        raise ConfigError(
            "sampling.stop is not carried over to SkyRL, which would sample past it.",
            remedy="Remove it, and append generator.sampling_params.stop for SkyRL's own engines to skyrl.sh.",
        )
    evaluated_by = evaluation.sampling(sampling)
    if options.source == "api":  # one size and one way of sampling for all groups of a session
        made["generator.eval_n_samples_per_prompt"], evaluated_by = training.group_size, sampling
    for name, one in (("sampling_params", sampling), ("eval_sampling_params", evaluated_by)):
        made |= {
            f"generator.{name}.max_generate_length": one.max_tokens,
            f"generator.{name}.temperature": one.temperature,
            f"generator.{name}.top_p": one.top_p,
            f"generator.{name}.top_k": one.top_k or -1,
            f"generator.{name}.min_p": one.min_p,
            f"generator.{name}.logprobs": 1,
        }
    return made


def _advantages(run: RunConfig) -> dict[str, Any]:
    """SkyRL's estimator for the run file's transforms. Raises ConfigError for transforms without one."""
    baseline, divided = "none", True
    for name, one in run.transform.items():
        if one.use == "group_advantage":
            baseline, divided = one.options.get("baseline", "group"), one.options.get("divide_by_std") is not False
        elif one.use != "drop_flat":  # a flat group's advantages are 0 in SkyRL too, so nothing is lost
            raise ConfigError(
                f"[transform.{name}] changes advantages, but SkyRL would train without it.",
                remedy=f"Remove [transform.{name}], or do its work in a reward or in the environment.",
            )
    if baseline == "none":
        raise ConfigError(
            "advantages would be the rewards themselves, without a baseline: SkyRL has no estimator for them.",
            remedy="Set baseline group or others in [transform.group_advantage]. Or have the environment give Rollout.advantages, "
            "with [transform.group_advantage] in the run file and trainer.algorithm.advantage_estimator=atropos after skyrl.sh.",
        )
    if run.training.group_size == 1:
        raise ConfigError(
            "training.group_size=1: compared with its own mean a reward is 0, but SkyRL's grpo would train on the reward itself.",
            remedy="Set training.group_size=2 or more.",
        )
    if baseline == "others":
        return {"trainer.algorithm.advantage_estimator": "rloo"}
    return {"trainer.algorithm.advantage_estimator": "grpo", "trainer.algorithm.grpo_norm_by_std": divided}


def shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | bool) else str(value)


def _tried(subject: str, what: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, what())
    except Exception as error:  # noqa: BLE001 - the plugin boundary: SkyRL may raise anything
        remedy = (
            f"Tested with {', '.join(f'{name} {version}' for name, version in TESTED.items())}. On Python 3.11, run this before SkyRL "
            "is imported: import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict"
        )
        return Finding(subject, False, f"{type(error).__name__}: {error}", remedy)


def _import() -> str:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    from atropos_adapter_skyrl.signatures import form

    return f"{BasePPOExp.__module__} loads; {form()}"


def _unknown() -> Sequence[Finding]:
    """A note for each feature of this SkyRL that the adapter does not know."""
    from atropos_adapter_skyrl.rows import output_of
    from atropos_adapter_skyrl.signatures import unknown

    try:
        found = unknown(output_of([], [], [], step_wise=True, own_advantages=False))
    except Exception as error:  # noqa: BLE001 - the plugin boundary: SkyRL's code, of a version that was never tested
        message = f"the search for new features of this SkyRL failed: {type(error).__name__}: {error}"
        return [Finding("not known", False, message, f"Use skyrl {TESTED['skyrl']}, or report this.")]
    return [
        Finding("not known", None, one, "This SkyRL is newer than this adapter: watch a short training.")
        for one in found
    ]


def _ray() -> str:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        return f"here, and sees {ray.cluster_resources().get('GPU', 0):g} GPUs"
    finally:
        ray.shutdown()


def _episode(model: Path) -> str:
    from atropos_adapter_skyrl.trial import run_trial

    return finished(run_trial(model))


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, run in a separate thread and loop, because the calling thread may have a running loop:
    `atropos check` calls the doctor in one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
