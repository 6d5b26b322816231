"""What the hub reports of itself: its figures, why no batch can be formed, and why a group cannot come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atropos_core.errors import DataError, HubFull
from atropos_core.held import EnvironmentStatus, HubStatus, Label, Limits, Want
from atropos_core.shares import Lane

if TYPE_CHECKING:
    from atropos_core.hub import Hub


def status(hub: Hub[Any]) -> HubStatus:
    lanes, now = hub._lanes, hub._clock()
    heads = [next(iter(lane.waiting.values())).since for lane in lanes.by_name.values() if lane.waiting]
    return HubStatus(
        groups=lanes.waiting,
        sequences=lanes.waiting_sequences,
        size_bytes=sum(lane.waiting_bytes for lane in lanes.by_name.values()),
        leased=len(hub._out) - hub._trained_groups,
        trained=hub._trained_groups + len(hub._let_go),
        committed=hub._committed,
        held_bytes=lanes.held_bytes,
        held_sequences=lanes.held_sequences,
        limits=hub.limits,
        puts_waiting=hub._offers,
        oldest_s=now - min(heads) if heads else None,
        environments={name: _of(lane) for name, lane in lanes.by_name.items()},
        dropped=dict(hub.dropped),
        why=why_no_batch(hub),
    )


def _of(lane: Lane[Any]) -> EnvironmentStatus:
    return EnvironmentStatus(
        groups=len(lane.waiting),
        sequences=lane.waiting_sequences,
        size_bytes=lane.waiting_bytes,
        held_bytes=lane.held_bytes,
        puts_waiting=len(lane.offers),
        weight=lane.weight,
        minimum=lane.minimum,
    )


def why_no_batch(hub: Hub[Any]) -> str | None:
    """Why the batch that was asked for last cannot be formed; None where nothing is missing."""
    unmet, lanes = hub._unmet, hub._lanes
    if unmet is None:
        return None
    waiting = f"{lanes.waiting} groups of {lanes.waiting_sequences} sequences wait, {unmet} are wanted"
    if hub._chooser.held_up_by:
        lane = lanes.by_name.get(hub._chooser.held_up_by)
        part = f"{lane.minimum:.0%}" if lane else "part"
        return f"{waiting}: {part} of a batch is kept for environment {hub._chooser.held_up_by!r}, which has nothing"
    if unmet.sequences and lanes.waiting_sequences >= unmet.sequences:
        return f"{waiting}: groups of {', '.join(map(str, sorted(lanes.sizes)[:8]))} do not add up to it yet"
    if out := len(hub._out):
        waiting += f"; {out - hub._trained_groups} more are leased and {hub._trained_groups} trained, not saved"
    return f"{waiting}; {_fill(hub)} held, {hub._offers} groups wait for room"


def full(hub: Hub[Any], label: Label) -> HubFull:
    """For a group that found no room in time."""
    return HubFull(
        f"the hub had no room for a group of {label.environment!r} ({label.size_bytes / 1e6:.3g} MB) in time: "
        f"{_fill(hub)} are held.",
        remedy="Try again later: room comes back as the trainer trains and saves.",
    )


def too_small(hub: Hub[Any], want: Want) -> HubFull:
    """For a batch that the whole hub cannot hold."""
    kept = f", {hub._trained_groups} of them trained but in no checkpoint yet" if hub._trained_groups else ""
    return HubFull(
        f"the hub is full ({_fill(hub)}) with {len(hub)} groups waiting, and the step needs {want}: neither can "
        f"go on. It holds {len(hub._held)} groups{kept}.",
        remedy=f"Raise {' and '.join(_short(hub))}, lower training.groups_per_step, group_size or sampling.max_tokens, or "
        "save checkpoints more often.",
    )


def is_small(hub: Hub[Any]) -> bool:
    """Less room is left than two of the groups that are held take. With more, it is only giants that do not fit."""
    return bool(_short(hub))


def _short(hub: Hub[Any]) -> list[str]:
    """The options whose bounds leave so little room."""
    limits, lanes, held = hub.limits, hub._lanes, len(hub._held)
    bound, found = limits.sequences, []
    if held * (limits.size_bytes - lanes.held_bytes) < 2 * lanes.held_bytes:
        found.append(limits.size_option)
    if bound is not None and held * (bound - lanes.held_sequences) < 2 * lanes.held_sequences:
        found.append(limits.sequences_option)
    return found


def check_name(name: str) -> None:
    """Raises DataError for half of a surrogate pair: whoever writes such a name down fails, in somebody else's call."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name {name[:80]!a} of an environment or task is no Unicode text") from None


def check_fits(limits: Limits, label: Label) -> None:
    """Raises DataError."""
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


def _fill(hub: Hub[Any]) -> str:
    limits, lanes = hub.limits, hub._lanes
    text = f"{lanes.held_bytes / 1e6:.1f} of {limits.size_bytes / 1e6:.1f} MB"
    if limits.sequences is not None:
        text += f", {lanes.held_sequences} of {limits.sequences} sequences"
    return text
