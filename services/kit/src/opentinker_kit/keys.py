"""`python -m opentinker_kit.keys FOLDER`: makes what a deployment must keep secret, once.

Each secret is 256 bits in a file that only its owner may read. Those that are there stay as they are, so this
runs at every start. `nats.conf` is made with them, since nats-server takes its token from its configuration.
"""

import sys
from pathlib import Path

from opentinker_kit.files import make_key_file, write_atomic
from opentinker_kit.settings import read_secret

NATS_CONF = """\
port: 4222
http: 8222
jetstream {{ store_dir: /data }}
authorization {{ token: "{token}" }}
"""


def make_keys(folder: Path) -> None:
    """bootstrap.key (users), service.key (servers), job_tokens.key, s3.key, nats.key, nats.conf and
    postgres.key in `folder`.
    """
    for name in ("bootstrap", "service", "job_tokens", "s3", "nats", "postgres"):
        make_key_file(folder / f"{name}.key")
    write_atomic(folder / "nats.conf", NATS_CONF.format(token=read_secret(folder / "nats.key")), mode=0o600)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m opentinker_kit.keys FOLDER")
    make_keys(Path(sys.argv[1]))
