"""What a policy asks of the scheduler."""

from dataclasses import replace

from opentinker.errors import unsupported
from opentinker.training.tuning import Full, JobOptions, ServerOptions, Tuning
from opentinkerapi.scheduler.v1 import job_pb2


def policy_jobs(
    model: str,
    tuning: Tuning,
    trainer: ServerOptions | None,
    inference: ServerOptions | None,
    options: JobOptions | None = None,
    *,
    name: str,
    run: str,
    serve: bool,
    supervised: bool,
) -> tuple[job_pb2.Job, job_pb2.Job | None]:
    """The job that a policy lives in; and, without `serve`, the one to be made once it is sampled."""
    full = isinstance(tuning, Full)
    if trainer is not None and trainer.replicas != 1:
        raise unsupported(
            "trainer.replicas", "replicas are inference servers; a trainer is spread over ranks=n processes"
        )
    trains = job_pb2.SlotSpec(
        role=job_pb2.SLOT_ROLE_TRAINER,
        base_model=model,
        tuning=job_pb2.TUNING_KIND_FULL if full else job_pb2.TUNING_KIND_LORA,
        count=1,
        options=_fitting(trainer, tuning).to_wire(),
    )
    serving = _fitting(inference, tuning)
    if full and serving.serving_mode is None:
        # The scheduler sees this by itself where the job trains too, not where it only serves.
        serving = replace(serving, serving_mode="merged")
    serves = job_pb2.SlotSpec(
        role=job_pb2.SLOT_ROLE_INFERENCE,
        base_model=model,
        count=serving.replicas,
        options=serving.to_wire(),
    )
    learning = job_pb2.JOB_KIND_FULL_RL if full else job_pb2.JOB_KIND_LORA_RL
    job = job_pb2.Job(
        display_name=name,
        kind=job_pb2.JOB_KIND_SFT if supervised else learning,
        slots=[trains, serves] if serve else [trains],
        run=run,
    )
    chosen = options or JobOptions()
    chosen.apply(job)
    if serve:
        return job, None
    kind = job_pb2.JOB_KIND_INFERENCE
    later = job_pb2.Job(display_name=name, kind=kind, slots=[serves], run=run)
    chosen.apply(later)
    return job, later


def _fitting(options: ServerOptions | None, tuning: Tuning) -> ServerOptions:
    """Servers that take the tuning, where nothing else was asked for: the adapter's rank, or a server that is
    not shared.
    """
    chosen = options or ServerOptions()
    if isinstance(tuning, Full):
        return replace(chosen, exclusive=True)
    return chosen if chosen.max_lora_rank is not None else replace(chosen, max_lora_rank=max(32, tuning.rank))
