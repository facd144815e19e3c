"""The --help of each command fits a terminal of 80 columns."""

import importlib

import pytest

COMMANDS = ("train", "predict", "pack", "verify", "info", "convert", "sweep")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main = importlib.import_module(f"mpidl.cli.{command}").main
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and max(map(len, lines)) <= 80
