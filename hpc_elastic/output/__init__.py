"""Workers' output: the pump that writes the logs, and what reads them."""
