"""Reading a server's metrics page in tests."""

import re
import ssl
import urllib.request


class Page:
    """What a scrape brought."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, name: str, **labels: str) -> float:
        """Of the one line with these labels, whatever their order; AssertionError if there is none."""
        for line in self.text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and (found[1], _labels(found[2] or "")) == (name, labels):
                return float(found[3])
        raise AssertionError(f"{name} {labels} is not in\n{self.text}")


def _labels(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', text))


def scrape(
    port: int,
    *,
    path: str = "/metrics",
    key: str = "",
    tls: ssl.SSLContext | None = None,
    method: str = "GET",
) -> Page:
    """Read a page as Prometheus does. Blocks: from a test on the server's loop call it in a thread."""
    url = f"{'http' if tls is None else 'https'}://localhost:{port}{path}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10, context=tls) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return Page(answer.read().decode())
