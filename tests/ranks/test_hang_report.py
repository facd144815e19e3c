"""Test the message about a hanging job, and the file with the complete report."""

from mpidl.ranks import hang_report
from mpidl.ranks.acts import Address, Sighting

PEERS = [hang_report.Peer(f"n{rank // 2}", Address(100 + rank, "", 3, 4)) for rank in range(6)]
STACKS = 'Thread 0x1 (most recent call first):\n  File "net.py", line 3 in forward'
SIGHTINGS = {
    1: Sighting("T", "epoch 1, iteration 2: computes, after gop max, for 9 s"),
    2: Sighting(""),
    3: Sighting("R", "epoch 1, iteration 2: computes, after gop max, for 8 s", STACKS),
    4: None,
    5: None,
}
HANG = hang_report.Hang(PEERS, "epoch 1: gop max did not complete.", {0: "waits"}, SIGHTINGS)
SILENT = [
    "  rank 1 on host n0 (process 101) does not answer: its process is stopped (SIGSTOP); last "
    "activity: epoch 1, iteration 2: computes, after gop max, for 9 s",
    "  rank 2 on host n1 (process 102) does not answer: its process has ended",
    "  rank 3 on host n1 (process 103) does not answer: its process is running; last activity: "
    "epoch 1, iteration 2: computes, after gop max, for 8 s",
    "  rank 4 on host n2 (process 104) does not answer: no rank on this host answers",
    "  rank 5 on host n2 (process 105) does not answer: no rank on this host answers",
]
NO_STACKS = "  rank 1 is stopped, so it cannot show its Python stacks"


def test_without_a_folder_the_message_has_the_stacks():
    lines = HANG.report(None).splitlines()
    assert lines[0] == "mpidl: epoch 1: gop max did not complete."
    assert lines[1:7] == [*SILENT, "  rank 0, waits"]
    assert lines[7:] == [
        NO_STACKS,
        "  Python stacks of rank 3:",
        "    Thread 0x1 (most recent call first):",
        '      File "net.py", line 3 in forward',
    ]


def test_a_folder_gets_the_stacks(tmp_path):
    lines = HANG.report(str(tmp_path)).splitlines()
    path = tmp_path / hang_report.NAME
    assert lines[1:] == [
        *SILENT,
        "  rank 0, waits",
        f"  {path} lists all ranks, with the Python stacks of the silent ranks",
    ]
    report = path.read_text().splitlines()
    assert report[1:8] == [*lines[:7]] and report[8] == NO_STACKS
    assert '      File "net.py", line 3 in forward' in report


def test_a_folder_that_does_not_exist(tmp_path):
    assert HANG.report(str(tmp_path / "none")) == HANG.report(None)


def test_many_ranks_are_counted(tmp_path):
    peers = [hang_report.Peer("n", Address(rank, "", 3, 4)) for rank in range(100)]
    answers = {rank: f"act {rank}" for rank in range(1, 100)}
    hang = hang_report.Hang(peers, "gop.", answers, {0: Sighting("T", "a")})
    text = hang.report(str(tmp_path))
    assert "rank 16, act 16" in text and "rank 17, act 17" not in text
    assert "  and 83 more ranks\n" in text
    assert "rank 99, act 99" in (tmp_path / hang_report.NAME).read_text()
