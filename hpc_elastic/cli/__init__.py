"""The command line: one file per subcommand, each imported only when it is asked for."""

import os
import signal
import sys

if sys.argv and sys.argv[0].endswith((os.sep + "hpc-elastic", os.sep + os.path.join("hpc_elastic", "__main__.py"))):
    # Until `main` can answer it, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
