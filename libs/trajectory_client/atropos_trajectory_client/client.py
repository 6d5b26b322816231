"""The trajectory API for a worker or a trainer: groups, draws and leases over HTTP (`/v1`, codec frames).

If the server dies and comes back at the same address, work continues: every call is repeated until its deadline, puts carry a key so
that none counts twice, workers register again, and a trainer repeats its offers.
"""

from __future__ import annotations

from atropos_trajectory_client.http import CONTENT_TYPE, DAMAGED, NOT_WANTED, OTHER_TIMELINE, Api, UnknownThere
from atropos_trajectory_client.trainer_session import LeaseReply, SessionSpec, TrainerSession
from atropos_trajectory_client.worker import Assignment, Worker, WorkerSpec

__all__ = [
    "CONTENT_TYPE", "DAMAGED", "NOT_WANTED", "OTHER_TIMELINE", "Api", "Assignment", "LeaseReply", "SessionSpec", "TrainerSession",
    "UnknownThere", "Worker", "WorkerSpec",
]  # fmt: skip
