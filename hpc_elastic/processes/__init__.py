"""Starting, watching and ending processes of this node, and moving their output. Linux only, free of torch."""
