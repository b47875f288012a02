"""iptables rules that let through what network policies allow and refuse the rest, as a network plugin would. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from deploy.validate_network import Pair


def rules(role: str, addresses: Mapping[str, Sequence[str]], pairs: Iterable[Pair]) -> str:
    """Return the input of `iptables-restore` for a host of `role`; `addresses` are those of every role's hosts.

    Only openings of connections are judged. What is refused gets a reset, not silence: a caller knows at once, whatever
    the machine does meanwhile.
    """
    lines = [
        "*filter",
        ":INPUT ACCEPT [0:0]",
        ":OUTPUT ACCEPT [0:0]",
        "-A INPUT -i lo -j ACCEPT",
        "-A OUTPUT -o lo -j ACCEPT",
    ]
    lines += [f"-A {chain} -p tcp ! --syn -j ACCEPT" for chain in ("INPUT", "OUTPUT")]
    for source, target, port in sorted(pairs):
        if role == target:
            lines += [_accept("INPUT -s", address, port, source) for address in addresses.get(source, ())]
        if role == source:
            lines += [_accept("OUTPUT -d", address, port, target) for address in addresses.get(target, ())]
    lines += [f"-A {chain} -p tcp -j REJECT --reject-with tcp-reset" for chain in ("INPUT", "OUTPUT")]
    return "\n".join([*lines, "-A INPUT -j DROP", "-A OUTPUT -j DROP", "COMMIT", ""])


def used(saved: str, role: str) -> set[Pair]:
    """Return the pairs whose connections a host of `role` has let in, by the counters of `iptables-save -c`."""
    found: set[Pair] = set()
    for line in saved.splitlines():
        words = line.split()
        if "-A INPUT" in line and "--comment" in words and not words[0].startswith("[0:"):
            found.add((words[words.index("--comment") + 1], role, int(words[words.index("--dport") + 1])))
    return found


def _accept(where: str, address: str, port: int, peer: str) -> str:
    return f"-A {where} {address} -p tcp --dport {port} -m comment --comment {peer} -j ACCEPT"
