"""The command line: subcommands, each of whose modules is imported only when it is asked for."""

import os
import signal
import sys

_COMMANDS = os.sep + "hpc-elastic", os.sep + os.path.join("hpc_elastic", "__main__.py")
if sys.argv and sys.argv[0].endswith(_COMMANDS) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Until `main` can answer it, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
