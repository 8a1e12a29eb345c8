"""The command that makes certificates for development."""

from pathlib import Path
from typing import Annotated

import typer


def certs(
    directory: Annotated[Path, typer.Argument(help="Where to write them; nothing there is overwritten.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that servers are called by, beside localhost; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are good for.")] = 365,
) -> None:
    """Make a certificate authority of your own, a server's certificate and a client's."""
    from opentinkerapi.runtime.certificates import make_certificates

    for path in make_certificates(directory, host or (), days):
        typer.echo(f"  {path}")
    folder = directory.absolute()
    typer.echo("Servers (PEER_TLS is for their own calls; without CLIENT_CA_FILE callers show nothing):")
    typer.echo(f"  OPENTINKER_TLS__CERTIFICATE_FILE={folder / 'server.pem'}")
    typer.echo(f"  OPENTINKER_TLS__KEY_FILE={folder / 'server.key'}")
    typer.echo(f"  OPENTINKER_TLS__CLIENT_CA_FILE={folder / 'ca.pem'}")
    typer.echo(f"  OPENTINKER_PEER_TLS__CA_FILE={folder / 'ca.pem'}")
    typer.echo("Clients:")
    typer.echo(f"  OPENTINKER_TLS_CA={folder / 'ca.pem'}")
    typer.echo(f"  OPENTINKER_TLS_CERT={folder / 'client.pem'}")
    typer.echo(f"  OPENTINKER_TLS_KEY={folder / 'client.key'}")
