"""Where uploaded bytes lie: by their hash, each project's apart, so that knowing a hash opens nothing."""

from opentinker_kit.auth import DEFAULT_PROJECT


def blob_key(sha256: str, project: str = "") -> str:
    """The key of a blob that a project uploaded; no project is the one that a cluster begins with."""
    return f"blobs/{sha256}" if project in ("", DEFAULT_PROJECT) else f"blobs/{project}/{sha256}"
