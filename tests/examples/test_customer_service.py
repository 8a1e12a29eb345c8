"""The rules of examples/customer_service.py: the database has the last word, and a refusal must be earned."""

import random
from functools import partial
from typing import Any

import pytest

import opentinker as ot
from examples import customer_service
from examples.customer_service import WISHES, Clerk, CustomerService, Pushover, brusque, call, held_out
from tests.examples.playing import heard, play, rewards


def shares(env: partial[CustomerService]) -> dict[bool, int]:
    """How many of the first customers may have what they want, and how many may not."""
    found = {True: 0, False: 0}
    for seed in range(200):
        environment = env()
        environment.reset(seed=seed, task={})
        found[not environment.forbidden] += 1
    return found


@pytest.mark.parametrize("identify", [True, False])
@pytest.mark.parametrize("wish", WISHES)
def test_the_clerk_serves_everybody(wish: str, identify: bool) -> None:
    env = partial(CustomerService, [wish], identify=identify)
    assert min(shares(env).values()) > 20
    assert set(rewards(env, partial(Clerk, identify))) == {1.0}


def test_who_grants_everything_fails_those_who_are_not_entitled() -> None:
    env = partial(CustomerService)
    for seed in range(100):
        environment = env()
        reward, _ = play(environment, Pushover(), seed=seed)
        assert reward == float(not environment.forbidden)


def test_words_without_deeds_earn_nothing() -> None:
    assert set(rewards(CustomerService, lambda: brusque)) == {0.0}
    for said in (
        "",
        "It is done.",
        "I cannot.",
        "refunded",
        "I cannot: 30 days, shipped, packing, e-mail.",
        "?",
    ):
        assert set(rewards(CustomerService, lambda said=said: lambda seen, dice: said, 60)) == {0.0}


def random_calls(seen: ot.Observation, dice: random.Random) -> str:
    """Calls any tool with a number it heard, or says anything."""
    number = dice.randint(100, 999)
    return dice.choice(
        (
            call("order", number=number),
            call("refund", number=number),
            call("cancel", number=number),
            call("readdress", number=number, address="1 Oak Street"),
            "What is the number of the order?",
            "It is done.",
            "I cannot: it is shipped.",
        )
    )


def test_random_calls_earn_next_to_nothing() -> None:
    assert sum(rewards(CustomerService, lambda: random_calls)) < 4


class Hasty(Clerk):
    """Knows all there is to know, but not by looking and asking."""

    def __init__(self, environment: CustomerService, looks: bool) -> None:
        super().__init__()
        self.environment = environment
        self.looks = looks
        self.did = False

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        who = self.environment.customer
        if self.looks and who.order not in self.environment.looked:
            return call("order", number=who.order)
        if self.did:
            return "It is done."
        self.did = True
        if who.wish == "address":
            return call("readdress", number=who.order, address=who.address)
        return call(who.wish, number=who.order)


@pytest.mark.parametrize("looks", [True, False])
def test_a_right_change_made_before_looking_and_asking_does_not_count(looks: bool) -> None:
    granted = 0
    for seed in range(100):
        environment = CustomerService()
        reward, _ = play(environment, Hasty(environment, looks), seed=seed)
        granted += not environment.forbidden and environment.orders == environment.wanted
        assert reward == 0.0
    assert granted > 20
    environment = CustomerService(identify=False)
    if looks:
        rewarded = sum(
            play(each, Hasty(each, True), seed=seed)[0]
            for seed in range(20)
            for each in [CustomerService(identify=False)]
        )
        assert rewarded > 5


def first(want: str, **options: Any) -> CustomerService:
    """An episode whose customer is refused for that reason ("": for none)."""
    for seed in range(500):
        environment = CustomerService(**options)
        environment.reset(seed=seed, task={})
        if environment.forbidden == want:
            return environment
    raise AssertionError(want)


def say(environment: CustomerService, said: str) -> Any:
    return environment.step(heard(said, environment.tools))


@pytest.mark.parametrize("want", ["e-mail", "30", "shipped"])
def test_a_refusal_needs_the_look_and_the_right_reason(want: str) -> None:
    for looks, why, reward in ((True, want, 1.0), (False, want, 0.0), (True, "the moon", 0.0)):
        environment = first(want)
        if looks:
            say(environment, call("order", number=environment.customer.order))
        end = say(environment, f"I cannot: {why}.")
        assert end.terminated
        assert end.reward.value == reward
    environment = first("")
    say(environment, call("order", number=environment.customer.order))
    assert say(environment, f"I cannot: {want}.").reward.value == 0.0


def test_customers_say_what_they_are_asked_for_and_leave_when_nothing_comes_of_it() -> None:
    environment = first("", wishes=["address"], shy=1.0)
    who = environment.customer
    assert str(who.order) not in environment.talk.begin()
    assert say(environment, "Which order is it?").observation.text == f"It is order {who.order}."
    assert say(environment, "Your e-mail?").observation.text == f"It is {who.email}."
    assert say(environment, "To which address?").observation.text == f"To {who.address}."
    assert say(environment, "I see.").observation.text.startswith("I do not understand.")
    assert not say(environment, "I see.").done
    end = say(environment, "I see.")
    assert end.terminated
    assert end.reward.value == 0.0


def test_wrong_calls_are_told_and_turns_end() -> None:
    environment = CustomerService(turns=3)
    environment.reset(seed=0, task={})
    told = say(environment, call("order", number=1)).observation.text
    assert told == "error: there is no order 1"
    assert "must be of type integer" in say(environment, call("refund", number="x")).observation.text
    end = say(environment, call("order", number=1))
    assert end.truncated
    assert end.reward.value == 0.0
    assert environment.metrics() == {"turns": 3.0, "tool_errors": 2.0}


def test_customers_are_a_function_of_the_seed_and_those_held_out_are_never_drawn() -> None:
    environment = CustomerService()
    assert environment.draw(3) == environment.draw(3) != environment.draw(4)
    tasks = environment.tasks("test")
    assert tasks is not None
    assert len(tasks) == customer_service.HELD_OUT
    assert all(held_out(*environment.build(f"test {task['customer']}")) for task in tasks)
    assert not any(held_out(*environment.draw(seed)) for seed in range(200))
    # Doing nothing is never the right thing where the wish is granted.
    for seed in range(300):
        environment = CustomerService()
        environment.reset(seed=seed, task={})
        assert (environment.orders == environment.wanted) == bool(environment.forbidden)


@pytest.mark.parametrize("options", [{"wishes": []}, {"wishes": ["gift"]}, {"shy": 2.0}, {"turns": 0}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CustomerService(**options)  # type: ignore[arg-type]
