"""What all tests share."""

from __future__ import annotations

import signal

# Whoever starts the tests in the background may have them ignore Ctrl-C, and what they start would ignore it as well: a
# handler of Python's is not passed on, so programs that the tests start begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
