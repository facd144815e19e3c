"""Run a training step with only public names of mpidl, so that any version can run this file.

`against` starts this file as a process in which another checkout is first on Python's path. This
file imports nothing from `benchmarks`, which the other checkout may lack.
"""

import json
import os
import socket
import sys
import time

import numpy as np

import mpidl as dl


def main():
    task, address = json.loads(sys.argv[1]), sys.argv[2]
    os.sched_setaffinity(0, {task["core"]})
    dl.configure(threads=1)
    world = dl.World(threads=1)
    net = getattr(dl.nn.zoo, task["network"])(seed=0)
    count = task["batch_size"]
    pixels = np.random.default_rng(0).random((count, *net.input_shape), np.float32)
    store = dl.ArrayDatastore(pixels, np.arange(count) % net.output_shape[0])
    queue = dl.MinibatchQueue(store, count, 0, world, "never")
    ((images, labels),) = queue.epoch(1)
    sgdm = dl.SGDM(0.01)
    gradient = dl.value_and_grad(
        lambda net, x, y: dl.softmax_cross_entropy(net(x), y), reduce=world
    )

    def steps(count):
        start = time.perf_counter()
        for _ in range(count):
            loss, gradients, net.state = gradient(net, images, labels)
            net.parameters = sgdm(net.parameters, gradients)
        return (time.perf_counter() - start) / count

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as link:
            print(json.dumps({"rank": 0}), file=link, flush=True)
            for line in link:
                action, *arguments = json.loads(line)
                answer = [steps(*arguments)] if action == "steps" else dl.weights_sha256(net)
                print(json.dumps({"value": answer}), file=link, flush=True)


if __name__ == "__main__":
    main()
