"""Makes the launcher that the settings name."""

import secrets
from collections.abc import Callable, Mapping, Sequence

from opentinker_scheduler.adapters.gpus import this_node
from opentinker_scheduler.adapters.processes import ProcessLauncher, Recipe, StaticLauncher, this_python
from opentinker_scheduler.adapters.ray_cluster import RayCluster
from opentinker_scheduler.adapters.ray_launcher import RayLauncher, RayRecipe
from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.launch_settings import node_settings, server_settings
from opentinker_scheduler.launcher_ports import Launcher, OnExit
from opentinker_scheduler.settings import SchedulerSettings

_SOME = 0.001
"""Of a resource of Ray that only says what a node has."""


def make_launcher(
    settings: SchedulerSettings, address: Callable[[], str], cluster: Callable[[], str], on_exit: OnExit
) -> Launcher:
    """`address` of the scheduler, and the name of its `cluster`, once they are known."""
    if settings.launcher == "static":
        return StaticLauncher()
    directory = settings.state_dir.absolute() / "servers"
    if settings.launcher == "ray":
        there = RayRecipe(
            directory=directory,
            python=settings.python,
            modules=settings.server_modules,
            told=lambda server: node_settings(settings, address(), server),
            bundle_for=lambda server: _bundle(settings, server),
            new_key=lambda: secrets.token_urlsafe(32),
            adds_nodes=settings.ray_autoscaler,
        )
        return RayLauncher(there, RayCluster(settings.ray_address, cluster), on_exit)
    node = this_node(settings.gpus, settings.accelerator)
    here = Recipe(
        directory=directory,
        python=settings.python or this_python(),
        modules=settings.server_modules,
        settings_for=lambda server, folder: server_settings(settings, address(), server, folder),
        pass_fds=_inherited(settings),
        node=node,
        gives_gpus=node is not None and any(settings.engine_gpus.values()),
    )
    return ProcessLauncher(here, on_exit)


def _bundle(settings: SchedulerSettings, server: Server) -> Mapping[str, float]:
    """What each rank of a server takes of a node of Ray."""
    engine, kind = server.options.engine, server.options.accelerator
    gpus = settings.engine_gpus.get(engine, 0)
    return {
        **settings.ray_bundles.get(engine, {"CPU": 1.0}),
        **({"GPU": float(gpus)} if gpus else {}),
        **({f"accelerator_type:{kind}": _SOME} if kind else {}),
    }


def _inherited(settings: SchedulerSettings) -> Sequence[int]:
    lifeline = () if settings.lifeline_fd is None else (settings.lifeline_fd,)
    return (*lifeline, *settings.inherit_fds)
