"""One agent per node: joins rounds, starts that node's workers, watches and stops them. Never imports torch."""
