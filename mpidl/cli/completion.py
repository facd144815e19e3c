"""`python -m mpidl.completion`: print a shell script that completes `mpidl` commands.

The script contains all commands and options, so completing a word starts no Python.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mpidl_command
from mpidl.cli.parser import DESCRIBE, Parser, ParserReady, typed_command
from mpidl.errors import UserError
from mpidl.ranks import failure

PATHS = re.compile("FILE|DIR|DATA|SRC|DST|RUN")  # placeholders of values that are paths
STARTERS = ("mpirun", "mpiexec", "srun")  # programs that run the command on several ranks


class Value(NamedTuple):
    """A flag with its value, or a positional argument."""

    flag: str  # such as "--solver"; "" for a positional argument
    help: str
    metavar: str  # placeholder of the value; "" for a flag without a value
    choices: Sequence[str]  # values to suggest
    is_path: bool  # whether the value may be a path
    is_repeated: bool = False  # whether several values may follow


class Command(NamedTuple):
    """A command: its name, its summary, its flags and then its positional arguments."""

    name: str
    summary: str
    values: list[Value]


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.completion; the attribute `shell` is a key of `SHELLS`."""
    command = typed_command("mpidl.completion")
    parser = Parser(
        "mpidl.completion",
        "Print a shell script that completes the commands and options of mpidl.",
        quiet,
        epilog="Save the script in a folder that exists (mkdir -p), and open a new shell:\n\n"
        f"  {command} bash > ~/.local/share/bash-completion/completions/mpidl\n"
        f"  {command} zsh > DIR/_mpidl (DIR: a folder in $fpath)\n"
        f"  {command} fish > ~/.config/fish/completions/mpidl.fish\n\n"
        "To complete commands after mpirun and srun too, source the script for bash in ~/.bashrc. "
        "After an update of mpidl, save the script again.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=", ".join(SHELLS))
    return parser.parse(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("completion uses one process: run it without mpirun")
    print(SHELLS[parsed.shell](described_commands()), end="")
    return 0


def described_commands() -> list[Command]:
    """Return all commands with their options, in the order in which `mpidl --help` lists them."""
    return [described(name, text) for name, text in mpidl_command.commands().items()]


def described(name: str, summary: str) -> Command:
    """Return a command with its options. A command without a `Parser` has no options."""
    flags, operands = [], []
    try:
        mpidl_command.load(name)(DESCRIBE)
    except UserError:
        pass
    except ParserReady as ready:
        parser: Parser = ready.args[0]
        flags = [_value(action, parser.suggestions) for action in parser.options]
        operands = [_value(action, {}) for action in parser.operands]
    helps = {"--help": "Show the most common options", "--help-all": "Show all options"}
    flags += [Value(flag, text, "", (), False) for flag, text in helps.items()]
    return Command(name, summary, [*flags, *operands])


def _value(action: argparse.Action, suggestions: Mapping[str, Sequence[str]]) -> Value:
    """Describe an argument; `suggestions` are the values of flags, {flag: values}."""
    flag = action.option_strings[0] if action.option_strings else ""
    text, metavar = str(action.help), "" if action.nargs == 0 else str(action.metavar)
    is_path = bool(PATHS.search(metavar)) or ".py:" in text
    phrase = re.split(r"[.;:] | \(", text)[0]
    choices = tuple(suggestions.get(flag, action.choices or ()))
    return Value(flag, phrase, metavar, choices, is_path, is_repeated=action.nargs == "+")


def bash(commands: Sequence[Command]) -> str:
    """Return the script for bash."""
    cases = []
    for command in commands:
        flags = " ".join(value.flag for value in command.values if value.flag)
        cases.append(f'        {command.name}:) flags="{flags}" ;;')
    for command in commands:
        for value in command.values:
            pattern = f"{command.name}:{value.flag or 'operand'}"
            if value.choices or value.is_path:
                words = " ".join(value.choices)
                cases.append(f'        {pattern}) values="{words}" paths={value.is_path:d} ;;')
            elif value.metavar:
                cases.append(f"        {pattern}) other=1 ;;")
    return BASH.format(
        commands=" ".join(command.name for command in commands),
        cases="\n".join(cases),
        starters=" ".join(STARTERS),
    )


BASH = """\
# bash completion of mpidl; printed by: mpidl completion bash

_mpidl_case() {{ # _mpidl_case COMMAND:FLAG: set what may follow
    case $1 in
{cases}
    esac
}}

_mpidl() {{
    local i first=-1 flags="" values="" paths=0 other=0
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}}
    COMPREPLY=()
    for ((i = 0; i < COMP_CWORD; i++)); do
        if [[ ${{COMP_WORDS[i]##*/}} == mpidl ]]; then first=$((i + 1)) && break; fi
    done
    if ((first < 0)); then return; fi
    if ((COMP_CWORD == first)); then
        mapfile -t COMPREPLY < <(compgen -W "{commands} help --help --version" -- "$word")
        return
    fi
    if [[ $word == "=" ]]; then word=""; fi
    if [[ $previous == "=" ]]; then previous=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
    if [[ ${{COMP_WORDS[first]}} == help ]]; then values="{commands}"; fi
    if [[ $previous == -* && $word != -* ]]; then _mpidl_case "${{COMP_WORDS[first]}}:$previous"; fi
    if [[ -z $values$flags ]] && ((paths + other == 0)); then
        if [[ $word == -* ]]; then
            _mpidl_case "${{COMP_WORDS[first]}}:"
        else
            _mpidl_case "${{COMP_WORDS[first]}}:operand"
            if [[ -z $values ]] && ((paths == 0)); then _mpidl_case "${{COMP_WORDS[first]}}:"; fi
        fi
    fi
    mapfile -t COMPREPLY < <(compgen -W "$values $flags" -- "$word")
    if ((paths)); then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$word")
    fi
}}

complete -F _mpidl mpidl
for _mpidl_starter in {starters}; do
    complete -p "$_mpidl_starter" &>/dev/null || complete -o default -F _mpidl "$_mpidl_starter"
done
unset _mpidl_starter
"""


def zsh(commands: Sequence[Command]) -> str:
    """Return the script for zsh."""
    names = "\n".join(f"        {_quote(f'{c.name}:{c.summary}')}" for c in commands)
    cases = []
    for command in commands:
        specs = [_zsh_spec(value) for value in command.values]
        lines = " \\\n".join(f"            {spec}" for spec in specs)
        cases.append(f"        {command.name})\n            _arguments \\\n{lines}\n            ;;")
    return ZSH.format(names=names, cases="\n".join(cases))


def _zsh_spec(value):
    """Return the argument of _arguments for a flag or a positional argument."""
    name = re.sub(r"[\[\]:]", " ", value.metavar) or "value"
    words = " ".join(value.choices)
    if value.is_path:
        action = f" _mpidl_path_or {words}" if words else "_files"
    else:
        action = f"({words})" if words else " "
    if not value.flag:
        return _quote(f"{'*' if value.is_repeated else ''}:{name}:{action}")
    text = re.sub(r"[\[\]]", "", value.help)
    if not value.metavar:
        return _quote(f"{value.flag}[{text}]")
    return _quote(f"{value.flag}=[{text}]:{name}:{action}")


ZSH = """\
#compdef mpidl
# zsh completion of mpidl; printed by: mpidl completion zsh

_mpidl_path_or() {{ # _mpidl_path_or WORD...: complete a path or one of the words
    _alternative "values:value:($*)" "files:file:_files"
}}

_mpidl() {{
    local -a commands
    commands=(
{names}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
{cases}
    esac
}}

if [[ $funcstack[1] == _mpidl ]]; then _mpidl "$@"; else compdef _mpidl mpidl; fi
"""


def fish(commands: Sequence[Command]) -> str:
    """Return the script for fish."""
    lines = ["# fish completion of mpidl; printed by: mpidl completion fish", ""]
    lines.append("complete -c mpidl -f")
    for command in commands:
        head = f"complete -c mpidl -n __fish_use_subcommand -a {command.name}"
        lines.append(f"{head} -d {_quote(command.summary)}")
    for command in commands:
        head = f"complete -c mpidl -n '__fish_seen_subcommand_from {command.name}'"
        for value in command.values:
            flag = f" -l {value.flag[2:]} -d {_quote(value.help)}" if value.flag else ""
            choices = f" -a {_quote(' '.join(value.choices))}" if value.choices else ""
            mode = (" -rF" if value.is_path else " -x") if value.metavar and value.flag else ""
            mode = " -F" if value.is_path and not value.flag else mode
            lines.append(f"{head}{flag}{mode}{choices}")
    return "\n".join(lines) + "\n"


def _quote(text):
    """Quote a string for a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
