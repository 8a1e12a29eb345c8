"""Leases in the leader's memory: who holds one, and until when on the leader's monotonic clock.

SQL knows grants, releases and expiries; renewals live here only. A new leader therefore gives every lease one
full TTL (`grant` again). Times are seconds of a monotonic clock and are passed in.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline: float


class LeaseTable:
    """Leases by holder. A holder whose deadline passed has no lease, whether or not it was released yet."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def grant(self, holder: str, ttl_s: float, now: float) -> None:
        """Give a lease of `ttl_s` from now on; replaces one that the holder has."""
        if ttl_s <= 0:
            raise ValueError(f"a lease needs a positive TTL, not {ttl_s}")
        self._leases[holder] = _Lease(ttl_s, now + ttl_s)

    def renew(self, holder: str, now: float) -> bool:
        """Extend a live lease to one TTL from now. False if there is none or it is over."""
        lease = self._leases.get(holder)
        if lease is None or now >= lease.deadline:
            return False
        lease.deadline = max(lease.deadline, now + lease.ttl_s)
        return True

    def release(self, holder: str) -> None:
        """End a lease; releasing again changes nothing."""
        self._leases.pop(holder, None)

    def holds(self, holder: str, now: float) -> bool:
        lease = self._leases.get(holder)
        return lease is not None and now < lease.deadline

    def remaining(self, holder: str, now: float) -> float:
        """Seconds until a lease ends; 0 without one."""
        lease = self._leases.get(holder)
        return 0.0 if lease is None else max(0.0, lease.deadline - now)

    def holders(self) -> frozenset[str]:
        """Who has a lease that was not released yet, over or not."""
        return frozenset(self._leases)

    def over(self, now: float) -> list[str]:
        """Holders whose lease is over, the longest overdue first. They stay until they are released."""
        overdue = [
            (lease.deadline, holder) for holder, lease in self._leases.items() if now >= lease.deadline
        ]
        return [holder for _, holder in sorted(overdue)]

    def extend_all(self, seconds: float) -> None:
        """Move every deadline: the leader itself stood still and could hear no renewal."""
        for lease in self._leases.values():
            lease.deadline += seconds
