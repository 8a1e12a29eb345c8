"""User ids for jails, each for one live jail of this machine.

The kernel does not limit the processes of uid 0, and two jails under one uid would share a count. A slot is
taken by binding an abstract socket of its name, which the kernel frees when its holder dies, however it dies.
"""

import os
import socket
from itertools import count

FIRST_UID = 701_000_000
SLOTS = 4096

_turn = count(os.getpid() * 7)


class Slot:
    """A uid (and gid) that no other live jail has and no file belongs to."""

    def __init__(self) -> None:
        """Take one. RuntimeError if all are taken."""
        for _ in range(SLOTS):
            uid = FIRST_UID + next(_turn) % SLOTS
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                holder.bind(f"\0opentinker.jail.{uid}")
            except OSError:
                holder.close()
                continue
            self.uid = uid
            self._holder = holder
            return
        raise RuntimeError(f"all {SLOTS} user ids for jails are taken")

    def free(self) -> None:
        """Give it back."""
        self._holder.close()
