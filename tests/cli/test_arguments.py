"""Test each command's --help, which shows the most common options, and --help-all."""

import pytest
from image_sets import refusal

import mpidl_command
from mpidl.cli import arguments, parser
from mpidl.cli.parser import DESCRIBE, Parser, ParserReady, typed_command
from mpidl.data.formats.path_formats import FILES
from mpidl.errors import UserError

COMMANDS = tuple(mpidl_command.commands())


def parser_of(command):
    with pytest.raises(ParserReady) as ready:
        mpidl_command.load(command)(DESCRIBE)
    return ready.value.args[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main = mpidl_command.load(command)
    flags = [action.option_strings[0] for action in parser_of(command).options]
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main([flag])
        text = capsys.readouterr().out
        assert len(text.splitlines()) > 10 and max(map(len, text.splitlines())) <= 80
        words = text.split()
        assert [name for name in flags if name not in words] == []


@pytest.mark.parametrize("command", ["train", "predict", "verify"])
def test_the_ten_commonest_options_come_first(command, capsys):
    described = parser_of(command)
    sections = described.sections()
    assert next(iter(sections)) == parser.COMMON
    assert [action.dest for action in sections[parser.COMMON]] == list(described.common)
    assert len(described.common) == 10
    short, complete = described.format_help(), ""
    described.is_complete = True
    complete = described.format_help()
    assert short.index("--data") < short.index("--threads") < len(short) < len(complete)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_group(command):
    """Every option of a command with groups is in one of them."""
    described = parser_of(command)
    sections = described.sections()
    assert parser.UNGROUPED not in sections, sections[parser.UNGROUPED]
    members = [action.dest for actions in sections.values() for action in actions]
    assert sorted(members) == sorted(action.dest for action in described.options)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/venv/bin/mpidl", "mpidl train"),
        ("/venv/lib/mpidl/train.py", "python -m mpidl.train"),
        ("/venv/lib/mpidl/__main__.py", "python -m mpidl train"),
        ("/venv/lib/pytest/__main__.py", "python -m mpidl.train"),
    ],
)
def test_usage_shows_what_the_user_typed(program, expected, monkeypatch):
    monkeypatch.setattr("sys.argv", [program])
    assert typed_command("mpidl.train") == expected
    assert parser_of("train").format_help().startswith(f"usage: {expected} [OPTION")


def test_a_timeline_needs_no_number():
    assert arguments.train(["--timeline"])["timeline"] == 100
    assert arguments.train(["--timeline", "--epochs", "2"]) == {"timeline": 100, "epochs": 2}
    assert arguments.train(["--timeline", "7"])["timeline"] == 7
    assert "timeline" not in arguments.train([])
    for words in (["--timeline", "x"], ["--timeline", "-1"], ["--timeline=0.5"]):
        with pytest.raises(UserError, match="--timeline must be"):
            arguments.train(words)


def test_a_command_without_common_options_shows_all(capsys):
    """Without common options, --help shows all options, even those with the same destination."""
    described = Parser("mpidl.none", "Do nothing.", quiet=False)
    for i in range(parser.SHORT_LIST + 1):
        described.text(f"--flag-{i}", "N", f"Set {i}", dest="same")
    text = described.format_help()
    assert parser.UNGROUPED in text and text.count("--flag-") == parser.SHORT_LIST + 1
    with pytest.raises(UserError, match="unknown option --flg-1: did you mean --flag-1?"):
        described.parse(["--flg-1"])


def test_an_option_that_is_on_or_off_needs_no_value():
    assert arguments.train(["--tensorboard", "--epochs", "3"])["tensorboard"] == "on"
    assert arguments.train(["--epochs", "3", "--tensorboard"])["tensorboard"] == "on"
    assert arguments.train(["--tensorboard", "off"])["tensorboard"] == "off"
    assert "--tensorboard must be on or off" in refusal(arguments.train, ["--tensorboard", "yes"])
    assert "--epochs: expected one argument" in refusal(arguments.train, ["--epochs"])


def test_the_help_of_data_names_every_kind_of_file():
    for fmt in FILES:
        assert fmt.noun in arguments.DATA_HELP
