"""`python -m opentinker_gateway.healthcheck URL`: exits with 0 if the gateway there serves.

For container health checks; needs no key, as health is open to anyone.
"""

import sys
import urllib.request

TIMEOUT_S = 3.0


def is_serving(url: str) -> bool:
    """Whether the gateway at `http://host:port` answers, and reaches its scheduler."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m opentinker_gateway.healthcheck URL")
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
