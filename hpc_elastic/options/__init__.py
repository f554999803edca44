"""The options: one table, the layers of files and variables that give them values, sbatch's options."""
