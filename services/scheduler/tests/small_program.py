"""A program for launchers: starts a child that sleeps, prints its pid, and sleeps; or ends with a code."""

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    settings = json.loads(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
    if "exit" in settings:
        sys.stderr.write("something broke\n")
        sys.exit(settings["exit"])
    child = subprocess.Popen(["sleep", "600"])
    sys.stderr.write(f"{child.pid}\n")
    time.sleep(600)


if __name__ == "__main__":
    main()
