"""Whether a run is well: named checks, each with a state, thresholds in the run file, and an action.

`measure` turns the groups of a step into numbers, `rescoring` asks the rewards again, `checks` judge numbers alone, so
that `atropos doctor` finds in metrics.jsonl what the run itself found. `watch` puts them together.
"""
