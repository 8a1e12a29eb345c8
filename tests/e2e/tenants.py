"""Tenants of a cluster, and a run that is small enough to be compared bit by bit."""

from pathlib import Path
from typing import Any

import opentinker as ot
from opentinker.connection.accounts import Accounts

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)


def tenant(admin: ot.Cluster, name: str) -> ot.Cluster:
    """A connection by a member of a new project."""
    accounts = Accounts(admin.control)
    admin.wait(accounts.create_project(name))
    admin.wait(accounts.create_user(name))
    admin.wait(accounts.set_member(name, name, "member"))
    made = admin.wait(accounts.create_key(project=name, user=name, role="", name="", ttl=None))
    return ot.connect(admin.address, key=made.key)


def small_fit(
    cluster: ot.Cluster,
    env: Any,
    model: str,
    run_dir: Path,
    seed: int,
    trainer: ot.ServerOptions = TRAINER,
    steps: int = 2,
) -> ot.FitResult:
    """Guessing numbers; `env` is the class or the name of a hosted one."""
    return ot.fit(
        env=env,
        env_options={"low": 0, "high": 4},
        model=model,
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=2,
        steps=steps,
        learning_rate=1e-3,
        sampling=ot.SamplingParams(max_tokens=6),
        checkpoint_every=1,
        seed=seed,
        run_dir=run_dir,
        trainer=trainer,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
