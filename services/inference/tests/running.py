"""An engine that has started, and the letters of the tiny model."""

from pathlib import Path

from services.inference.tests.adapters_for_tests import write_adapter
from tokenizers import pre_tokenizers

from opentinker_inference.domain.sampling import EngineInfo
from opentinker_inference.ports import Engine, Weights


class Running:
    """An engine that has started, and what it was started on."""

    def __init__(self, engine: Engine, info: EngineInfo, model_dir: Path, work_dir: Path) -> None:
        self.engine = engine
        self.info = info
        self.model_dir = model_dir
        self.work_dir = work_dir

    async def load(self, key: str, **adapter: object) -> Path:
        path = self.work_dir / key
        if not path.exists():
            write_adapter(path, self.model_dir, **adapter)  # type: ignore[arg-type]
        rank = int(adapter.get("rank", 4))  # type: ignore[call-overload]
        await self.engine.load(Weights(key, path, rank))
        return path

    async def base(self) -> None:
        """Make the base model the one that answers, where only one can be resident."""
        await self.engine.load(Weights("", None))


_ALPHABET = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))
"""The tiny model's vocabulary: token i is character i of the byte-level alphabet."""


def bytes_of(ids: tuple[int, ...]) -> str:
    return "".join(_ALPHABET[i] if i < 256 else "?" for i in ids)


def token_of(char: str) -> int:
    return _ALPHABET.index(char)
