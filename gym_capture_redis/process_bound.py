"""What belongs to the process that made it."""

from __future__ import annotations

from typing import NoReturn


class ProcessBound:
    """Base of clients: they hold connections, locks and caches, and are made anew where they are needed."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled; make one where it is used, of a class and arguments "
            "that are sent (functools.partial), or for a source of a token_source_factory(...)"
        )
