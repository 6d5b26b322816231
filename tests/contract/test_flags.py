"""Every flag of every command has an effect, or is refused where it would have none.

The flags are read off the command line itself, so that a new one without an entry fails. An entry is one of: `CHANGED`, where the
command runs here with and without the flag and what it prints or leaves must differ; `NAMED`, where a value that cannot be is
refused by name before anything is started; `SEEN_IN`, the test, or the file of tests, that has the effect and gives the flag.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.cli import make_app, run_app
from atropos_core.errors import RunDirectoryError
from atropos_core.storage.run_directory import RunDirectory
from tests.contract import observed

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "watched_tasks.py"
WATCHED, CONSTANT = f"{TASKS}:Watched", f"{TASKS}:Constant"


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def flags() -> set[str]:
    """As "command --flag"."""
    return {
        f"{name} {parameter.opts[0]}"
        for name, command in commands(typer.main.get_command(make_app()))
        for parameter in command.params
        if parameter.param_type_name == "option"
    }


def test_config_show_takes_what_a_run_takes_but_where_and_whether_it_is_run():
    of = {
        name: {flag.split()[-1] for flag in flags() if flag.startswith(f"{name} -")} for name in ("run", "config show")
    }
    assert of["run"] - of["config show"] == {"--dir", "--dry-run", "--figures"}
    assert of["config show"] <= of["run"] | {"--explain", "--json"}


# -- run here

SMALL = ("--set", "training.groups_per_step=2", "--set", "training.group_size=2", "--set", "evaluation.problems=2")
TOY = ("--model", "toy", "--engine", "toy", "--trainer", "toy", "--bridge", "local")
TEACHABLE = ("run", *TOY, "--env", WATCHED, *SMALL, "--dir", "run")
SHARED = {  # by every command that makes a configuration of them
    "--env": ("--env", CONSTANT),
    "--model": ("--model", "other-model"),
    "--reward": ("--reward", "numeric"),
    "--seed": ("--seed", "7"),
    "--set": ("--set", "sampling.max_tokens=3"),
    "--bridge": ("--bridge", "ipc"),
    "--engine": ("--engine", "hf"),
    "--trainer": ("--trainer", "grpo"),
    "--launcher": ("--launcher", f"{Path(__file__).parent}/broken_parts.py:LeavesRunning"),
    "--deterministic": ("--deterministic",),
    "--steps": ("--steps", "2"),
    "--dir": ("--dir", "elsewhere"),
}


@dataclass(frozen=True)
class Trial:
    base: tuple[str, ...]
    flags: dict[str, tuple[str, ...]]
    prepared: tuple[str, ...] = ()  # a command before it
    shared: tuple[str, ...] = ()  # of SHARED

    def changes(self) -> dict[str, tuple[str, ...]]:
        return {**{flag: SHARED[flag] for flag in self.shared}, **self.flags}


POLICY = ("--env", "--model", "--reward", "--seed", "--set", "--engine")
TRIALS = {
    "run": Trial(
        (*TEACHABLE, "--steps", "1"), {"--dry-run": ("--dry-run",)},
        shared=(*POLICY, "--bridge", "--trainer", "--launcher", "--deterministic", "--steps", "--dir"),
    ),
    "resume": Trial(
        ("resume", "run", "--steps", "2"), {"--steps": ("--steps", "3"), "--set": ("--set", "training.group_size=3")},
        prepared=(*TEACHABLE, "--steps", "1"),
    ),
    "eval": Trial(
        ("eval", "--env", WATCHED, "--model", "toy", "--problems", "2", "--temperature", "1", "--out", "out"),
        {"--problems": ("--problems", "3"), "--samples": ("--samples", "2"), "--temperature": ("--temperature", "0"),
         "--out": ("--out", "elsewhere")},
        shared=POLICY,
    ),
    "eval RUN": Trial(
        ("eval", "run", "--out", "out"), {"--step": ("--step", "1")},
        prepared=(*TEACHABLE, "--steps", "2", "--set", "checkpoint.every=1", "--set", "trainer.learning_rate=50.0"),
    ),
    "process": Trial(
        ("process", "--env", WATCHED, "--model", "toy", "--groups", "2", "--group-size", "2", "--out", "out.jsonl"),
        {"--groups": ("--groups", "3"), "--group-size": ("--group-size", "3"), "--test": ("--test",),
         "--old-schema": ("--old-schema",), "--out": ("--out", "elsewhere.jsonl")},
        shared=POLICY,
    ),
    "export": Trial(
        ("export", "run", "--as", "sft", "--out", "out.jsonl", "--keep-cut-off", "--json"),
        {"--as": ("--as", "dpo"), "--out": ("--out", "out.parquet"), "--step": ("--step", "2"), "--min-reward": ("--min-reward", "1e6"),
         "--only-correct": ("--only-correct",), "--best-per-group": ("--best-per-group", "1"), "--min-margin": ("--min-margin", "1e6")},
        prepared=(*TEACHABLE, "--steps", "2"),
    ),
    "process --as": Trial(
        ("process", "--env", WATCHED, "--model", "toy", "--groups", "3", "--as", "sft", "--out", "out.jsonl", "--keep-cut-off"),
        {"--as": ("--as", "dpo"), "--min-reward": ("--min-reward", "1e6"), "--only-correct": ("--only-correct",),
         "--best-per-group": ("--best-per-group", "1"), "--min-margin": ("--min-margin", "1e6")},
    ),
    "config show": Trial(
        ("config", "show", *TOY, "--env", WATCHED), {"--explain": ("--explain",), "--json": ("--json",)},
        shared=(*POLICY, "--bridge", "--trainer", "--launcher", "--deterministic", "--steps"),
    ),
    "new": Trial(("new", "environment", "word_tally"), {"--tools": ("--tools",)}, shared=("--dir",)),
    "check": Trial(
        ("check", f"{TASKS}:Unsteady"),
        {"--kind": ("--kind", "reward"), "--set": ("--set", "fails=true"), "--skip": ("--skip", "scores"), "--json": ("--json",)},
    ),
    "bias": Trial(
        ("bias", "turn_gae", "--group-size", "2"),
        {"--group-size": ("--group-size", "3"), "--seed": ("--seed", "1"), "--json": ("--json",)},
    ),
    "plugins": Trial(("plugins", "toy", "--kind", "engine"), {"--kind": ("--kind", "trainer"), "--json": ("--json",)}),
    "adapter": Trial(
        ("adapter", "skyrl", "--env", "gsm8k", "--model", "tiny", "--out", "out"),
        {"--option": ("--option", "attempts=9"), "--out": ("--out", "elsewhere")},
        shared=("--env", "--model", "--reward", "--steps", "--seed", "--set"),
    ),
    "train": Trial(
        ("train", *TOY, "--api", "URL/a", "--steps", "1", "--dir", "run"),
        {"--api": ("--api", "URL/b"), "--token-file": ("--token-file", "token"),
         "--engine-address": ("--engine-address", "localhost:0")},
        shared=(*POLICY, "--bridge", "--trainer", "--steps", "--dir"),
    ),
    "serve-agent": Trial(  # nobody comes
        ("serve-agent", "--model", "toy", *(word for use in ("engine.use=toy", "trainer.use=toy", "bridge.use=local",
         "environment.agent.tasks_from=gsm8k", "environment.agent.sandbox.patience_s=0.2") for word in ("--set", use)),
         *SMALL, "--port", "0", "--dir", "run"),
        {"--host": ("--host", "127.0.0.2"), "--port": ("--port", "65536"), "--token-file": ("--token-file", "token")},
        shared=("--env", "--model", "--seed", "--set", "--steps", "--dir"),
    ),
    "env": Trial(
        ("env", WATCHED, "--api", "URL/a", "--model", "toy"),
        {"--api": ("--api", "URL/b"), "--token-file": ("--token-file", "token"), "--weight": ("--weight", "3"),
         "--minimum": ("--minimum", "0.5"), "--model": ("--model", "other-model"), "--file": ("--file", "run.toml"),
         "--reward": ("--reward", "nonsense"), "--set": ("--set", "environment.watched.nonsense=1")},
    ),
}  # fmt: skip
CHANGED = {
    f"{name.removesuffix(' RUN').removesuffix(' --as')} {flag}": name
    for name, trial in TRIALS.items()
    for flag in trial.changes()
}


WITHOUT: dict[tuple[str, ...], object] = {}  # what each command leaves without the flag


@pytest.mark.parametrize("flag", list(CHANGED))
def test_a_flag_changes_what_a_command_prints_or_leaves(flag, tmp_path, monkeypatch, capsys):
    trial = TRIALS[CHANGED[flag]]
    arguments = trial.changes()[flag.rpartition(" ")[2]]

    def ran(name: str, *more: str) -> object:
        return outcome(tmp_path / name, trial, more, monkeypatch, capsys)

    if trial.base not in WITHOUT:
        WITHOUT[trial.base] = ran("before")
        assert WITHOUT[trial.base] == ran("again"), "or the flag is not what makes the difference"
    assert WITHOUT[trial.base] != ran("after", *arguments)


def outcome(folder: Path, trial: Trial, more: tuple[str, ...], monkeypatch: Any, capsys: Any) -> object:
    """What `atropos` printed, and left in an empty folder, but for times."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copytree(TOY_MODEL, "other-model")
    Path("other-model/chat_template.jinja").write_text("<|user|>" + (TOY_MODEL / "chat_template.jinja").read_text())
    Path("token").write_text("a-token")
    Path("token").chmod(0o600)
    Path("run.toml").write_text("[environment.watched]\nnonsense = 1\n")
    if trial.prepared:
        assert run_app(list(trial.prepared)) == 0
    with observed.listening() as (url, heads):
        capsys.readouterr()
        code = run_app([one.replace("URL", url) for one in (*trial.base, *more)])
        output = capsys.readouterr()
        bodies = [re.sub(rb'"name":"[^"]*"', b"", body) for body in heads.bodies if b'"minimum"' in body]
        requested = [*heads[:1], *bodies]

    def plain(text: str) -> str:
        text = text.replace(str(folder), "").replace(url, "URL")
        return re.sub(
            r"\d[\d,.]* ?(tokens/s|s\b|ms|GB|MB)|\d+:\d\d left|\S*\d{8}-\d{6}\S*|\d+(\.\d+)? %|\d+%", "", text
        )

    waits = re.compile(r"^waiting for .*\n", re.MULTILINE)  # said of what takes a second, which depends on the machine
    refused = plain(waits.sub("", output.err)) if code else ""
    printed = (
        plain(output.out) if not any(one in trial.base for one in ("run", "resume", "train", "eval", "process")) else ""
    )
    return code, printed, refused, requested, left(folder, plain)


def left(folder: Path, plain: Any) -> dict[str, object]:
    found = dict(observed.left_in(folder))
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.suffix == ".json" and "evaluation" in (figures := json.loads(path.read_text())):
            found[name] = figures["metrics"], plain(figures["model"])
        elif path.name in ("config.toml", "skyrl.sh", "run.toml"):
            found[name] = plain(path.read_text())
    return found


# -- refused by name

NAMED = {
    "engine --model": ("engine", "--model", "nonsense"),
    "engine --engine": ("engine", "--engine", "nonsense"),
    "engine --bridge": ("engine", "--model", "tiny", "--bridge", "nonsense"),
    "engine --trainer": ("engine", "--model", "tiny", "--bridge", "lora", "--trainer", "nonsense"),
    "engine --token-file": ("engine", "--model", "tiny", "--token-file", "nonsense"),
    "engine --set": ("engine", "--model", "tiny", "--set", "engine.nonsense=1"),
    "skyrl-env --model": ("skyrl-env", WATCHED, "--rings", "r", "--engine-url", "http://h", "--model", "nonsense"),
    "skyrl-env --reward": ("skyrl-env", WATCHED, "--rings", "r", "--engine-url", "http://h", "--reward", "nonsense"),
    "skyrl-env --file": ("skyrl-env", WATCHED, "--rings", "r", "--engine-url", "http://h", "--file", "nonsense"),
    "skyrl-env --set": (
        "skyrl-env",
        WATCHED,
        "--rings",
        "r",
        "--engine-url",
        "http://h",
        "--set",
        "reward.nonsense.use=1",
    ),
    "skyrl-env --token-file": (
        "skyrl-env",
        WATCHED,
        "--rings",
        "r",
        "--engine-url",
        "http://h",
        "--token-file",
        "nonsense",
    ),
    "skyrl-env --concurrency": ("skyrl-env", WATCHED, "--rings", "r", "--engine-url", "http://h", "--concurrency", "0"),
    "skyrl-env --hands": ("skyrl-env", WATCHED, "--rings", "r", "--engine-url", "http://h", "--hands", "4"),
    "env --drain-s": ("env", WATCHED, "--api", "http://127.0.0.1:9", "--drain-s", "-1"),
    "serve --sync": ("serve", "--sync", "nonsense"),
    "serve --model": ("serve", "--model", "nonsense"),
}


@pytest.mark.parametrize("flag", list(NAMED))
def test_a_value_that_cannot_be_is_refused_by_name(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_app(list(NAMED[flag])) != 0
    output = capsys.readouterr().err
    assert "nonsense" in output or flag.rpartition(" ")[2] in output
    assert not any(tmp_path.glob("**/*.sock")), "nothing was started"


IDLE = [  # flags that would do nothing beside others, and the error
    (("run", "--env", "gsm8k", "--steps", "3", "--set", "training.steps=4"), "training.steps is given twice"),
    (("eval", "--env", "gsm8k", "--model", "tiny", "--samples", "2", "--set", "evaluation.samples=3"), "given twice"),
    (("process", "--out", "o", "--env", "gsm8k", "--group-size", "2", "--set", "training.group_size=3"), "given twice"),
    (("train", "--api", "http://h", "--set", "api.url=http://i"), "api.url is given twice"),
    *((("eval", "--env", "gsm8k", "--model", "tiny", "--set", f"{path}=1"), f"--set {path} has no effect on `atropos eval`")
      for path in ("trainer.learning_rate", "bridge.keep", "evaluation.every", "training.steps", "checkpoint.every", "hub.size_mb",
                   "curriculum.seed", "transform.zscore.clip", "health.action", "api.url", "engine.replica.b.threads", "restarts")),
    *((("process", "--out", "o", "--env", "gsm8k", "--set", f"{path}=1"), f"--set {path} has no effect on `atropos process`")
      for path in ("trainer.learning_rate", "evaluation.problems", "training.steps")),
    *((("env", "gsm8k", "--api", "http://127.0.0.1:9", "--model", "tiny", "--set", f"{path}=1"),
       f"--set {path} has no effect on `atropos env`")
      for path in ("seed", "engine.threads", "sampling.temperature", "training.group_size", "evaluation.problems")),
    (("engine", "--model", "tiny", "--set", "training.steps=3"), "--set training.steps has no effect on `atropos engine`"),
    (("engine", "--model", "tiny", "--trainer", "grpo"), "trainer.use has no effect: the engine is sent whole models"),
    (("engine", "--model", "tiny", "--set", "trainer.lora.rank=8"), "trainer.lora.rank has no effect"),
    (("skyrl-env", "gsm8k", "--rings", "r", "--engine-url", "http://h", "--set", "sampling.max_tokens=3"),
     "--set sampling.max_tokens has no effect on `atropos skyrl-env`"),
    (("adapter", "skyrl", "--env", "gsm8k", "--out", "o", "--set", "bridge.use=lora"), "--set bridge.use has no effect"),
    (("adapter", "skyrl", "doctor", "--option", "attempts=9"), "attempts has no effect on `atropos adapter skyrl doctor`"),
    (("adapter", "skyrl", "doctor", "--seed", "3"), "does not take --seed"),
    (("adapter", "list", "--seed", "3"), "does not take --seed"),
    (("env", "gsm8k", "--api", "http://127.0.0.1:9", "--model", "tiny", "--wait-s", "3"), "--wait-s has no effect with --model"),
    (("run", "--env", "gsm8k", "--figures", "f.toml"), "--figures has no effect without --dry-run"),
    (("view", ".", "--html", "a.html", "--port", "8000"), "--port has no effect with --html"),
    (("view", ".", "--html-mb", "3"), "--html-mb has no effect without --html"),
    (("view", ".", "--force"), "--force has no effect without --html"),
    (("new", "reward", "word_tally", "--tools"), "--tools has no effect on a reward"),
    (("serve", "--no-journal", "--sync", "always"), "--sync has no effect with --no-journal"),
    (("serve", "--tls-key", "key.pem"), "TLS needs both --tls-cert and --tls-key"),
    (("eval", "--step", "3", "--model", "tiny", "--env", "gsm8k"), "--step names a checkpoint of a run"),
    (("train", "--api", "http://h", "--set", "hub.size_mb=9"), "hub.size_mb has no effect with [api]"),
    (("train", "--api", "http://h", "--set", "evaluation.every=9"), "evaluation.every has no effect with [api]"),
    (("skyrl-env", "gsm8k", "--rings", "r", "--engine-url", "http://h", "--hands", "4"), "--hands is called --concurrency now."),
    (("check", "gsm8k", "--skip", "nonsense"), "there is no check named 'nonsense'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "wanted"), IDLE, ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_a_flag_that_would_do_nothing_is_refused(arguments, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert run_app(list(arguments)) != 0
    assert wanted in " ".join(capsys.readouterr().err.split())
    assert not os.listdir(tmp_path), "nothing was begun"


def test_a_run_file_for_several_commands_may_hold_what_one_of_them_does_not_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        f'[environment.watched]\nuse = "{WATCHED}"\n[trainer]\nlearning_rate = 3.0\n[hub]\nsize_mb = 9\n'
    )
    toy = ("--model", "toy", "--groups", "1", "--group-size", "1", "--out", "out.jsonl")
    assert run_app(["process", "run.toml", *toy]) == 0, capsys.readouterr().err


def test_a_dry_run_says_that_the_directory_cannot_be_the_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("used").mkdir()
    Path("used/something").touch()
    assert run_app(["run", *TOY, "--env", WATCHED, "--dry-run", "--dir", "used"]) == 1
    assert "used is not empty" in capsys.readouterr().err
    running = RunDirectory(Path("running"))
    running.make()
    said = f"running is in use: its run is running now, in process {os.getpid()}."
    with running.locked():
        assert run_app(["run", *TOY, "--env", WATCHED, "--dry-run", "--dir", "running"]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
        with pytest.raises(RunDirectoryError, match=re.escape(said)), RunDirectory(Path("running")).locked():
            pass
    assert run_app(["run", *TOY, "--env", WATCHED, "--dry-run", "--dir", "new"]) == 0
    assert not Path("new").exists()


# -- seen elsewhere

SEEN_IN = {
    "plugins/env_atroposlib/tests/test_import.py::made": "import --dir",
    "tests/unit/cli/test_json.py::test_a_doctor_prints_one_document_and_ends_as_it_would": "doctor --json",
    "tests/unit/cli/test_json.py::test_an_evaluation_prints_its_figures_and_all_that_they_depend_on": "eval --json",
    "libs/records/tests/test_dataset.py::test_what_is_no_conversation_of_the_policy_is_left_out_by_name": "export --keep-cut-off",
    "libs/records/tests/test_dataset.py::export": "export --json",
    "tests/e2e/test_export.py::test_a_run_of_an_adapter_exports_it_and_merged_the_same_policy": "export --merged",
    "tests/e2e/test_quantize.py::test_a_base_is_rounded_in_the_dtype_that_the_run_has_it_in": "quantize --dtype",
    "tests/e2e/test_quantize.py::test_a_lora_is_trained_with_a_base_in_8_bits_in_engine_and_trainer": "quantize --format",
    "tests/e2e/test_process.py::test_a_data_set_of_live_rollouts": "process --keep-cut-off",
    "libs/evaluation/tests/test_chat_url.py::test_tools_turns_and_figures_are_those_of_a_model_here": "eval --key-variable --concurrency",
    "tests/e2e/test_push.py::test_a_data_set_is_pushed_in_one_private_repository_with_its_card": "export --push --public",
    "libs/evaluation/tests/test_chat_url.py::evaluated": "eval --model-url --model-name",
    "tests/e2e/test_audit.py": "audit --out",
    "libs/debugging/tests/test_rescore.py::rescored": "rescore --json",
    "libs/debugging/tests/test_rescore.py::test_a_negated_reward_turns_every_advantage_round": "rescore --reward --step --out",
    "libs/debugging/tests/test_rescore.py::test_a_saved_result_has_what_is_written_and_changes_no_record": "rescore --save",
    "libs/debugging/tests/test_rescore.py::test_a_weight_is_changed_by_a_flag_or_by_a_run_file": "rescore --set --config",
    "libs/debugging/tests/test_rescore.py::test_an_environment_that_has_changed_scores_again": "rescore --environments",
    "libs/debugging/tests/test_bisect.py::bisected": "bisect --json",
    "libs/debugging/tests/test_bisect.py::test_a_tolerance_lets_small_differences_pass": "bisect --tolerance",
    "libs/debugging/tests/test_replay.py::replayed": "replay --json",
    "libs/debugging/tests/test_replay.py::test_another_loss_and_another_rate_change_only_what_they_should": "replay --step --loss --set",
    "libs/debugging/tests/test_replay.py::test_saved_logprobs_are_those_of_the_tokens_that_moved": "replay --save",
    "libs/debugging/tests/test_drift.py::test_tables_are_printed_for_people": "bisect --statistics",
    "libs/debugging/tests/test_replay.py::test_another_seed_is_another_dropout": "replay --seed",
    "libs/debugging/tests/test_replay.py::test_tasks_are_sampled_again_with_the_policy_that_the_step_began_with": "replay --resample",
    "libs/debugging/tests/test_replay.py::test_a_negated_reward_turns_advantages_and_the_update_round": "replay --reward",
    "tests/unit/launch/test_picture.py": "plot --out",
    "tests/e2e/test_audit.py::test_a_changed_logprob_is_named_with_both_values": "audit --step --tolerance",
    "tests/e2e/test_audit.py::test_a_setting_of_the_trainer_is_for_the_audit_and_another_is_refused": "audit --set",
    "plugins/trajectory_api/tests/test_serve.py::test_a_port_that_is_taken_is_named_and_its_owner_left_alone": "serve --port",
    "plugins/trajectory_api/tests/test_serve.py::test_the_token_is_in_no_line_that_it_prints": "serve --token-file",
    "plugins/trajectory_api/tests/test_serve.py::test_the_oldest_silent_connections_make_way_for_new_ones": "serve --connections",
    "plugins/trajectory_api/tests/test_serve.py::test_over_tls_workers_and_trainers_want_the_certificate_to_be_trusted":
        "serve --tls-cert --tls-key",
    "plugins/trajectory_api/tests/test_serve.py::test_flags_that_cannot_be_are_named": "serve --host",
    "plugins/trajectory_api/tests/test_service.py::test_a_group_that_never_fits_is_refused_with_the_flags_that_make_room_for_it":
        "serve --hub-mb --hub-sequences",
    "plugins/trajectory_api/tests/test_versions.py::test_a_server_without_a_journal_is_informed_again_before_it_refuses_anything":
        "serve --journal",
    "plugins/trajectory_api/tests/test_client.py::test_a_trainer_that_was_away_for_longer_than_its_lease_has_lost_it":
        "serve --lease-s",
    "plugins/trajectory_api/tests/test_client.py::test_a_body_however_far_beyond_the_limit_is_refused_by_name": "serve --body-mb",
    "plugins/trajectory_api/tests/test_documents.py::test_the_example_client_runs_leases_and_commits": "serve --dir",
    "plugins/trajectory_api/tests/sent_groups.py": "serve --same-host",
    "tests/e2e/test_api_hostile.py": "serve --hold-s --in-flight-mb --request-s",
    "tests/e2e/api_faults.py": "serve --silent-s",
    "plugins/trajectory_api/tests/test_access.py": "serve --cors",
    "plugins/simulation/tests/test_command.py::test_a_dry_run_that_spans_machines_says_what_more_engines_would_bring": "run --figures",
    "plugins/simulation/tests/test_command.py::test_a_table_has_a_line_for_each_fleet_and_every_figure_its_origin":
        "simulate --figures --set --engines --workers",
    "plugins/simulation/tests/test_command.py::test_the_seed_and_a_growing_batch_change_the_table": "simulate --seed --batch-grows",
    "plugins/tinker_api/tests/test_command.py::test_with_a_key_only_its_callers_are_served_under_each_name_of_the_model":
        "tinker --token-file --name --queue-mb --adapters --host --set",
    "plugins/tinker_api/tests/test_command.py::test_components_without_adapters_are_refused_by_name": "tinker --trainer --engine",
    "plugins/tinker_api/tests/test_command.py::test_a_port_that_is_taken_is_named": "tinker --port",
    "plugins/tinker_api/tests/test_command.py::test_few_connections_and_slow_requests_are_turned_away": "tinker --connections --request-s",
    "plugins/tinker_api/tests/test_removal.py::test_the_snapshots_of_a_session_are_bounded_and_the_used_ones_stay": "tinker --snapshots",
    "plugins/tinker_api/tests/test_removal.py::test_a_silent_session_loses_its_snapshots_and_nothing_else": "tinker --snapshot-hours",
    "plugins/tinker_api/tests/test_hostile.py::test_a_body_beyond_the_bound_is_refused": "tinker --body-mb",
    "tests/tinker/server.py::start": "tinker --model --dir",
    "plugins/trainer_grpo/tests/test_plan_command.py::test_what_an_eight_billion_model_needs_of_a_small_card_and_of_a_large_one":
        "plan --model --gpu --host --context",
    "plugins/trainer_grpo/tests/test_plan_command.py::test_bridge_engine_and_settings_are_those_that_are_named":
        "plan --bridge --engine --set",
    "plugins/viewer/tests/test_command.py::test_a_port_that_is_taken_is_named": "view --port",
    "plugins/viewer/tests/test_command.py::test_a_file_is_written_and_where_it_cannot_be_the_error_says_so": "view --html --force",
    "plugins/viewer/tests/test_single_file.py::test_it_stays_below_its_bound_and_says_what_is_left_out": "view --html-mb",
    "tests/e2e/test_roles_tiny.py::test_a_server_for_other_machines_wants_a_token": "engine --host",
    "tests/e2e/test_roles.py::test_an_engine_alone_refuses_what_it_was_not_started_for_and_says_what_to_type": "engine --port",
    "tests/e2e/test_roles.py::test_a_worker_that_is_killed_leaves_its_draws_to_another": "env --concurrency",
    "tests/e2e/test_roles.py::test_a_worker_waits_for_a_trainer_aloud_and_not_for_ever": "env --wait-s",
    "tests/skyrl/test_train_rings.py::test_a_worker_gives_up_where_skyrl_does_not_come":
        "skyrl-env --rings --engine-url --wait-s",
}  # fmt: skip


def seen() -> dict[str, str]:
    return {
        f"{command} {flag}": test
        for test, entry in SEEN_IN.items()
        for command, *flags in [entry.split()]
        for flag in flags
    }


@pytest.mark.parametrize("flag", list(seen()))
def test_the_test_that_an_entry_names_is_there_and_gives_the_flag(flag):
    file, _, name = seen()[flag].partition("::")
    tree = ast.parse((ROOT / file).read_text())
    found = [one for one in ast.walk(tree) if getattr(one, "name", None) == name] if name else [tree]
    given = flag.rpartition(" ")[2]
    spelt = rf"{given}\b|{given.replace('--', '--no-')}\b|\b{given[2:].replace('-', '_')}="
    assert len(found) == 1 and re.search(spelt, ast.unparse(found[0]))


def test_there_is_an_entry_for_every_flag():
    known = {*CHANGED, *NAMED, *seen()}
    assert not (new := sorted(flags() - known)), f"say how the effect of a new flag is seen: {new}"
    assert not (gone := sorted(known - flags())), f"these are no flags any more: {gone}"
