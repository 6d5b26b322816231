"""Every code block of every page is executed by a test, and this table says by which."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY
from tests.pages.blocks import BLOCKS, Block

EXAMPLE = "plugins/agent_api/tests/test_example.py::"
HERE = "tests/pages/test_commands.py::"
CHAT_CLIENT = "libs/chat_client/tests/test_chat_client.py::test_the_example_of_the_readme"
LIBRARY = "tests/pages/test_library_pages.py::"
TINKER = "tests/tinker/test_page.py::"
TINKER_VLLM = "tests/vllm/test_tinker.py::test_clients_sample_from_snapshots_while_training_continues"
TINKER_RUN = "tests/tinker/test_atropos_run.py::test_the_command_of_the_page_trains"
TAKING = "tests/pages/test_serve_agent_page.py::test_the_command_the_loop_and_the_calls_of_the_page"
MULTI_TURN = "tests/pages/test_multi_turn_page.py::"
PYTHON = "tests/pages/test_python_page.py::test_the_examples_of_the_page_run_one_after_another"
SIMULATION = "plugins/simulation/tests/test_pages.py::test_the_commands_of_the_pages_print_a_table"
CREDIT = "tests/pages/test_credit_page.py::test_the_command_of_the_page_prints_what_it_shows"
DATASET = HERE + "test_the_rows_of_the_page_are_trained_on"
WORKED_CASE = "tests/pages/test_worked_cases.py::test_the_worked_case_prints_what_the_page_shows"
DEBUGGING = (
    "# sevens.py",
    "# rewards.py",
    "atropos run",
    "atropos rescore",
    "reward ",
    "atropos replay",
    "step  ",
    "saved ",
    "configuration",
)
HACKING = ("# game.py", "# game.toml", "atropos run", "warning ", "atropos rescore", "448 ")
COMING_FROM = ("atroposlib", "roll", "skyrl", "trl", "verifiers")
TUTORIAL = sorted({block.page for block in BLOCKS if block.page.startswith("docs/tutorial/")})
# Page, how the block's first line begins, and the tests that execute it or compare what it shows.
EXECUTED = (
    ("AGENTS.md", "make help", "tests/pages/test_every_block.py::test_make_knows_every_target_that_a_page_names"),
    ("CONTRIBUTING.md", "make quick", "tests/pages/test_every_block.py::test_make_knows_every_target_that_a_page_names"),
    ("README.md", "make run", "tests/pages/test_every_block.py::test_make_knows_every_target_that_a_page_names"),
    ("README.md", "model      tiny", HERE + "test_a_run_says_what_the_readme_shows"),
    ("README.md", "flowchart LR", "a drawing"),
    ("README.md", "import random", "tests/pages/test_readme_example.py::test_the_readme_example_learns_visibly"),
    ("README.md", "atropos check ./sums.py", HERE + "test_the_commands_beside_the_readme_example_run"),
    ("README.md", "import atropos_core as atropos", "tests/pages/test_python_page.py::test_the_lines_of_the_readme"),
    ("libs/adapter_kit/README.md", "from atropos_adapter_kit", LIBRARY + "test_an_adapters_doctor_says_what_is_not_installed"),
    ("libs/chat_client/README.md", "from atropos_chat_client", CHAT_CLIENT),
    ("libs/server_watch/README.md", "import asyncio", LIBRARY + "test_a_server_that_never_answers_is_given_up"),
    (
        "libs/torch_models/README.md",
        "model: SmolLM2",
        "libs/torch_models/tests/test_gguf.py::test_two_processes_convert_a_file_once_and_a_damaged_directory_is_made_again",
    ),
    ("libs/torch_models/README.md", "from atropos_torch_models", LIBRARY + "test_a_device_that_torch_does_not_find_is_refused"),
    ("plugins/env_dataset/README.md", "{", DATASET),
    ("plugins/tinker_api/README.md", "atropos tinker", TINKER + "test_the_script_of_the_page_runs_with_the_variables_of_the_page"),
    ("plugins/env_dataset/README.md", "atropos check dataset", DATASET),
    ("plugins/env_dataset/README.md", "# grade.py", DATASET),
    ("docs/agent-clients.md", "# codex", "tests/agents/test_clients.py::test_a_client_completes_a_task"),
    ("docs/agent-clients.md", "{", "tests/agents/test_clients.py::test_a_client_completes_a_task"),
    ("docs/agent-clients.md", "model:", "tests/agents/test_clients.py::test_a_client_completes_a_task"),
    ("docs/agent-tokens.md", "", "plugins/agent_api/tests/test_page.py::test_the_picture_of_a_rule_is_what_a_session_makes_of_it"),
    ("docs/agents.md", "pip install atropos-plugin-agent-api", EXAMPLE + "test_the_example_on_the_page_learns"),
    ("docs/agents.md", "held-out accuracy", EXAMPLE + "test_the_example_on_the_page_learns"),
    ("docs/agents.md", "atropos serve-agent", TAKING),
    ("docs/agents.md", "episodes are offered", TAKING),
    ("docs/agents.md", "import json, os, urllib.request", TAKING),
    ("docs/agents.md", "curl -X POST -H", TAKING),
    ("docs/agents.md", "from atropos_agent_api.grading", EXAMPLE + "test_the_reward_on_the_page_scores"),
    ("docs/agents.md", "atropos check agent", "plugins/agent_api/tests/test_poisoned.py::test_the_whole_contract"),
    ("docs/credit.md", "# bars.py", CREDIT),
    ("docs/credit.md", "atropos bias", CREDIT),
    ("docs/credit.md", "estimator", CREDIT),
    ("docs/bridges.md", "import asyncio", HERE + "test_the_bridge_on_the_page"),
    ("docs/bridges.md", "atropos check ./disk.py", HERE + "test_the_bridge_on_the_page"),
    ("docs/warm-start.md", "{", "tests/e2e/test_warmup.py::test_the_example_of_the_page_runs"),
    *((f"docs/coming-from/{page}.md", "import r", "tests/pages/test_coming_from.py::test_") for page in COMING_FROM),
    *((page, "", "tests/pages/test_tutorial.py::test_a_page_runs_as_it_stands") for page in TUTORIAL),
    ("docs/hooks.md", "[project.entry-points.atropos]", "tests/unit/cli/test_new.py::test_"),
    ("docs/hooks.md", "import atropos_core as atropos", "tests/e2e/test_own_components.py::test_the_reward_on_the_page"),
    ("docs/how-a-run-works.md", "draw                 prompt ids", "a drawing"),
    ("docs/multi-turn.md", "atropos run --env calculator", MULTI_TURN + "test_the_page_says_what_was_gained"),
    ("docs/multi-turn.md", "held-out accuracy", MULTI_TURN + "test_the_page_says_what_was_gained"),
    ("docs/multi-turn.md", '"""Word problems with a calculator', MULTI_TURN + "test_the_pieces_of_the_page"),
    ("docs/multi-turn.md", "# A question, and", MULTI_TURN + "test_the_pieces_of_the_page"),
    ("docs/multi-turn.md", "class Calculator(Environment)", MULTI_TURN + "test_the_pieces_of_the_page"),
    ("docs/multi-turn.md", "atropos check ./calculator.py", MULTI_TURN + "test_the_commands_beside_it"),
    ("docs/multi-turn.md", "score = Score", MULTI_TURN + "test_the_turn_rewards_of_the_page"),
    ("docs/multi-turn.md", "# tools.py", MULTI_TURN + "test_the_turn_rewards_of_the_page"),
    ("docs/multi-turn.md", "atropos run --model tiny-tools", MULTI_TURN + "test_the_turn_rewards_of_the_page"),
    ("docs/multi-turn.md", "reply = {", MULTI_TURN + "test_the_messages_of_the_page"),
    ("docs/multi-turn.md", "<|im_start|>system", MULTI_TURN + "test_the_rollout_of_the_page"),
    ("docs/multi-turn.md", "import asyncio", MULTI_TURN + "test_the_scripted_test_of_the_page"),
    ("docs/multi-turn.md", "error: not one operation", MULTI_TURN + "test_the_scripted_test_of_the_page"),
    ("docs/multi-turn.md", "atropos new environment shop", MULTI_TURN + "test_a_package_with_tools"),
    ("docs/recipes.md", "atropos recipes", "libs/recipes/tests/test_recipes.py::test_the_commands_of_the_page_do_what_it_says"),
    ("docs/records.md", "from pathlib import Path", "tests/pages/test_records.py::test_the_reader_on_the_page"),
    ("docs/records.md", "atropos audit runs/mine", "tests/pages/test_records.py::test_the_audit_on_the_page"),
    *(("docs/debugging.md", first, WORKED_CASE) for first in DEBUGGING),
    *(("docs/reward-hacking.md", first, WORKED_CASE) for first in HACKING),
    ("docs/export.md", "atropos export runs/mine", "tests/e2e/test_export.py::test_the_commands_and_the_example_of_the_page_run"),
    ("docs/export.md", "atropos process", "tests/e2e/test_export.py::test_the_commands_and_the_example_of_the_page_run"),
    ("docs/export.md", "import atropos_core", "tests/e2e/test_export.py::test_the_commands_and_the_example_of_the_page_run"),
    ("docs/python.md", "import atropos_core as atropos", PYTHON),
    ("docs/python.md", "class Longer", PYTHON),
    ("docs/python.md", "result = atropos.resume", PYTHON),
    ("docs/python.md", "with atropos.view(result) as page", PYTHON),
    ("docs/python.md", "from atropos_core.errors", PYTHON),
    ("docs/install.md", "make vllm", "tests/vllm/test_runs.py::test_"),
    ("docs/install.md", "make dist", "tests/dist/test_installed.py::test_"),
    ("docs/install.md", "docker build", "tests/dist/test_containers.py::test_the_commands_for_a_cpu"),
    ("distribution/README.md", "pip install", "tests/dist/test_installed.py::test_"),
    ("docs/roles.md", "atropos serve", HERE + "test_the_roles_of_the_page_train_together_and_say_what_it_shows"),
    ("docs/roles.md", "workers sample from", HERE + "test_the_roles_of_the_page_train_together_and_say_what_it_shows"),
    ("docs/roles.md", "worker gsm8k@", HERE + "test_the_roles_of_the_page_train_together_and_say_what_it_shows"),
    ("docs/roles.md", "(umask 077", HERE + "test_roles_with_a_token_and_addresses_of_their_own_train"),
    ("docs/roles.md", "atropos engine --model tiny --host", HERE + "test_an_engine_elsewhere_is_sent_weights"),
    ("docs/roles.md", "atropos engine --model tiny --engine vllm", "tests/vllm/test_engine_role.py::test_"),
    ("docs/roll.md", "pip install", "tests/dist/test_installed.py::test_a_new_plugin"),
    ("docs/roll.md", "atropos adapter roll", "tests/roll/test_adapter.py::test_the_command_on_the_page_names"),
    ("docs/roll.md", "train_env_manager:", "tests/roll/test_adapter.py::test_"),
    ("docs/roll.md", "import gem", "tests/roll/test_gem.py::test_gsm8k_is_made_reset_and_stepped"),
    ("docs/run-file.md", "atropos eval", HERE + "test_the_evaluations_on_the_page_run"),
    ("plugins/trainer_grpo/README.md", "atropos quantize", "tests/e2e/test_quantize.py::test_the_commands_of_the_page_round_and_train"),
    ("docs/run-file.md", "atropos plan", "plugins/trainer_grpo/tests/test_plan_command.py::test_the_commands_of_the_page_print"),
    ("docs/skyrl.md", "pip install", "tests/dist/test_installed.py::test_a_new_plugin"),
    ("docs/skyrl.md", "import typing", "tests/skyrl/test_train.py::test_"),
    ("docs/skyrl.md", "atropos adapter skyrl", "tests/skyrl/test_entrypoint.py::test_"),
    ("docs/skyrl.md", "atropos serve", "tests/skyrl/test_train_api.py::test_"),
    ("docs/skyrl.md", "atropos engine", "tests/skyrl/test_train_rings.py::test_"),
    ("docs/skyrl.md", "skyrl-gsm8k/skyrl.sh trainer.fully_async", "tests/skyrl/test_fully_async.py::test_the_exact_expected_reward"),
    ("docs/tinker.md", "pip install 'atropos-rl", TINKER + "test_the_script_of_the_page_runs_with_the_variables_of_the_page"),
    ("docs/tinker.md", "pip install 'atropos-plugin-tinker-client", TINKER_RUN),
    ("plugins/tinker_client/README.md", "pip install", TINKER_RUN),
    ("docs/tinker.md", "export TINKER_BASE_URL", TINKER + "test_the_script_of_the_page_runs_with_the_variables_of_the_page"),
    ("docs/gpu.md", "make dist", "tests/vllm/test_gpu_checks.py::test_the_check_holds"),
    ("docs/tinker.md", "atropos tinker --model Qwen/Qwen3-0.6B --engine vllm", TINKER_VLLM),
    ("plugins/engine_vllm/README.md", "atropos tinker --model Qwen/Qwen3-0.6B --engine vllm", TINKER_VLLM),
    ("docs/tinker.md", "import tinker", TINKER + "test_the_script_of_the_page_runs_with_the_variables_of_the_page"),
    ("docs/tinker.md", "(umask 077", TINKER + "test_the_key_of_the_page_opens_the_server_for_others"),
    ("docs/trajectory-api.md", "pip install", HERE + "test_the_calls_by_hand_do_what_the_page_says"),
    ("docs/trajectory-api.md", "python your_environment.py serve", "tests/atroposlib/test_clients.py::test_an_environment"),
    ("docs/trajectory-api.md", "curl -X POST", HERE + "test_the_calls_by_hand_do_what_the_page_says"),
    ("docs/trajectory-api.md", "put ──►", "a drawing"),
    ("docs/trajectory-api.md", "import asyncio", "plugins/trajectory_api/tests/test_documents.py::test_the_example_client_"),
    ("docs/trajectory-api.md", "(umask 077", HERE + "test_a_server_for_others_answers_who_has_the_token"),
    ("docs/trajectory-api.md", "curl -H 'Accept", HERE + "test_the_calls_by_hand_do_what_the_page_says"),
    ("plugins/adapter_roll/README.md", "import gem", "tests/roll/test_gem.py::test_gsm8k_is_made_reset_and_stepped"),
    ("plugins/adapter_roll/README.md", "env_type: atropos", "tests/roll/test_adapter.py::test_"),
    ("plugins/adapter_skyrl/README.md", "atropos adapter skyrl", "tests/skyrl/test_entrypoint.py::test_"),
    ("plugins/bridge_delta/README.md", "atropos engine", "tests/e2e/test_delta.py::test_a_run_trains_an_engine_elsewhere"),
    ("plugins/engine_vllm/README.md", "atropos run --model tiny", "tests/vllm/test_speculation_runs.py::test_the_run_of_the_page_"),
    ("plugins/engine_vllm/README.md", "pip install", "tests/dist/test_installed.py::test_a_new_plugin"),
    ("plugins/env_atroposlib/README.md", "atropos eval --env", "plugins/env_atroposlib/tests/test_commands.py::test_evaluate_is"),
    ("plugins/launcher_ray/README.md", "pip install", "tests/ray/test_runs.py::test_the_same_run_file_here_and_on_the_cluster"),
    ("plugins/launcher_slurm/README.md", "pip install", "tests/slurm/test_runs.py::test_the_same_run_here_and_as_a_job"),
    ("plugins/launcher_kubernetes/README.md", "pip install", "tests/kubernetes/test_pods.py::test_the_same_run_here_and_in_pods"),
    ("docs/simulation.md", "atropos simulate", SIMULATION),
    ("docs/simulation.md", "[run]", SIMULATION),
    ("plugins/simulation/README.md", "atropos simulate", SIMULATION),
    ("plugins/sinks/README.md", "import pandas", HERE + "test_what_the_sinks_write_is_read_as_their_pages_say"),
    ("plugins/sinks/README.md", ".venv/bin/tensorboard", HERE + "test_what_the_sinks_write_is_read_as_their_pages_say"),
    ("plugins/sinks/README.md", ".venv/bin/trackio get", "plugins/sinks/tests/test_trackio.py::test_what_a_killed_run"),
    ("plugins/sinks/README.md", ".venv/bin/wandb sync", "plugins/sinks/tests/test_wandb.py::test_an_offline_run"),
    ("plugins/trainer_grpo/README.md", "from atropos_trainer_grpo.losses", HERE + "test_a_loss_of_ones_own_is_checked"),
    ("plugins/trajectory_api/README.md", "atropos serve", HERE + "test_a_server_for_others_answers_who_has_the_token"),
    ("plugins/viewer/README.md", "atropos view", "plugins/viewer/tests/test_command.py::test_it_serves_until_ctrl_c_and_ends_with_0"),
    ("docs/my-rewards-are-all-0.md", "atropos", HERE + "test_the_commands_of_the_page_about_rewards_run"),
    ("docs/sweeps.md", "for rate in", HERE + "test_the_runs_of_the_page_about_settings_are_compared"),
    ("docs/sweeps.md", "import atropos_core", HERE + "test_the_runs_of_the_page_about_settings_are_compared"),
    ("docs/view.md", "atropos view", "plugins/viewer/tests/test_command.py::test_"),
    ("plugins/trajectory_api/README.md", "(umask 077", HERE + "test_a_server_for_others_answers_who_has_the_token"),
)  # fmt: skip
RUN_FILES = "tests/pages/test_run_files.py"  # executes every table in TOML that is not named above


def entries_of(block: Block) -> list[str]:
    return [by for page, first, by in EXECUTED if page == block.page and block.first.startswith(first)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_of_every_page_is_executed(block: Block) -> None:
    if block.language == "toml" and not entries_of(block):
        assert (REPOSITORY / RUN_FILES).is_file()
        return
    assert entries_of(block), f"{block} begins {block.first!r}: no test executes it; write one, and name it in EXECUTED"


@pytest.mark.parametrize("entry", EXECUTED, ids=lambda entry: f"{entry[0]}: {entry[1]}")
def test_every_entry_names_a_block_and_a_test_that_there_are(entry: tuple[str, str, str]) -> None:
    page, first, by = entry
    assert any(block.page == page and block.first.startswith(first) for block in BLOCKS), "no such block any more"
    if by == "a drawing":
        return
    file, _, name = by.partition("::")
    assert re.search(rf"^\s*(?:async )?def {name}", (REPOSITORY / file).read_text(), re.M), f"{by} is no test"


def test_make_knows_every_target_that_a_page_names() -> None:
    known = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    named = {target for block in BLOCKS for target in re.findall(r"^make ([\w-]+)", block.text, re.M)}
    assert {"run", "test", "help", "bench"} <= named <= known
