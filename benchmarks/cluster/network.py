"""The addresses, links and limits of an emulated cluster, as commands for ip and tc.  Pure: nothing is run here.

Every rank has a network namespace of its own, with one address, 10.83.<node>.<rank of the node>; one more namespace
holds the fabric. The routes of a rank decide which link a connection takes, by the other end's address alone::

    rank ---- nic ----[ bridge of the NIC ]-- up ==== down --[ switch ]-- ...    to ranks of other nodes
    rank ---- in -----[ bridge of the node ]-- ...                               to ranks of its node: a switch
    rank ---- in3 ------------------------ in0 ---- rank                         to each of them apart: a mesh

The NIC's limit is on both ends of the pair up/down: tc shapes what leaves an interface, so `up` limits what the NIC's
ranks send and `down` what they receive, whoever sends it. Links inside a node have such a limit at both ends too, or
none. All gloo connections of a rank start from its one address, so what rank i sends to rank j leaves by i's NIC and
arrives by j's. Every rank knows the hardware addresses of all others: nobody asks for them over slow links, and the
kernel's table of those that were asked for, one for all namespaces, is not filled (64 ranks have 4,032 neighbours).
"""

from __future__ import annotations

from dataclasses import dataclass

MTU = 9000  # fewer packets; headers are 0.7 % of a full one
RECEIVE_WINDOW = 16 << 20  # bytes that a connection may have on its way: more than any message
QUEUE = 512 << 20  # more than all windows that meet in one queue: nothing is ever dropped

#: A TCP packet without data: 20 + 20 bytes of headers and nothing behind them.
ACKNOWLEDGEMENT = ["match", "ip", "protocol", "6", "0xff", "match", "u16", "40", "0xffff", "at", "2"]

#: For every namespace: no loss, so no guesses at one, no discovery of rates, no slow start after a pause.
#:
#: Acknowledgements overtake data (:func:`limiter`), and then TCP itself throws data away that look too old: by their
#: time stamp (PAWS, RFC 7323), or because what they acknowledge lies further back than the largest window so far
#: (RFC 5961). So there are no time stamps, and the window is large from the beginning.
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_timestamps": "0",
    "net/ipv4/tcp_sack": "0",
    "net/ipv4/tcp_rmem": f"4096 {RECEIVE_WINDOW} {RECEIVE_WINDOW}",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_early_retrans": "0",
    "net/ipv4/conf/all/rp_filter": "0",
}


@dataclass(frozen=True)
class Shape:
    """What is built.

    Attributes:
        nodes, ranks_per_node: of the cluster.
        nics: NICs of a node; local rank r uses NIC r * nics // ranks_per_node.
        nic_rate: bits/second of a NIC, each way.
        fabric: links inside a node: "mesh": one for each pair of ranks; "switch": one port for each rank.
        link_rate: bits/second of each of these links, each way; None: no limit.
        patience: seconds after which TCP sends again what nobody has acknowledged. What waits in a queue is late, not
            lost: sent twice it would only be more to wait for. More than any queue takes; the kernel has 120 at most.
    """

    nodes: int
    ranks_per_node: int
    nics: int
    nic_rate: int
    fabric: str = "switch"
    link_rate: int | None = None
    patience: int = 2

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def nic(self, rank: int) -> int:
        """Return the NIC of a rank, numbered over all nodes."""
        node, local = divmod(rank, self.ranks_per_node)
        return node * self.nics + local * self.nics // self.ranks_per_node

    def address(self, rank: int) -> str:
        """Return the address of a rank."""
        node, local = divmod(rank, self.ranks_per_node)
        return f"10.83.{node}.{local + 1}"

    def neighbours(self, rank: int) -> list[int]:
        """Return the other ranks of the node."""
        first = self.node(rank) * self.ranks_per_node
        return [r for r in range(first, first + self.ranks_per_node) if r != rank]


@dataclass(frozen=True)
class Names:
    """Namespaces of one run: all begin with a prefix that holds the process's number.

    Attributes:
        prefix: for instance "mindspeed-cp-4711-".
    """

    prefix: str

    @property
    def fabric(self) -> str:
        """The namespace of bridges and NICs."""
        return f"{self.prefix}fabric"

    def rank(self, rank: int) -> str:
        """Return the namespace of a rank."""
        return f"{self.prefix}rank{rank}"

    def all(self, shape: Shape) -> list[str]:
        """Return all namespaces of a cluster."""
        return [self.fabric, *(self.rank(r) for r in range(shape.ranks))]


Command = list[str]


def commands(shape: Shape, names: Names) -> list[Command]:
    """Return the commands that make the cluster, in order; namespaces first."""
    out: list[Command] = []
    for space in names.all(shape):
        out.append(["ip", "netns", "add", space])
        out.append(["ip", "netns", "exec", space, "sh", "-c", settings_script()])
        out.append(["ip", "-n", space, "link", "set", "lo", "up"])
    fabric = names.fabric
    out += _bridge(fabric, "switch")
    for nic in range(shape.nodes * shape.nics):
        out += _bridge(fabric, f"nic{nic}")
        out += _link((fabric, f"up{nic}"), (fabric, f"down{nic}"), shape.nic_rate)
        out += [_member(fabric, f"up{nic}", f"nic{nic}"), _member(fabric, f"down{nic}", "switch")]
    for rank in range(shape.ranks):
        space = names.rank(rank)
        out += _link((space, "nic"), (fabric, f"rank{rank}"), None, hardware_address(rank))
        out.append(_member(fabric, f"rank{rank}", f"nic{shape.nic(rank)}"))
        out.append(["ip", "-n", space, "address", "add", f"{shape.address(rank)}/32", "dev", "nic"])
        out.append(_route(space, "10.83.0.0/16", "nic", shape, rank))
    out += _mesh(shape, names) if shape.fabric == "mesh" else _ports(shape, names)
    return out + _neighbours(shape, names)


def hardware_address(rank: int, link: int | None = None) -> str:
    """Return the hardware address of a rank's NIC, or of one of its links in the node.

    Args:
        rank: its number.
        link: rank at the other end of a mesh's link; a switch's port has the rank's own number. None: the NIC.
    """
    high, low = divmod(rank, 256)
    peer_high, peer_low = divmod(0 if link is None else link, 256)
    if max(high, peer_high) > 255:
        raise ValueError(f"rank {max(rank, link or 0)} is too large for a hardware address; valid: up to 65535")
    return f"02:{link is not None:02x}:{high:02x}:{low:02x}:{peer_high:02x}:{peer_low:02x}"


def trial(names: Names) -> list[Command]:
    """Return commands that use a little of everything that a cluster needs, to test whether this machine has it."""
    space = names.fabric
    return [
        ["ip", "netns", "add", space],
        ["ip", "netns", "exec", space, "sh", "-c", settings_script()],
        *_bridge(space, "switch"),
        *_link((space, "up0"), (space, "down0"), 10_000_000),
        _member(space, "up0", "switch"),
    ]


def settings_script() -> str:
    """Return a script that writes SETTINGS, in a namespace."""
    return " && ".join(f"echo '{value}' > /proc/sys/{key}" for key, value in SETTINGS.items())


def remove(names: list[str]) -> list[Command]:
    """Return the commands that remove namespaces, and with them all that is in them."""
    return [["ip", "netns", "delete", name] for name in names]


def limiter(space: str, device: str, rate: int) -> list[Command]:
    """Return the commands that limit what leaves an interface to a rate in bits/second: bursts of a millisecond, two
    full packets at least; its queue drops nothing. Bare acknowledgements pass first: behind the data of the other
    direction they would hold up their own, and two busy directions would reach half of the rate (Zhang, Shenker and
    Clark, SIGCOMM 1991)."""
    burst = str(max(2 * (MTU + 100), rate // 8 // 1000))
    tc, on = ["tc", "-n", space], ["dev", device]
    bursts = ["burst", burst, "cburst", burst, "quantum", str(2 * MTU)]

    def kind(number: int, share: int, order: int) -> Command:
        rates = ["rate", f"{share}bit", "ceil", f"{rate}bit"]
        under = ["parent", "1:1", "classid", f"1:{number}"]
        return [*tc, "class", "add", *on, *under, "htb", *rates, "prio", str(order), *bursts]

    return [
        [*tc, "qdisc", "replace", *on, "root", "handle", "1:", "htb", "default", "3"],
        [*tc, "class", "add", *on, "parent", "1:", "classid", "1:1", "htb", "rate", f"{rate}bit", *bursts],
        kind(2, rate // 20, 0),
        kind(3, rate - rate // 20, 1),
        [*tc, "qdisc", "add", *on, "parent", "1:3", "bfifo", "limit", str(QUEUE)],
        [*tc, "filter", "add", *on, "parent", "1:", "protocol", "ip", "u32", *ACKNOWLEDGEMENT, "flowid", "1:2"],
    ]


def _mesh(shape: Shape, names: Names) -> list[Command]:
    """Return the commands that make a link for each pair of ranks of a node."""
    out = []
    for rank in range(shape.ranks):
        for neighbour in shape.neighbours(rank):
            if rank < neighbour:
                ends = (names.rank(rank), f"in{neighbour}"), (names.rank(neighbour), f"in{rank}")
                hardware = hardware_address(rank, neighbour), hardware_address(neighbour, rank)
                out += _link(*ends, shape.link_rate, *hardware)
                out.append(_route(ends[0][0], f"{shape.address(neighbour)}/32", ends[0][1], shape, rank))
                out.append(_route(ends[1][0], f"{shape.address(rank)}/32", ends[1][1], shape, neighbour))
    return out


def _ports(shape: Shape, names: Names) -> list[Command]:
    """Return the commands that make a bridge for each node, and a port on it for each rank."""
    out: list[Command] = []
    if shape.ranks_per_node == 1:
        return out
    for node in range(shape.nodes):
        out += _bridge(names.fabric, f"node{node}")
    for rank in range(shape.ranks):
        space, port = names.rank(rank), f"port{rank}"
        out += _link((space, "in"), (names.fabric, port), shape.link_rate, hardware_address(rank, rank))
        out.append(_member(names.fabric, port, f"node{shape.node(rank)}"))
        for neighbour in shape.neighbours(rank):
            out.append(_route(space, f"{shape.address(neighbour)}/32", "in", shape, rank))
    return out


def _bridge(space: str, name: str) -> list[Command]:
    return [
        ["ip", "-n", space, "link", "add", name, "mtu", str(MTU), "type", "bridge"],
        ["ip", "-n", space, "link", "set", name, "addrgenmode", "none", "up"],
    ]


def _neighbours(shape: Shape, names: Names) -> list[Command]:
    """Return the commands that tell every rank the hardware addresses of all others."""
    out = []
    for rank in range(shape.ranks):
        in_node = set(shape.neighbours(rank))
        for other in range(shape.ranks):
            if other == rank:
                continue
            device, hardware = "nic", hardware_address(other)
            if other in in_node and shape.fabric == "mesh":
                device, hardware = f"in{other}", hardware_address(other, rank)
            elif other in in_node:
                device, hardware = "in", hardware_address(other, other)
            out.append(
                ["ip", "-n", names.rank(rank), "neighbour", "add", shape.address(other), "lladdr", hardware,
                 "dev", device, "nud", "permanent"]
            )  # fmt: skip
    return out


def _link(first_end: tuple[str, str], other: tuple[str, str], rate: int | None, *hardware: str) -> list[Command]:
    """Return the commands that make a pair of interfaces, each (namespace, name), limited at both ends; with hardware
    addresses of the first or of both."""
    first, second = (["name", end, "netns", where, "mtu", str(MTU)] for where, end in (first_end, other))
    for end, address in zip((first, second), hardware, strict=False):
        end += ["address", address]
    out = [["ip", "link", "add", *first, "type", "veth", "peer", *second]]
    for where, end in (first_end, other):
        out.append(["ip", "-n", where, "link", "set", end, "addrgenmode", "none", "up"])
        if rate is not None:
            out += limiter(where, end, rate)
    return out


def _member(space: str, name: str, bridge: str) -> Command:
    return ["ip", "-n", space, "link", "set", name, "master", bridge]


def _route(space: str, to: str, device: str, shape: Shape, rank: int) -> Command:
    patience = ["rto_min", f"{shape.patience}s"]
    return ["ip", "-n", space, "route", "add", to, "dev", device, "src", shape.address(rank), *patience]
