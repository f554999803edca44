"""What a run is asked for: the options, and the layers that give them values. The CLI and the executor read it here."""
