"""The game of `env_host` on OpenEnv's server, and OpenEnv's client that plays it.

`python -m benchmarks.env_openenv` serves in-process, as its application does by itself, until its input ends.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.env_game import Game

ROOT = Path(__file__).resolve().parent.parent
MAX_SESSIONS = 1024
KINDS = ("plain", "on_the_loop", "mcp")


def ensure_openenv() -> None:
    """Install the `bench-env` dependencies of this repository if OpenEnv is not there."""
    if importlib.util.find_spec("openenv") is None:
        constraints = ROOT / "deploy" / "constraints" / "dev.txt"
        command = [sys.executable, "-m", "pip", "install", "--constraint", str(constraints)]
        subprocess.run(
            [*command, "--group", f"{ROOT / 'pyproject.toml'}:bench-env"], check=True, stdout=sys.stderr
        )


async def play(port: int, sessions: int, steps: int) -> float:
    """Seconds that so many sessions take for their steps, all at once."""
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(base_url=f"ws://127.0.0.1:{port}") for _ in range(sessions)]
    for start in range(0, sessions, 64):
        await asyncio.gather(*(client.connect() for client in clients[start : start + 64]))
    try:
        for start in range(0, sessions, 64):
            group = enumerate(clients[start : start + 64], start)
            await asyncio.gather(*(client.reset(seed=seed) for seed, client in group))

        async def one(client: Any) -> None:
            for step in range(steps):
                result = await client.step({"text": str(step)})
                assert not result.done

        began = time.perf_counter()
        await asyncio.gather(*(one(client) for client in clients))
        return time.perf_counter() - began
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def application(kind: str, pause: float) -> Any:
    """Their FastAPI application for the game.

    `plain`: `step` is a plain method, which they run in a thread of its session. `on_the_loop`: it is
    `async`. `mcp`: on their class for environments with tools, which runs it in the loop's default executor.
    """
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class GameAction(Action):  # type: ignore[misc]
        text: str = ""

    class GameObservation(Observation):  # type: ignore[misc]
        text: str = ""

    class PlainGame(Environment[GameAction, GameObservation, State]):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._game = Game(pause)

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
        ) -> GameObservation:
            return GameObservation(text=self._game.reset(seed or 0))

        def step(self, action: GameAction, timeout_s: float | None = None, **kwargs: Any) -> GameObservation:
            text, reward = self._game.step(action.text)
            return GameObservation(text=text, reward=reward)

        @property
        def state(self) -> State:
            return State()

    class LoopGame(PlainGame):
        async def step_async(
            self, action: GameAction, timeout_s: float | None = None, **kwargs: Any
        ) -> GameObservation:
            return self.step(action)

    def tool_game() -> Any:
        from fastmcp import FastMCP
        from openenv.core.env_server.mcp_environment import MCPEnvironment

        class ToolGame(MCPEnvironment):  # type: ignore[misc]
            SUPPORTS_CONCURRENT_SESSIONS = True

            def __init__(self) -> None:
                super().__init__(FastMCP("game"))
                self._game = Game(pause)

            def reset(
                self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
            ) -> GameObservation:
                return GameObservation(text=self._game.reset(seed or 0))

            def _step_impl(
                self, action: GameAction, timeout_s: float | None = None, **kwargs: Any
            ) -> GameObservation:
                text, reward = self._game.step(action.text)
                return GameObservation(text=text, reward=reward)

            @property
            def state(self) -> State:
                return State()

        return ToolGame

    made: Any = {"plain": lambda: PlainGame, "on_the_loop": lambda: LoopGame, "mcp": tool_game}[kind]()
    return create_fastapi_app(made, GameAction, GameObservation, max_concurrent_envs=MAX_SESSIONS)


def main() -> None:
    """Serve until the input ends."""
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(application(arguments.kind, arguments.pause), log_level="critical")
    server = uvicorn.Server(config)

    def follow() -> None:
        while not server.started:
            time.sleep(0.05)
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        sys.stdin.read()
        server.should_exit = True
        time.sleep(5.0)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    server.run(sockets=[listening])


if __name__ == "__main__":
    main()
