"""Check that a file is a trace in the Chrome Trace Event format.

`SCHEMA` follows the description of the format: https://docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (sections JSON Object Format, Complete Events, Async
Events and Metadata Events).
"""

import gzip
import json

import jsonschema

NUMBER = {"type": "number", "minimum": 0}
NAMES = ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
EVENT = {
    "type": "object",
    "required": ["ph", "name", "pid", "tid"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "cat": {"type": "string", "minLength": 1},
        "ph": {"enum": ["X", "b", "e", "M"]},
        "pid": {"type": "integer"},
        "tid": {"type": "integer"},
        "ts": NUMBER,
        "dur": NUMBER,
        "id2": {
            "required": ["local"],
            "properties": {"local": {"type": "string"}},
            "additionalProperties": False,
        },
        "args": {"type": "object"},
    },
    "allOf": [
        {"if": {"properties": {"ph": {"const": phase}}}, "then": rule}
        for phase, rule in {
            "X": {"required": ["ts", "dur"]},
            "b": {"required": ["ts", "id2", "cat"]},
            "e": {"required": ["ts", "id2", "cat"]},
            "M": {
                "required": ["args"],
                "properties": {
                    "name": {"enum": list(NAMES)},
                    "args": {
                        "properties": {
                            "name": {"type": "string"},
                            "sort_index": {"type": "integer"},
                        },
                        "minProperties": 1,
                        "additionalProperties": False,
                    },
                },
            },
        }.items()
    ],
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {"type": "array", "items": EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
}


def read(path):
    """Read a trace, check it, and return it."""
    with gzip.open(path) as file:
        trace = json.load(file)
    check(trace)
    return trace


def check(trace):
    """Raise an error unless an object is a valid trace."""
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    check_threads(trace)
    check_nesting(trace)
    check_pairs(trace)


def check_threads(trace):
    """Check that thread numbers are unique, because Perfetto merges equal numbers."""
    processes = {}
    for event in trace["traceEvents"]:
        if processes.setdefault(event["tid"], event["pid"]) != event["pid"]:
            raise ValueError(f"two processes have a thread {event['tid']}")
    if set(processes) & set(processes.values()):
        raise ValueError("a thread has the number of a process")


def check_nesting(trace):
    """Check that a thread's complete events are nested, because viewers draw them as a stack."""
    lines = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, end = (round(1e3 * t) for t in (event["ts"], event["ts"] + event["dur"]))
            lines.setdefault((event["pid"], event["tid"]), []).append((start, -end))
    for line, spans in lines.items():
        stack = []
        for start, negative_end in sorted(spans):
            while stack and stack[-1] <= start:
                stack.pop()
            if stack and -negative_end > stack[-1]:
                raise ValueError(f"overlapping events of process and thread {line}")
            stack.append(-negative_end)


def check_pairs(trace):
    """Check that each asynchronous event begins once and later ends once."""
    begins = {}
    for event in trace["traceEvents"]:
        key = event["pid"], event.get("cat"), event["name"], str(event.get("id2"))
        if event["ph"] == "b":
            if key in begins:
                raise ValueError(f"two events begin as {key}")
            begins[key] = event["ts"]
        elif event["ph"] == "e" and begins.pop(key) > event["ts"]:
            raise ValueError(f"{key} ends before it begins")
    if begins:
        raise ValueError(f"events without an end: {list(begins)}")


def complete(trace, rank, category):
    """Return the complete events of a rank and category."""
    events = trace["traceEvents"]
    return [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category]
