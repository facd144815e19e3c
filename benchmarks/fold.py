"""`python -m benchmarks fold`: what the fixed order of sums costs.

The training step with the fixed fold against one that adds from left to right and calls
MPI_Allreduce, as other tools do.
"""

import contextlib
import tempfile

import numpy as np

from benchmarks import machine, ours, subject, turns
from mpidl.autodiff import value_and_grad
from mpidl.comm import World
from mpidl.errors import UserError
from mpidl.training.options import configuration

TURNS = 5  # of each process


def main(chosen):
    """Run the sub-command; returns its exit code."""
    launched = machine.launched()
    if launched and chosen.ranks:
        raise UserError("--ranks starts the ranks itself: run it without mpirun")
    result = here(chosen) if launched else fresh(chosen)
    if result is not None:
        machine.write_json(chosen.json, result)
    return 0


def fresh(chosen):
    """The result in fresh processes: in each round fold, plain, and fold again as a control.

    Where a process happens to lie in memory moves its times by more than the fold costs, so every
    round starts new ones; within a round they take turns.
    """
    found = {}
    counts = chosen.ranks or [1, 2]
    for ranks in counts:
        rounds = []
        for _ in range(chosen.rounds):
            rounds.append(_round(chosen, ranks))
            about = rounds[-1].pop("about")
        found[ranks] = {kind: np.array([r[kind] for r in rounds]) for kind in rounds[0]}
        if ranks == counts[0]:
            print(
                f"{chosen.network}, batch {chosen.batch_size}, {chosen.threads} thread(s) a rank, "
                f"{about['arithmetic']}; {chosen.rounds} rounds of fresh processes"
            )
        _show(ranks, found[ranks])
    return machine.facts(chosen, about["versions"]) | {
        "arithmetic": about["arithmetic"],
        "processes": "fresh",
        **_described(chosen),
        **_figures(found),
    }


def _round(chosen, ranks):
    """Seconds of a step of each kind, in processes started for this round."""
    kinds = {"fold": False, "plain": True, "again": False}
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder, contextlib.ExitStack() as st:
        sides = {}
        for kind, plain in kinds.items():
            side = ours.side(kind, chosen, folder, ranks=ranks, plain=plain)
            sides[kind] = st.enter_context(side)

        def turn(kind, count):
            return max(np.mean(seconds) for seconds in sides[kind].ask("steps", count))

        times = {kind: [] for kind in kinds}
        for kind in kinds:
            turn(kind, 2)
        for i in range(TURNS):
            for kind in list(kinds) if i % 2 == 0 else reversed(kinds):
                times[kind].append(turn(kind, chosen.iterations))
        medians = {kind: float(np.median(values)) for kind, values in times.items()}
        return medians | {"about": sides["fold"].ask("about")[0]}


def here(chosen):
    """The result in the processes that run this, which take turns with themselves; None on all
    ranks but 0. Also, how much of the gradients' exchange is hidden behind backward:
    1 - (wait at the end of backward) / (exchange by itself)."""
    subject.configure(chosen)
    fixed = World(timeout=chosen.timeout)
    plain = World(timeout=chosen.timeout, plain=True)
    steps = {}
    for kind, world in (("fold", fixed), ("plain", plain)):
        net = subject.network(chosen.network, chosen.image, chosen.seed)
        batch = subject.mini_batch(net.input_shape, chosen.batch_size, chosen.seed)
        steps[kind] = subject.Step(net, batch, world, chosen.batchnorm)
    alone = _exchange_alone(steps["fold"], chosen.rounds)

    def turn(kind, count):
        fixed.barrier()
        return float(np.mean(turns.timed_steps(steps[kind], count, fixed.barrier)))

    for kind in steps:
        turn(kind, 2)
        steps[kind].times.clear()
    times = {"fold": [], "plain": [], "again": []}
    for i in range(chosen.rounds):
        for kind in list(times) if i % 2 == 0 else reversed(times):
            times[kind].append(turn("plain" if kind == "plain" else "fold", chosen.iterations))
    if fixed.rank:
        return None
    found = {fixed.size: {kind: np.array(values) for kind, values in times.items()}}
    print(
        f"{chosen.network}, batch {chosen.batch_size}, {chosen.threads} thread(s) a rank, "
        f"{machine.arithmetic()}; {chosen.rounds} rounds of {chosen.iterations} steps, in turns"
    )
    _show(fixed.size, found[fixed.size])
    hidden = None
    if fixed.size > 1:
        wait = float(np.median(steps["fold"].times.wait))
        hidden = max(0.0, 1 - wait / alone)
        print(
            f"  gradient exchange     {alone * 1e3:.2f} ms by itself, {wait * 1e3:.2f} ms of wait "
            f"after backward: {hidden * 100:.0f} % hidden"
        )
    versions = configuration.versions_of(fixed.transport.MPI.Get_library_version())
    return machine.facts(chosen, versions) | {
        "processes": "these",
        **_described(chosen),
        **_figures(found),
        "hidden": hidden,
    }


def _exchange_alone(step, rounds):
    """Median seconds of the exchange of all gradients with nothing else going on."""
    times = []
    for _ in range(max(rounds, 9)):
        _, gradients, _ = value_and_grad(subject.loss_of)(step.net, *step.batch)
        step.world.barrier()
        times.append(turns.seconds(lambda g=gradients: step.world.gplus(g)))
    return float(np.median(times))


def _described(chosen):
    names = ("network", "batch_size", "threads", "batchnorm", "rounds", "iterations")
    return {name: getattr(chosen, name) for name in names}


def _ratios(times):
    """(overhead of each round, the control's): a fold's step over another's, less 1."""
    return times["fold"] / times["plain"] - 1, times["again"] / times["fold"] - 1


def _show(ranks, times):
    overhead, control = _ratios(times)
    print(f"{ranks} rank(s)")
    print(f"  step, fixed fold      {machine.spread(times['fold'], 1e3)} ms")
    print(f"  step, plain Allreduce {machine.spread(times['plain'], 1e3)} ms")
    print(f"  overhead of the fold  {machine.spread(overhead, 100)} %")
    print(f"  the fold to itself    {machine.spread(control, 100)} %", flush=True)


def _figures(found):
    def of(function):
        return {str(ranks): function(times) for ranks, times in found.items()}

    return {
        "overhead": of(lambda t: float(np.median(_ratios(t)[0]))),
        "control": of(lambda t: float(np.median(_ratios(t)[1]))),
        "overhead_quartiles": of(lambda t: np.quantile(_ratios(t)[0], [0.25, 0.75]).tolist()),
        "control_quartiles": of(lambda t: np.quantile(_ratios(t)[1], [0.25, 0.75]).tolist()),
        "ms": of(lambda t: {kind: machine.summary(values, 1e3) for kind, values in t.items()}),
    }
