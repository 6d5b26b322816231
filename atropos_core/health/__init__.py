"""Health of a run: named checks, each with a state, thresholds in the run file, and an action.

`measure` turns the groups of a step into numbers, `rescoring` calls the rewards again, and `checks` judge only numbers, so that
`atropos doctor` finds in metrics.jsonl what the run itself found. `watch` combines them.
"""
