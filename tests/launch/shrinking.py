"""Train in a job in which ranks kill themselves at given moments, for `test_shrink.py`.

    mpirun --with-ft ulfm -n 4 python shrinking.py OUT '{"2": 31, "0": 57}'

In this example, rank 2 ends in its 31st wait for other ranks, and rank 0 in its 57th wait. A rank
that makes fewer waits than its number survives. The last line of the output is JSON with the result
and the number of waits.
"""

import json
import os
import signal
import sys

import short_training

import mpidl as dl
from mpidl.certificates import certificate
from mpidl.comm.transport import Transport
from mpidl.report import metrics

OPTIONS = {
    "epochs": 4,
    "batch_size": 70,
    "solver": "adam",
    "checkpoint_every": 2,
    "validation_frequency": 2,
    "output_network": "best-validation",
    "batchnorm_statistics": "population",
    "worker_load": "measured",
    "certify": "public",
    "certify_every": 2,
    "checkpoint_keep": 3,
    "plots": "none",
    "verbose": "off",
}
START = "certificate_start"  # a record that a loss of ranks repeats
waits = 0


def end_in_wait(moment):
    """Let this process kill itself in the wait whose number is `moment`."""
    poll = Transport._poll

    def counted(*arguments):
        global waits
        waits += 1
        if waits == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        poll(*arguments)

    Transport._poll = counted


def certificate_states(out):
    """Return the states of the certificate, without bonds between them."""
    document = certificate.read(out)
    assert document.broken is None
    links = document.of_kind("state") + document.of_kind("validation")
    return [{name: link[name] for name in link if name != "previous"} for link in links]


def main():
    out, moments = sys.argv[1], json.loads(sys.argv[2])
    world = dl.World(timeout=60)
    images = short_training.pictures(300)
    validation = short_training.pictures(90, "validation")
    net = short_training.small()
    on_lost_rank = "shrink" if world.size > 1 else "stop"
    options = dl.TrainingOptions(**OPTIONS, validation=validation, on_lost_rank=on_lost_rank)
    end_in_wait(moments.get(str(world.rank)))
    result = dl.train(net, images, options, world=world, out=out)
    if world.rank == 0:
        kinds = [(r["kind"], r["iteration"]) for r in metrics.read(f"{out}/metrics.jsonl")]
        content = {
            "sha256": dl.weights_sha256(net),
            "ranks": world.size,
            "lost": [rank for rank, _ in world.lost_ranks],
            "lost_ranks": result.lost_ranks,
            "iterations": result.history.iteration.iteration.tolist(),
            "records": sorted(r for r in kinds if r[0] not in ("ranks", "lost", START)),
            "states": certificate_states(out),
            "losses": result.history.iteration.loss.tolist(),
            "validations": result.history.validation.loss.tolist(),
            "waits": waits,
        }
        print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
