"""Checkpoints that workers write on their node, and that agents copy to the shared filesystem. Bytes; no torch.

A node's files of one step are a *part*. A part is whole when all ranks of the node have left their `checkpoint_dir`. A
checkpoint is *committed* when the shared filesystem has all of its parts and an index of them.
"""
