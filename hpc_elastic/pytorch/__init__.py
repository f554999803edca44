"""Code that needs torch: the store host, and the adapters to torch's own interfaces. Importing the package does not."""
