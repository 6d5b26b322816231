"""The text that the teacher reads instead of a rollout: the problem, the results of the group's attempts, and the same reply."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Message, Rollout, ScoredGroup, Tokens, TopK, offsets_of
from atropos_distillation.config import SelfOptions


@dataclass(frozen=True)
class Lesson:
    """`tokens` from `before` on equal the rollout's tokens from `start` on, as sampled, up to the last trained one."""

    rollout: Rollout
    tokens: Tokens
    before: int
    start: int

    def of_rollout(self, scored: TopK) -> TopK:
        """Move the scores of `tokens` to their positions in the rollout [T], only for tokens that the loss counts."""
        trained, begin = self.rollout.trained, scored.offsets[self.before]
        counts = np.zeros(len(trained), np.int64)
        said = np.diff(scored.offsets)[self.before :]
        counts[self.start : self.start + len(said)] = said
        keep = np.repeat(trained, counts)
        offsets = offsets_of(np.where(trained, counts, 0))
        return TopK(offsets, scored.token_ids[begin:][keep], scored.logprobs[begin:][keep])


def lessons_of(
    group: ScoredGroup, options: SelfOptions, tokenizer: ChatTokenizer, positions: int
) -> tuple[list[Lesson], int]:
    """Return the lessons, and how many rollouts should have one and do not: their prompt differs from the rendered task, or the lesson
    is not shorter than the model's `positions`."""
    found: list[Lesson] = []
    wanted = 0
    plain = tokenizer.render(group.task.messages)
    for at, episode in enumerate(group.episodes):
        shown = _shown(group, at, options, tokenizer)
        for rollout in episode.rollouts if shown or not options.shows else ():
            if rollout.teacher is not None or not rollout.trained.any():
                continue
            wanted += 1
            start, end = int(np.argmax(rollout.sampled)), int(np.flatnonzero(rollout.trained)[-1]) + 1
            if np.array_equal(plain, rollout.tokens[:start]):
                prompt = tokenizer.render(with_context(group.task.messages, options.template, shown))
                tokens = np.concatenate([prompt, rollout.tokens[start:end]]).astype(np.int32)
                if len(tokens) >= positions:
                    continue
                found.append(Lesson(rollout, tokens, len(prompt), start))
    return found, wanted - len(found)


def _shown(group: ScoredGroup, at: int, options: SelfOptions, tokenizer: ChatTokenizer) -> str:
    """Return what is shown for the group's episode `at`. A sibling is the next episode that succeeded, never the episode itself."""
    others = [*range(at + 1, len(group.episodes)), *range(at)]
    sibling = next((group.episodes[one].rollouts[-1] for one in others if group.rewards[one] >= options.success), None)
    later = group.episodes[at].messages[len(group.task.messages) :]
    texts = {
        "sibling": tokenizer.decode(sibling.tokens[sibling.sampled]) if sibling else "",
        "answer": group.task.answer or "",
        "feedback": "\n".join(str(one.get("content") or "") for one in later if one["role"] != "assistant"),
    }
    forms = {"sibling": options.solution, "answer": options.solution, "feedback": options.feedback}
    shown = [(forms[name], texts[name].strip()) for name in options.shows]
    return "\n\n".join(form.format(problem="", shown=text) for form, text in shown if text)


def with_context(messages: tuple[Message, ...], template: str, shown: str) -> list[Message]:
    """Put `shown` in the user's last message, or in a new message if there is none."""
    at = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=len(messages))
    problem = "".join(str(one.get("content") or "") for one in messages[at : at + 1])
    changed = {"role": "user", "content": template.format(problem=problem, shown=shown)}
    return [*messages[:at], changed, *messages[at + 1 :]]
