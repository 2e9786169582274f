"""Why W ranks could not be compared with one process."""

from __future__ import annotations

from hpcddp.errors import UserError


class ComparisonError(UserError):
    """The job did not run, so that nothing can be said about it."""

    kind = "doctor"
