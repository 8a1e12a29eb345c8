"""Environments that ship with the client; env_host serves them too."""

from opentinker.environments.builtin.arithmetic import Arithmetic
from opentinker.environments.builtin.guess_number import GuessNumber

__all__ = ["Arithmetic", "GuessNumber"]
