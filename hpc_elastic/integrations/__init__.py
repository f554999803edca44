"""Callbacks for training frameworks, and `last_whole_checkpoint`.

Only the script that uses a framework imports its module here, which imports the framework.
"""

from hpc_elastic.integrations.checkpoints import last_whole_checkpoint as last_whole_checkpoint
