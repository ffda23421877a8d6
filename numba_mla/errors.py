"""The errors that are this package's own."""


class IsaUnavailableError(ValueError):
    """An instruction set was asked for by name that is unknown or that this machine cannot run."""
