"""Tables on the terminal."""

from collections.abc import Collection, Iterable, Sequence

import typer


def show(
    titles: Sequence[str], rows: Iterable[Sequence[str]], nothing: str, *, sparse: Collection[str] = ()
) -> None:
    """A table, or what to say where it would be empty. `sparse`: columns that are left out where no row has
    anything in them.
    """
    rows = list(rows)
    kept = [at for at, title in enumerate(titles) if title not in sparse or any(row[at] for row in rows)]
    titles, rows = [titles[at] for at in kept], [[row[at] for at in kept] for row in rows]
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        Console().print(table)
    else:
        typer.echo(nothing)
