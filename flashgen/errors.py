"""The errors a user may see: one sentence that says what held, what was given, what to do.

Every class carries the exit code of the command line. Anything raised that is not a FlashgenError
is a bug of flashgen, and is shown as one.
"""


class FlashgenError(Exception):
    """Base of all errors that flashgen raises on purpose."""

    exit_code = 1


class InvalidArgument(FlashgenError, ValueError):
    """A value that cannot be used; the message names the argument."""

    exit_code = 2


class TableError(FlashgenError, ValueError):
    """A table that cannot be read; the message names file, line and mend."""


class GeneratedError(FlashgenError, RuntimeError):
    """generated/ does not agree with configs/ and templates/."""


class NoGpuError(FlashgenError, RuntimeError):
    """A GPU was asked for and there is none."""

    exit_code = 3


class NoEstimate(FlashgenError, RuntimeError):
    """The estimator has no honest number for this kernel; the message says why."""


class ToolchainError(FlashgenError, RuntimeError):
    """Something the machine must provide is missing: a C compiler, a package of an extra, a
    folder.
    """


class LaunchError(FlashgenError, RuntimeError):
    """No rung of the ladder could launch a kernel for this call."""


class NotDifferentiable(FlashgenError, NotImplementedError):
    """A derivative was asked for that no kernel computes; the message names what does."""
