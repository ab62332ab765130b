"""Run as a module in a rank: becomes the command in its arguments, which need not be Python's."""

import os
import sys

if __name__ == "__main__":
    os.execvp(sys.argv[1], sys.argv[1:])
