"""What the nodes of a run agree through: files on the shared filesystem, a notifier that says "look now", nothing
else."""
