"""Print one of the README's two commands, without its install part, so that CI runs what the README says."""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def command(name: str) -> str:
    """Return the part after the last `&&` of the README line that ends in `# run` or `# test`."""
    line = re.search(rf"^(.+?)\s+# {name}$", README.read_text(), re.MULTILINE)
    if line is None:
        raise SystemExit(f"README.md has no command marked '# {name}'")
    return line.group(1).split("&&")[-1].strip()


if __name__ == "__main__":
    print(command(sys.argv[1]))
