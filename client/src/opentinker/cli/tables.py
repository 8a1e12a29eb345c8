"""Tables on the terminal."""

from collections.abc import Iterable, Sequence

import typer


def show(titles: Sequence[str], rows: Iterable[Sequence[str]], nothing: str) -> None:
    """A table, or what to say where it would be empty."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        Console().print(table)
    else:
        typer.echo(nothing)
