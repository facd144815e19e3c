"""Test the links of a certificate: how they are made from records, and what breaks them."""

import copy
import hashlib
import json

import pytest

from mpidl.certificates import chain

RECORDS = [
    {"kind": "certificate_start", "iteration": 0, "ranks": 4, "options": {"seed": "0"}},
    {"kind": "certificate_state", "iteration": 0, "tables": {"learnables": "aa"}},
    {"kind": "iteration", "iteration": 1, "loss": 2.25},
    {"kind": "ranks", "iteration": 1},
    {"kind": "iteration", "iteration": 2, "loss": 1.5},
    {"kind": "certificate_state", "iteration": 2, "tables": {"learnables": "bb"}},
    {"kind": "certificate_start", "iteration": 2, "ranks": 3, "options": {"seed": "0"}},
    {"kind": "iteration", "iteration": 3, "loss": 1.0},
    {"kind": "certificate_state", "iteration": 3, "tables": {"learnables": "cc"}},
]


def links_and_head():
    links = chain.build(RECORDS, {"iteration": 3, "weights": "dd"})
    return links, chain.digest(links[-1])


def test_a_chain_has_the_losses_and_what_changed_at_a_start():
    links, head = links_and_head()
    kinds = ["start", "state", "state", "start", "state", "end"]
    assert [link["kind"] for link in links] == kinds
    assert [link["losses"] for link in links if link["kind"] == "state"] == [[], [2.25, 1.5], [1.0]]
    assert links[3].keys() == {"kind", "iteration", "ranks", "previous"}
    assert [start["options"] for start in chain.starts(links)] == [{"seed": "0"}] * 2
    assert chain.broken(links, head) is None


def test_the_digest_of_a_link_is_that_of_the_standard_library():
    links, _ = links_and_head()
    for link, following in zip(links, links[1:], strict=False):
        text = json.dumps(link, sort_keys=True, separators=(",", ":"))
        assert following["previous"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("index", range(6))
def test_a_changed_link_breaks_the_chain(index):
    links, head = links_and_head()
    links = copy.deepcopy(links)
    links[index]["iteration"] += 1
    assert chain.broken(links, head) == index


def test_a_missing_or_moved_link_and_another_head_break_the_chain():
    links, head = links_and_head()
    assert chain.broken(links[:2] + links[3:], head) == 1
    assert chain.broken([*links[:2], links[3], links[2], *links[4:]], head) == 1
    assert chain.broken(links[1:], head) == 0
    assert chain.broken(links, "0" * 64) == 5
    assert chain.broken(links[:-1], head) == 4
