"""What the nodes found of the network between them means for a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpc_elastic.base.text import first_of
from hpc_elastic.doctor.findings import Finding, ok, problem, warning
from hpc_elastic.doctor.network_probe import DATAGRAMS, NetworkFacts
from hpc_elastic.doctor.pairs import rate_text

_LOSS = 0.02
"""Of the datagrams between two nodes, by the best of the addresses."""
_APART = 1.0
"""Seconds between two wall clocks."""
_MOST = 4


def judge_network(facts: Mapping[str, NetworkFacts]) -> list[Finding]:
    """All findings, in the order of their lines.

    Args:
        facts: By node, of those that measured any.
    """
    if len(facts) < 2:
        return []
    return [
        *_addresses(facts),
        *_names(facts),
        *_master(facts),
        *_datagrams(facts),
        *_clocks(facts),
        *_bandwidth(facts),
    ]


def _addresses(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    """Which address of each node reaches which."""
    works: dict[str, dict[str, set[str]]] = {
        node: {address: set() for address in own.addresses} for node, own in facts.items()
    }
    why: dict[tuple[str, str], str] = {}
    for node, own in facts.items():
        for tried in own.reached:
            if not tried.error:
                works.setdefault(tried.node, {}).setdefault(tried.address, set()).add(node)
            else:
                why.setdefault((node, tried.node), f"{tried.address}: {tried.error}")
    cut_off = [
        f"{node} does not reach {other} ({why.get((node, other), 'it has no address')})"
        for node in facts
        for other in facts
        if node != other and not any(node in reaching for reaching in works[other].values())
    ]
    if cut_off:
        yield problem(
            "network.addresses", first_of(cut_off, _MOST), "workers on these nodes can't meet: a run there fails",
            "--exclude one of the nodes, and have the site look at its network and firewall",
        )  # fmt: skip
        return
    useless = [
        f"{node}'s {address} is reached by {len(reaching)} of {len(facts) - 1} nodes"
        for node, addresses in works.items()
        for address, reaching in addresses.items()
        if len(reaching) < len(facts) - 1
    ]
    first_ones = [node for node, own in facts.items() if len(works[node].get(first_address(own), ())) < len(facts) - 1]
    if first_ones:
        yield warning(
            "network.addresses", first_of(useless, _MOST),
            f"a script that uses the name of {first_of(first_ones, _MOST)} as MASTER_ADDR does not work everywhere",
            "use MASTER_ADDR as workers get it (an address that others have reached), or --master-addr; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for the process group",
        )  # fmt: skip
    else:
        also = f"; {first_of(useless, _MOST)}" if useless else ""
        shown = first_of([f"{node} at {first_address(own)}" for node, own in facts.items()], _MOST)
        yield ok("network.addresses", f"each node reaches each ({shown}){also}")


def first_address(own: NetworkFacts) -> str:
    """What a node's own name gives first."""
    return own.addresses[0] if own.addresses else ""


def _names(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    if not any(own.names for own in facts.values()):
        return
    wrong = []
    for node, own in facts.items():
        for name, found in own.names.items():
            theirs = facts[name].addresses if name in facts else ()
            if not found:
                wrong.append(f"{name} has no address on {node}")
            elif name != node and not set(found) & set(theirs) and theirs:
                wrong.append(f"{name} is {found[0]} on {node}, which is none of its addresses")
    if wrong:
        yield warning(
            "network.nodes-names", first_of(wrong, _MOST), "a script that connects to nodes by their names fails there",
            "use MASTER_ADDR as workers get it; have the site mend /etc/hosts or DNS",
        )  # fmt: skip
    else:
        yield ok("network.nodes-names", "the nodes' names resolve to their addresses on all of them")


def _master(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    tried = {node: own.master for node, own in facts.items() if own.master is not None}
    if not tried:
        return
    address = next(iter(tried.values())).address
    failed = [f"{node} ({found.error})" for node, found in tried.items() if found.error]
    if failed:
        yield problem(
            "network.master", f"MASTER_ADDR={address} is not reached from {first_of(failed, _MOST)}",
            "workers there wait for the process group until it times out",
            "--master-addr with an address of the first node that all others reach; --master-port where a firewall "
            "lets few ports through",
        )  # fmt: skip
    else:
        yield ok("network.master", f"MASTER_ADDR={address} is reached from all nodes")


def _datagrams(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    lost: dict[tuple[str, str], int] = {}
    for node, own in facts.items():
        for sender, counts in own.datagrams.items():
            lost[sender, node] = DATAGRAMS - max(counts.values(), default=0)
    bad = sorted(((count, *pair) for pair, count in lost.items() if count > _LOSS * DATAGRAMS), reverse=True)
    if not bad:
        total = sum(lost.values())
        yield ok("network.datagrams", f"{total} of {DATAGRAMS * len(lost)} between all nodes were lost")
        return
    said = [f"from {sender} to {node} {count} of {DATAGRAMS} were lost" for count, sender, node in bad]
    none_come = all(count == DATAGRAMS for count, _, _ in bad) and len(bad) == len(lost)
    means = (
        "agents learn from files alone: a failure is noticed some seconds later"
        if none_come
        else "a node may be asked through the files whether it lives, and its failures are noticed some seconds later"
    )
    way_out = (
        "have UDP between nodes allowed, or --rdzv-conf doorbell=off"
        if none_come
        else "have the site look at the links of the nodes that are named most; TCP suffers from the same loss"
    )
    yield warning("network.datagrams", first_of(said, _MOST), means, way_out)


def _clocks(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    apart = [
        (abs(ahead.seconds), ahead.bound, node, other, ahead.seconds)
        for node, own in facts.items()
        for other, ahead in own.clocks.items()
        if node < other
    ]
    if not apart:
        yield ok("network.clocks", "not known: no datagrams passed both ways")
        return
    far = sorted((one for one in apart if one[0] - one[1] > _APART), reverse=True)
    if far:
        said = [f"{node}'s is {seconds:+.1f} s against {other}'s" for _, _, node, other, seconds in far]
        yield warning(
            "network.clocks", first_of(said, _MOST),
            "the times in the scripts' own logs do not fit together; hpc-elastic compares no wall clocks",
            "have the site look at NTP on the nodes that are named most",
        )  # fmt: skip
    else:
        most, bound = max((one[0], one[1]) for one in apart)
        yield ok("network.clocks", f"at most {1000 * most:.0f} ms apart (± {1000 * bound:.1f} ms)")


def _bandwidth(facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    measured = next((own.pairs for own in facts.values() if own.pairs is not None), None)
    if measured is None:
        why = dict.fromkeys(own.no_pairs for own in facts.values() if own.no_pairs)
        yield warning(
            "network.bandwidth", f"not measured: {first_of(list(why), 2)}", "slow links are not known",
            "hpc-elastic doctor again",
        )  # fmt: skip
        return
    name = measured.names
    bad = [f"{name[node]}: {why}" for node, why in measured.bad.items()]
    slow = [f"{name[node]}: {why}" for node, why in measured.slow.items()]
    failed = [
        f"{name[one.pair[0]]} and {name[one.pair[1]]}: {one.why}"
        for one in measured.failed
        if measured.bad.keys().isdisjoint(one.pair)
    ]
    way_out = "--exclude it, and have the site look at its network"
    if bad:
        yield problem("network.bandwidth", first_of(bad, _MOST), "collectives with this node fail or hang", way_out)
    if failed:
        yield problem(
            "network.bandwidth", f"no transfer between {first_of(failed, _MOST)}",
            "collectives between them fail or hang",
            f"{measured.backend} must find the right network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); ask the site",
        )  # fmt: skip
    if slow:
        yield warning(
            "network.bandwidth", first_of(slow, _MOST), "all workers wait for the slowest in each step", way_out
        )
    if not (bad or failed or slow) and measured.median is not None:
        by = (
            "a plain TCP connection, as the workers' Python lacks torch"
            if measured.backend == "tcp"
            else measured.backend
        )
        least = rate_text(measured.bytes, max(measured.seconds.values()))
        yield ok(
            "network.bandwidth",
            f"{rate_text(measured.bytes, measured.median)} in the median, {least} at least, between two nodes by {by}",
        )
