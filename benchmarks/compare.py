"""`python -m benchmarks compare`: our training step and PyTorch's, in turns on the same cores."""

import contextlib
import importlib.util
import math
import os
import tempfile
import time

from benchmarks import machine, others, ours, theirs, turns
from mpidl.errors import Fault, UserError

# What holds each side to AVX2, as environment variables.
HELD = {
    None: ({}, {}),
    "avx2": (
        {"MPIDL_CPU": "x86-64-v3", "OPENBLAS_CORETYPE": "Haswell"},
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}
# Losses of the first step that differ by more are those of two different computations.
SAME_LOSS = 1e-4
STEPS_COMPARED = 3


def main(chosen):
    """Run the sub-command; returns its exit code."""
    ranks, threads = chosen.ranks, chosen.threads
    if importlib.util.find_spec("torch") is None and not chosen.others:
        raise UserError(
            "compare needs PyTorch, which is not installed: pip install '.[bench]' (its build "
            "for CPUs will do)"
        )
    if ranks > 1 and chosen.batch_size % (16 * ranks):
        raise UserError(
            f"--batch-size must be a multiple of {16 * ranks} for {ranks} ranks, so that each has "
            f"as many images, found {chosen.batch_size}"
        )
    print(
        f"{chosen.network}, batch {chosen.batch_size}, {ranks} rank(s) x {threads} thread(s), "
        f"cores {machine.cores_of(ranks, threads)}" + (", AVX2" if chosen.held_to else "")
    )
    if ranks * threads > len(os.sched_getaffinity(0)):
        print(f"warning: {ranks} x {threads} threads share {len(os.sched_getaffinity(0))} core(s)")
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        result = memory(chosen, folder) if chosen.memory else speed(chosen, folder)
    machine.write_json(chosen.json, result)
    if result.get("loss_difference", 0) > SAME_LOSS:
        raise Fault(
            f"the losses of the first step differ by {result['loss_difference']:.1e}: the two "
            "sides do not compute the same"
        )
    return 0


def our_side(chosen, folder):
    """Our ranks."""
    environment = HELD[chosen.held_to][0]
    return ours.side("ours", chosen, folder, ranks=chosen.ranks, environment=environment)


def other_side(name, chosen, folder):
    """The side of one PyTorch variant or other library."""
    if name in chosen.others:
        return others.side(name, chosen, folder)
    environment = HELD[chosen.held_to][1]
    return theirs.side(name, chosen, folder, ranks=chosen.ranks, environment=environment)


def names_of(chosen):
    """Whom ours is compared with: variants of PyTorch, where it is installed, and others."""
    torch = chosen.variants if importlib.util.find_spec("torch") else []
    return [*torch, *chosen.others]


def speed(chosen, folder):
    """The result of timing all sides in turns."""
    with contextlib.ExitStack() as stack:
        us = stack.enter_context(our_side(chosen, folder))
        about = us.ask("about")[0]
        our_losses = us.ask("losses", STEPS_COMPARED)[0]
        result = machine.facts(chosen, about["versions"]) | {"failed": {}, "losses": {}}
        result["arithmetic"] = {"ours": about["arithmetic"]}
        result["losses"]["ours"] = our_losses
        sides = {}
        for name in names_of(chosen):
            began = time.monotonic()
            try:
                side = stack.enter_context(other_side(name, chosen, folder))
                about = side.ask("about")[0]
                found = side.ask("losses", STEPS_COMPARED)
                losses = [math.fsum(x) / len(x) for x in zip(*found, strict=True)]
            except turns.Lost as lost:
                result["failed"][name] = lost.reason
                print(f"{name}: failed: {lost.reason}", flush=True)
                continue
            sides[name] = side
            result["versions"] |= about["versions"]
            result["arithmetic"][name] = about["arithmetic"]
            result["losses"][name] = losses
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        if not sides:
            raise Fault("nothing to compare with: no other side could be started")
        times = take_turns(us, sides, chosen.rounds)
    return result | evaluate(chosen, times, result["losses"])


def take_turns(us, sides, rounds):
    """Ours, one of theirs, ours, the next of theirs, ...; returns {name: [(ours, theirs), ...]},
    seconds of a step, each the mean over a turn."""

    def turn(side, count):
        return max(sum(seconds) / len(seconds) for seconds in side.ask("steps", count))

    everyone = {"ours": us, **sides}
    counts = {k: turns.steps_for(turn(side, 2)) for k, side in everyone.items()}
    times = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides) if i % 2 == 0 else reversed(sides):
            pair = {}
            for kind in ("ours", name) if i % 2 == 0 else (name, "ours"):
                pair[kind] = turn(everyone[kind], counts[kind])
            times[name].append((pair["ours"], pair[name]))
    return times


def evaluate(chosen, times, losses):
    """Print the table; returns what of the result it holds."""
    mine = [pair[0] for pairs in times.values() for pair in pairs]
    medians = {k: machine.median([x for _, x in pairs]) for k, pairs in times.items()}
    torch = {k: v for k, v in medians.items() if k not in chosen.others}
    best = min(torch or medians, key=medians.get)
    print(f"\n{'':24}  ms a step, {chosen.rounds} rounds               theirs / ours")
    print(f"{'ours':24}  {machine.spread(mine, 1e3)}")
    for name, pairs in times.items():
        ratios = [b / a for a, b in pairs]
        print(
            f"{name:24}  {machine.spread([b for _, b in pairs], 1e3):32}  {machine.spread(ratios)}"
        )
    ratio = medians[best] / machine.median(mine)
    ratios = [b / a for a, b in times[best]]
    first = {k: abs(v[0] / losses["ours"][0] - 1) for k, v in losses.items() if k != "ours"}
    print(
        f"ratio {ratio:.2f} (turn by turn {min(ratios):.2f} to {max(ratios):.2f}): "
        f"{best} against ours"
    )
    print(
        f"loss of step 1: {losses['ours'][0]:.8f}; others differ by at most "
        f"{max(first.values()):.1e}, after {STEPS_COMPARED} steps by "
        f"{max(abs(v[-1] / losses['ours'][-1] - 1) for v in losses.values()):.1e}"
    )
    return {
        "network": chosen.network,
        "batch_size": chosen.batch_size,
        "ranks": chosen.ranks,
        "threads": chosen.threads,
        "held_to": chosen.held_to,
        "winograd": chosen.winograd,
        "rounds": chosen.rounds,
        "ratio": ratio,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "best_variant": best,
        "ours_ms": machine.median(mine) * 1e3,
        "ours_ms_spread": machine.summary(mine, 1e3),
        "torch_ms": {k: v * 1e3 for k, v in torch.items()},
        "others_ms": {k: v * 1e3 for k, v in medians.items() if k not in torch},
        "ms_spread": {k: machine.summary([b for _, b in p], 1e3) for k, p in times.items()},
        "loss_difference": max(first.values()),
    }


def memory(chosen, folder):
    """The result of measuring each side's peak memory, each in fresh processes."""
    with our_side(chosen, folder) as us:
        about = us.ask("about")[0]
        mine = sum(us.ask("memory", 3))
    result = machine.facts(chosen, about["versions"]) | {"failed": {}}
    print(f"{'ours':24}  {mine / 2**20:8.1f} MiB above what was held before the first step")
    found = {}
    for name in names_of(chosen):
        try:
            with other_side(name, chosen, folder) as side:
                side.ask("losses", 2)
                found[name] = sum(side.ask("memory", 2)) / 2**20
                print(f"{name:24}  {found[name]:8.1f} MiB", flush=True)
        except turns.Lost as lost:
            result["failed"][name] = lost.reason
            print(f"{name:24}  failed: {lost.reason}", flush=True)
    if not found:
        raise Fault("nothing to compare with: no variant could be started")
    least = min(found, key=found.get)
    print(f"PyTorch's least / ours {found[least] * 2**20 / mine:.2f} ({least})")
    return result | {
        "network": chosen.network,
        "batch_size": chosen.batch_size,
        "ranks": chosen.ranks,
        "threads": chosen.threads,
        "ours_mib": mine / 2**20,
        "torch_mib": found,
        "least_variant": least,
        "memory_ratio": found[least] * 2**20 / mine,
    }
