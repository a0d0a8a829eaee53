"""What all tests run under."""

import signal

# A shell that runs the tests in the background ignores Ctrl-C, and programs under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
