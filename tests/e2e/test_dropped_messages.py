"""A run whose model's chat template leaves out a message ends with one error, and `atropos check` names the roles that cause it."""

from __future__ import annotations

ENVIRONMENT = """
from atropos_core import Conversation, Environment, Score, Task


class Talk(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"What is {n} + {n}?"},), str(2 * n)) for n in range(40)]

    async def rollout(self, task, policy, *, seed):
        talk = Conversation(policy, seed=seed)
        await talk.reply(*task.messages)
        reply = await talk.reply({"role": ROLE, "content": "Are you sure?"})
        return talk.episode(Score(float(reply["content"].strip() == task.answer)))
"""
SMALL = ("--steps", "1", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=2", "--dir", "run")


def test_a_run_ends_at_the_first_message_that_the_policy_would_not_see(atropos, tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT.replace("ROLE", "'tool'"))
    ended = atropos("run", "--env", "./talk.py", "--model", "tiny", *SMALL)
    said = " ".join(ended.err.split())
    assert ended.code == 1, said
    assert "the chat template of tiny leaves message 1 of 1, of the role 'tool', out of the prompt" in said
    assert "environment 'talk', task 'train-" in said and "--model tiny-tools" in said and "Traceback" not in said


def test_check_names_a_role_that_templates_leave_out_and_notes_tools(atropos, tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT.replace("ROLE", "'usr'"))
    ended = atropos("check", "./talk.py")
    said = " ".join((ended.out + ended.err).split())
    assert ended.code == 1 and "a message has the role 'usr', which chat templates do not know" in said
    (tmp_path / "talk.py").write_text(ENVIRONMENT.replace("ROLE", "'tool'"))
    said = " ".join(atropos("check", "./talk.py").out.split())
    assert "a run needs a model whose chat template shows them" in said and "tiny-tools" in said
    (tmp_path / "talk.py").write_text(ENVIRONMENT.replace("ROLE", "'user'"))
    assert "whose chat template" not in atropos("check", "./talk.py").out
