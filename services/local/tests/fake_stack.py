"""`python -m opentinker_local` with `kit_service` as scheduler and env_host: `python fake_stack.py run …`."""

import sys

from opentinker_local.__main__ import main

if __name__ == "__main__":
    sys.exit(main(modules={"scheduler": "kit_service", "env_host": "kit_service"}))
