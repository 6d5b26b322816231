"""Every error that we raise on purpose.

The command line prints an `AtroposError` in a few lines, and any other exception with its traceback.
To add one, derive it from the nearest class here. Its message says what is wrong, with the value that was given, and why;
`remedy` says what to do if that is a separate sentence.
"""

from __future__ import annotations


class AtroposError(Exception):
    """The root of our errors. `exit_code` is the exit code of the command line."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n  {self.remedy}" if self.remedy else text


class ConfigError(AtroposError):
    """The run file or a flag asks for something that cannot be: unknown key, wrong type, impossible value."""

    exit_code = 2


class UnknownComponent(ConfigError):
    """No installed plugin offers a component of that kind and name."""


class PluginError(AtroposError):
    """A plugin that the run needs could not be loaded, or broke its contract while being built."""

    exit_code = 2


class FitError(ConfigError):
    """The components of a run cannot work together, or not on this machine."""


class DataError(AtroposError):
    """A data set, task or rollout is missing, empty or malformed."""


class MessageDropped(DataError):
    """A model's chat template leaves a message, or the tools, out of the prompt. Ends the run: each such prompt would lack them."""


class NoSuchVersion(DataError):
    """A token claims to be sampled from a policy version that no engine can have had."""


class TooLarge(DataError):
    """More was sent at once than the other end accepts."""


class TokenizerMismatch(AtroposError):
    """Two parts of a run that must agree on the tokenizer do not."""


class DeadlineExceeded(AtroposError):
    """A wait ended without an answer."""


class ProcessDied(AtroposError):
    """A process that the run needs has ended."""


class ProcessSilent(ProcessDied):
    """A process that the run needs, on this or another machine, is running but does not answer."""


class EngineReplaced(ProcessDied):
    """Another process than the one that the run opened answers at an engine's address: its model is unknown."""


class WorkerLost(AtroposError):
    """A process that computes for rollouts has ended: the rollouts that it worked for fail, and later ones get a new process."""


class RemoteError(AtroposError):
    """Code in a child process raised. The message carries the child's own traceback."""


class EventLoopBlocked(AtroposError):
    """Code on the run's event loop did not yield: nothing else could proceed."""


class OutOfMemory(AtroposError):
    """The system, or a device, refused memory that a process requested."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        more = (
            "Give it more (`ulimit -v`, the machine, its container), or ask for less: `atropos run ... --dry-run` says"
        )
        super().__init__(message, remedy=remedy or f"{more} what each part holds.")


class EndsProcess(AtroposError):
    """A component's code would have ended the process that runs it."""


class WeightsMismatch(AtroposError):
    """A tensor at one end of a bridge is not what the other end says it is."""


class Misaligned(AtroposError):
    """Tokens were not sampled from the weights that were published, or not with the logprobs that they claim."""


class TrainingDiverged(AtroposError):
    """A loss, gradient, weight or logit is not a finite number."""

    @classmethod
    def in_logits(cls, version: int) -> TrainingDiverged:
        """Return the error for the model that an engine samples from at this policy version; 0 is the run's first model."""
        wider = "try bfloat16 or float32 in place of float16"
        return cls(
            f"the model of policy version {version} gives logits that are not finite numbers.",
            remedy=f"No update has changed it yet: the model itself is broken, or computes beyond its precision ({wider})."
            if version <= 0
            else "An update broke its weights: `atropos resume` continues from the last checkpoint, with a lower "
            f"trainer.learning_rate. Or it computes beyond its precision: {wider}.",
        )


class CheckpointError(AtroposError):
    """A checkpoint cannot be written, or what is there cannot be trusted."""


class RunDirectoryError(AtroposError):
    """A run directory, or a file of results, cannot be made, written or locked."""


class HubClosed(AtroposError):
    """The hub no longer takes or gives groups: the run is ending."""


class HubFull(AtroposError):
    """The hub had no room for a group before the deadline."""


class StoreFull(HubFull):
    """The disk had no room for a group. What was acknowledged before is safe."""


class LeaseLost(AtroposError):
    """Groups that a trainer leased are no longer its own: its lease ran out, or another session was opened."""


class ApiError(AtroposError):
    """The trajectory API cannot be reached, or refused a call."""


class AccessRefused(ApiError):
    """A server, an engine or a ring requires a token, another token, or another user of the machine."""


class NoProgress(AtroposError):
    """Too many steps in a row left nothing to train on, or too many rollouts nothing to keep."""


class RunPaused(AtroposError):
    """A health check whose action is "pause" fell ill: everything is saved, and the run can be resumed."""

    exit_code = 3


class RunRolledBack(AtroposError):
    """A health check whose action is "rollback" fell ill: the run continues from an earlier checkpoint."""

    exit_code = 3


class RunIll(AtroposError):
    """A health check whose action is "stop" fell ill: what came after the last checkpoint is not kept."""

    exit_code = 3


class SandboxError(AtroposError):
    """A sandbox could not start a program, or was lost while one ran in it."""


class Interrupted(AtroposError):
    """The user stopped the run."""

    exit_code = 130
