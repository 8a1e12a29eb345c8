"""What a job may ask for: everything impossible is refused at once, by name."""

from dataclasses import replace

import pytest

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.admission import Model, Offer, check_capacity, check_job, complete
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import JobKind, OnClientLoss, Role, ServerOptions, SlotSpec, Tuning
from opentinker_scheduler.domain.nodes import Node
from opentinkerapi.runtime.reasons import Reason

TRAINER, INFERENCE = SlotSpec(Role.TRAINER, "m"), SlotSpec(Role.INFERENCE, "m")
FULL = replace(TRAINER, tuning=Tuning.FULL)
MODEL = Model("m", 2048)
OFFER = Offer(
    limits=Limits(max_servers=4, max_engine_servers={"vllm": 1}),
    engines={Role.TRAINER: ("torch", "noop"), Role.INFERENCE: ("transformers", "noop")},
    default_engines={Role.TRAINER: "torch", Role.INFERENCE: "transformers"},
    install_hints={"vllm": "run: pip install vllm"},
    default_dtypes={"torch": "float32"},
    default_serving_modes={"transformers": "adapter"},
    max_context_tokens=8192,
)


def refusal(*slots: SlotSpec, kind: JobKind = JobKind.LORA_RL, **more: object) -> ServiceError:
    loss = more.get("loss", OnClientLoss.PAUSE)
    with pytest.raises(ServiceError) as refused:
        check_job(kind, slots, loss, more.get("ttl", 600.0), more.get("labels", {}))  # type: ignore[arg-type]
    return refused.value


def test_what_is_fine_passes() -> None:
    check_job(JobKind.LORA_RL, [TRAINER, INFERENCE], OnClientLoss.CANCEL, 10.0, {"a": "b"})
    check_job(JobKind.INFERENCE, [INFERENCE], OnClientLoss.PAUSE, 600.0, {})
    check_job(JobKind.FULL_RL, [FULL, INFERENCE], OnClientLoss.PAUSE, 600.0, {})
    for trainer in (TRAINER, FULL):
        check_job(JobKind.SFT, [trainer], OnClientLoss.PAUSE, 600.0, {})


def test_all_weights_take_servers_of_their_own() -> None:
    trainer = complete(FULL, MODEL, OFFER, "f", full=True)
    sampler = complete(INFERENCE, MODEL, OFFER, "f", full=True)
    assert (trainer.tuning, trainer.exclusive) == (Tuning.FULL, True)
    assert (sampler.options.serving_mode, sampler.exclusive) == ("merged", True)
    static = replace(OFFER, limits=Limits(can_launch=False))
    assert complete(INFERENCE, MODEL, static, "f", full=True).options == ServerOptions(serving_mode="merged")
    adapter = replace(INFERENCE, options=ServerOptions(serving_mode="adapter"))
    error = refusal(FULL, adapter, kind=JobKind.FULL_RL)
    assert (error.reason, error.field) == (
        Reason.UNSUPPORTED_COMBINATION,
        "job.slots[1].options.serving_mode",
    )


def test_only_inference_goes_on_without_a_client() -> None:
    check_job(JobKind.INFERENCE, [INFERENCE], OnClientLoss.DETACH, 60.0, {})
    error = refusal(TRAINER, loss=OnClientLoss.DETACH)
    assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "job.on_client_loss")


@pytest.mark.parametrize("ttl", [9.9, 24 * 3600 + 1.0])
def test_a_lease_has_bounds(ttl: float) -> None:
    assert refusal(TRAINER, ttl=ttl).field == "job.lease_ttl"


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        (ServerOptions(engine="vlm"), "engine", "torch, noop"),
        (ServerOptions(dtype="float16"), "dtype", "float32, bfloat16"),
        (ServerOptions(serving_mode="merge"), "serving_mode", "adapter, merged"),
        (ServerOptions(serving_mode="merged"), "serving_mode", "inference"),
        (ServerOptions(max_lora_rank=-1), "max_lora_rank", "positive"),
        (ServerOptions(context_tokens=-1), "context_tokens", "positive"),
        (ServerOptions(ranks=-1), "ranks", "positive"),
    ],
)
def test_options_are_checked_one_by_one(options: ServerOptions, field: str, says: str) -> None:
    error = refusal(INFERENCE, replace(TRAINER, options=options))
    assert error.reason is Reason.INVALID_FIELD
    assert error.field == f"job.slots[1].options.{field}"
    assert says in error.message


def test_kinds_and_slots_must_fit() -> None:
    assert refusal(INFERENCE).reason is Reason.UNSUPPORTED_COMBINATION
    for slots, kind in (
        ([TRAINER], JobKind.INFERENCE),
        ([INFERENCE], JobKind.SFT),
        ([FULL, INFERENCE], JobKind.LORA_RL),
        ([TRAINER, INFERENCE], JobKind.FULL_RL),
    ):
        assert refusal(*slots, kind=kind).reason is Reason.UNSUPPORTED_COMBINATION, kind
    ranked = replace(INFERENCE, options=ServerOptions(ranks=2))
    assert refusal(TRAINER, ranked).field == "job.slots[1].options.ranks"
    for count in (0, 2**31 - 1):
        assert refusal(replace(TRAINER, count=count)).field == "job.slots[0].count"
    assert refusal(TRAINER, replace(INFERENCE, tuning=Tuning.LORA)).field == "job.slots[1].tuning"
    assert refusal(TRAINER, labels={str(i): "" for i in range(65)}).field == "job.labels"


def test_defaults_are_filled_in_so_that_equal_wishes_share_servers() -> None:
    plain = complete(TRAINER, MODEL, OFFER, "job.slots[0]")
    same = replace(TRAINER, options=ServerOptions(engine="torch", dtype="float32"), tuning=Tuning.LORA)
    assert plain == complete(same, MODEL, OFFER, "job.slots[0]")
    assert plain.options == ServerOptions("torch", "float32", "", 32, 2048, ranks=1)
    assert complete(INFERENCE, MODEL, OFFER, "f").options.serving_mode == "adapter"


def test_an_engine_that_is_not_installed_says_how_to_get_it() -> None:
    spec = replace(INFERENCE, options=ServerOptions(engine="vllm"))
    with pytest.raises(ServiceError) as refused:
        complete(spec, MODEL, OFFER, "job.slots[1]")
    assert refused.value.reason is Reason.MISSING_DEPENDENCY
    assert "pip install vllm" in refused.value.message
    assert "transformers" in refused.value.message


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (ServerOptions(max_lora_rank=512), "max_lora_rank=256"),
        (ServerOptions(context_tokens=4096), "2048 tokens of m"),
        (ServerOptions(context_tokens=10_000), "max_context_tokens=8192"),
    ],
)
def test_what_is_too_large_names_the_limit(options: ServerOptions, limit: str) -> None:
    with pytest.raises(ServiceError) as refused:
        complete(replace(TRAINER, options=options), MODEL, OFFER, "job.slots[0]")
    assert refused.value.reason is Reason.CANNOT_BE_SATISFIED
    assert limit in refused.value.message


def test_a_model_that_sees_images_gets_an_engine_that_serves_it() -> None:
    """vLLM cannot load such a model here: said when the job is created, not when its server starts."""
    sees = Model("m", 2048, images=True)
    both = {**OFFER.engines, Role.INFERENCE: ("vllm", "transformers")}
    offer = replace(OFFER, engines=both, default_engines={**OFFER.default_engines, Role.INFERENCE: "vllm"})
    assert complete(INFERENCE, MODEL, offer, "f").options.engine == "vllm"
    assert complete(INFERENCE, sees, offer, "f").options.engine == "transformers"
    assert complete(TRAINER, sees, offer, "f").options.engine == "torch"
    asked = replace(INFERENCE, options=ServerOptions(engine="vllm"))
    with pytest.raises(ServiceError, match="use engine=transformers") as refused:
        complete(asked, sees, offer, "job.slots[1]")
    assert refused.value.reason is Reason.UNSUPPORTED_COMBINATION
    assert refused.value.field == "job.slots[1].options.engine"


def test_what_no_empty_cluster_could_hold_is_refused() -> None:
    many = complete(replace(TRAINER, count=33), MODEL, OFFER, "f")
    with pytest.raises(ServiceError, match="max_servers is 4") as refused:
        check_capacity([many], OFFER.limits)
    assert refused.value.reason is Reason.CANNOT_BE_SATISFIED
    check_capacity([replace(many, count=32)], OFFER.limits)
    merged = SlotSpec(Role.INFERENCE, "m", count=2, options=ServerOptions("vllm", "", "merged"))
    with pytest.raises(ServiceError, match=r"max_engine_servers\[vllm\] is 1"):
        check_capacity([merged], OFFER.limits)
    # A server has room for eight adapters' slots, but replicas share none.
    replicas = complete(replace(INFERENCE, count=5), MODEL, OFFER, "f")
    with pytest.raises(ServiceError, match="needs 5 servers; the limit max_servers is 4"):
        check_capacity([replicas], OFFER.limits)
    check_capacity([replace(replicas, count=4)], OFFER.limits)


def test_without_a_launcher_nothing_is_filled_in() -> None:
    offer = replace(OFFER, limits=Limits(can_launch=False))
    assert complete(INFERENCE, Model("m", 0), offer, "f").options == ServerOptions()
    check_capacity([replace(TRAINER, count=1000)], offer.limits)


def test_what_the_nodes_can_never_hold_is_refused() -> None:
    nodes = (Node("a", 4, "H100"), Node("b", 2, "A100"))
    limits = Limits(max_servers=64, engine_gpus={"torch": 1, "vllm": 2}, trainer_slots=1, inference_slots=1)
    offer = replace(OFFER, limits=limits).on(nodes)

    def check(*specs: SlotSpec) -> None:
        check_capacity([complete(spec, MODEL, offer, "f") for spec in specs], offer.limits)

    def ranks(number: int, accelerator: str = "") -> SlotSpec:
        return replace(TRAINER, options=ServerOptions(ranks=number, accelerator=accelerator))

    check(ranks(4, "H100"), ranks(2, "A100"))
    # The large one fits only where the small one is not in its way.
    check(ranks(1), ranks(4))
    with pytest.raises(
        ServiceError, match="trainer server with 1 GPU of type A100 for each of 3 ranks"
    ) as refused:
        check(ranks(3, "A100"))
    assert (refused.value.reason, refused.value.field) == (Reason.CANNOT_BE_SATISFIED, "job.slots")
    assert "a has 4, b has 2 (setting engine_gpus[torch]=1)" in refused.value.message
    with pytest.raises(ServiceError, match="this job needs 7 GPUs at once"):
        check(ranks(4), replace(TRAINER, count=3))
    # Where nobody knows the nodes nothing is refused.
    offer = offer.on(())
    check(ranks(100))


def test_a_type_that_no_node_has_is_refused() -> None:
    asked = replace(TRAINER, options=ServerOptions(accelerator="B200"))
    for nodes, words in (
        ((Node("a", 1, "H100"), Node("b", 1, "A100"), Node("c", 1)), "there are A100, H100"),
        ((), "types of this cluster's nodes are not known"),
    ):
        with pytest.raises(ServiceError, match=words) as refused:
            complete(asked, MODEL, OFFER.on(nodes), "job.slots[0]")
        assert refused.value.reason is Reason.CANNOT_BE_SATISFIED
        assert refused.value.field == "job.slots[0].options.accelerator"
    # Where there is one type only, it need not be named; where there are more, who names none gets any.
    one = (Node("a", 1, "H100"), Node("b", 1, "H100"))
    assert complete(TRAINER, MODEL, OFFER.on(one), "f").options.accelerator == "H100"
    assert complete(TRAINER, MODEL, OFFER.on((*one, Node("c", 1))), "f").options.accelerator == ""


def test_a_server_that_registered_itself_says_its_type() -> None:
    offered = ServerOptions(engine="torch", accelerator="H100")
    assert offered.accepts(ServerOptions(accelerator="H100"))
    assert offered.accepts(ServerOptions())
    assert not offered.accepts(ServerOptions(accelerator="A100"))
    assert not ServerOptions(engine="torch").accepts(ServerOptions(accelerator="A100"))
