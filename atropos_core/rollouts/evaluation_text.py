"""The result of an evaluation in words."""

from __future__ import annotations

from collections.abc import Mapping


def held_out(metrics: Mapping[str, float]) -> str:
    """Describe the result of an evaluation; empty if there was none."""
    if "eval/accuracy" in metrics:
        figure = f"accuracy {metrics['eval/accuracy']:.1%}"
    elif "eval/reward" in metrics:
        figure = f"reward {metrics['eval/reward']:.3f}"
    else:
        return ""
    problems = metrics["eval/problems"]
    cut = metrics.get("eval/cut_off_lowest", 0)
    said = f", {cut:.0%} of the replies were cut off at max_tokens and earned least" if cut > 0.5 else ""
    return f"held-out {figure} on {problems:.0f} problem{'s' * (problems != 1)}{_failed(metrics)}{said}"


def _failed(metrics: Mapping[str, float]) -> str:
    """Describe the failed rollouts of an evaluation, which may not be the policy's fault."""
    failed = metrics.get("eval/failed", 0)
    counted = f" and count{'s' * (failed == 1)} as wrong" if "eval/accuracy" in metrics else ""
    return f", {failed:.0f} rollout{'s' * (failed != 1)} failed{counted}" if failed else ""


def held_out_change(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Compare two evaluations: over all problems, by further graders, and by environment if there are several. Compares accuracy,
    or the reward if scores have no `correct`. Empty if one of the two is missing."""
    name = next((one for one in ("eval/accuracy", "eval/reward") if one in before and one in after), None)
    if name is None:
        return []
    problems = f"{after['eval/problems']:.0f} problems{_failed(after)}"
    if name == "eval/accuracy":
        points = 100 * (after[name] - before[name])
        lines = [f"held-out accuracy {before[name]:.1%} -> {after[name]:.1%} ({points:+.1f} points, {problems})"]
    else:
        gain = after[name] - before[name]
        lines = [f"held-out reward {before[name]:.3f} -> {after[name]:.3f} ({gain:+.3f}, {problems})"]
    kinds = ("eval/accuracy_", "eval/pass@")
    for one in (one for one in after if one.startswith(kinds) and one in before):
        shown = one.removeprefix("eval/").removeprefix("accuracy_")
        lines.append(f"  {shown}: {before[one]:.1%} -> {after[one]:.1%}")
    environments = [one.split("/")[1] for one in after if one.startswith("eval/") and one.endswith("/reward")]
    for environment in (one for one in environments if f"eval/{one}/reward" in before):
        accuracy, reward = f"eval/{environment}/accuracy", f"eval/{environment}/reward"
        if accuracy in before and accuracy in after:
            lines.append(f"  {environment}: accuracy {before[accuracy]:.1%} -> {after[accuracy]:.1%}")
        else:
            lines.append(f"  {environment}: reward {before[reward]:.3f} -> {after[reward]:.3f}")
    return lines
