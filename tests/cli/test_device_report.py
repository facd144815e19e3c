"""Test the report on a job's ranks, with simulated ranks and with files of simulated hosts."""

import json
import os

import pytest

from mpidl.backends.discovery import Gpu
from mpidl.cli import device_probe, device_report
from mpidl.cli.device_probe import Memory, RankReport, SharedMemory
from mpidl.ranks.devices import RankGpus
from mpidl.ranks.thread_budget import Cores
from mpidl.text import host_list, ranges

GB = 10**9
H200 = Gpu(0, "card 0", "NVIDIA H200", "sm_90", 132, 139 << 30)


def rank(host="n1", cores=range(8), *, gpus=(), quota=None, **other):
    """Return the report of a rank on a host with 64 cores."""
    fields = {
        "host_cores": 64,
        "cpu": "AMD EPYC 7763",
        "build": "x86-64-v3",
        "best_build": "x86-64-v3",
        "sources": "abc",
        "memory": Memory(512 * GB, 500 * GB),
        "shared_memory": SharedMemory("tmpfs", 256 * GB, 250 * GB, 3e9),
        "driver": "",
        "versions": "mpidl 1",
        "mpi": "MPICH 5",
        "fabric": "mlx5_0",
    }
    reason = "" if gpus else "no NVIDIA driver"
    return RankReport(
        host=host,
        cores=Cores(tuple(cores), quota),
        gpus=RankGpus(host, gpus, reason),
        **(fields | other),
    )


def bound(hosts, count=8, width=8, **other):
    """Return reports of `count` ranks per host, each with `width` separate cores."""
    return [
        rank(host, range(i * width, (i + 1) * width), **other)
        for host in hosts
        for i in range(count)
    ]


def rows(report):
    return [line.split("  ") for line in device_report.table(report)[1:]]


def test_a_job_as_it_should_be():
    report = device_report.compare(bound(["n1", "n2"], 2, 32))
    assert report.warnings == [] and report.threads == [32] * 4
    lines = device_report.table(report)
    assert lines[0].split() == "ranks hosts cores threads kernels GB free GPU".split()
    assert lines[2].split("  ")[0] == "1" and "32-63 of 64, bound" in lines[2]
    assert len(lines) == 5 and all("500 of 512" in line for line in lines[1:])


def test_a_large_job_has_a_row_per_kind_of_rank():
    hosts = [f"n{number:03}" for number in range(1, 129)]
    ranks = bound(hosts)
    assert len(ranks) == 1024
    lines = device_report.table(device_report.compare(ranks))
    assert len(lines) == 2 and lines[1].startswith("0-1023  n[001-128]  8 of 64, bound  8  ")
    ranks[800:] = [r._replace(memory=Memory(512 * GB, 7 * GB, 64 * GB)) for r in ranks[800:]]
    ranks[5] = ranks[5]._replace(build="generic", cpu="older")
    report = device_report.compare(ranks)
    lines = device_report.table(report)
    assert [line.split()[0] for line in lines[1:]] == ["0-4,6-799", "5", "800-1023"]
    assert "7.0 of 512, limit 64.0" in lines[3] and "n[101-128]" in lines[3]
    assert len(max(lines, key=len)) < 100
    assert len(report.warnings) == 1 and "older (64 cores) on n001; " in report.warnings[0]
    assert len(json.dumps(device_report.as_json(report))) > 1024 * 300


def test_many_kinds_of_ranks_are_counted():
    ranks = [rank(f"n{i}", memory=Memory((i + 1) * GB, GB)) for i in range(40)]
    lines = device_report.table(device_report.compare(ranks))
    assert len(lines) == 1 + device_report.MAX_KINDS + 1
    assert lines[-1] == "and 8 more kinds of ranks: see --json"


@pytest.mark.parametrize(
    "ranks, threads, expected",
    [
        ([rank()], 0, []),
        ([rank(cores=range(64))], 0, []),  # one rank needs no binding
        ([rank(), rank("n2")], 0, []),
        (
            [rank()] * 2,
            0,
            [
                "2 ranks on n1 are not bound to separate cores, so their threads "
                "may move or share a core: mpirun -bind-to hwthread:4"
            ],
        ),
        ([rank(), rank(cores=range(8, 16))] * 2, 0, ["4 ranks on n1 are not bound"]),
        (
            [rank()] * 2,
            5,
            [
                "2 rank(s) x 5 thread(s) on n1 share 8 core(s), which slows all of "
                "them: use --threads 4"
            ],
        ),
        (
            [rank(cores=[0])] * 3,
            0,
            [
                "3 rank(s) x 1 thread(s) on n1 share 1 core(s), which slows "
                "all of them: start at most 1 per host"
            ],
        ),
        (
            [rank(cores=[0]), rank(cores=range(1, 9))],
            2,
            ["rank 0 on n1 runs 2 threads but may use only 1 core(s): use --threads 1"],
        ),
        (bound(["n1", "n2"], quota=4), 0, ["8 rank(s) x 1 thread(s) on n[1-2] share 4 core(s)"]),
        (
            [rank(), rank("n2", cpu="Xeon")],
            0,
            [
                "the ranks have different CPUs, and each step waits for the slowest rank: "
                "AMD EPYC 7763 (64 cores) on n1; Xeon (64 cores) on n2; request nodes of one kind "
                "(sbatch --constraint), or balance the load (--worker-load measured)"
            ],
        ),
        ([rank(gpus=(H200,)), rank("n2", gpus=(H200,), cpu="Xeon")], 0, []),  # the GPUs compute
        (
            [rank(), rank("n2", versions="mpidl 2")],
            0,
            ["the ranks run different software: mpidl 1 on n1; mpidl 2 on n2; install"],
        ),
        (bound(["n1"], gpus=(H200,)), 0, ["8 ranks share 1 GPU(s) on n1"]),
    ],
)
def test_warnings_say_what_mends_them(ranks, threads, expected):
    lines = device_report.compare(ranks, threads).warnings
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"warning: {text}"), line


@pytest.mark.parametrize(
    "memory, text",
    [
        (SharedMemory("tmpfs", 64 * GB, 2 * GB, 3e9), ""),
        (SharedMemory("tmpfs", 64 * GB, 2 * GB, None), ""),  # not measured
        (SharedMemory(), "there is no /dev/shm on n[1-2]: mount -t tmpfs tmpfs /dev/shm"),
        (
            SharedMemory("overlay", 64 * GB, 2 * GB, 3e9),
            "/dev/shm on n[1-2] is on a disk (overlay)",
        ),
        (SharedMemory("tmpfs", 64 * GB, 2 * GB, 5e7), "/dev/shm on n[1-2] writes less than 100 MB"),
        (
            SharedMemory("tmpfs", 64 << 20, 60 << 20, 3e9),
            "/dev/shm on n[1-2] has less than the 1024 MB free that the images of --cache-mb need: "
            "docker run --shm-size=2g",
        ),
        (SharedMemory("tmpfs", 64 * GB, 9), "/dev/shm on n[1-2] has less than the 1024 MB"),
    ],
)
def test_shared_memory(memory, text):
    report = device_report.compare(bound(["n1", "n2"], 2, shared_memory=memory))
    assert len(report.warnings) == bool(text), report.warnings
    assert "".join(report.warnings).startswith(f"warning: {text}" if text else "")
    separate = [rank(shared_memory=memory), rank("n2", shared_memory=memory)]
    assert device_report.compare(separate).warnings == []


def test_facts_that_differ_name_their_hosts():
    ranks = [*bound(["n1", "n2"]), *bound(["n3"], mpi="Open MPI 5")]
    facts = device_report.facts(device_report.compare(ranks))
    assert facts["MPI"] == "MPICH 5 on n[1-2]; Open MPI 5 on n3"
    assert facts["fabric"] == "mlx5_0" and facts["/dev/shm"] == "256 GB, tmpfs"


def test_gpus_of_the_ranks():
    cards = tuple(H200._replace(index=i, identity=f"card {i}") for i in range(2))
    report = device_report.compare(bound(["n1"], 2, gpus=cards, driver="550.54"))
    assert [gpu.identity for gpu in report.gpus] == ["card 0", "card 1"]
    assert all(row[-1] == "NVIDIA H200, 139 GiB" for row in rows(report))
    assert device_report.facts(report)["GPU driver"] == "550.54"
    assert device_report.as_json(report)["ranks"][1]["gpu"]["identity"] == "card 1"


def test_the_command_that_binds():
    assert device_report.binding_command(4, "MPICH 5", True).startswith("srun --cpu-bind=cores")
    assert "--map-by slot:PE=4" in device_report.binding_command(4, "Open MPI v5.0.5")
    assert device_report.binding_command(4, "MPICH Version: 5") == "mpirun -bind-to hwthread:4"


@pytest.mark.parametrize(
    "groups, files, limit",
    [
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a/b", {"a/memory.max": "1000", "a/b/memory.max": "500"}, 500),
        ("0::/", {"memory.max": "700"}, 700),
        ("0::/not/mounted", {"memory.max": "700"}, 700),
        ("5:cpu:/x\n4:memory:/x", {"memory/x/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("0::/a", {}, None),
    ],
)
def test_the_limit_of_memory(groups, files, limit, tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"{groups}\n")
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemFree: 1 kB\nMemAvailable:  8 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    memory = device_probe.find_memory(str(tmp_path), str(tmp_path / "cgroup"))
    assert memory == (16 << 10, 8 << 10, limit)
    assert device_probe.find_memory(str(tmp_path / "none")) == (None, None, None)


def test_the_file_system_of_shared_memory(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / overlay rw 0 0\nshm {tmp_path} tmpfs rw 0 0\nx {tmp_path}2 xfs rw\n")
    memory = device_probe.find_shared_memory(str(tmp_path), True, str(mounts))
    status = os.statvfs(tmp_path)
    assert memory.kind == "tmpfs" and memory.total == status.f_blocks * status.f_frsize
    assert memory.speed > 0 and os.listdir(tmp_path) == ["mounts"]
    assert device_probe.find_shared_memory(str(tmp_path), False, str(mounts)).speed is None
    assert device_probe.find_shared_memory("/", False, str(mounts)).kind == "overlay"
    assert device_probe.find_shared_memory(str(tmp_path / "none")) == SharedMemory()


def test_the_fabric(tmp_path, monkeypatch):
    for name in device_probe.MPI_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    text = "MPICH Version: 5\nMPICH Device: ch4:ucx\nMPICH configure: --with-device=ch4\n"
    assert device_probe.fabric(text, str(tmp_path)) == "ch4:ucx"
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    monkeypatch.setenv("UCX_TLS", "rc")
    assert device_probe.fabric("Open MPI v5", str(tmp_path)) == (
        "mlx5_0 (InfiniBand 200 Gb/sec (4X HDR)), cxi0 (Slingshot), UCX_TLS=rc"
    )
    monkeypatch.undo()
    assert device_probe.fabric("Open MPI v5", str(tmp_path / "none"))


def test_names_of_hosts():
    for hosts, text in (
        (["login"], "login"),
        (["n1", "n1", "n2", "n10"], "n[1-2,10]"),
        (["n09", "n10", "n11", "gpu-3.cluster"], "n[09-11], gpu-3.cluster"),
        (["n099", "n100", "n1000"], "n[099-100], n1000"),
        (["rack1-node2", "rack1-node3", "rack2-node1"], "rack1-node[2-3], rack2-node1"),
        (
            [f"{letter}0" for letter in "abcdefghijkl"],
            "a0, b0, c0, d0, e0, f0, g0, h0, i0, j0 and 2 more",
        ),
    ):
        assert host_list(hosts) == text
    assert ranges([]) == "" and ranges([5, 2, 1, 0, 2]) == "0-2,5"
