"""Write rollouts into one file, in one of the forms, and count what is left out, with the reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from atropos_core.errors import ConfigError, DataError
from atropos_core.scripting.results import Exported
from atropos_records.files import new_file
from atropos_records.forms import FORMS
from atropos_records.groups import ExportedGroup
from atropos_records.selection import LeftOut, Selection

USED_BY = {
    "min_reward": ("sft",), "only_correct": ("sft",), "best_per_group": ("sft",), "min_margin": ("dpo",),
    "keep_cut_off": ("sft", "dpo"),
}  # fmt: skip # options of a selection, and the forms that they are for


def selection_of(
    form: str | None,
    *,
    min_reward: float | None = None,
    only_correct: bool = False,
    best_per_group: int | None = None,
    min_margin: float | None = None,
    keep_cut_off: bool = False,
) -> Selection:
    """Return the selection. Raises ConfigError for an option that this form does not use."""
    given = {"min_reward": min_reward, "only_correct": only_correct or None, "best_per_group": best_per_group}
    given |= {"min_margin": min_margin, "keep_cut_off": keep_cut_off or None}
    for name, value in given.items():
        if value is not None and form not in USED_BY[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect {f'with --as {form}' if form else 'without --as'}: "
                f"it is for {' and '.join(USED_BY[name])}."
            )
    return Selection(min_reward, only_correct, best_per_group, min_margin or 0.0, keep_cut_off)


class DatasetExport:
    """One file that groups are added to. It appears, complete, after `finish`; `discard` leaves nothing behind."""

    def __init__(self, form: str, path: Path, selection: Selection) -> None:
        """Raises ConfigError if the name does not fit the form, RunDirectoryError if the file exists."""
        if form not in FORMS:
            raise ConfigError(f"{form!r} is not a form of a data set.", remedy=f"Choose one of: {', '.join(FORMS)}.")
        columns, self._rows = FORMS[form]
        if form == "parquet" and path.suffix != ".parquet":
            raise ConfigError(f"{path}: --as parquet writes parquet.", remedy="Name it NAME.parquet.")
        self._file = new_file(path, columns)
        self._form, self._selection = form, selection
        self.written = 0
        self.left_out: LeftOut = Counter()
        self._without_tokens: Counter[str] = Counter()

    def add(self, group: ExportedGroup) -> None:
        for row in self._rows(group, self._selection, self.left_out):
            self._file.write(row)
            self.written += 1
        if group.why_no_tokens and self._form == "parquet":
            self._without_tokens[group.why_no_tokens] += len(group.episodes)

    def finish(self) -> Exported:
        """Finish the file. Raises DataError if it has no rows, and then leaves no file."""
        if not self.written:
            self.discard()
            reasons = "; ".join(f"{count} times: {reason}" for reason, count in self.left_out.most_common())
            raise DataError(
                f"nothing is left to write with --as {self._form}: {reasons or 'there are no rollouts'}.",
                remedy="Ask for less, or look at everything that is recorded with --as parquet.",
            )
        self._file.finish()
        counts = dict(self.left_out.most_common())
        return Exported(self._file.path, self._form, self.written, counts, dict(self._without_tokens))

    def discard(self) -> None:
        self._file.discard()
