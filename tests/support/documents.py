"""What the documents show, as a user would take it from there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def yaml_with(name: str, page: Path) -> str:
    """The one block of YAML on the page that names this class."""
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    (block,) = [block for block in blocks if name in block]
    return str(block)
