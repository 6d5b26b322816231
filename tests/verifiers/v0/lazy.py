"""Its data set is loaded when it is first asked for, and is not there."""

from pathlib import Path

import verifiers as vf


def load_environment(source: str):
    return vf.SingleTurnEnv(dataset=lambda: Path(source).read_text())
