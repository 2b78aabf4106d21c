"""Addresses, links and limits of an emulated cluster, as commands."""

import pytest

from benchmarks.cluster.network import (
    ACKNOWLEDGEMENT,
    MTU,
    Names,
    Shape,
    commands,
    limiter,
)

NAMES = Names("mindspeed-cp-1-")
RATE = 100_000_000


def words(shape: Shape) -> list[str]:
    return [" ".join(command) for command in commands(shape, NAMES)]


@pytest.mark.parametrize("nodes, per_node, nics", [(2, 4, 4), (2, 4, 2), (2, 4, 1), (4, 2, 2), (1, 8, 8), (3, 3, 2)])
@pytest.mark.parametrize("fabric", ["switch", "mesh"])
def test_every_rank_has_one_address_and_a_route_to_every_other_rank(nodes, per_node, nics, fabric):
    shape = Shape(nodes, per_node, nics, RATE, fabric, RATE)
    made = words(shape)
    addresses = [shape.address(rank) for rank in range(shape.ranks)]
    assert len(set(addresses)) == shape.ranks
    for rank, own in enumerate(addresses):
        space = NAMES.rank(rank)
        assert [line for line in made if f"-n {space} address add" in line] == [
            f"ip -n {space} address add {own}/32 dev nic"
        ]
        assert f"ip -n {space} route add 10.83.0.0/16 dev nic src {own} rto_min 2s" in made
        for other in range(shape.ranks):
            direct = [line for line in made if line.startswith(f"ip -n {space} route add {addresses[other]}/32 ")]
            if other == rank or shape.node(other) != shape.node(rank):
                assert direct == []  # by the NIC
            else:
                device = "in" if fabric == "switch" else f"in{other}"
                assert direct == [f"ip -n {space} route add {addresses[other]}/32 dev {device} src {own} rto_min 2s"]


@pytest.mark.parametrize(
    "nics, nic_of_rank", [(4, [0, 1, 2, 3, 4, 5, 6, 7]), (2, [0, 0, 1, 1, 2, 2, 3, 3]), (1, [0] * 4 + [1] * 4)]
)
def test_ranks_are_spread_over_the_nics_of_their_node(nics, nic_of_rank):
    shape = Shape(2, 4, nics, RATE)
    assert [shape.nic(rank) for rank in range(8)] == nic_of_rank
    made = words(shape)
    for rank in range(8):
        assert f"ip -n {NAMES.fabric} link set rank{rank} master nic{nic_of_rank[rank]}" in made


@pytest.mark.parametrize("nodes, per_node, nics", [(2, 4, 2), (8, 8, 8), (3, 3, 1), (3, 1, 1)])
@pytest.mark.parametrize("fabric", ["switch", "mesh"])
def test_every_rank_knows_the_hardware_address_by_which_it_reaches_each_other_rank(nodes, per_node, nics, fabric):
    shape = Shape(nodes, per_node, nics, RATE, fabric, RATE)
    made = commands(shape, NAMES)
    hardware = {}  # (namespace, device) -> address
    for command in made:
        for i, word in enumerate(command):
            if word == "address" and command[i - 1] == str(MTU):
                begin = max(j for j in range(i) if command[j] == "name")
                hardware[command[begin + 3], command[begin + 1]] = command[i + 1]
    assert len(set(hardware.values())) == len(hardware)
    assert all(int(address[:2], 16) & 3 == 2 for address in hardware.values())  # of one interface, and given by hand
    for rank in range(shape.ranks):
        told = [command[5:] for command in made if command[2] == NAMES.rank(rank) and "neighbour" in command]
        assert len(told) == shape.ranks - 1
        for other in set(range(shape.ranks)) - {rank}:
            device = back = "nic"
            if shape.node(rank) == shape.node(other):
                device, back = ("in", "in") if fabric == "switch" else (f"in{other}", f"in{rank}")
            address = hardware[NAMES.rank(other), back]
            assert [shape.address(other), "lladdr", address, "dev", device, "nud", "permanent"] in told


def limits(shape: Shape) -> dict[tuple[str, str], int]:
    """(namespace, device) -> bits/second."""
    rates = {}
    for command in commands(shape, NAMES):
        if "class" in command and command[command.index("classid") + 1] == "1:1":
            place = command[command.index("-n") + 1], command[command.index("dev") + 1]
            rates[place] = int(command[command.index("rate") + 1].removesuffix("bit"))
    return rates


def test_a_nic_is_limited_both_ways_and_links_in_a_node_only_if_they_have_a_rate():
    fabric = NAMES.fabric
    nics = {(fabric, f"{end}{nic}"): RATE for nic in range(4) for end in ("up", "down")}
    assert limits(Shape(2, 4, 2, RATE)) == nics
    ports = {(fabric, f"port{rank}"): 7 * RATE for rank in range(8)} | {
        (NAMES.rank(r), "in"): 7 * RATE for r in range(8)
    }
    assert limits(Shape(2, 4, 2, RATE, "switch", 7 * RATE)) == nics | ports


def test_a_mesh_has_a_limited_link_for_each_pair_of_a_node():
    shape = Shape(2, 4, 4, RATE, "mesh", 2 * RATE)
    links = {place: rate for place, rate in limits(shape).items() if place[1].startswith("in")}
    expected = {(NAMES.rank(r), f"in{other}") for r in range(8) for other in shape.neighbours(r)}
    assert set(links) == expected and len(expected) == 8 * 3 and set(links.values()) == {2 * RATE}
    pairs = [line for line in words(shape) if "name in" in line]
    assert len(pairs) == 2 * 6


def test_the_limiter_shares_one_rate_and_lets_acknowledgements_pass():
    made = limiter("space", "nic", RATE)
    rates = {c[c.index("classid") + 1]: c[c.index("rate") + 1] for c in made if "class" in c}
    assert rates == {"1:1": "100000000bit", "1:2": "5000000bit", "1:3": "95000000bit"}
    ceilings = {c[c.index("classid") + 1]: c[c.index("ceil") + 1] for c in made if "ceil" in c}
    assert set(ceilings.values()) == {"100000000bit"}
    (match,) = [c for c in made if "filter" in c]
    assert match[-2:] == ["flowid", "1:2"] and " ".join(ACKNOWLEDGEMENT) in " ".join(match)
