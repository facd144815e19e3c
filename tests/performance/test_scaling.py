"""Test the arguments of mpidl.scaling: those for the study, those for mpidl.train, and errors."""

import pytest

import mpidl as dl
from mpidl.comm.simulation import Link
from mpidl.errors import Fault
from mpidl.performance import command as scaling
from mpidl.performance import prediction, study
from mpidl.ranks import failure, thread_budget


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
        ("--predict 1,x", "--predict must be numbers of ranks such as 1,2,3, found 1,x"),
        ("--predict 8,2048", "--predict: expected at most 1024 ranks, found 2048"),
        ("--epoch 3", "unknown option --epoch: did you mean --epochs"),
        ("--repeat 0", "--repeat must be at least 1"),
        ("--ranks", "--ranks: expected one argument"),
        ("--resume runs/a", "--resume: a study cannot use this option of mpidl.train"),
        ("--preview a.png", "--preview: a study cannot use"),
        ("--upload s3://a/b", "--upload: a study cannot use"),
        ("--table --ranks 2", "--table: expected no --ranks"),
        ("--accuracy 95", "--accuracy must be above 0 and at most 1, found 95"),
        ("--accuracy high", "--accuracy must be a number, above 0 and at most 1, found high"),
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
        ('{"format": 1, "accuracy": 0.5, "rows": [{"records": [[1]]}]}', "it is damaged"),
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
    options = dl.TrainingOptions(**command.typed)
    assert scaling._threads(command, options, {}) == threads
    earlier = {"threads": 7}  # later starts use these values again
    assert scaling._threads(command, options, earlier) == (options.threads or 7)


def test_later_starts_keep_the_images_per_rank():
    parsed = scaling.parse("--weak --ranks 2,4".split()).parsed
    options = dl.TrainingOptions(batch_size=128)
    assert scaling._batch_per_rank(parsed, options, {}) == 64
    earlier = {"batch_size": 128, "batch_per_rank": 128}
    assert scaling._batch_per_rank(parsed, options, earlier) == 128
    assert scaling._batch_per_rank(parsed, options, earlier | {"batch_size": 256}) == 64


def test_a_prediction_of_unequal_shares_is_refused(tmp_path):
    words = ["--predict", "--worker-load", "1,2", "--out", str(tmp_path / "study")]
    with pytest.raises(dl.UserError, match="--worker-load 1,2: expected none with --predict"):
        scaling.main(words)
    assert not (tmp_path / "study").exists()


def test_a_probe_is_not_repeated(tmp_path):
    """If ranks and seconds are unchanged, the command reuses the probe of an earlier start."""
    plan = study.Plan(str(tmp_path), (), ())
    runs = study.Study(plan, failure.Signals())
    parsed = scaling.parse("--predict --probe-ranks 2 --probe-seconds 7".split()).parsed
    record = {"ranks": 2, "seconds": 7.0}
    assert scaling._probe(parsed, runs, 1, record) is record


def test_a_probe_that_fails(tmp_path, monkeypatch):
    def fail(self, name, words, log):
        log.write("mpidl: no memory\n")
        return code

    monkeypatch.setattr(study.Study, "execute", fail)
    runs = study.Study(study.Plan(str(tmp_path), (), ()), failure.Signals())
    parsed = scaling.parse("--predict --probe-ranks 2".split()).parsed
    code = 2
    with pytest.raises(dl.UserError, match="^no memory$"):
        scaling._probe(parsed, runs, 1, {"ranks": 3, "seconds": 60.0})
    code = 1
    with pytest.raises(
        Fault, match="probe on 2 ranks ended with exit code 1: no memory; see .*log"
    ):
        scaling._probe(parsed, runs, 1, None)
    runs.signals.name = "SIGUSR1"
    assert scaling._probe(parsed, runs, 1, None) is None


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("--ranks 1,2", "--ranks 1,2,4", "--threads 4"),
        ("--ranks 1,2", "--ranks 1,2,4 --overwrite", "--threads 2"),
        ("--ranks 1,2", "--ranks 1,2,4 --threads 2", None),
        ("--weak --ranks 2,4", "--weak --ranks 1,2", "--threads 2 --batch-per-rank 64"),
    ],
)
def test_a_continued_study_keeps_its_threads_and_batch(tmp_path, monkeypatch, first, second, words):
    """A continued study keeps its threads and batch, or is refused (`words` is None)."""
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
            scaling.main([*second.split(), "--out", str(tmp_path)])
    else:
        scaling.main([*second.split(), "--out", str(tmp_path)])
        assert plans[-1].words == tuple(words.split())


@pytest.mark.parametrize(("load", "is_named"), [(0.05, False), (0.43, True)])
def test_busy_cores_are_named_before_the_first_run(tmp_path, monkeypatch, capsys, load, is_named):
    monkeypatch.setattr(thread_budget, "busy_share", lambda: load)
    monkeypatch.setattr(study.Study, "execute", lambda self, name, words, log: 1)
    scaling.main(["--ranks", "1", "--out", str(tmp_path / "study")])
    warning = "warning: other programs use 43% of the cores, so speeds will be too low; "
    assert (warning in capsys.readouterr().out) == is_named
