"""A small HTTP server on an inherited socket, in place of the gateway: `python -m http_service --settings F`.

It answers with its pid; /crash ends it at once, without an answer.
"""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentinker_kit.lifeline import exit_at_eof


class Handler(BaseHTTPRequestHandler):
    """Says who it is."""

    def do_GET(self) -> None:
        if self.path == "/crash":
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())


def main() -> None:
    settings = json.loads(Path(sys.argv[-1]).read_text())
    exit_at_eof(settings["lifeline_fd"])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=settings["listen_fd"])
    ready = Path(settings["ready_file"])
    ready.write_text(json.dumps({"pid": os.getpid()}))
    server.serve_forever()


if __name__ == "__main__":
    main()
