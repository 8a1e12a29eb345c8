"""What `make evidence CASE=...` can measure: one module for each case, and what they share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Progress:
    """Remembers the parts of a case that are done, for this commit, so that it can be stopped and resumed."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder / commit
        """A case may keep files here; they are gone once it is done."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returned (JSON), now or in an earlier run."""
        kept = self.folder / f"{name}.json"
        if kept.exists():
            print(f"evidence: {name}: kept from an earlier run", flush=True)
            return json.loads(kept.read_text())
        print(f"evidence: {name} ...", flush=True)
        found = measure()
        scratch = kept.with_suffix(".tmp")
        scratch.write_text(json.dumps(found))
        scratch.rename(kept)
        return found
