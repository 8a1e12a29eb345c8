"""Two tenants of one embedded stack: they train at once on one base model, on the same servers, and neither
sees or changes anything of the other's.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import opentinker as ot
from opentinker import errors
from opentinker.connection.accounts import Accounts
from tests.e2e.tenants import small_fit, tenant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ot.Cluster]]:
    """Connections to one stack by members of two projects, and by the admin."""
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as admin:
        found = {"admin": admin, **{name: tenant(admin, name) for name in ("one", "two")}}
        yield found
        for name in ("one", "two"):
            found[name].close()


def test_each_gets_what_it_gets_alone_and_nothing_of_the_other(
    tenants: dict[str, ot.Cluster], tiny_model_dir: Path, tmp_path: Path
) -> None:
    def run(name: str, seed: int, where: str) -> ot.FitResult:
        return small_fit(tenants[name], "guess_number", str(tiny_model_dir), tmp_path / where, seed)

    alone = run("one", 11, "alone")
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(run, "one", 11, "first"), pool.submit(run, "two", 12, "second")]
        first, second = (future.result() for future in beside)
    assert first.rewards == alone.rewards
    assert first.policy.published.sha256 == alone.policy.published.sha256
    assert second.policy.published.sha256 != first.policy.published.sha256

    one, two = tenants["one"], tenants["two"]
    for cluster, results in ((one, [alone, first]), (two, [second])):
        sampled = sum(int(row["tokens/sampled"]) for result in results for row in result.metrics)
        accounts, seconds = Accounts(cluster.control), 0
        # Servers say so with their renewals.
        while (used := cluster.wait(accounts.usage("", 10, by_job=True))) and (
            sum(row.tokens_sampled for row in used) < sampled
        ):
            time.sleep(1.0)
            seconds += 1
            assert seconds < 30, used
        assert len(used) == len(results)
        assert sum(row.tokens_sampled for row in used) == sampled
        assert all(row.tokens_trained > 0 for row in used)
        assert all(row.slot_hours > 0 for row in used)
    owned = {name: {job.name for job in tenants[name].jobs().result()} for name in ("one", "two")}
    assert len(owned["one"]) >= 2
    assert owned["two"]
    assert not owned["one"] & owned["two"]
    assert tenants["admin"].jobs().result() == []
    version = f"{first.policy.name}/versions/{first.version}"
    with pytest.raises(errors.NotFound):
        two.export(version, tmp_path / "stolen").result()
    with pytest.raises(errors.NotFound):
        two.serve(first.policy, "stolen").result()
    with pytest.raises(errors.NotFound):
        two.model(version).chat("hi").result()
    assert first.checkpoint is not None
    with pytest.raises(errors.NotFound):
        second.policy.restore(first.checkpoint).result()
    # A server of both samples each tenant's own weights alone.
    second.policy.sampler._policy = first.policy.name
    with pytest.raises(errors.NotFound):
        second.policy.sample([1, 2], ot.SamplingParams(max_tokens=2)).result()
    assert one.export(version, tmp_path / "own").result().is_dir()
    # Each reads of its jobs what both servers wrote about them, and nothing else of these servers.
    for name, policies in (("one", {alone.policy.name, first.policy.name}), ("two", {second.policy.name})):
        published: set[str] = set()
        for job in owned[name]:
            lines = tenants[name].logs(job).result()
            written = [json.loads(line.text) for line in lines if line.server]
            assert {values["job"] for values in written} == {job}
            assert {values.get("policy", "") for values in written} <= policies | {""}
            assert {line.role for line in lines if line.server} == {1, 2}
            assert {line.text.split()[0].rstrip(":") for line in lines if not line.server} >= {
                "QUEUED",
                "STARTING",
                "RUNNING",
            }
            published |= {v["policy"] for v in written if v.get("kind") == "publish_weights"}
        assert published == policies
    with pytest.raises(errors.NotFound):
        two.logs(next(iter(owned["one"]))).result()
    with pytest.raises(errors.PermissionDenied):
        two.logs(two.servers().result()[0].name).result()
    everything = tenants["admin"].logs(two.servers().result()[0].name).result()
    named = {json.loads(line.text).get("job") for line in everything if line.text.startswith("{")}
    assert named & owned["one"]
    assert named & owned["two"]
