"""Export of trained models: graphs, operators of the runtimes, and files."""
