"""The deterministic engine: same seed, same bits, whatever else runs (contracts §6)."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from services.inference.tests.adapters_for_tests import write_adapter
from services.inference.tests.engine_helpers import collect, job

from opentinker_inference.domain.sampling import Completion, SampleJob
from opentinker_inference.engine.transformers_engine import TransformersEngine
from opentinker_inference.ports import EngineConfig, Weights

Outcome = dict[int, tuple[tuple[int, ...], tuple[float, ...]]]


def outcome(completions: dict[int, Completion]) -> Outcome:
    return {i: (c.token_ids, c.logprobs) for i, c in sorted(completions.items())}


async def started(model_dir: Path, threads: int, adapters: dict[str, Path]) -> TransformersEngine:
    engine = TransformersEngine(
        EngineConfig(
            "transformers",
            model_dir,
            context_tokens=2048,
            threads=threads,
            max_rows=24,
            kv_cache_bytes=2 << 20,  # a few rows at a time: who waits for whom may not matter either
        )
    )
    await engine.start()
    for key, path in adapters.items():
        await engine.load(Weights(key, path, 4))
    return engine


def requests() -> list[SampleJob]:
    """Prompts of many lengths, some outgrowing their capacity, under two versions and the base."""
    generator = random.Random(0)
    made = []
    for index, length in enumerate((1, 3, 17, 40, 63, 64, 65, 90, 130, 30, 30, 8)):
        prompt = [generator.randrange(250) for _ in range(length)]
        made.append(
            job(
                f"r{index}",
                prompt=prompt,
                n=(1, 2, 4)[index % 3],
                weights=("", "v1", "v2")[index % 3],
                seed=1000 * index,
                max_tokens=(3, 12, 36)[index % 3],
                temperature=(1.0, 0.7)[index % 2],
                top_p=(1.0, 0.9)[index % 2],
            )
        )
    return made


@pytest.fixture
def adapters(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Path]:
    return {
        key: write_adapter(tmp_path / key, tiny_model_dir, rank=rank, seed=rank)
        for key, rank in (("v1", 4), ("v2", 8))
    }


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_alone_and_among_others_are_bitwise_equal(
    threads: int, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    engine = await started(tiny_model_dir, threads, adapters)
    alone = [outcome(await collect(engine, request)) for request in requests()]

    async def later(delay: float, request: SampleJob) -> Outcome:
        await asyncio.sleep(delay)
        return outcome(await collect(engine, request))

    generator = random.Random(threads)
    together = await asyncio.gather(*(later(generator.random() * 0.2, r) for r in requests()))
    assert list(together) == alone
    await engine.close()


async def test_another_process_gives_the_same_bits(
    tiny_model_dir: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = await started(tiny_model_dir, 1, adapters)
    mine = [outcome(await collect(engine, request)) for request in requests()]
    await engine.close()
    script = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "from services.inference.tests import test_determinism as t\n"
        "async def main():\n"
        "    paths = {k: Path(v) for k, v in json.loads(sys.argv[2]).items()}\n"
        "    engine = await t.started(Path(sys.argv[1]), 1, paths)\n"
        "    got = await asyncio.gather(*(t.collect(engine, r) for r in reversed(t.requests())))\n"
        "    out = [{i: [c.token_ids, [x.hex() for x in c.logprobs]] for i, c in g.items()} for g in got]\n"
        "    Path(sys.argv[3]).write_text(json.dumps(out[::-1]))\n"
        "    await engine.close()\n"
        "asyncio.run(main())\n"
    )
    result = tmp_path / "result.json"
    paths = json.dumps({key: str(path) for key, path in adapters.items()})
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, str(tiny_model_dir), paths, str(result)],
        check=True,
        timeout=100,
        cwd=Path(__file__).parents[3],
    )
    theirs = json.loads(result.read_text())
    assert [
        {str(i): [list(ids), [x.hex() for x in logprobs]] for i, (ids, logprobs) in one.items()}
        for one in mine
    ] == [{i: one[i] for i in sorted(one, key=int)} for one in theirs]


async def test_where_batches_show_every_completion_runs_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "opentinker_inference.engine.transformers_engine.find_quantum", lambda model, max_rows: 0
    )
    engine = await started(tiny_model_dir, 1, {})
    alone = outcome(await collect(engine, job("a", n=3, seed=5)))
    others = [collect(engine, job(f"x{i}", n=2, seed=50 + i)) for i in range(3)]
    got, *_ = await asyncio.gather(collect(engine, job("b", n=3, seed=5)), *others)
    assert outcome(got) == alone
    await engine.close()
