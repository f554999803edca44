"""Storage by which the nodes of a run agree: files on the shared filesystem, and a notifier that says "look now"."""
