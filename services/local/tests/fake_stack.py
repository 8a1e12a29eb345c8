"""`python -m opentinker_local` with `kit_service` as scheduler and env_host, `http_service` as gateway:
`python fake_stack.py run …`.
"""

import sys

from opentinker_local.__main__ import main

MODULES = {"gateway": "http_service", "scheduler": "kit_service", "env_host": "kit_service"}

if __name__ == "__main__":
    sys.exit(main(modules=MODULES))
