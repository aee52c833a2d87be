import io
import sys

import pytest

from sdo.cli.common.terminal import free_streams, plain_streams


class Screen(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


def open_screens(monkeypatch):
    found = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", found[0])
    monkeypatch.setattr(sys, "stderr", found[1])
    return found


def test_nothing_that_is_printed_is_obeyed(monkeypatch):
    screens = open_screens(monkeypatch)
    with plain_streams():
        print("a\x1b[31m\x07\x9b\u202e\ud800 b\tc\rd", "größe")
        print("\x1b[2J", file=sys.stderr)
    assert screens[0].getvalue() == "a\\x1b[31m\\x07\\x9b\\u202e\\ud800 b\tc\\rd gr\\xf6\\xdfe\n"
    assert screens[1].getvalue() == "\\x1b[2J\n"
    assert (sys.stdout, sys.stderr) == screens


def test_progress_bars_are_drawn(monkeypatch):
    screens = open_screens(monkeypatch)
    with plain_streams():
        for text in ("\r 3 of 4", "\r    \r", "\n\n\x1b[A\x1b[A"):
            sys.stderr.write(text)
        assert sys.stderr.isatty()
        assert not sys.stdout.isatty()  # colors of other packages would come out as escapes
    assert screens[1].getvalue() == "\r 3 of 4\r    \r\n\n\x1b[A\x1b[A"


def test_a_package_may_be_given_the_terminal(monkeypatch):
    screens = open_screens(monkeypatch)
    with plain_streams():
        with free_streams():
            print("\x1b[1mbold")
        print("\x1b[1mbold")
    assert screens[0].getvalue() == "\x1b[1mbold\n\\x1b[1mbold\n"


@pytest.mark.parametrize(("stream", "name"), [("stdout", "standard output"), ("stderr", "standard error")])
def test_a_stream_that_takes_nothing_is_named(monkeypatch, stream, name):
    open_screens(monkeypatch)

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(getattr(sys, stream), "write", full)
    with plain_streams(), pytest.raises(OSError, match="No space left") as caught:
        print("a", file=getattr(sys, stream))
    assert caught.value.filename == name
