"""The errors that a user may see. A message is one sentence: the condition, the value given, what
to do.

Every class carries the exit code of the command line. Any exception that is not a FlashgenError is
a bug of flashgen and is reported as one.
"""

MOST_SHOWN = 200
"""Characters of a value that a message shows."""


def cut(text: str) -> str:
    """The text of a value for a message: what is longer than MOST_SHOWN is cut."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def shown(value: object) -> str:
    """A value for a message, of whatever type: that of a tensor may be long."""
    return cut(repr(value))


def printable(text: str) -> str:
    """The text with all but printable characters and line breaks escaped: names in files and what
    other programs say must not reach a terminal as commands.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


def one_line(error: BaseException) -> str:
    """The class and the message of any exception: one printable line, at most 200 characters."""
    import textwrap
    import traceback

    # format_exception_only() also formats an exception whose __str__ raises.
    return textwrap.shorten(printable(traceback.format_exception_only(error)[-1]), 200)


class FlashgenError(Exception):
    """Base class of all errors that flashgen raises on purpose. Its text is printable, and words
    that are longer than a name or a number may be are cut.
    """

    exit_code = 1

    def __str__(self) -> str:
        import re

        short = re.sub(
            rf"[^\s/]{{{MOST_SHOWN + 1},}}", lambda word: cut(word[0]), super().__str__()
        )
        return printable(short)


class InvalidArgument(FlashgenError, ValueError, RuntimeError):
    """A value that cannot be used; the message names the argument.

    A RuntimeError, too, as the checks of torch and FlashAttention raise: what catches theirs
    catches that of a drop-in.
    """

    exit_code = 2


class TableError(FlashgenError, ValueError):
    """A table that cannot be read; the message names file, line and remedy."""


class GeneratedError(FlashgenError, RuntimeError):
    """generated/ does not agree with configs/ and templates/."""


class NoGpuError(FlashgenError, RuntimeError):
    """A GPU was required and there is none."""

    exit_code = 3


class NoEstimate(FlashgenError, RuntimeError):
    """The estimator has no reliable figure for this kernel; the message gives the reason."""


class ToolchainError(FlashgenError, RuntimeError):
    """The machine lacks something required: a C compiler, a package of an extra, a folder."""


class ToolKilled(FlashgenError, RuntimeError):
    """A program that flashgen had started was killed from outside, as where memory runs out."""


class LaunchError(FlashgenError, RuntimeError):
    """No candidate, from the tuned entry to the default kernel, could be launched for this call."""


class NotDifferentiable(FlashgenError, NotImplementedError):
    """A derivative that no kernel computes; the message names an alternative."""
