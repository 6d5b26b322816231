"""The whole loop through the command line, on the toy policy: no torch, a second each."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from tests.conftest import metrics_of

TOY = ("run", "--model", "toy", "--dir", "run", "--set", "evaluation.problems=4")


def test_reward_rises_and_everything_lies_where_the_summary_says(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--steps", "40", "--set", "trainer.learning_rate=20.0")
    assert ended.code == 0, ended.err
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(41))
    assert lines[-1]["reward/mean"] > lines[1]["reward/mean"] + 0.3
    for line in lines:
        assert ("reward/mean" in line) == (line["step"] > 0), "the evaluation before training has eval/reward"
        for key in ("alignment/max_abs_logprob_diff", "policy/probe_shift_nats", "bridge/publish_s",
                    "bridge/bytes_copied", "time/step_s", "tokens/s"):  # fmt: skip
            assert isinstance(line[key], float), (line["step"], key)
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 40]
    for path in re.findall(r"run/\S+", ended.out):
        assert (tmp_path / path.rstrip("/")).exists(), path
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["trainer"]["learning_rate"] == 20.0
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16 * 8
    assert rollouts[0]["messages"][-1]["role"] == "assistant"


def test_a_run_without_the_sink_jsonl_names_only_what_was_written(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--steps", "1", "--set", "sink.jsonl.use=none")
    assert ended.code == 0, ended.err
    named = re.findall(r"run/\S+", ended.out)
    assert "run/checkpoints/step-000001/policy" in named and "run/metrics.jsonl" not in named
    assert all((tmp_path / path.rstrip("/")).exists() for path in named)


def test_zero_steps_evaluate_and_save(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--steps", "0")
    assert ended.code == 0, ended.err
    assert (tmp_path / "run/checkpoints/step-000000/policy/table.npy").is_file()


def test_two_environments_share_a_run_by_weight(atropos, sevens, tmp_path):
    (tmp_path / "run.toml").write_text(
        f"""
        model = "toy"
        [training]
        steps = 20
        [evaluation]
        problems = 4
        [environment.often]
        use = "{tmp_path}/sevens.py:Sevens"
        weight = 3
        [environment.seldom]
        use = "{tmp_path}/sevens.py:Sevens"
        """
    )
    ended = atropos("run", "run.toml", "--dir", "run")
    assert ended.code == 0, ended.err
    drawn = {"often": set(), "seldom": set()}
    for path in sorted((tmp_path / "run/rollouts").glob("step-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            drawn[row["environment"]].add(row["draw"])
    share = len(drawn["often"]) / (len(drawn["often"]) + len(drawn["seldom"]))
    assert 0.65 < share < 0.85, "320 draws at weights 3 and 1"
    assert "eval/often/accuracy" in metrics_of(tmp_path / "run")[-1]


def test_where_scores_do_not_say_what_is_right_the_held_out_reward_is_shown(atropos, sevens, tmp_path):
    source = (tmp_path / "sevens.py").read_text()
    (tmp_path / "ungraded.py").write_text(source.replace(', correct=text.startswith("7")', ""))
    ended = atropos(*TOY, "--env", "./ungraded.py:Sevens", "--steps", "2", "--set", "evaluation.every=1")
    assert ended.code == 0, ended.err
    evaluated = [line["eval/reward"] for line in metrics_of(tmp_path / "run")]
    assert f"before training: held-out reward {evaluated[0]:.3f} on 4 problems" in ended.out
    assert f"after step 1: held-out reward {evaluated[1]:.3f} on 4 problems\n" in ended.out
    gain = evaluated[2] - evaluated[0]
    assert f"held-out reward {evaluated[0]:.3f} -> {evaluated[2]:.3f} ({gain:+.3f}, 4 problems)\n" in ended.out
    assert "accuracy" not in ended.out


def test_a_deterministic_run_is_the_same_twice_and_across_a_resume(atropos, sevens, tmp_path):
    arguments = ("run", "--model", "toy", "--env", sevens, "--deterministic", "--set", "evaluation.problems=4")
    assert atropos(*arguments, "--dir", "a", "--steps", "12").code == 0
    assert atropos(*arguments, "--dir", "b", "--steps", "5").code == 0
    resumed = atropos("resume", "b", "--steps", "12")
    assert resumed.code == 0, resumed.err
    assert "changed: training.steps is 12; the run had 5" in resumed.out
    table = "checkpoints/step-000012/policy/table.npy"
    assert (tmp_path / "a" / table).read_bytes() == (tmp_path / "b" / table).read_bytes()
    assert [line["step"] for line in metrics_of(tmp_path / "b")] == list(range(13))


def test_a_finished_run_says_that_nothing_is_left(atropos, sevens):
    assert atropos(*TOY, "--env", sevens, "--steps", "2").code == 0
    ended = atropos("resume", "run")
    assert ended.code == 0
    assert "nothing left to do" in ended.out


def test_a_corrupt_checkpoint_is_named_and_the_one_before_used(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--steps", "4", "--set", "checkpoint.every=2").code == 0
    table = tmp_path / "run/checkpoints/step-000004/policy/table.npy"
    damaged = bytearray(table.read_bytes())
    damaged[-1] ^= 1
    table.write_bytes(bytes(damaged))
    ended = atropos("resume", "run", "--steps", "6")
    assert ended.code == 0, ended.err
    assert "step-000004 is corrupt" in ended.err
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(7))


def test_staleness_of_one_trains_every_draw_and_keeps_the_bound(atropos, sevens, tmp_path):
    ended = atropos(
        *TOY, "--env", sevens, "--steps", "20", "--set", "training.max_staleness=1", "--set", "engine.latency_s=0.005"
    )
    assert ended.code == 0, ended.err
    assert len(metrics_of(tmp_path / "run")) == 21


def test_the_supervisor_of_a_toy_run_imports_no_torch(atropos, sevens, tmp_path):
    script = (
        "import sys; from atropos_core.cli import run_app; "
        f"code = run_app(['run', '--model', 'toy', '--env', {sevens!r}, '--steps', '1', '--dir', 'run']); "
        "sys.exit(code or ('torch' in sys.modules) or ('transformers' in sys.modules))"
    )
    import subprocess

    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60).returncode == 0


def test_every_run_needs_its_own_directory(atropos, sevens, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/something").write_text("precious")
    ended = atropos(*TOY, "--env", sevens)
    assert ended.code == 1
    assert "not empty" in ended.err
    assert Path(tmp_path / "run/something").read_text() == "precious"


def test_a_resume_remembers_what_it_changed(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--steps", "2").code == 0
    assert atropos("resume", "run", "--steps", "4").code == 0
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["training"]["steps"] == 4
    assert "all of its 4 steps" in atropos("resume", "run").out


def test_a_run_resumes_from_another_folder_and_with_values_that_only_toml_can_write(atropos, sevens, tmp_path):
    (tmp_path / "run.toml").write_text('model = "toy"\n[environment.mine]\nuse = "./sevens.py:Sevens"\n')
    bound = ("--set", "training.max_logprob_diff=inf", "--set", "evaluation.problems=2")
    assert atropos("run", "run.toml", "--dir", "run", "--steps", "2", *bound).code == 0
    (tmp_path / "elsewhere").mkdir()
    ended = atropos("resume", "../run", "--steps", "3", cwd=tmp_path / "elsewhere")
    assert ended.code == 0, ended.err


def test_looking_at_a_living_run_does_not_disturb_its_checkpoints(atropos, sevens, tmp_path):
    assert atropos(*TOY, "--env", sevens, "--steps", "1").code == 0
    half = tmp_path / "run/checkpoints/.step-000002.partial"
    half.mkdir()
    atropos("resume", "run")  # nothing is left to do: it only looks
    assert half.is_dir()
    assert atropos("resume", "run", "--steps", "2").code == 0
    assert not half.is_dir()


def test_numpy_scores_are_plain_numbers_in_the_files(atropos, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from atropos_core import Environment, Score, Task\n"
        "class Mine(Environment):\n"
        "    def tasks(self, split):\n"
        "        return [Task(f'{split}-{n}', ({'role': 'user', 'content': str(n)},)) for n in range(4)]\n"
        "    async def score(self, task, reply):\n"
        "        x = np.float32(reply['content'].count('7'))\n"
        "        return Score(x, correct=x > 0, parts={'x': x}, metrics={'y': np.int64(3)})\n"
    )
    ended = atropos(*TOY, "--env", "./mine.py", "--steps", "2")
    assert ended.code == 0, ended.err
    row = json.loads((tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert isinstance(row["correct"], bool)


def test_with_staleness_the_proof_of_alignment_goes_on(atropos, sevens, tmp_path):
    ended = atropos(
        *TOY, "--env", sevens, "--steps", "8", "--set", "training.max_staleness=2", "--set", "engine.latency_s=0.01",
        "--set", "trainer.learning_rate=50.0",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = metrics_of(tmp_path / "run")[2:]
    assert any(line.get("alignment/fresh_tokens") == 0 for line in lines), "or this shows nothing"
    assert all("alignment/max_abs_logprob_diff" in line for line in lines)


def test_env_chooses_a_section_of_the_run_file_by_its_name(atropos, sevens, tmp_path):
    section = '[environment.{}]\nuse = "./sevens.py:Sevens"\n'
    (tmp_path / "run.toml").write_text('model = "toy"\n' + section.format("first") + section.format("second"))
    ended = atropos("config", "show", "run.toml", "--env", "second", "--steps", "7")
    assert ended.code == 0, ended.err
    assert "environment.second.use" in ended.out
    assert "environment.first" not in ended.out
