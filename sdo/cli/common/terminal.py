"""What reaches the terminal: names and texts from outside stand there as they are, and nothing in them is obeyed."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from sdo.errors import printable

STDOUT = "standard output"
# What progress bars write to move between lines, alone in a write.
_MOVES = re.compile(r"[\r\n]*(?:\x1b\[A)*")


class _Plain:
    """A stream that writes control characters as escapes, and is named in its errors; all else is the stream's own."""

    def __init__(self, stream: Any, name: str, *, terminal: bool) -> None:
        self.stream = stream
        self._name = name
        self._terminal = terminal

    def write(self, text: str) -> int:
        """Write text; breaks of lines and tabs stay, and a return of the carriage at either end."""
        shown = text
        if not _MOVES.fullmatch(text):
            body = text.strip("\r")
            before, _, after = text.partition(body)
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            plain = printable(body, keep="\n\t").encode(encoding, "backslashreplace").decode(encoding)
            shown = f"{before}{plain}{after}"
        with self._naming():
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        """Write what is held back."""
        with self._naming():
            self.stream.flush()

    def isatty(self) -> bool:
        """Whether others may draw here: on standard output not, since their colors would come out as escapes."""
        return self._terminal and bool(self.stream.isatty())

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def plain_streams() -> Iterator[None]:
    """Let nothing that is printed control the terminal."""
    streams = _Plain(sys.stdout, STDOUT, terminal=False), _Plain(sys.stderr, "standard error", terminal=True)
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield


@contextlib.contextmanager
def free_streams() -> Iterator[None]:
    """Give the terminal to a package that draws on it itself, as trackers of experiments do during training."""
    streams = [stream.stream if isinstance(stream, _Plain) else stream for stream in (sys.stdout, sys.stderr)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield
