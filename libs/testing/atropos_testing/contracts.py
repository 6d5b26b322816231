"""The contract of each kind of component, by kind: as findings, and as a test function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from atropos_core.errors import ConfigError
from atropos_core.guards.exits import calls_components
from atropos_core.interfaces import Finding, Loss
from atropos_core.storage.tempdirs import owned_directory
from atropos_testing.report import expect_all_ok
from atropos_testing.subject import Subject, Target, find

calls_components(Path(__file__).parent)

KINDS = (
    "environment", "reward", "transform", "curriculum", "bridge", "loss", "sink", "teacher", "engine", "trainer", "adapter",
    "sandbox", "launcher",
)  # fmt: skip


def check(
    kind: str,
    target: Target,
    options: Mapping[str, Any] | None = None,
    *,
    skip: Sequence[str] = (),
    **settings: Any,  # of the kind's own contract class
) -> list[Finding]:
    """Return all findings on one component. Raises only what finding or configuring it raises."""
    if kind not in KINDS:
        raise ConfigError(f"there is no contract for {kind!r}. Choose one of: {', '.join(KINDS)}.")
    with owned_directory("check") as directory:
        return _contract(kind)(find(kind, target, options, directory), skip=skip, **settings).findings()


def environment_contract(
    target: Target,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    tasks: int = 6,
    deadline_s: float = 30.0,
) -> Callable[[], None]:
    """Return a test function. It runs `tasks` of the environment's tasks, each rollout within `deadline_s`."""
    return _test("environment", target, options, skip, tasks=tasks, deadline_s=deadline_s)


def reward_contract(
    target: Target,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    answer: str = "42",
    data: Mapping[str, Any] | None = None,
    deadline_s: float = 60.0,
) -> Callable[[], None]:
    """Return a test function. `answer` and `data` are of the task whose episodes are scored."""
    return _test("reward", target, options, skip, answer=answer, data=data or {}, deadline_s=deadline_s)


def transform_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("transform", target, options, skip)


def curriculum_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("curriculum", target, options, skip)


def bridge_contract(
    target: Target,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    model: str | None = None,
    engine: str | None = None,
    trainer: str | None = None,
) -> Callable[[], None]:
    """Return a test function. Without `engine` and `trainer`, it uses the first installed pair that the bridge fits, and fails if there
    is none."""
    settings = {"model": model, "engine": engine, "trainer": trainer, "must_run": True}
    return _test("bridge", target, options, skip, **settings)


def loss_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    """Return a test function. It checks what the loss's own trainer requires."""
    return _test("loss", target, options, skip)


def sink_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("sink", target, options, skip)


def teacher_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("teacher", target, options, skip)


def engine_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("engine", target, options, skip)


def trainer_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("trainer", target, options, skip)


def adapter_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("adapter", target, options, skip)


def sandbox_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("sandbox", target, options, skip)


def launcher_contract(
    target: Target, *, options: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> Callable[[], None]:
    return _test("launcher", target, options, skip)


class _Contract(Protocol):
    def findings(self) -> list[Finding]: ...


class _LossContract:
    def __init__(self, subject: Subject, *, skip: Sequence[str] = ()) -> None:
        self._subject, self._skip = subject, skip

    def findings(self) -> list[Finding]:
        made: Loss = self._subject.make()
        module, _, name = made.contract.partition(":")
        found: list[Finding] = getattr(import_module(module), name)(made, skip=self._skip)
        return found


def _contract(kind: str) -> Callable[..., _Contract]:
    if kind == "loss":
        return _LossContract
    match kind:
        case "environment":
            from atropos_testing.environments import EnvironmentContract

            return EnvironmentContract
        case "reward":
            from atropos_testing.rewards import RewardContract

            return RewardContract
        case "transform":
            from atropos_testing.transforms import TransformContract

            return TransformContract
        case "curriculum":
            from atropos_testing.curricula import CurriculumContract

            return CurriculumContract
        case "sink":
            from atropos_testing.sinks import SinkContract

            return SinkContract
        case "teacher":
            from atropos_testing.teachers import TeacherContract

            return TeacherContract
        case "engine":
            from atropos_testing.engines import EngineContract

            return EngineContract
        case "adapter":
            from atropos_testing.adapters import AdapterContract

            return AdapterContract
        case "sandbox":
            from atropos_testing.sandboxes import SandboxContract

            return SandboxContract
        case "launcher":
            from atropos_testing.launchers import LauncherContract

            return LauncherContract
        case "trainer":
            from atropos_testing.trainers import TrainerContract

            return TrainerContract
    from atropos_testing.bridges import BridgeContract

    return BridgeContract


def _test(
    kind: str, target: Target, options: Mapping[str, Any] | None, skip: Sequence[str], **settings: Any
) -> Callable[[], None]:
    def test() -> None:
        label = target if isinstance(target, str) else getattr(target, "name", getattr(target, "__name__", ""))
        expect_all_ok(f"{kind} {label!r}", check(kind, target, options, skip=skip, **settings))

    test.__doc__ = f"The contract of a {kind}."
    return test
