"""Commands around accounts: users, projects, keys, audit, whoami."""

from datetime import UTC, timedelta
from typing import Annotated, Any

import typer

from opentinker.cli.serving import Address, Key, StateDir, running_cluster
from opentinker.cli.tables import show
from opentinker.connection.accounts import ROLE_WORDS, Accounts

Project = Annotated[str, typer.Option(help="Name of the project, or projects/ID (default: your own).")]
User = Annotated[str, typer.Argument(help="Name of the user, or users/ID.")]
RoleOption = Annotated[str, typer.Option(help="viewer, member or admin.")]

users_app = typer.Typer(help="Show who uses the cluster, and change it.", add_completion=False)
projects_app = typer.Typer(help="Show projects and their members, and change them.", add_completion=False)
keys_app = typer.Typer(help="Show API keys, make and revoke them.", add_completion=False)


@users_app.callback(invoke_without_command=True)
def list_users(
    context: typer.Context, state_dir: StateDir = None, address: Address = None, key: Key = None
) -> None:
    """Show the users of the cluster."""
    context.obj = (state_dir, address, key)
    if context.invoked_subcommand is not None:
        return
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(Accounts(cluster.control).users())
    rows = [
        (user.display_name, user.name, "disabled" if user.disabled else "", _time(user, "create_time"))
        for user in found
    ]
    show(("user", "name", "state", "since"), rows, "no users: opentinker users create NAME makes one")


@users_app.command("create")
def create_user(
    context: typer.Context, name: Annotated[str, typer.Argument(help="What to call it.")]
) -> None:
    """Make a user. Then: opentinker projects add, opentinker keys create."""
    with running_cluster(*context.obj) as cluster:
        made = cluster.wait(Accounts(cluster.control).create_user(name))
    typer.echo(f"{made.display_name} is {made.name}")


@users_app.command()
def disable(context: typer.Context, user: User) -> None:
    """Refuse all keys of a user from now on."""
    with running_cluster(*context.obj) as cluster:
        done = cluster.wait(Accounts(cluster.control).disable_user(user, disabled=True))
    typer.echo(f"{done.display_name} is disabled")


@users_app.command()
def enable(context: typer.Context, user: User) -> None:
    """Take the keys of a user again."""
    with running_cluster(*context.obj) as cluster:
        done = cluster.wait(Accounts(cluster.control).disable_user(user, disabled=False))
    typer.echo(f"{done.display_name} is enabled")


@projects_app.callback(invoke_without_command=True)
def list_projects(
    context: typer.Context, state_dir: StateDir = None, address: Address = None, key: Key = None
) -> None:
    """Show the projects that you may see."""
    context.obj = (state_dir, address, key)
    if context.invoked_subcommand is not None:
        return
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(Accounts(cluster.control).projects())
    rows = [(project.display_name, project.name, _time(project, "create_time")) for project in found]
    show(("project", "name", "since"), rows, "no projects")


@projects_app.command("create")
def create_project(
    context: typer.Context, name: Annotated[str, typer.Argument(help="What to call it.")]
) -> None:
    """Make a project."""
    with running_cluster(*context.obj) as cluster:
        made = cluster.wait(Accounts(cluster.control).create_project(name))
    typer.echo(f"{made.display_name} is {made.name}")


@projects_app.command()
def members(context: typer.Context, project: Project = "") -> None:
    """Show who is a member of a project."""
    with running_cluster(*context.obj) as cluster:
        found = cluster.wait(Accounts(cluster.control).members(project))
    rows = [(member.user, ROLE_WORDS[member.role]) for member in found]
    show(("user", "role"), rows, "no members: opentinker projects add USER makes one")


@projects_app.command()
def add(context: typer.Context, user: User, project: Project = "", role: RoleOption = "member") -> None:
    """Make a user a member of a project, or give a member another role."""
    with running_cluster(*context.obj) as cluster:
        made = cluster.wait(Accounts(cluster.control).set_member(project, user, role))
    typer.echo(f"{made.user} is {ROLE_WORDS[made.role]} of {made.project}")


@projects_app.command()
def remove(context: typer.Context, user: User, project: Project = "") -> None:
    """End a membership, and with it the user's keys for the project."""
    with running_cluster(*context.obj) as cluster:
        cluster.wait(Accounts(cluster.control).remove_member(project, user))
    typer.echo(f"{user} is a member no longer")


@keys_app.callback(invoke_without_command=True)
def list_keys(
    context: typer.Context, state_dir: StateDir = None, address: Address = None, key: Key = None
) -> None:
    """Show the keys of your project: as an admin all of them, otherwise your own."""
    context.obj = (state_dir, address, key)
    if context.invoked_subcommand is None:
        _list_keys(context, "")


@keys_app.command("list")
def list_keys_of(context: typer.Context, project: Project = "") -> None:
    """Show the keys of a project."""
    _list_keys(context, project)


@keys_app.command("create")
def create_key(
    context: typer.Context,
    user: Annotated[str, typer.Option(help="Whose key, a name or users/ID (default: yours).")] = "",
    project: Project = "",
    role: Annotated[str, typer.Option(help="The most it may do (default: what its user may).")] = "",
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    days: Annotated[float | None, typer.Option(min=0.0, help="How long it works (default: always).")] = None,
) -> None:
    """Make a key and print it. It is shown this once."""
    ttl = None if days is None else timedelta(days=days)
    with running_cluster(*context.obj) as cluster:
        accounts = Accounts(cluster.control)
        made = cluster.wait(accounts.create_key(project=project, user=user, role=role, name=name, ttl=ttl))
    if not made.key:
        # The first answer was lost on the way, and a key is told once.
        typer.echo(
            f"the key was made and its answer lost: opentinker keys revoke {made.api_key.name}", err=True
        )
        raise typer.Exit(code=1)
    typer.echo(f"{made.api_key.name}: {ROLE_WORDS[made.api_key.role]} of {made.api_key.project}", err=True)
    typer.echo(made.key)


@keys_app.command()
def revoke(context: typer.Context, name: Annotated[str, typer.Argument(help="apiKeys/ID.")]) -> None:
    """End a key."""
    with running_cluster(*context.obj) as cluster:
        done = cluster.wait(Accounts(cluster.control).revoke_key(name))
    typer.echo(f"{done.name} is revoked")


def audit(
    project: Project = "",
    limit: Annotated[int, typer.Option(min=1, help="How many entries.")] = 50,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show what was changed and what was refused, newest first. For admins."""
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(Accounts(cluster.control).audit(project, limit))
    rows = [
        (
            _time(entry, "time"),
            entry.caller or "?",
            entry.project.removeprefix("projects/"),
            entry.method.rpartition("/")[2],
            entry.resource,
            entry.outcome,
        )
        for entry in found
    ]
    show(("when", "who", "project", "call", "what", "outcome"), rows, "nothing was changed yet")


def usage(
    project: Project = "",
    jobs: Annotated[bool, typer.Option("--jobs", help="A row for each job instead of each day.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many rows.")] = 30,
    state_dir: StateDir = None,
    address: Address = None,
    key: Key = None,
) -> None:
    """Show what a project used: slots, GPUs, tokens trained and sampled. Days are UTC."""
    with running_cluster(state_dir, address, key) as cluster:
        found = cluster.wait(Accounts(cluster.control).usage(project, limit, by_job=jobs))
    priced = any(row.HasField("price") for row in found)
    rows = [
        (
            row.job or row.date,
            f"{row.slot_hours:,.2f}",
            f"{row.gpu_hours:,.2f}",
            f"{row.tokens_trained:,}",
            f"{row.tokens_sampled:,}",
            *([f"{row.price:,.2f}"] if priced else []),
        )
        for row in found
    ]
    titles = ("job" if jobs else "day", "slot hours", "GPU hours", "tokens trained", "tokens sampled")
    show((*titles, "price") if priced else titles, rows, "nothing was used yet")


def whoami(state_dir: StateDir = None, address: Address = None, key: Key = None) -> None:
    """Show who you are to the cluster."""
    with running_cluster(state_dir, address, key) as cluster:
        me = cluster.wait(Accounts(cluster.control).caller())
    more = ", and of the cluster" if me.cluster_admin else ""
    typer.echo(f"{me.caller}: {ROLE_WORDS[me.role]} of {me.project}{more}")


def _list_keys(context: typer.Context, project: str) -> None:
    with running_cluster(*context.obj) as cluster:
        found = cluster.wait(Accounts(cluster.control).keys(project))
    rows = [
        (
            each.name,
            each.display_name,
            each.user,
            ROLE_WORDS[each.role],
            _time(each, "expire_time") or "never",
            _time(each, "revoke_time"),
        )
        for each in found
    ]
    show(("key", "for", "user", "role", "expires", "revoked"), rows, "no keys")


def _time(message: Any, field: str) -> str:
    """A time in UTC, empty where it is not set."""
    if not message.HasField(field):
        return ""
    return str(getattr(message, field).ToDatetime(UTC).isoformat(timespec="seconds"))
