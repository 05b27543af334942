"""What standard error may be besides a log."""

import io


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class OfNotebook(io.StringIO):
    """What stands in for standard error in a kernel."""

    __module__ = "ipykernel.iostream"
