"""Entry of the torch engine's processes: the front starts rank 0, with a socket, and rank 0 the others."""

import os

from opentinker_kit.frames import EngineServer
from opentinker_trainer.engine.group import Leader, run_worker
from opentinker_trainer.engine.handlers import EngineHandlers
from opentinker_trainer.rank_link import FD_VARIABLE


def main() -> None:
    fd = os.environ.get(FD_VARIABLE)
    if fd is not None:
        run_worker(int(fd))
        return
    leader = Leader(EngineHandlers())
    server = EngineServer(leader.table())
    leader.abort = server.abort
    server.run()


if __name__ == "__main__":
    main()
