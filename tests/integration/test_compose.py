"""The services of deploy/compose.yaml work together: servers that register themselves, keys, S3 as the only
path for weights, hosted environments.
"""

from pathlib import Path

import openai
import pytest

import opentinker as ot
from tests.integration.composed import composed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_policy_is_trained_and_served(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = str(tiny_model_dir)
    with composed(tmp_path, tiny_model_dir.parent, OPENTINKER_BASE_MODEL=model) as deployment:
        with pytest.raises(ot.errors.Unauthenticated), ot.connect(deployment.address, key="not the key"):
            pass
        key = (deployment.keys / "bootstrap.key").read_text().strip()
        with ot.connect(deployment.address, key=key) as cluster:
            result = ot.fit(
                env="guess_number",
                env_options={"low": 0, "high": 4},
                model=model,
                tuning=ot.LoRA(rank=4),
                algorithm=ot.GRPO(group_size=4),
                groups_per_step=2,
                steps=2,
                sampling=ot.SamplingParams(max_tokens=8),
                seed=11,
                run_dir=tmp_path / "run",
                progress=False,
                cluster=cluster,
            )
            assert result.version >= 1
            played = ot.run(
                result.policy, "guess_number", episodes=2, sampling=ot.SamplingParams(max_tokens=8)
            )
            assert played.episodes == 2
            (completion,) = result.policy.sample([1, 2, 3], ot.SamplingParams(max_tokens=4), seed=5).result()
            assert completion.spans
            assert all(version == result.version for _, _, version in completion.spans)
            gateway = f"http://127.0.0.1:{deployment.ports['gateway']}/v1"
            with openai.OpenAI(base_url=gateway, api_key=key) as client:
                served = client.completions.create(model=result.policy.name, prompt="2 + 2 =", max_tokens=4)
            assert served.usage is not None
            assert 1 <= served.usage.completion_tokens <= 4
            assert served.system_fingerprint == f"{result.policy.name}/versions/{result.version}"
