"""Entry of the torch engine's process; started by the front, with a socket."""

from opentinker_kit.frames import EngineServer
from opentinker_trainer.engine.handlers import EngineHandlers


def main() -> None:
    EngineServer(EngineHandlers().table()).run()


if __name__ == "__main__":
    main()
