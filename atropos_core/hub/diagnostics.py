"""The hub's reports: its figures, why no batch can be formed, and why a group has no room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atropos_core.errors import DataError, HubFull
from atropos_core.hub.fair_queue import EnvironmentQueue
from atropos_core.hub.records import EnvironmentStatus, HubStatus, Label, Limits, Want

if TYPE_CHECKING:
    from atropos_core.hub.ledger import Ledger


def status(ledger: Ledger[Any]) -> HubStatus:
    queues, now = ledger.queues, ledger.clock()
    heads = [next(iter(queue.waiting.values())).since for queue in queues.by_name.values() if queue.waiting]
    return HubStatus(
        groups=queues.waiting,
        sequences=queues.waiting_sequences,
        size_bytes=sum(queue.waiting_bytes for queue in queues.by_name.values()),
        leased=len(ledger.out) - ledger.trained_groups,
        trained=ledger.trained_groups + len(ledger.let_go),
        committed=ledger.committed,
        held_bytes=queues.held_bytes,
        held_sequences=queues.held_sequences,
        limits=ledger.limits,
        puts_waiting=ledger.offers,
        oldest_s=now - min(heads) if heads else None,
        environments={name: _of(queue) for name, queue in queues.by_name.items()},
        dropped=dict(ledger.dropped),
        why=why_no_batch(ledger),
    )


def _of(queue: EnvironmentQueue[Any]) -> EnvironmentStatus:
    return EnvironmentStatus(
        groups=len(queue.waiting),
        sequences=queue.waiting_sequences,
        size_bytes=queue.waiting_bytes,
        held_bytes=queue.held_bytes,
        puts_waiting=len(queue.offers),
        weight=queue.weight,
        minimum=queue.minimum,
    )


def why_no_batch(ledger: Ledger[Any]) -> str | None:
    """Say why the last requested batch cannot be formed; None if nothing is missing."""
    unmet, queues = ledger.unmet, ledger.queues
    if unmet is None:
        return None
    waiting = f"{queues.waiting} groups of {queues.waiting_sequences} sequences wait, {unmet} are wanted"
    if ledger.selector.held_up_by:
        queue = queues.by_name.get(ledger.selector.held_up_by)
        part = f"{queue.minimum:.0%}" if queue else "part"
        return f"{waiting}: {part} of a batch is kept for environment {ledger.selector.held_up_by!r}, which has nothing"
    if unmet.sequences and queues.waiting_sequences >= unmet.sequences:
        return f"{waiting}: groups of {', '.join(map(str, sorted(queues.sizes)[:8]))} do not add up to it yet"
    if out := len(ledger.out):
        waiting += f"; {out - ledger.trained_groups} more are leased and {ledger.trained_groups} trained, not saved"
    return f"{waiting}; {_fill(ledger)} used, {ledger.offers} groups wait for room"


def full(ledger: Ledger[Any], label: Label) -> HubFull:
    """Return the error for a group that found no room in time."""
    return HubFull(
        f"the hub had no room for a group of {label.environment!r} ({label.size_bytes / 1e6:.3g} MB) in time: "
        f"{_fill(ledger)} are used.",
        remedy="Try again later: room comes back as the trainer trains and saves.",
    )


def too_small(ledger: Ledger[Any], want: Want) -> HubFull:
    """Return the error for a batch that is larger than the hub."""
    kept = f", {ledger.trained_groups} of them trained but in no checkpoint yet" if ledger.trained_groups else ""
    return HubFull(
        f"the hub is full ({_fill(ledger)}) with {ledger.queues.waiting} groups waiting, and the step needs {want}: neither can "
        f"continue. It holds {len(ledger.records)} groups{kept}.",
        remedy=f"Raise {' and '.join(_short(ledger))}, lower training.groups_per_step, group_size or sampling.max_tokens, or "
        "save checkpoints more often.",
    )


def is_small(ledger: Ledger[Any]) -> bool:
    """True if less room is left than two of the hub's groups take. With more room, only giant groups do not fit."""
    return bool(_short(ledger))


def _short(ledger: Ledger[Any]) -> list[str]:
    """Return the options whose limits leave so little room."""
    limits, queues, held = ledger.limits, ledger.queues, len(ledger.records)
    bound, found = limits.sequences, []
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


def _fill(ledger: Ledger[Any]) -> str:
    limits, queues = ledger.limits, ledger.queues
    text = f"{queues.held_bytes / 1e6:.1f} of {limits.size_bytes / 1e6:.1f} MB"
    if limits.sequences is not None:
        text += f", {queues.held_sequences} of {limits.sequences} sequences"
    return text
