"""What env_host imports in the environment that has verifiers."""

from opentinker.environments.adapters.verifiers import verifiers_environment

CONFIG = {"taskset": {"id": "sums_taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
Sums = verifiers_environment(CONFIG, test=CONFIG, name="sums", run_timeout_s=60.0)
