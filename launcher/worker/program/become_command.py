"""Run as a module in a rank: becomes the command in its arguments, which need not be Python's."""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, which no shell could undo
    os.execvp(sys.argv[1], sys.argv[1:])
