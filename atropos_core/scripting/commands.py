"""`atropos run` and the other commands as functions. Each takes the command's flags as keywords (`set` is --set), does the same,
and returns its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from atropos_core import console
from atropos_core.cli.options import configure
from atropos_core.errors import Interrupted
from atropos_core.launch.plan import Plan
from atropos_core.plugins.manager import load_plugins
from atropos_core.scripting.arguments import Arguments
from atropos_core.scripting.blocking import blocking
from atropos_core.scripting.results import (
    CheckResult,
    EvaluationResult,
    Exported,
    ExportedPolicy,
    InstalledComponent,
    InstalledPlugins,
    RunResult,
    View,
)

Component = Any  # its name, its place, a class, an instance, a function; or {"use": one of these, and its options}
Components = Any  # one, a list of them, or a mapping from the names that the run is to have for them
Settings = Mapping[
    str, Any
]  # of a run file, by dotted path or nested: {"training.steps": 50}, {"training": {"steps": 50}}


def run(
    run_file: str | Path | None = None,
    *,
    environment: Components = None,
    model: str | Path | None = None,
    bridge: Component = None,
    engine: Component = None,
    trainer: Component = None,
    launcher: Component = None,
    reward: Components = None,
    curriculum: Component = None,
    transform: Components = None,
    teacher: Components = None,
    sink: Components = None,
    steps: int | None = None,
    seed: int | None = None,
    deterministic: bool = False,
    set: Settings | None = None,
    directory: str | Path | None = None,
) -> RunResult:
    """Train a policy and return when it has ended: `atropos run`. Ctrl-C pauses it, which the result says; a second one ends it at
    once. Raises AtroposError."""
    from atropos_core.cli.run import warn_of_broken
    from atropos_core.launch.sizes import plan_run
    from atropos_core.storage.run_directory import RunDirectory

    arguments = Arguments(set)
    flags: dict[str, Any] = {
        "env": arguments.several("environment", environment),
        "reward": arguments.several("reward", reward),
        "bridge": arguments.one("bridge", bridge),
        "engine": arguments.one("engine", engine),
        "trainer": arguments.one("trainer", trainer),
        "model": _text(model),
        "flags": {"launcher.use": arguments.one("launcher", launcher)},
    }
    _add_further(arguments, curriculum, transform, teacher, sink)

    def work() -> RunResult:
        loaded, resolved, plugins = configure(
            _path(run_file), **flags, steps=steps, seed=seed, deterministic=deterministic, changes=arguments.changes
        )
        plan = plan_run(loaded, resolved, plugins)
        warn_of_broken(plugins)
        own = RunDirectory.for_new_run(_path(directory), "-".join(loaded.config.environment))
        return _executed(plan, own.make())

    with arguments.given():
        return blocking(work)


def resume(
    run: str | Path | RunResult,
    *,
    environment: Components = None,
    reward: Components = None,
    bridge: Component = None,
    engine: Component = None,
    trainer: Component = None,
    curriculum: Component = None,
    transform: Components = None,
    teacher: Components = None,
    sink: Components = None,
    steps: int | None = None,
    set: Settings | None = None,
) -> RunResult:
    """Continue a run from its last complete checkpoint: `atropos resume`. Objects that the run was given must be given again, by
    the same keywords; everything else is in the run directory. Raises AtroposError."""
    from atropos_core.cli.resume import plan_resume

    directory = _directory(run)
    arguments = Arguments(set)
    for kind, components in (("environment", environment), ("reward", reward)):
        arguments.add(kind, components)
    for kind, component in (("bridge", bridge), ("engine", engine), ("trainer", trainer)):
        _add_one(arguments, kind, component)
    _add_further(arguments, curriculum, transform, teacher, sink)

    def work() -> RunResult:
        resumed = plan_resume(directory, steps=steps, changes=arguments.changes)
        return (
            _executed(resumed.plan, directory, resume=True) if resumed.has_steps else RunResult(directory, "finished")
        )

    with arguments.given():
        return blocking(work)


def evaluate(
    run: str | Path | RunResult | None = None,
    *,
    step: int | None = None,
    environment: Components = None,
    model: str | Path | None = None,
    engine: Component = None,
    reward: Components = None,
    model_url: str | None = None,
    model_name: str | None = None,
    key_variable: str | None = None,
    concurrency: int | None = None,
    problems: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    set: Settings | None = None,
    out: str | Path | None = None,
) -> EvaluationResult:
    """Evaluate a model, a run's checkpoint, or a model behind an OpenAI-compatible URL on held-out problems: `atropos eval`. Raises
    AtroposError."""
    arguments = Arguments(set)
    env, rewards = arguments.several("environment", environment), arguments.several("reward", reward)
    of = arguments.one("engine", engine)
    call = load_plugins().function("evaluate")

    def work() -> EvaluationResult:
        made: EvaluationResult = call(
            None if run is None else _directory(run), step=step, env=env, model=_text(model), engine=of, reward=rewards,
            model_url=model_url, model_name=model_name, key_variable=key_variable, concurrency=concurrency, problems=problems,
            samples=samples, temperature=temperature, seed=seed, changes=arguments.changes, out=_path(out),
        )  # fmt: skip
        return made

    with arguments.given():
        return blocking(work)


def process(
    out: str | Path,
    run_file: str | Path | None = None,
    *,
    environment: Components = None,
    model: str | Path | None = None,
    engine: Component = None,
    reward: Components = None,
    groups: int = 16,
    group_size: int | None = None,
    test: bool = False,
    old_schema: bool = False,
    form: Literal["sft", "dpo", "parquet"] | None = None,
    min_reward: float | None = None,
    only_correct: bool = False,
    best_per_group: int | None = None,
    min_margin: float | None = None,
    keep_cut_off: bool = False,
    seed: int | None = None,
    set: Settings | None = None,
) -> Path:
    """Run tasks without training, and write the scored groups, one per line, or a data set in one of `export`'s forms: `atropos
    process`. Returns the new file `out`. Raises AtroposError; ConfigError if it is not installed."""
    arguments = Arguments(set)
    env, rewards = arguments.several("environment", environment), arguments.several("reward", reward)
    of = arguments.one("engine", engine)
    call, path = load_plugins().function("process"), Path(out)

    def work() -> Path:
        call(
            path, file=_path(run_file), env=env, model=_text(model), engine=of, reward=rewards, groups=groups,
            group_size=group_size, test=test, old_schema=old_schema, form=form, min_reward=min_reward, only_correct=only_correct,
            best_per_group=best_per_group, min_margin=min_margin, keep_cut_off=keep_cut_off, seed=seed, changes=arguments.changes,
        )  # fmt: skip
        return path

    with arguments.given():
        return blocking(work)


def export(
    run: str | Path | RunResult,
    form: Literal["sft", "dpo", "parquet", "hf"],
    out: str | Path,
    *,
    step: int | Sequence[int] | None = None,
    min_reward: float | None = None,
    only_correct: bool = False,
    best_per_group: int | None = None,
    min_margin: float | None = None,
    keep_cut_off: bool = False,
    merged: bool = False,
    push: str | None = None,
    public: bool = False,
) -> Exported | ExportedPolicy:
    """Export a run's rollouts as a data set, or (`"hf"`) its policy as a model directory, and upload it with `push`: `atropos export
    --as FORM`. Raises AtroposError."""
    call = load_plugins().function("export")
    steps = [step] if isinstance(step, int) else list(step or ())
    made: Exported | ExportedPolicy = blocking(
        lambda: call(
            _directory(run), form, Path(out), steps=steps, min_reward=min_reward, only_correct=only_correct,
            best_per_group=best_per_group, min_margin=min_margin, keep_cut_off=keep_cut_off, merged=merged, push=push, public=public,
        )
    )  # fmt: skip
    return made


def check(
    component: Component,
    *,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
) -> CheckResult:
    """Test a component against the contract of its kind: `atropos check`. Raises AtroposError if it is not a component."""
    call = load_plugins().function("check")
    return CheckResult(*blocking(lambda: call(component, kind, options or {}, skip)))


def doctor(run: str | Path | RunResult | None = None) -> CheckResult:
    """Check this machine, or a running or finished run: `atropos doctor`."""
    call = load_plugins().function("doctor")
    directory = None if run is None else _directory(run)
    return CheckResult("machine" if run is None else "run", blocking(lambda: call(directory)))


def view(*runs: str | Path | RunResult, port: int = 0) -> View:
    """Serve the page of these runs on this machine, or of the newest in runs/: `atropos view`. Returns once it can be opened, at
    `url`. `close()` ends it, and so does the end of this process. `save_view` writes it as a file. Raises AtroposError;
    ConfigError if it is not installed."""
    page: View = load_plugins().function("view")([_directory(run) for run in runs], port)
    return page


def save_view(
    *runs: str | Path | RunResult, out: str | Path, megabytes: float | None = None, force: bool = False
) -> Path:
    """Write the same page as one file, `out`, that can be opened anywhere: `atropos view --html`. Returns `out`. The file has at most
    `megabytes`, and replaces an existing file only with `force`. Raises AtroposError."""
    call, path = load_plugins().function("save_view"), Path(out)
    blocking(lambda: call([_directory(run) for run in runs], path, megabytes, force))
    return path


def installed() -> InstalledPlugins:
    """List what is installed: `atropos plugins`. (`atropos_core.plugins` is the package of the plugin system.)"""
    loaded = load_plugins()
    versions = {report.distribution: report.version for report in loaded.reports}
    components = [
        InstalledComponent(
            offer.kind, offer.provider.name, offer.provider.summary, offer.distribution, versions[offer.distribution]
        )
        for offer in loaded.registry.offers()
    ]
    return InstalledPlugins(components, {report.name: report.error for report in loaded.broken() if report.error})


def _executed(plan: Plan, directory: Path, *, resume: bool = False) -> RunResult:
    from atropos_core.launch.supervisor import execute

    directory = directory.absolute()  # which the result names, wherever a notebook goes from here
    try:
        return RunResult(directory, "finished", execute(plan, directory, resume=resume))
    except Interrupted as error:
        console.say(f"{error}. Go on with: atropos_core.resume({str(directory)!r})")
        return RunResult(directory, "paused")


def _add_further(
    arguments: Arguments, curriculum: Component, transform: Components, teacher: Components, sink: Components
) -> None:
    _add_one(arguments, "curriculum", curriculum)
    for kind, components in (("transform", transform), ("teacher", teacher), ("sink", sink)):
        arguments.add(kind, components)


def _add_one(arguments: Arguments, kind: str, component: Component) -> None:
    if (name := arguments.one(kind, component)) is not None:
        arguments.changes.append(f'{kind}.use="{name}"')


def _directory(run: str | Path | RunResult) -> Path:
    return run.directory if isinstance(run, RunResult) else Path(run)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
