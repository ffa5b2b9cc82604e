"""The errors that end a command: what was wrong, where, and what to do."""


class PybuildError(Exception):
    """A failure that the user is told in one message, never as a traceback.

    `what` names the fault and where it is; `remedy` says what to do about it. `exit_status` is 2: unusable
    arguments or input.
    """

    exit_status = 2

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n{self.remedy}" if self.remedy else self.what


class BuildError(PybuildError):
    """A build, a download or a check that ran and failed. `exit_status` is 1."""

    exit_status = 1
