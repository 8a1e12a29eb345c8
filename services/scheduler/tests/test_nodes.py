"""Which GPUs a server gets, whatever is free on whatever nodes."""

from collections import Counter
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_scheduler.domain.nodes import Ask, Node, Pool, accelerators, id_of, node_of


def pool(**free: int) -> Pool:
    return Pool([Node(name, gpus) for name, gpus in free.items()])


def test_the_node_with_the_least_room_that_is_enough() -> None:
    assert pool(a=8, b=2, c=4).find(Ask(1, 3)) == ("c/0", "c/1", "c/2")


def test_ranks_are_together_where_they_fit_else_on_as_few_nodes_as_possible() -> None:
    assert pool(a=2, b=2, c=4).find(Ask(4, 1)) == ("c/0", "c/1", "c/2", "c/3")
    assert pool(a=2, b=2, c=4).find(Ask(5, 1)) == ("c/0", "c/1", "c/2", "c/3", "a/0")
    # A rank's two GPUs are never on two nodes, and a server's ranks never on two types.
    assert pool(a=3, b=1).find(Ask(2, 2)) is None
    mixed = Pool([Node("a", 1, "H100"), Node("b", 1, "A100")])
    assert mixed.find(Ask(2, 1)) is None
    assert mixed.find(Ask(1, 1, "A100")) == ("b/0",)
    assert mixed.find(Ask(1, 1, "B200")) is None


def test_gpus_go_by_the_names_that_their_node_has_for_them() -> None:
    named = Node("a", 2, ids=("GPU-7", "MIG-1/0"))
    assert named.devices == ("a/GPU-7", "a/MIG-1/0")
    assert [(node_of(each), id_of(each)) for each in named.devices] == [("a", "GPU-7"), ("a", "MIG-1/0")]


def test_what_a_node_does_not_have_any_more_is_not_free() -> None:
    changed = Pool([Node("a", 1)], ["a/0", "a/1", "gone/0"])
    changed.give_back(["a/0", "a/0", "a/1", "gone/0"])
    assert changed.find(Ask(1, 2)) is None
    assert changed.find(Ask(1, 1)) == ("a/0",)


def test_the_types_that_there_are() -> None:
    assert accelerators([Node("a", 1), Node("b", 1, "H100"), Node("c", 1, "H100"), Node("d", 1, "A100")]) == [
        "A100",
        "H100",
    ]


NODES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "A", "B"])), max_size=5)
ASKS = st.builds(Ask, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["", "A", "B"]))


@settings(max_examples=300, deadline=None)
@given(made=NODES, ask=ASKS, data=st.data())
def test_every_choice_keeps_the_rules(made: list[tuple[int, str]], ask: Ask, data: st.DataObject) -> None:
    nodes = [Node(f"n{number}", gpus, kind) for number, (gpus, kind) in enumerate(made)]
    there = [device for node in nodes for device in node.devices]
    chosen_from = st.lists(st.sampled_from(there), unique=True) if there else st.just([])
    taken, kept = set(data.draw(chosen_from)), set(data.draw(chosen_from))
    found = Pool(nodes, taken).find(ask, kept)
    free = Counter(node_of(device) for device in there if device not in taken | kept)
    rooms = {
        kind: [free[node.name] // ask.gpus for node in nodes if node.accelerator == kind]
        for kind in ("", "A", "B")
        if ask.gpus and ask.accelerator in ("", kind)
    }
    if found is None:
        assert all(sum(room) < ask.ranks for room in rooms.values())
        return
    assert len(found) == len(set(found)) == ask.total
    assert set(found) <= set(there) - taken - kept
    if not found:
        return
    kinds = {node.name: node.accelerator for node in nodes}
    assert {kinds[node_of(device)] for device in found} <= set(rooms)
    assert len({kinds[node_of(device)] for device in found}) == 1
    for rank in range(ask.ranks):
        assert len({node_of(device) for device in found[rank * ask.gpus : (rank + 1) * ask.gpus]}) == 1
    used = len({node_of(device) for device in found})
    fewer = (group for room in rooms.values() for group in combinations(room, used - 1))
    assert all(sum(group) < ask.ranks for group in fewer)
    if used == 1:
        enough = [free[node.name] for node in nodes if kinds[node.name] in rooms]
        least = min(room for room in enough if room // ask.gpus >= ask.ranks)
        assert free[node_of(found[0])] == least
