"""The README is the manual: its commands, tree and files must be those of the repository."""

import re
import subprocess
import sys
from pathlib import Path

from harness.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUB_COMMAND = re.compile(r"k3-harness ([a-z]+)")


def block_after(heading: str) -> str:
    """The first code block below a heading."""
    return re.search(rf"## {heading}\n+```\w*\n(.*?)```", README, re.DOTALL).group(1)


def test_the_top_holds_exactly_two_commands():
    """The first code block has one command that runs the main job and one that passes the tests."""
    lines = re.search(r"```sh\n(.*?)```", README, re.DOTALL).group(1).strip().splitlines()
    assert [line.split("#")[-1].strip() for line in lines] == ["run", "test"]


def test_ci_runs_the_commands_of_the_readme():
    """What CI extracts is the end of the README's own lines."""
    script = [sys.executable, str(ROOT / ".ci" / "readme_command.py")]
    found = [subprocess.check_output([*script, name], text=True).strip() for name in ("run", "test")]
    assert found == ["k3-harness run quick", "python -m pytest"]


def test_the_tree_names_what_exists():
    """Every file and folder of the annotated tree is in the repository, at the place where it is shown."""
    folder, missing = ROOT, []
    for line in block_after("The tree").splitlines():
        indent, words = len(line) - len(line.lstrip()), line.split()
        if indent == 0:
            folder = ROOT / words[0]
            missing += [] if folder.is_dir() else [words[0]]
        names = words if indent else []
        paths = [name for name in names if re.fullmatch(r"\w+(\.py|/)", name)]
        missing += [name for name in paths if not (folder / name).exists()]
    assert missing == []


def test_every_command_it_shows_exists():
    """No sub-command of k3-harness is shown that the program does not have."""
    assert set(SUB_COMMAND.findall(README)) <= set(COMMANDS)
