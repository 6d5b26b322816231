"""Why no batch can be formed, and why a group is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atropos_core.errors import DataError, HubFull
from atropos_core.hub.fair_queue import EnvironmentQueues
from atropos_core.hub.records import BatchSize, Label, Limits


def why_no_batch(
    queues: EnvironmentQueues[Any], size: BatchSize, held_up_by: str | None, leased: int, trained: int
) -> str:
    """`held_up_by` is the environment whose minimum the batch waits for. `leased` and `trained` count groups that are not saved."""
    waiting = f"{queues.waiting} groups of {queues.waiting_sequences} sequences wait, {size} are wanted"
    if held_up_by:
        queue = queues.by_name.get(held_up_by)
        part = f"{queue.minimum:.0%}" if queue else "part"
        return f"{waiting}: {part} of a batch is kept for environment {held_up_by!r}, which has nothing"
    if size.sequences and queues.waiting_sequences >= size.sequences:
        return f"{waiting}: groups of {', '.join(map(str, sorted(queues.sizes)[:8]))} do not add up to it yet"
    if leased or trained:
        waiting += f"; {leased} more are leased and {trained} trained, not saved"
    return f"{waiting}; {_fill(queues)} used, {queues.puts_waiting} groups wait for room"


def full(queues: EnvironmentQueues[Any], label: Label) -> HubFull:
    """Return the error for a group that found no room in time."""
    return HubFull(
        f"the hub had no room for a group of {label.environment!r} ({label.size_bytes / 1e6:.3g} MB) in time: "
        f"{_fill(queues)} are used.",
        remedy="Try again later: room comes back as the trainer trains and saves.",
    )


def too_small(
    queues: EnvironmentQueues[Any], size: BatchSize, held: int, trained: int, options: Sequence[str]
) -> HubFull:
    """Return the error for a batch that is larger than the hub allows. `held` counts all groups, `options` should be raised."""
    kept = f", {trained} of them trained but in no checkpoint yet" if trained else ""
    return HubFull(
        f"the hub is full ({_fill(queues)}) with {queues.waiting} groups waiting, and the step needs {size}: neither can "
        f"continue. It holds {held} groups{kept}.",
        remedy=f"Raise {' and '.join(options)}, lower training.groups_per_step, group_size or sampling.max_tokens, or "
        "save checkpoints more often.",
    )


def short(queues: EnvironmentQueues[Any], held: int) -> list[str]:
    """Return the options whose limits leave less room than two of the hub's `held` groups take. With more room, only giant groups
    do not fit."""
    limits, bound, found = queues.limits, queues.limits.sequences, []
    if held * (limits.size_bytes - queues.held_bytes) < 2 * queues.held_bytes:
        found.append(limits.size_option)
    if bound is not None and held * (bound - queues.held_sequences) < 2 * queues.held_sequences:
        found.append(limits.sequences_option)
    return found


def check_name(name: str) -> None:
    """Raises DataError for half of a surrogate pair, which cannot be encoded and would fail later, in another caller's call."""
    if name.isascii():
        return
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name {name[:80]!a} of an environment or task is no Unicode text") from None


def check_fits(limits: Limits, label: Label) -> None:
    """Raises DataError for a group that is larger than the hub."""
    if label.sequences < 1 or label.size_bytes < 0:
        raise DataError(f"a group of task {label.task!r} has {label.sequences} sequences and {label.size_bytes} bytes")
    check_name(label.environment)
    check_name(label.task)
    bound, beyond = limits.sequences, []
    if label.size_bytes > limits.size_bytes:
        beyond.append(limits.size_option)
    if bound is not None and label.sequences > bound:
        beyond.append(limits.sequences_option)
    if beyond:
        raise DataError(
            f"a group of task {label.task!r} holds {label.size_bytes / 1e6:.1f} MB and {label.sequences} sequences, more "
            f"than the whole hub ({limits.size_bytes / 1e6:.1f} MB, {bound or 'any number of'} sequences).",
            remedy=f"Raise {' and '.join(beyond)}, or make groups smaller (training.group_size, sampling.max_tokens).",
        )


def _fill(queues: EnvironmentQueues[Any]) -> str:
    limits = queues.limits
    text = f"{queues.held_bytes / 1e6:.1f} of {limits.size_bytes / 1e6:.1f} MB"
    if limits.sequences is not None:
        text += f", {queues.held_sequences} of {limits.sequences} sequences"
    return text
