"""The ranks' files of a checkpoint are read part by part, and no code in them is run."""

import os
import pickle

import pytest
import torch

from atropos_core.errors import CheckpointError
from atropos_trainer_grpo import sharded_state


@pytest.fixture
def saved(tmp_path):
    """Return a directory, the state, and what `write` returned: two parameters after one update, the second with a master."""
    moment = {"step": torch.tensor(1.0), "exp_avg": torch.arange(6.0).reshape(2, 3), "exp_avg_sq": torch.ones(2, 3)}
    state = {"optimizer": "adamw", "updates": 1, "masters": [None, None], "moments": {0: moment}}
    made = sharded_state.write(state, ["a", "b"], [None, torch.full((4,), 0.1)], tmp_path)
    return tmp_path, state, made


def test_tensors_come_back_and_the_rest_is_beside(saved):
    directory, state, made = saved
    assert sharded_state.are_named(made) and not sharded_state.are_named(state)
    assert made["masters"] == [None, "master.b"] and made["moments"][0]["exp_avg"] == "exp_avg.a"
    read = sharded_state.read(made, [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)], directory)
    assert read["updates"] == 1 and read["masters"][0] is None
    assert torch.equal(read["masters"][1], torch.full((4,), 0.1)), "in float32, whatever the parameter is"
    for kind, values in state["moments"][0].items():
        assert torch.equal(read["moments"][0][kind], values)


def test_a_missing_file_and_parameters_of_another_shape_are_refused(saved):
    directory, _, made = saved
    with pytest.raises(CheckpointError, match="cannot be read: rank 0: .*exp_avg.a"):
        sharded_state.read(made, [torch.zeros(3, 3), torch.zeros(4)], directory)
    next((directory / "trainer_state").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="cannot be read: rank 0: FileNotFoundError"):
        sharded_state.read(made, [torch.zeros(2, 3), torch.zeros(4)], directory)


class Runs:
    """An object that a stranger's index could hold: loading it runs code."""

    def __reduce__(self):
        return os.mkdir, ("made-by-a-checkpoint",)


def test_an_index_that_would_run_something_is_refused(saved, monkeypatch):
    directory, _, made = saved
    monkeypatch.chdir(directory)
    (directory / "trainer_state/.metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match="mkdir is no part of DCP's index"):
        sharded_state.read(made, [torch.zeros(2, 3), torch.zeros(4)], directory)
    assert not (directory / "made-by-a-checkpoint").exists()
