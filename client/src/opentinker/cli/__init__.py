"""The command line: `opentinker up | down | status | demo | sft`."""

import sys


def main() -> None:
    """Run a command. An error that a user can act on is one paragraph and exit code 1, never a traceback."""
    from opentinker.cli.app import app
    from opentinker.errors import OpenTinkerError

    try:
        app()
    except OpenTinkerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
