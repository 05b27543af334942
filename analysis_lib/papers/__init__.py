"""What an experiment of each paper needs beyond measuring; the claims, and the verdict of a model on each."""
