"""The chain of a certificate: links, each with the digest of the link before.

A run writes records to metrics.jsonl. The chain is made from them at the end, so a resumed or
rolled-back run removes the links that it will repeat in the same way as its other records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Link = dict[str, Any]

FIRST = "0" * 64  # the entry `previous` of the first link
START, STATE, VALIDATION, END = "start", "state", "validation", "end"
PREFIX = "certificate_"  # of the kinds of records in metrics.jsonl


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys, such as the digest of a link."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def build(records: Iterable[Mapping[str, Any]], end: Mapping[str, Any]) -> list[Link]:
    """Return the links of a run from its records in metrics.jsonl and its last link."""
    links: list[Link] = []
    previous = FIRST
    for link in [*_unbound(records), {"kind": END, **end}]:
        links.append({**link, "previous": previous})
        previous = digest(links[-1])
    return links


def _unbound(records: Iterable[Mapping[str, Any]]) -> Iterator[Link]:
    """Yield the links that records stand for; a state gets the losses since the state before."""
    losses: list[float | None] = []
    current: Link = {}  # all entries of the last start
    for record in records:
        kind = str(record.get("kind"))
        if kind == "iteration":
            losses.append(record.get("loss"))
        if not kind.startswith(PREFIX):
            continue
        link = {**record, "kind": kind.removeprefix(PREFIX)}
        if link["kind"] == STATE:
            link["losses"], losses = losses, []
        if link["kind"] == START:
            changed = {key: v for key, v in link.items() if key not in current or current[key] != v}
            current, link = link, {**changed, **{k: link[k] for k in ("kind", "iteration")}}
            link["ranks"] = current["ranks"]
        yield link


def broken(links: Iterable[Mapping[str, Any]], head: str) -> int | None:
    """Return the index of the first link that the next link or the head does not confirm."""
    links = list(links)
    following = [str(link["previous"]) for link in links[1:]] + [head]
    if links and links[0]["previous"] != FIRST:
        return 0
    digests = map(digest, links)
    pairs = enumerate(zip(digests, following, strict=True))
    return next((index for index, (actual, expected) in pairs if actual != expected), None)


def starts(links: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Return the starts of a chain, each with all its entries."""
    complete: list[Link] = []
    for link in links:
        if link["kind"] == START:
            complete.append({**(complete[-1] if complete else {}), **link})
    return complete
