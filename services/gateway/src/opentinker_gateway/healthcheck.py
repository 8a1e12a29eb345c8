"""`python -m opentinker_gateway.healthcheck URL`: exits with 0 if the gateway there serves.

For container health checks; needs no key, as health is open to anyone. Whether that gateway speaks TLS, and
what it has to be shown, is read from the environment, as the gateway itself reads it.
"""

import ssl
import sys
import urllib.request

from opentinker_kit.settings import TransportSettings

TIMEOUT_S = 3.0


def is_serving(url: str, tls: ssl.SSLContext | None = None) -> bool:
    """Whether the gateway at `http://host:port` answers, and reaches its scheduler; by https with `tls`."""
    if tls is not None:
        url = f"https://{url.removeprefix('http://').removeprefix('https://')}"
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S, context=tls) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tls_of_this_gateway() -> ssl.SSLContext | None:
    """How the gateway of this environment is called; None where it speaks no TLS."""
    settings = TransportSettings()
    if settings.tls is None:
        return None
    ca = settings.peer_tls.ca_file if settings.peer_tls is not None else None
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(settings.tls.certificate_file, settings.tls.key_file)
    return context


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m opentinker_gateway.healthcheck URL")
    sys.exit(0 if is_serving(sys.argv[1], tls_of_this_gateway()) else 1)
