"""What a trainer counts: operations and how long they took, tokens trained, what waits."""

from opentinker_kit.metrics import Labels, Metrics
from opentinker_trainer.application.holdings import Holdings
from opentinkerapi.trainer.v1 import operation_pb2


class TrainerMetrics:
    """Told of each operation that has ended. What is replayed after a crash has ended before."""

    def __init__(self, metrics: Metrics, holdings: Holdings) -> None:
        self._holdings = holdings
        self._took = metrics.timer(
            "opentinker_trainer_operation_seconds",
            "Engine time of operations that ended; `optim_step` are the steps.",
            ("kind", "state"),
        )
        self._tokens = metrics.counter("opentinker_trainer_tokens_trained", "Loss tokens that were computed.")
        self._skipped = metrics.counter(
            "opentinker_trainer_steps_skipped", "Optimizer steps without a finite gradient."
        )
        metrics.read(
            "opentinker_trainer_operations", "Operations that have not ended.", self._operations, ("state",)
        )
        metrics.read("opentinker_trainer_policies", "Policies held.", lambda: {(): len(list(holdings))})

    def ended(self, kind: str, done: operation_pb2.Operation) -> None:
        """See `dispatcher.Watcher`."""
        state = operation_pb2.OperationState.Name(done.state).removeprefix("OPERATION_STATE_").lower()
        self._took(done.engine_time.ToTimedelta().total_seconds(), kind, state)
        self._tokens(done.forward_backward.trained_tokens)
        if done.optim_step.skipped:
            self._skipped()

    def _operations(self) -> dict[Labels, float]:
        running = sum(policy.queue.running is not None for policy in self._holdings)
        open_ones = sum(policy.queue.contiguous - policy.queue.ended_seq for policy in self._holdings)
        return {("running",): running, ("waiting",): open_ones - running}
