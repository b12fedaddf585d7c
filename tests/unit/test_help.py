"""What `--help` says: everything, readable on a terminal of 80 columns, with examples that work."""

from __future__ import annotations

import shlex

import pytest
import typer
from typer.testing import CliRunner

from gguf_mtp.cli.app import app
from gguf_mtp.cli.help import EXAMPLES, PANELS, RARE

COMMANDS = typer.main.get_group(app).commands
RUNNER = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})


def help_of(*arguments: str) -> str:
    done = RUNNER.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_are_listed_by_what_they_are_for() -> None:
    text = help_of("--help")
    places = [text.index(f"\n│ {name} ") for names in PANELS.values() for name in names]
    assert places == sorted(places)
    assert sorted(COMMANDS) == sorted(EXAMPLES) == sorted(sum(PANELS.values(), ()))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_nothing_is_cut_and_every_option_is_named(command: str) -> None:
    text = help_of(command, "--help-all")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for option in COMMANDS[command].params:
        if not getattr(option, "hidden", False) and option.param_type_name == "option":
            name = next(name for name in option.opts if name.startswith("--"))
            assert name in text or f"--[no-]{name[2:]}" in text


def test_a_first_look_leaves_out_what_is_rare() -> None:
    first, full = help_of("serve", "--help"), help_of("serve", "--help-all")
    assert "--samplers" in full
    assert "--samplers" not in first
    assert "--port" in first
    assert "gguf-mtp serve --help-all" in first
    assert "--spec-draft-n-max" not in full, "llama.cpp's names are accepted, not listed"
    known = {option.name for command in COMMANDS.values() for option in command.params}
    assert known >= RARE


@pytest.mark.parametrize("example", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_commands(example: str) -> None:
    name, *arguments = shlex.split(example.split("| ")[-1])[1:]
    COMMANDS[name].make_context(name, arguments)
