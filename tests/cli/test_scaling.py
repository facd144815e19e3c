"""Arguments of mpidl.scaling: those of the study, those of mpidl.train, and what it refuses."""

import pytest

import mpidl as dl
from mpidl.cli import scaling
from mpidl.performance import prediction
from mpidl.performance.simulation import Link


def test_other_arguments_are_those_of_train():
    words = "--ranks 1,2 --epochs 3 --weak --data=/a --repeat=2 --overwrite -- --threads 2"
    command = scaling.parse(words.split())
    assert command.parsed.ranks == [1, 2] and command.parsed.weak and command.parsed.overwrite
    assert command.parsed.repeat == 2
    assert command.words == ("--epochs", "3", "--data=/a", "--threads", "2")
    assert command.typed == {"epochs": 3, "data": "/a", "threads": 2}


def test_numbers_to_predict():
    powers = prediction.default_counts()
    assert powers[0] == 1 and powers[-1] == 1024 and len(powers) == 11
    for words, counts in (
        ("--predict", powers),
        ("--predict --epochs 3", powers),
        ("--predict 2,4 --epochs 3", [2, 4]),
        ("--predict=8 --epochs 3", [8]),
    ):
        parsed = scaling.parse(words.split()).parsed
        assert parsed.predict == counts and parsed.ranks is None
    link = scaling.parse(["--predict", "--link", "2,100"]).parsed.link
    assert link == Link(pytest.approx(2e-6), pytest.approx(8e-11))


def test_without_a_count_the_cores_are_filled():
    counts = scaling.parse(["--epochs", "1"]).parsed.ranks
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] <= scaling._cores()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 1,x", "--ranks must be numbers of ranks such as 1,2,3, found 1,x"),
        ("--ranks 0", "--ranks must be numbers of ranks"),
        ("--epoch 3", "unknown option --epoch: did you mean --epochs"),
        ("--repeat 0", "--repeat must be at least 1"),
        ("--ranks", "--ranks: expected one argument"),
        ("--resume runs/a", "--resume: a study cannot use this option of mpidl.train"),
        ("--preview a.png", "--preview: a study cannot use"),
        ("--upload s3://a/b", "--upload: a study cannot use"),
        ("--table --ranks 2", "--table: expected no --ranks"),
        ("--link 2,100", "--link: expected --predict with it"),
        ("--predict --link 2", "--link must be US,GBIT, such as 2,100, found 2"),
        ("--predict --link 1.2.3,4", "--link must be US,GBIT"),
        ("--predict --link 2,0", "--link must be US,GBIT"),
        ("--ranks-per-node 4", "--ranks-per-node: expected --predict with it"),
        ("--out s3://a/b", "--out s3://a/b: "),
        ("--epochs many", "--epochs must be a whole number"),
    ],
)
def test_refused(words, message):
    with pytest.raises(dl.UserError) as error:
        scaling.parse(words.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_under_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(dl.UserError, match="scaling starts the ranks itself"):
        scaling.main(["--ranks", "1"])


def test_no_study_to_show(tmp_path):
    with pytest.raises(dl.UserError, match="expected the folder of a study, found no scaling.json"):
        scaling.main(["--table", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON file"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "expected the file of a study, format 1"),
        ('{"format": 1, "rows": [{}]}', "it is damaged"),
    ],
)
def test_a_damaged_study(tmp_path, text, message):
    (tmp_path / "scaling.json").write_text(text)
    with pytest.raises(dl.UserError) as error:
        scaling.main(["--table", "--out", str(tmp_path)])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cores", "words", "threads"),
    [
        (8, "--ranks 1,2,4", 2),
        (8, "--ranks 1,16", 1),
        (8, "--predict", 1),
        (8, "--ranks 1 --threads 3", 3),
        (8, "--ranks 1 --srun", 5),
    ],
)
def test_all_runs_have_the_same_threads(monkeypatch, cores, words, threads):
    monkeypatch.setattr(scaling, "_cores", lambda: cores)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    command = scaling.parse(words.split())
    assert scaling._threads(command, dl.TrainingOptions(**command.typed), {}) == threads


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ("--ranks 1,2", "--ranks 1,2,4", "--threads 4"),
        ("--ranks 1,2", "--ranks 1,2,4 --overwrite", "--threads 2"),
        ("--ranks 1,2", "--ranks 1,2,4 --threads 2", None),
        ("--weak --ranks 2,4", "--weak --ranks 1,2", "--threads 2 --batch-per-rank 64"),
        ("--weak --ranks 2,4", "--weak --ranks 1,2 --batch-size 128", None),
    ],
)
def test_a_continued_study_keeps_its_threads_and_batch(tmp_path, monkeypatch, first, then, words):
    """On 8 cores, with the recipe's mini-batch of 128; None: the study is refused."""
    plans = []

    def run(command, runs, threads):
        runs.start(command.parsed.overwrite)
        plans.append(runs.plan)
        return 0

    monkeypatch.setattr(scaling, "_cores", lambda: 8)
    monkeypatch.setattr(scaling, "_run", run)
    scaling.main([*first.split(), "--out", str(tmp_path)])
    if words is None:
        with pytest.raises(dl.UserError, match="it holds a study of other runs"):
            scaling.main([*then.split(), "--out", str(tmp_path)])
    else:
        scaling.main([*then.split(), "--out", str(tmp_path)])
        assert plans[-1].words == tuple(words.split())
