"""How many episodes are played at once."""

import asyncio

MAX_EPISODES = 256
"""Unless told otherwise: enough to keep several engines busy, few enough for one event loop."""


class Seats:
    """So many episodes at once. A group takes its seats together, in the order of asking; its episodes leave
    one by one, so that a slow one holds only its own. A group larger than the room plays alone.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self.taken = 0

    async def take(self, count: int) -> None:
        """Wait for seats."""
        async with self._turn:
            while self.taken and self.taken + count > self._total:
                self._left.clear()
                await self._left.wait()
            self.taken += count

    def leave(self) -> None:
        """Give one seat back."""
        self.taken -= 1
        self._left.set()
