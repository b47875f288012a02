"""Events of pages behind replay have the names of exact pages of the same tokens."""

import random

from engine.cache.plain_names import PlainNames


class Heard:
    """What a reader of the events believes is cached; checks that parents come first and go last."""

    def __init__(self):
        self.known = set()
        self.events = []

    def stored(self, hashes, parent):
        assert parent is None or parent in self.known
        for page in hashes:
            assert page not in self.known
            self.known.add(page)
        self.events.append(("stored", list(hashes), parent))

    def removed(self, hashes):
        for page in hashes:
            self.known.remove(page)
        self.events.append(("removed", list(hashes), None))

    def cleared(self):
        self.known.clear()
        self.events.append(("cleared", [], None))


def test_exact_pages_keep_their_names():
    heard = Heard()
    names = PlainNames(heard)
    names.stored([b"a", b"b"], None)
    names.stored([b"c"], b"b")
    names.removed([b"c"])
    assert heard.events == [("stored", [b"a", b"b"], None), ("stored", [b"c"], b"b"), ("removed", [b"c"], None)]


def test_a_page_behind_a_hit_is_told_as_the_exact_page_of_its_tokens():
    heard = Heard()
    names = PlainNames(heard)
    names.stored([b"a"], None)
    names.introduce([b"x", b"y"], [b"b", b"c"])
    names.stored([b"x", b"y"], b"a")
    assert heard.events[-1] == ("stored", [b"b", b"c"], b"a")
    names.introduce([b"x", b"y", b"z"], [b"b", b"c", b"d"])
    names.stored([b"z"], b"y")
    assert heard.events[-1] == ("stored", [b"d"], b"c")


def test_a_name_is_stored_with_its_first_page_and_removed_with_its_last():
    heard = Heard()
    names = PlainNames(heard)
    names.stored([b"a", b"b"], None)
    names.introduce([b"x", b"y"], [b"b", b"c"])
    names.stored([b"x", b"y"], b"a")
    assert heard.events[-1] == ("stored", [b"c"], b"b")
    names.removed([b"b"])
    assert heard.known == {b"a", b"b", b"c"}
    names.removed([b"y", b"x"])
    assert heard.known == {b"a"}


def test_after_a_flush_nothing_is_known():
    heard = Heard()
    names = PlainNames(heard)
    names.introduce([b"x"], [b"a"])
    names.stored([b"x"], None)
    names.cleared()
    names.stored([b"a"], None)
    assert heard.known == {b"a"}
    names.removed([b"a"])
    assert heard.known == set()


def test_random_histories_leave_exactly_the_names_of_what_is_there():
    rng = random.Random(0)
    heard = Heard()
    names = PlainNames(heard)
    chains = {}
    for step in range(400):
        history, length = rng.randrange(4), rng.randint(1, 6)
        pages = [f"{'p' if i < history else history}{i}".encode() for i in range(6)]
        plain = [f"p{i}".encode() for i in range(6)]
        have = chains.get(history, 0)
        shared = max(have, min(history, max((min(n, h) for h, n in chains.items()), default=0)))
        if length > shared:
            names.introduce(pages, plain)
            names.stored(pages[shared:length], pages[shared - 1] if shared else None)
            chains[history] = length
        elif step % 3 == 0 and have > history:
            names.removed(pages[history:have][::-1])
            chains[history] = history
        there = {f"p{i}".encode() for n in chains.values() for i in range(n)}
        assert heard.known == there
