"""Reads compiled kernels for what a chip would only do wrong now and then."""

import re

_MOVES = re.compile(r" = t(t\.(reshape|join|trans|split|expand_dims|broadcast)|tg\.convert_layout) ")


def open_products(ttgir: str) -> list[str]:
    """Return products of Hopper whose factor in registers the next pass of a loop writes while they may still read it.

    A product that no wait follows in its pass is open until the first ``wait 0`` of the next one. What its factor is made of
    must lie behind that wait, too.
    """
    found, body = list[str](), list[str]()
    for line in ttgir.splitlines():
        if "scf.for" in line:
            body = []
        elif "scf.yield" in line:
            found += _open_in(body)
            body = []
        else:
            body.append(line)
    return found


def _open_in(body: list[str]) -> list[str]:
    waits = [i for i, line in enumerate(body) if "warp_group_dot_wait" in line and "pendings = 0 " in line]
    made = {match[1]: i for i, line in enumerate(body) if (match := re.match(r"\s*(%\w+)", line)) and " = " in line}
    found = []
    for at, line in enumerate(body):
        product = re.search(r"warp_group_dot (%\w+),.* : tensor<", line)
        if product is None or any(wait > at for wait in waits):
            continue
        ahead, todo = set[int](), [product[1]]
        while todo:
            i = made.get(todo.pop())
            if i is not None and i not in ahead:
                ahead.add(i)
                if _MOVES.search(body[i]):
                    todo += re.findall(r"%\w+", body[i].split(" = ", 1)[1])
        if not waits or min(ahead, default=at) < waits[0]:
            found.append(line.strip()[:80])
    return found
