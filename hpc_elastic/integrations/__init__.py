"""For scripts of training frameworks: a callback for each, and which of their checkpoints is whole.

Each module imports its framework, and is imported by the script that uses it: nothing here is loaded otherwise.
"""

from hpc_elastic.integrations.checkpoints import last_whole_checkpoint as last_whole_checkpoint
