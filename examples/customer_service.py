"""Train an agent that serves customers: it talks, calls tools and keeps to a policy. Customers are scripts.

    python examples/customer_service.py

Customers want a refund, a cancellation or another address. Some are entitled to it, some are not, and some
are not who they say they are. What counts is the shop's database at the end, compared as a whole, and what
the customer was told. Conversations of the split "test" are never drawn in training.
"""

import argparse
import copy
import json
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 60
DAYS = 30
"""A refund is possible so long after delivery."""
NAMES = ("ann", "bob", "cora", "dan", "eva", "finn", "gus", "hana")
ITEMS = ("lamp", "kettle", "chair", "radio", "clock", "tent", "mixer", "vase")
STREETS = ("Oak Street", "Mill Lane", "High Street", "Park Road", "Lake View", "Hill Road")
WISHES = ("refund", "cancel", "address")
PATIENCE = 3
"""So many answers of no use, and the customer leaves."""

POLICY = (
    "You serve the customers of a shop. Look an order up before anything else. A refund is for orders "
    f"delivered at most {DAYS} days ago. Only an order that is being packed can be cancelled or readdressed. "
    'If the policy forbids a wish, change nothing and say "I cannot", with the reason. When it is done, '
    "say so."
)
IDENTIFY = " Before you change an order, ask for the customer's e-mail; it must be the one of the order."

_DONE = re.compile(r"\b(done|refunded|cancell?ed|changed|updated)\b", re.IGNORECASE)
_REFUSES = re.compile(r"\b(cannot|can't|can not|not possible|unable)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Order:
    """One row of the shop's database."""

    item: str
    email: str
    status: str
    """packing, shipped, delivered, refunded or cancelled."""
    days: int
    """Since delivery; 0 before."""
    address: str


Orders = dict[int, Order]


@dataclass(frozen=True)
class Customer:
    """Who writes, and what they want. All of it is hidden from the agent until they say it."""

    wish: str
    order: int
    email: str
    address: str
    shy: bool
    """Does not say the number of the order before being asked."""


def reason(customer: Customer, order: Order, identify: bool) -> str:
    """A word for why the policy forbids the wish; "" if it does not."""
    if identify and customer.email != order.email:
        return "e-mail"
    if customer.wish == "refund":
        if order.status != "delivered":
            return order.status
        return str(DAYS) if order.days > DAYS else ""
    return "" if order.status == "packing" else order.status


def granted(customer: Customer, order: Order) -> Order:
    """The order as it should be afterwards."""
    if customer.wish == "address":
        return replace(order, address=customer.address)
    return replace(order, status="refunded" if customer.wish == "refund" else "cancelled")


class Talk:
    """The customer's side of the conversation: answers what is asked, insists, and leaves."""

    def __init__(self, customer: Customer) -> None:
        self.customer = customer
        self.useless = 0
        self.identified = False
        """Was asked for the e-mail, and said it."""

    def begin(self) -> str:
        """The first message."""
        who = self.customer
        which = "my order" if who.shy else f"order {who.order}"
        wants = {
            "refund": f"I want my money back for {which}.",
            "cancel": f"Please cancel {which}.",
            "address": f"Please send {which} to another address.",
        }
        return wants[who.wish]

    def answer(self, said: str) -> str:
        """To a message that ends nothing; "" when they leave."""
        who, asked = self.customer, said.lower()
        if "?" in said:
            if "mail" in asked:
                self.identified = True
                return f"It is {who.email}."
            if "address" in asked and who.wish == "address":
                return f"To {who.address}."
            if "number" in asked or "which order" in asked:
                return f"It is order {who.order}."
        self.useless += 1
        return "" if self.useless == PATIENCE else f"I do not understand. {self.begin()}"


class CustomerService(ot.ToolEnvironment):
    """Serve one customer by the policy: 1 if the database is as it should be and the customer knows.

    A refusal counts if the order was looked up and the reason is the right one.
    """

    splits = ("test",)

    def __init__(
        self, wishes: Sequence[str] = WISHES, identify: bool = True, shy: float = 0.5, turns: int = 12
    ) -> None:
        """`identify`: whether customers must be asked who they are; `shy`: the share of those who do not say
        the number of their order; `turns`: how often the agent may speak or call tools.
        """
        if not wishes or not set(wishes) <= set(WISHES):
            raise ValueError(f"wishes must be some of {', '.join(WISHES)}, not {list(wishes)}")
        if not 0 <= shy <= 1:
            raise ValueError(f"shy is a share from 0 to 1, not {shy}")
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        self.wishes, self.identify, self.shy, self.turns = tuple(wishes), identify, shy, turns

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.orders, self.customer = self.build(f"test {task['customer']}") if task else self.draw(seed)
        order = self.orders[self.customer.order]
        self.forbidden = reason(self.customer, order, self.identify)
        self.wanted = copy.copy(self.orders)
        if not self.forbidden:
            self.wanted[self.customer.order] = granted(self.customer, order)
        self.talk = Talk(self.customer)
        self.looked: set[int] = set()
        self.rash = False
        self.used = self.errors = 0
        policy = POLICY + (IDENTIFY if self.identify else "")
        return ot.Observation(
            messages=[{"role": "system", "content": policy}, {"role": "user", "content": self.talk.begin()}],
            info={"wish": self.customer.wish},
        )

    @ot.tool
    def order(self, number: int) -> dict[str, Any]:
        """Look an order up."""
        self.looked.add(number)
        return asdict(self.found(number))

    @ot.tool
    def refund(self, number: int) -> str:
        """Pay the price of an order back."""
        self.change(number, status="refunded")
        return "refunded"

    @ot.tool
    def cancel(self, number: int) -> str:
        """Cancel an order."""
        self.change(number, status="cancelled")
        return "cancelled"

    @ot.tool
    def readdress(self, number: int, address: str) -> str:
        """Change where an order goes."""
        self.change(number, address=address)
        return "changed"

    def change(self, number: int, **values: str) -> None:
        """Change an order. Whoever does it before looking and asking has not kept to the policy."""
        self.orders[number] = replace(self.found(number), **values)  # type: ignore[arg-type]
        self.rash |= number not in self.looked or (self.identify and not self.talk.identified)

    def found(self, number: int) -> Order:
        """An order of that number; ToolError, which the model is told, if there is none."""
        if number not in self.orders:
            self.errors += 1
            raise ot.ToolError(f"there is no order {number}")
        return self.orders[number]

    def step(self, action: ot.Action) -> ot.StepResult:
        self.used += 1
        result = super().step(action)
        assert isinstance(result, ot.StepResult), "no tool here is async"
        if self.used == self.turns and not result.done:
            return ot.StepResult(reward=0.0, truncated=True)
        return result

    def answered(self, text: str) -> ot.StepResult:
        """The customer hears it. They stay until they are refused, or know that it is done, or give up."""
        if _REFUSES.search(text):
            return self.end(self.refused_well(text))
        if not self.forbidden and self.orders == self.wanted and _DONE.search(text):
            return self.end(not self.rash)
        reply = self.talk.answer(text)
        return ot.StepResult(reply) if reply else self.end(False)

    def refused_well(self, text: str) -> bool:
        """Whether a refusal is due, and gives the reason that the looked-up order gave."""
        if not self.forbidden or self.customer.order not in self.looked:
            return False
        return re.search(rf"\b{self.forbidden.replace('-', '-?')}\b", text.lower()) is not None

    def end(self, served: bool) -> ot.StepResult:
        """Over; the database has the last word."""
        return ot.StepResult(reward=float(served and self.orders == self.wanted), terminated=True)

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found = (number for number in range(100_000) if held_out(*self.build(f"test {number}")))
        return [{"customer": number} for number, _ in zip(found, range(HELD_OUT), strict=False)]

    def draw(self, seed: int) -> tuple[Orders, Customer]:
        """A shop and a customer for training."""
        attempt = 0
        while held_out(*(drawn := self.build(f"train {seed} {attempt}"))):
            attempt += 1
        return drawn

    def build(self, seed: str) -> tuple[Orders, Customer]:
        """Any shop, with a customer."""
        dice = random.Random(seed)
        orders: Orders = {}
        for number in dice.sample(range(100, 1000), 4):
            status = dice.choice(("packing", "packing", "shipped", "delivered", "delivered"))
            days = (
                dice.choice((dice.randint(1, DAYS), dice.randint(DAYS + 1, 90)))
                if status == "delivered"
                else 0
            )
            orders[number] = Order(
                dice.choice(ITEMS), f"{dice.choice(NAMES)}@mail.com", status, days, street(dice)
            )
        wish, number = dice.choice(self.wishes), dice.choice(list(orders))
        email = orders[number].email
        if self.identify and dice.random() < 0.25:
            email = dice.choice([f"{name}@mail.com" for name in NAMES if f"{name}@mail.com" != email])
        while (address := street(dice)) == orders[number].address:
            pass
        return orders, Customer(wish, number, email, address, dice.random() < self.shy)

    def metrics(self) -> dict[str, float]:
        return {"turns": float(self.used), "tool_errors": float(self.errors)}


def street(dice: random.Random) -> str:
    """An address."""
    return f"{dice.randint(1, 99)} {dice.choice(STREETS)}"


def held_out(orders: Orders, customer: Customer) -> bool:
    """One in eight customers is for tests only, whoever draws them."""
    return zlib.crc32(f"{orders} {customer}".encode()) % 8 == 0


def call(name: str, **arguments: Any) -> str:
    """A tool call as models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Clerk:
    """Serves anybody by the policy, from nothing but what it hears. A script to compare with, and for
    demonstrations.
    """

    def __init__(self, identify: bool = True) -> None:
        self.identify = identify
        self.wish = self.number = self.email = self.address = ""
        self.row: dict[str, Any] = {}
        self.asked = ""

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        """What it says or does next."""
        heard = seen.as_messages()[-1].content.text
        if not self.wish:
            words = {"refund": "money", "cancel": "cancel", "address": "address"}
            self.wish = next(wish for wish, word in words.items() if word in heard)
        self.listen(heard)
        if not self.number:
            return self.ask("number", "What is the number of the order?")
        if not self.row:
            return call("order", number=int(self.number))
        if self.identify and not self.email:
            return self.ask("email", "What is your e-mail?")
        if heard in ("refunded", "cancelled", "changed"):
            return "It is done."
        if forbidden := self.forbidden():
            return f"I cannot: {forbidden}."
        if self.wish == "address" and not self.address:
            return self.ask("address", "What is the new address?")
        return self.change()

    def ask(self, what: str, words: str) -> str:
        self.asked = what
        return words

    def listen(self, heard: str) -> None:
        """Keep what it is told."""
        if not self.number and (number := re.search(r"\border (\d+)", heard)):
            self.number = number[1]
        elif heard.startswith("{"):
            self.row = json.loads(heard)
        elif self.asked == "email":
            self.email = heard.removeprefix("It is ").removesuffix(".")
        elif self.asked == "address":
            self.address = heard.removeprefix("To ").removesuffix(".")
        self.asked = ""

    def forbidden(self) -> str:
        """Why the wish is not granted."""
        if self.identify and self.email != self.row["email"]:
            return "that is not the e-mail of the order"
        if self.wish != "refund":
            return "" if self.row["status"] == "packing" else f"it is {self.row['status']}"
        if self.row["status"] != "delivered":
            return f"it is {self.row['status']}"
        return f"more than {DAYS} days have passed" if self.row["days"] > DAYS else ""

    def change(self) -> str:
        """The call that grants the wish."""
        number = int(self.number)
        if self.wish == "address":
            return call("readdress", number=number, address=self.address)
        return call(self.wish, number=number)


class Pushover(Clerk):
    """Grants everything, whatever the policy says."""

    def forbidden(self) -> str:
        return ""


def brusque(seen: ot.Observation, dice: random.Random) -> str:
    """Says something polite at random, and does nothing."""
    return dice.choice(
        ("I cannot.", "It is done.", "I am not sure.", f"I cannot: more than {DAYS} days have passed.")
    )


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--wishes", nargs="+", default=list(WISHES), choices=WISHES)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 episodes in each step")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out customers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/customer_service"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=CustomerService,
            env_options={"wishes": arguments.wishes, "turns": arguments.turns},
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=48),
            limits=ot.Limits(parse_errors=3),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "Customers served by the policy")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
