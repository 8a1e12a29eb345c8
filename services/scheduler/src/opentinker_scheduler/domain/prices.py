"""What use costs, where the operator says so."""

from dataclasses import dataclass

from opentinker_scheduler.domain.shares import Used

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Prices:
    """For an hour, in a currency of the operator's. None: there is no price for it."""

    slot_hour: float | None = None
    gpu_hour: float | None = None

    def of(self, used: Used) -> float | None:
        """None where nothing has a price."""
        if self.slot_hour is None and self.gpu_hour is None:
            return None
        slots = (self.slot_hour or 0.0) * used.slot_seconds
        return (slots + (self.gpu_hour or 0.0) * used.gpu_seconds) / HOUR_S


NO_PRICES = Prices()
